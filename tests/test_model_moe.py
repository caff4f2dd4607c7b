# SPDX-License-Identifier: Apache-2.0
"""Routing and the sum over experts, against a loop over tokens."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_a import config
from trellisbank.model import moe

CFG = replace(config(), hidden_size=32, moe_intermediate_size=24, n_routed_experts=6)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def expert(number: int) -> moe.ExpertWeights:
    return (
        draw(24, 32, seed=3 * number + 1) / 3,
        draw(32, 24, seed=3 * number + 2) / 3,
        draw(24, 32, seed=3 * number + 3) / 3,
    )


def test_routing_weights_are_the_unbiased_scores() -> None:
    x, gate = draw(2, 5, 32), draw(6, 32, seed=1) / 4
    bias = torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, -5.0])
    chosen, weights = moe.route(CFG, x, gate, bias)
    assert chosen.shape == weights.shape == (2, 5, 3)
    scores = F.softplus(x.double() @ gate.double().T).sqrt()
    assert (chosen == 2).any(-1).all() and not (chosen == 5).any(), "the bias decides"
    picked = scores.gather(-1, chosen)
    expected = picked / picked.sum(-1, keepdim=True) * 1.5
    assert torch.allclose(weights.double(), expected, rtol=1e-5)
    biased = (scores + bias).gather(-1, chosen)
    assert (biased.diff(dim=-1) <= 0).all(), "descending"


def test_one_expert_is_not_normalized() -> None:
    x, gate = draw(4, 32), draw(6, 32, seed=1) / 4
    _, weights = moe.route(replace(CFG, num_experts_per_tok=1), x, gate, torch.zeros(6))
    best = F.softplus(x.double() @ gate.double().T).sqrt().amax(-1)
    assert torch.allclose(weights[:, 0].double(), 1.5 * best, rtol=1e-5)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_clamps(limit: float) -> None:
    """The gate from above only, the up part on both sides; 0 switches it off."""
    x, (w1, _, w3) = draw(9, 32), expert(0)
    gate, up = F.linear(x, w1).float(), F.linear(x, w3).float()
    if limit:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    assert torch.equal(moe.expert_hidden(x, w1, w3, limit), F.silu(gate) * up)
    assert (gate < -0.5).any()


def by_token(x: Tensor, chosen: Tensor, routing: Tensor) -> Tensor:
    """The definition: ascending experts, routing weight before w2, shared expert last."""
    rows = []
    for token, picked, shares in zip(
        x.flatten(0, 1), chosen.flatten(0, 1), routing.flatten(0, 1), strict=True
    ):
        total = torch.zeros(32)
        for place in picked.argsort().tolist():
            w1, w2, w3 = expert(int(picked[place]))
            hidden = moe.expert_hidden(token[None], w1, w3, CFG.swiglu_limit)
            total += F.linear((hidden * shares[place]).bfloat16(), w2)[0].float()
        w1, w2, w3 = expert(9)
        hidden = moe.expert_hidden(token[None], w1, w3, CFG.swiglu_limit)
        rows.append((total + F.linear(hidden.bfloat16(), w2)[0].float()).bfloat16())
    return torch.stack(rows).view_as(x)


def test_sum_over_experts() -> None:
    x = draw(3, 7, 32)
    chosen, routing = moe.route(CFG, x, draw(6, 32, seed=1) / 4, torch.zeros(6))
    chosen = chosen.where(chosen != 4, 5).sort(-1, descending=True).values
    asked: list[int] = []

    def ask(number: int) -> moe.ExpertWeights:
        asked.append(number)
        return expert(number)

    expected = by_token(x, chosen, routing)
    for by_row in (True, False):
        asked.clear()
        found = moe.moe(CFG, x, chosen, routing, ask, expert(9), by_row=by_row)
        assert asked == sorted(set(chosen.flatten().tolist())), "each once, none without a token"
        # A product of few tokens may round its last bit otherwise than one of a single token.
        assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=2**-7)
        assert (found == expected).float().mean() > 0.95


def test_tokens_of_several_rows_go_in_bounded_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(3, 7, 32)
    chosen, routing = moe.route(CFG, x, draw(6, 32, seed=1) / 4, torch.zeros(6))
    expected = by_token(x, chosen, routing)
    seen: list[int] = []
    multiply = moe.expert_output

    def watched(part: Tensor, *others: Any) -> Tensor:
        seen.append(len(part))
        return multiply(part, *others)

    monkeypatch.setattr(moe, "expert_output", watched)
    monkeypatch.setattr(moe, "TOKENS", 4)
    found = moe.moe(CFG, x, chosen, routing, expert, expert(9), by_row=False)
    assert torch.allclose(found.float(), expected.float(), rtol=2**-6, atol=2**-7)
    assert max(seen) == 4 and sum(seen) == chosen.numel() + 21


def test_rows_do_not_see_one_another() -> None:
    x = draw(4, 9, 32)
    chosen, routing = moe.route(CFG, x, draw(6, 32, seed=1) / 4, torch.zeros(6))
    whole = moe.moe(CFG, x, chosen, routing, expert, expert(9))
    for row in range(4):
        part = slice(row, row + 1)
        alone = moe.moe(CFG, x[part], chosen[part], routing[part], expert, expert(9))
        assert torch.equal(alone, whole[part])
