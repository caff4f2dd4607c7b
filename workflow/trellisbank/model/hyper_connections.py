# SPDX-License-Identifier: Apache-2.0
"""Parallel residual copies: the coefficients that mix them, and the step that writes to them.

Manifold-constrained hyper-connections: each sublayer derives from the stream how the copies are
read (`pre`, used one sublayer later), how its output is written (`post`) and how the
copies mix (`comb`, made nearly doubly stochastic by Sinkhorn rounds that end on columns).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from trellisbank.model.config import ModelConfig
from trellisbank.model.primitives import BF16


def mixes(
    cfg: ModelConfig, stream: Tensor, fn: Tensor, base: Tensor, scale: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mixing coefficients of one sublayer, all fp32.

    Args:
        cfg: The model.
        stream: bf16 `[..., C, D]`.
        fn: fp32 `[C(C+2), C*D]`: rows for pre, post, then comb in row-major order.
        base: fp32 `[C(C+2)]`.
        scale: fp32 `[3]`, one number for each part.

    Returns:
        `pre [..., C]`, `post [..., C]`, `comb [..., C, C]` (source row, destination column).
    """
    copies = cfg.hc_mult
    flat = stream.flatten(-2).float()
    # One statistic over all copies; the scaling follows the projection.
    shared = torch.rsqrt(flat.square().mean(-1, keepdim=True) + cfg.rms_norm_eps)
    projected = F.linear(flat, fn) * shared
    pre, post, comb = projected.split([copies, copies, copies * copies], dim=-1)
    base_pre, base_post, base_comb = base.split([copies, copies, copies * copies])
    pre = torch.sigmoid(pre * scale[0] + base_pre) + cfg.hc_eps
    post = 2 * torch.sigmoid(post * scale[1] + base_post)
    comb = (comb * scale[2] + base_comb).unflatten(-1, (copies, copies))
    return pre, post, sinkhorn(comb, cfg.hc_sinkhorn_iters, cfg.hc_eps)


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """Row softmax, then `rounds` column passes with `rounds - 1` row passes between them.

    Ends on columns: they sum to one, rows only nearly.
    """
    # Spelt out: the library's softmax differs in the last bit.
    raised = torch.exp(logits - logits.detach().amax(-1, keepdim=True))
    comb = raised / raised.sum(-1, keepdim=True) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def expand(output: Tensor, stream: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Write a sublayer's output to the copies: `post[j] * y + sum_i comb[i, j] * X[i]`.

    Args:
        output: bf16 `[..., D]`.
        stream: bf16 `[..., C, D]`.
        post: fp32 `[..., C]`.
        comb: fp32 `[..., C, C]`.

    Returns:
        bf16 `[..., C, D]`, rounded once.
    """
    mixed = (comb.unsqueeze(-1) * stream.float().unsqueeze(-2)).sum(-3)
    return (post.unsqueeze(-1) * output.float().unsqueeze(-2) + mixed).to(BF16)
