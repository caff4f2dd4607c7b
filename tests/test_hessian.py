# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from trellisbank.model.moe import expert_hidden
from trellisbank.quantize import hessian

GOLDEN = load_file(Path(__file__).parent / "data" / "exl3_matrices.safetensors")


def relative(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm())


def generator(seed):
    return torch.Generator().manual_seed(seed)


def layer(tokens, splits=1, experts=4, width=128, inner=256):
    """Weights of one expert, and captures whose last split sends `tokens` tokens to expert 2."""
    g = generator(tokens)
    w1, w3 = (torch.randn(inner, width, generator=g).bfloat16() / 8 for _ in range(2))
    captures = []
    for split in range(splits):
        x = torch.randn(24, width, generator=g).bfloat16()
        chosen = torch.tensor([0, 1]).repeat(24, 1)
        if split == splits - 1:
            chosen[torch.randperm(24, generator=g)[:tokens], 1] = 2
        captures.append((x, chosen, torch.rand(24, 2, generator=g)))
    return w1, w3, captures


def test_sum_of_outer_products():
    rows = torch.randn(3000, 64, generator=generator(0)).bfloat16()
    h = hessian.empty(64)
    for part in rows.split(700):
        hessian.accumulate(h, part)
    assert (h.count, h.dropped) == (3000, 0)
    assert relative(h.matrix, rows.double().T @ rows.double()) < 1e-6


def test_rows_that_are_not_finite_are_dropped_and_counted():
    rows = torch.randn(50, 64, generator=generator(1))
    broken = rows.clone()
    broken[[3, 20], [0, 63]] = torch.tensor([float("nan"), float("-inf")])
    h, expected = hessian.empty(64), hessian.empty(64)
    hessian.accumulate(h, broken)
    hessian.accumulate(expected, rows[[i for i in range(50) if i not in (3, 20)]])
    assert (h.count, h.dropped) == (48, 2)
    assert torch.equal(h.matrix, expected.matrix)


@pytest.mark.parametrize("tokens", [0, 1, 2])
@pytest.mark.parametrize("weighting", ["none", "route"])
def test_few_tokens_are_exact(tokens, weighting):
    w1, w3, captures = layer(tokens, splits=2)
    gate_up, down = hessian.expert_hessians(captures, 2, w1, w3, 10.0, weighting)
    x, chosen, weights = captures[-1]
    mine = (chosen == 2).any(1)
    inputs = x[mine].float()
    hidden = expert_hidden(x[mine], w1, w3, 10.0)
    if weighting == "route":
        hidden = hidden * weights[mine, 1:]
    hidden = hidden.bfloat16().float()
    for h, rows in ((gate_up, inputs), (down, hidden)):
        assert h.count == len(rows) == tokens
        expected = torch.zeros_like(h.matrix)
        for row in rows:
            expected += torch.outer(row, row)
        assert torch.equal(h.matrix, expected)


def test_splits_add_up_and_leading_axes_do_not_matter():
    w1, w3, captures = layer(9, splits=3)
    both = hessian.expert_hessians(captures, 1, w1, w3, 0.0)
    alone = [hessian.expert_hessians([capture], 1, w1, w3, 0.0) for capture in captures]
    for i in (0, 1):
        assert both[i].count == sum(h[i].count for h in alone)
        assert relative(both[i].matrix, sum(h[i].matrix for h in alone)) < 1e-6
    shaped = [tuple(t.reshape(4, 6, -1) for t in capture) for capture in captures]
    again = hessian.expert_hessians(shaped, 1, w1, w3, 0.0)
    assert torch.equal(again[1].matrix, both[1].matrix)


def test_finalize_reproduces_exllamav3():
    h, su = GOLDEN["s128x256/H"], GOLDEN["steps/su_sign"].flatten()
    ready = hessian.finalize(h, 1024)
    assert ready.fallback is None
    assert relative(ready.damped.diagonal(), GOLDEN["steps/H_diag_damped"]) < 1e-6
    rotated = hessian.rotate(ready.damped, su)
    assert relative(rotated, GOLDEN["steps/H_rot_damped"]) < 1e-6
    # The factor feels the rounding of the rotation.
    factor, retries = hessian.block_ldl(rotated, 0.025)
    assert relative(factor, GOLDEN["steps/L"]) < 3e-5
    assert hessian.outcome(factor, retries) == (None, ())
    assert torch.equal(h, GOLDEN["s128x256/H"])


@given(st.integers(1, 6), st.integers(0, 2**31))
@settings(max_examples=20)
def test_block_ldl_factors(blocks, seed):
    k = 16 * blocks
    x = torch.randn(2 * k, k, generator=generator(seed))
    h = x.T @ x / k
    below, retries = hessian.block_ldl(h, 0.025)
    assert retries == 0
    # Block LDL: L^-1 H L^-T is block diagonal.
    inverse = torch.linalg.inv((below + torch.eye(k)).double())
    middle = inverse @ h.double() @ inverse.T
    same_block = torch.arange(k)[:, None] // 16 == torch.arange(k) // 16
    assert float(middle[~same_block].abs().max() if blocks > 1 else 0) < 1e-4
    assert float(below[same_block].abs().max()) == 0


def test_raised_damping_is_noted():
    q, _ = torch.linalg.qr(torch.randn(128, 128, generator=generator(5)))
    values = torch.linspace(0.5, 2.0, 128)
    values[0] = -0.2  # damping of 0.025 does not mend it; a few retries do
    factor, retries = hessian.block_ldl(hessian.finalize(q * values @ q.T, 1).damped, 0.025)
    assert bool(factor.isfinite().all())
    assert hessian.outcome(factor, retries) == (None, (f"damping raised {retries} times",))
    assert 1 < retries <= hessian.RETRIES


def test_indefinite_hessians_have_no_factor():
    damped = hessian.finalize(torch.eye(128) - torch.ones(128, 128) * 0.5, 7).damped
    reason = "factorization failed after 10 retries"
    assert hessian.outcome(*hessian.block_ldl(damped, 0.025)) == (reason, ())


@pytest.mark.parametrize(
    ("matrix", "count", "reason"),
    [
        (None, 5, "no Hessian"),
        (torch.zeros(128, 128), 0, "no calibration rows"),
        (torch.eye(128), 2, "2 calibration rows of 3"),
        (torch.zeros(128, 128), 7, "mean diagonal"),
        (-torch.eye(128), 7, "mean diagonal"),
        (torch.eye(128) * float("inf"), 7, "not finite"),
        (torch.full((128, 128), float("nan")), 7, "not finite"),
    ],
)
def test_unusable_hessians_give_a_reason(matrix, count, reason):
    ready = hessian.finalize(matrix, count, min_count=3 if count == 2 else 1)
    assert reason in ready.fallback
    assert ready.damped is None


@pytest.mark.parametrize("tokens", [0, 1, 3, 64])
def test_rank_deficiency_is_counted(tokens):
    h = hessian.empty(32)
    rows = torch.randn(tokens, 32, generator=generator(tokens))
    rows[:, 7] = 0
    hessian.accumulate(h, rows)
    found = hessian.statistics(h)
    rank = min(tokens, 31)
    assert (found.count, found.rank, found.rank_deficiency) == (tokens, rank, 32 - rank)
    assert found.dead_inputs == (1 if tokens else 32)
    assert found.trace == pytest.approx(float(rows.square().sum()), rel=1e-6)
    assert (found.condition is None) == (tokens == 0)


def test_statistics_of_a_broken_matrix():
    found = hessian.statistics(hessian.Hessian(torch.full((16, 16), float("nan")), 4))
    assert found.rank is None and found.condition is None


@given(st.sampled_from([20, 50, 80, 200]), st.integers(0, 2**31))
@settings(max_examples=20, deadline=None)
def test_rank_and_condition_from_pivots(tokens, seed):
    h = hessian.empty(64)
    spread = torch.logspace(0, -2, 64)
    hessian.accumulate(h, torch.randn(tokens, 64, generator=generator(seed)) * spread)
    found = hessian.statistics(h)
    eigenvalues = torch.linalg.eigvalsh(h.matrix.double())
    # The next pivot is at least the next eigenvalue over k: none that large is left out.
    bound = 64 * torch.finfo(torch.float32).eps * float(h.matrix.diagonal().max())
    assert int((eigenvalues > 64 * bound).sum()) <= found.rank <= min(tokens, 64)
    assert found.condition >= 1
    if tokens >= 64:
        assert found.condition <= 1.01 * float(eigenvalues[-1] / eigenvalues[0])


@pytest.mark.parametrize("tokens", [1, 10, 40, 200])
def test_rank_of_well_spread_rows_is_their_number(tokens):
    h = hessian.empty(64)
    hessian.accumulate(h, torch.randn(tokens, 64, generator=generator(0)))
    found = hessian.statistics(h)
    assert found.rank == min(tokens, 64) and found.rank_deficiency == 64 - found.rank
