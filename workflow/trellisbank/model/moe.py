# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: routing, one expert, and the sum over a token's experts."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from trellisbank.model.config import ModelConfig
from trellisbank.model.primitives import BF16, linear

TOKENS = 1 << 15
"""Tokens of several rows multiplied at a time: bounds an expert's activations (some 1.3 GB)."""

ExpertWeights = tuple[Tensor, Tensor, Tensor]
"""`w1 [I, D]`, `w2 [D, I]`, `w3 [I, D]`: gate, down, up."""


def route(cfg: ModelConfig, x: Tensor, gate: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Choose each token's experts.

    Scores are `sqrt(softplus(x @ gate.T))` in fp32. The bias takes part in choosing only;
    weights are the unbiased scores, normalized over the chosen ones and scaled.

    Args:
        cfg: The model.
        x: bf16 `[..., D]`.
        gate: `[E, D]`.
        bias: fp32 `[E]`.

    Returns:
        int64 `[..., T]` in descending order of biased score, fp32 `[..., T]`.
    """
    scores = F.softplus(F.linear(x.float(), gate.float())).sqrt()
    chosen = (scores + bias).topk(cfg.num_experts_per_tok, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if cfg.num_experts_per_tok > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * cfg.routed_scaling_factor


def expert_hidden(x: Tensor, w1: Tensor, w3: Tensor, limit: float) -> Tensor:
    """Activation before `w2`, fp32 `[..., I]`, of a gate and an up rounded to bf16."""
    return swiglu(linear(x, w1).float(), linear(x, w3).float(), limit)


def swiglu(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """`silu(gate) * up` of fp32 tensors, both clamped if limit > 0, the gate from above only."""
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return F.silu(gate) * up


def expert_output(
    x: Tensor, weights: ExpertWeights, limit: float, routing: Tensor | None = None
) -> Tensor:
    """One expert on its tokens: bf16 `[n, D]` to bf16 `[n, D]`.

    The routing weight (fp32 `[n]`) enters before `w2`, ahead of the rounding to bf16.
    """
    w1, w2, w3 = weights
    hidden = expert_hidden(x, w1, w3, limit)
    if routing is not None:
        hidden = hidden * routing.unsqueeze(-1)
    return linear(hidden.to(BF16), w2)


def moe(
    cfg: ModelConfig,
    x: Tensor,
    chosen: Tensor,
    routing: Tensor,
    experts: Callable[[int], ExpertWeights],
    shared: ExpertWeights,
    by_row: bool = True,
) -> Tensor:
    """Sum of the routed experts, in ascending number, and the shared expert last.

    Each expert that has a token is asked for exactly once, so only one needs to be in memory.

    Args:
        cfg: The model.
        x: bf16 `[rows, S, D]`.
        chosen: int64 `[rows, S, T]`.
        routing: fp32 `[rows, S, T]`.
        experts: Gives the weights of a routed expert.
        shared: Weights of the shared expert.
        by_row: Multiply the tokens of one row at a time. A product's last bit may depend on
            how many tokens it holds; this way a row's result never depends on its neighbours.
            Training and GPUs pass False: an expert's tokens of all rows, `TOKENS` at a time.

    Returns:
        bf16 `[rows, S, D]`; the sum is kept in fp32 and rounded once.
    """
    rows, length, width = x.shape
    slots = length * cfg.num_experts_per_tok
    flat = x.reshape(rows * length, width)
    # A stable sort by expert leaves each expert's (token, slot) pairs in order of row and token.
    pairs = chosen.reshape(-1)
    order = pairs.argsort(stable=True)
    tokens = order // cfg.num_experts_per_tok
    routing = routing.reshape(-1)[order]
    row = torch.arange(rows, device=x.device).repeat_interleave(slots)
    counts = torch.bincount(pairs * rows + row, minlength=cfg.n_routed_experts * rows)
    total = torch.zeros_like(flat, dtype=torch.float32)
    start = 0
    for expert, by_rows in enumerate(counts.view(-1, rows).tolist()):
        if not any(by_rows):
            continue
        weights = experts(expert)
        parts = by_rows
        if not by_row:
            whole, rest = divmod(sum(by_rows), TOKENS)
            parts = [TOKENS] * whole + [rest]
        for count in parts:
            if not count:
                continue
            part = slice(start, start + count)
            start += count
            output = expert_output(flat[tokens[part]], weights, cfg.swiglu_limit, routing[part])
            total.index_add_(0, tokens[part], output.float())
    step = length if by_row else TOKENS
    sums = [
        (routed + expert_output(part, shared, cfg.swiglu_limit).float()).to(BF16)
        for routed, part in zip(total.split(step), flat.split(step), strict=True)
    ]
    return torch.cat(sums).view_as(x)
