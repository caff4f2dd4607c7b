# SPDX-License-Identifier: Apache-2.0
"""Operations that every part of the forward shares: norm, rotation, linear maps, rounding.

All are differentiable. The fake-quantizations pass the gradient straight through.
"""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trellisbank.model.config import ModelConfig

BF16 = torch.bfloat16


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x @ weight.T` in the weight's precision, rounded once to bf16.

    A bf16 weight gives the model's own bf16 product (fp32 accumulation); an fp32 weight gives
    an fp32 product of the same numbers, the other order of operations used as a noise floor.
    """
    return F.linear(x.to(weight.dtype), weight).to(BF16)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in fp32, plain weight, one rounding to bf16."""
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * scaled).to(BF16)


def collapse(weights: Tensor, stream: Tensor) -> Tensor:
    """Weighted sum of the copies: `[..., C]` fp32 and `[..., C, D]` bf16 to `[..., D]` bf16.

    Written as multiply and sum: a matrix product would round in another order.
    """
    return (weights.unsqueeze(-1) * stream.float()).sum(-2).to(BF16)


def rotary_frequencies(cfg: ModelConfig, compressed: bool) -> Tensor:
    """Angle per position of each pair, fp32 `[R/2]`.

    Layers without compression use the plain base; layers with it use YaRN interpolation
    (Peng et al., arXiv:2309.00071, without the attention temperature) at every length.
    """
    width = cfg.qk_rope_head_dim
    base = cfg.compress_rope_theta if compressed else cfg.rope_theta
    plain = 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.float32) / width))
    if not compressed:
        return plain

    def pair_turning(times: float) -> float:
        """Index of the pair that turns this often within the trained length."""
        length = cfg.yarn_original_max_position_embeddings
        return width * math.log(length / (2 * math.pi * times)) / (2 * math.log(base))

    low = max(math.floor(pair_turning(cfg.yarn_beta_fast)), 0)
    high = min(math.ceil(pair_turning(cfg.yarn_beta_slow)), width - 1)
    ramp = (torch.arange(width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretched = ramp.clamp(0, 1)
    return plain / cfg.yarn_factor * stretched + plain * (1 - stretched)


@lru_cache(maxsize=16)
def rotary_table(cfg: ModelConfig, compressed: bool, length: int, device: torch.device) -> Tensor:
    """Unit complex factors `[length, R/2]`, complex64; angles are fp32 products."""
    positions = torch.arange(length, dtype=torch.float32)
    angles = torch.outer(positions, rotary_frequencies(cfg, compressed))
    return torch.polar(torch.ones_like(angles), angles).to(device)


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the trailing adjacent pairs of the last axis; the rest passes through.

    Args:
        x: bf16 `[..., width]`.
        table: Complex64, broadcastable to `[..., R/2]`; its conjugate rotates back.
    """
    width = 2 * table.shape[-1]
    kept, turned = x.split([x.shape[-1] - width, width], dim=-1)
    pairs = torch.view_as_complex(turned.float().unflatten(-1, (-1, 2)))
    return torch.cat([kept, torch.view_as_real(pairs * table).flatten(-2).to(x.dtype)], dim=-1)


class _StraightThrough(torch.autograd.Function):
    """Apply a rounding; its gradient is taken as one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _power_of_two_at_least(x: Tensor) -> Tensor:
    """Smallest power of two >= x, for normal positive fp32, from the bits (no logarithm)."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent << 23).view(torch.float32)


def _groups(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The last axis in groups, fp32, and the largest magnitude of each."""
    grouped = x.float().unflatten(-1, (-1, size))
    return grouped, grouped.abs().amax(-1, keepdim=True)


def _round_fp8(x: Tensor) -> Tensor:
    grouped, largest = _groups(x, 32)
    scale = _power_of_two_at_least(largest.clamp_min(1e-4) * (1 / 448))
    codes = (grouped / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).flatten(-2).to(BF16)


def _e2m1(x: Tensor) -> Tensor:
    """Nearest of 0, .5, 1, 1.5, 2, 3, 4, 6 with sign, ties to the even code; `|x| <= 6`."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return torch.round(x / step) * step


def _round_fp4(x: Tensor, kind: str) -> Tensor:
    if kind == "index":
        grouped, largest = _groups(x, 32)
        scale = _power_of_two_at_least(largest.clamp_min(6 * 2.0**-126) * (1 / 6))
    else:
        grouped, largest = _groups(x, 16)
        wanted = (largest.clamp_min(6 * 2.0**-9) / 6).clamp_max(448)
        scale = wanted.to(torch.float8_e4m3fn).float()
    return (_e2m1((grouped / scale).clamp(-6, 6)) * scale).flatten(-2).to(BF16)


def _through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    rounded: Tensor = _StraightThrough.apply(x, rounding)  # type: ignore[no-untyped-call]
    return rounded


def fake_fp8(x: Tensor) -> Tensor:
    """Round as e4m3 in groups of 32 with a power-of-two scale: the window keys.

    The scale is the smallest power of two that brings the group's largest magnitude (at least
    1e-4) within 448; powers of two stay exact. Input and output bf16.
    """
    return _through(x, _round_fp8)


def fake_fp4_index(x: Tensor) -> Tensor:
    """Round as e2m1 in groups of 32 with a power-of-two scale: index queries and keys."""
    return _through(x, partial(_round_fp4, kind="index"))


def fake_fp4_latent(x: Tensor) -> Tensor:
    """Round as e2m1 in groups of 16 with an e4m3 scale: the compressed keys.

    The scale is `largest / 6` rounded to e4m3, so a quotient may pass 6 and is clamped.
    """
    return _through(x, partial(_round_fp4, kind="latent"))
