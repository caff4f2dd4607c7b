# SPDX-License-Identifier: Apache-2.0
"""Norm, rotation and fake-quantization against their definitions in plain arithmetic."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from model_a import config
from trellisbank.model.primitives import (
    fake_fp4_index,
    fake_fp4_latent,
    fake_fp8,
    linear,
    rms_norm,
    rotary_frequencies,
    rotary_table,
    rotate,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4_TIES = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5.0: 4}
values = arrays(
    np.float32, 32, elements=st.floats(-1e4, 1e4, width=32).filter(lambda x: abs(x) > 1e-30)
)


def as_bf16(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array).bfloat16()


def power_of_two_scale(largest: float, most: float) -> float:
    """The definition with exact logarithms; `largest * (1 / most)` is an fp32 product."""
    mantissa, exponent = math.frexp(float(np.float32(largest) * np.float32(1 / most)))
    return 2.0 ** (exponent - 1 if mantissa == 0.5 else exponent)


def nearest_e2m1(x: float) -> float:
    """By distance; at a tie the code with an even number."""
    size = min(abs(x), 6.0)
    code = min(range(8), key=lambda c: (abs(E2M1[c] - size), c % 2))
    return math.copysign(E2M1[code], x)


def test_fp4_ties_go_to_the_even_code() -> None:
    x = torch.zeros(32)
    x[: len(FP4_TIES)] = torch.tensor(list(FP4_TIES))
    x[31] = 6.0  # sets the scale to one
    for sign in (1, -1):
        rounded = fake_fp4_index(sign * x.bfloat16())[: len(FP4_TIES)]
        assert (sign * rounded).tolist() == list(FP4_TIES.values())


@given(values)
def test_fp4_index(array: np.ndarray) -> None:
    x = as_bf16(array)
    scale = power_of_two_scale(max(float(x.abs().max()), 6 * 2.0**-126), 6)
    expected = torch.tensor([nearest_e2m1(v / scale) * scale for v in x.tolist()]).bfloat16()
    assert torch.equal(fake_fp4_index(x), expected)


@given(values)
def test_fp4_latent(array: np.ndarray) -> None:
    x = as_bf16(array)
    parts = []
    for group in x.split(16):
        wanted = torch.tensor(max(float(group.abs().max()), 6 * 2.0**-9)) / 6
        scale = wanted.clamp_max(448).to(torch.float8_e4m3fn).float()
        quotients = (group.float() / scale).tolist()
        parts.append(torch.tensor([nearest_e2m1(q) for q in quotients]) * scale)
    assert torch.equal(fake_fp4_latent(x), torch.cat(parts).bfloat16())


@given(values)
def test_fp8(array: np.ndarray) -> None:
    x = as_bf16(array)
    scale = power_of_two_scale(max(float(x.abs().max()), 1e-4), 448)
    codes = (x.double() / scale).clamp(-448, 448)
    # e4m3 by arithmetic: three bits behind the leading one, steps of 2^-9 below 2^-6.
    exponent = torch.floor(torch.log2(codes.abs().clamp_min(2.0**-6)))
    step = 2.0 ** (exponent - 3)
    expected = (torch.round(codes / step) * step * scale).bfloat16()
    assert torch.equal(fake_fp8(x), expected)


@pytest.mark.parametrize("exponent", [-20, 0, 5])
def test_exact_powers_of_two_keep_their_scale(exponent: int) -> None:
    x = torch.zeros(32, dtype=torch.bfloat16)
    x[0] = 448 * 2.0**exponent if exponent > -20 else 0.0
    assert torch.equal(fake_fp8(x), x)


def test_fake_quantization_passes_the_gradient() -> None:
    for rounding in (fake_fp8, fake_fp4_index, fake_fp4_latent):
        x = torch.randn(3, 32).bfloat16().requires_grad_()
        weight = torch.randn(3, 32).bfloat16()
        (rounding(x) * weight).sum().backward()
        assert torch.equal(x.grad, weight)


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 64).bfloat16(), torch.randn(64).bfloat16()
    wide = x.double()
    expected = wide / wide.square().mean(-1, keepdim=True).sqrt() * weight.double()
    assert torch.allclose(rms_norm(x, weight, 1e-20).double(), expected, rtol=2**-8)
    assert not rms_norm(torch.zeros_like(x), weight, 1e-20).any(), "zero stays zero"
    assert rms_norm(x * 1e-12, weight, 1e-20).abs().max() < 0.9 * expected.abs().max()


def test_linear_keeps_bf16_in_both_orders() -> None:
    x, weight = torch.randn(7, 96).bfloat16(), torch.randn(40, 96).bfloat16()
    narrow, wide = linear(x, weight), linear(x, weight.float())
    assert narrow.dtype == wide.dtype == torch.bfloat16
    assert torch.allclose(narrow.float(), wide.float(), rtol=2**-7, atol=1e-4)
    assert torch.equal(wide, (x.float() @ weight.float().T).bfloat16())


def test_rotation_turns_the_trailing_pairs() -> None:
    cfg = config()
    table = rotary_table(cfg, False, 50, torch.device("cpu"))
    x = torch.randn(50, cfg.head_dim).bfloat16()
    turned = rotate(x, table)
    kept = cfg.head_dim - cfg.qk_rope_head_dim
    assert torch.equal(turned[:, :kept], x[:, :kept])
    for position, pair in ((1, 0), (17, 3), (49, 15)):
        angle = position * cfg.rope_theta ** (-2 * pair / cfg.qk_rope_head_dim)
        even, odd = x[position, kept + 2 * pair : kept + 2 * pair + 2].tolist()
        expected = [
            even * math.cos(angle) - odd * math.sin(angle),
            even * math.sin(angle) + odd * math.cos(angle),
        ]
        found = turned[position, kept + 2 * pair : kept + 2 * pair + 2].tolist()
        assert found == pytest.approx(expected, abs=2**-6)
    back = rotate(turned, table.conj())
    assert torch.allclose(back.float(), x.float(), atol=2**-5)


def test_yarn_at_the_release_sizes() -> None:
    """Fast pairs keep their angle, slow ones are stretched by the factor, between is a ramp."""
    cfg = replace(
        config(),
        qk_rope_head_dim=64,
        compress_rope_theta=160000.0,
        yarn_factor=16.0,
        yarn_original_max_position_embeddings=65536,
    )
    plain = [160000.0 ** (-2 * i / 64) for i in range(32)]
    found = rotary_frequencies(cfg, compressed=True).tolist()

    def pair(turns: float) -> float:
        return 64 * math.log(65536 / (2 * math.pi * turns)) / (2 * math.log(160000))

    low, high = math.floor(pair(32)), math.ceil(pair(1))
    assert (low, high) == (15, 25)
    for i, (ours, base) in enumerate(zip(found, plain, strict=True)):
        share = min(max((i - low) / (high - low), 0), 1)
        assert ours == pytest.approx(base * (share / 16 + 1 - share), rel=1e-5)
    assert rotary_frequencies(replace(cfg, rope_theta=10000.0), compressed=False)[
        16
    ].item() == pytest.approx(0.01, rel=1e-5)
