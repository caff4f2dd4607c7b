# SPDX-License-Identifier: Apache-2.0
"""Hessians of the layer-wise least-squares problem: sums of outer products of a matrix's inputs.

For ``y = x W`` the error of a quantized ``W - E`` over calibration rows ``X`` is ``|X E|^2 =
tr(E^T H E)`` with ``H = X^T X``. Sums are fp32 in a fixed order: captures as given, tokens
ascending, `CHUNK` rows at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from scipy.linalg import lapack
from torch import Tensor

from trellisbank.model.moe import expert_hidden
from trellisbank.quantize.decode_torch import turn

CHUNK = 1024
"""Rows added at a time. Part of the result: it fixes the order of summation."""

BLOCK = 16
"""Rows of a block of error feedback: those of a tile."""

RETRIES = 10
"""Times that the damping is raised when the factorization fails, as exllamav3 does."""

TINY = 1e-20
"""A mean diagonal below this holds no calibration (exllamav3's bound)."""

Capture = tuple[Tensor, Tensor, Tensor]
"""FFN inputs bf16 ``[n, D]``, chosen experts int64 ``[n, T]``, routing weights fp32 ``[n, T]``."""


@dataclass
class Hessian:
    """Sum of outer products.

    Attributes:
        matrix: fp32 ``[k, k]``, ``X^T X``, not normalised.
        count: rows added.
        dropped: rows left out because they held a non-finite value.
    """

    matrix: Tensor
    count: int = 0
    dropped: int = 0


def empty(k: int, device: torch.device | str = "cpu") -> Hessian:
    """No rows yet."""
    return Hessian(torch.zeros(k, k, device=device))


def accumulate(hessian: Hessian, rows: Tensor) -> None:
    """Add ``x^T x`` for every row with finite entries; count the others.

    Args:
        hessian: changed in place.
        rows: ``[n, k]``, any floating dtype; products and sums are fp32.
    """
    for chunk in rows.split(CHUNK):
        x = chunk.float()
        finite = x.isfinite().all(dim=1)
        kept = x[finite]
        hessian.count += len(kept)
        hessian.dropped += len(x) - len(kept)
        if len(kept):
            hessian.matrix.addmm_(kept.T, kept)


def expert_hessians(
    captures: Iterable[Capture],
    expert: int,
    w1: Tensor,
    w3: Tensor,
    limit: float,
    down_weighting: Literal["none", "route"] = "route",
) -> tuple[Hessian, Hessian]:
    """Hessians of one routed expert's two matrix groups, from its own tokens.

    Args:
        captures: one for each split, in a fixed order; tokens may have any leading shape.
        expert: its number.
        w1: gate, bf16 ``[I, D]``; the sums are made where it lies.
        w3: up, bf16 ``[I, D]``.
        limit: SwiGLU clamp, 0 for none.
        down_weighting: ``none``: the inputs of ``w2`` without the routing weight; ``route``: with
            it, as the forward feeds them.

    Returns:
        gate_up ``[D, D]`` of the FFN inputs, down ``[I, I]`` of the bf16 activations before ``w2``.
    """
    gate_up, down = empty(w1.shape[1], w1.device), empty(w1.shape[0], w1.device)
    for inputs, chosen, weights in captures:
        mine = chosen.flatten(0, -2) == expert
        tokens = mine.any(dim=1).nonzero().squeeze(1)
        x = inputs.flatten(0, -2)[tokens].to(w1.device)
        routing = (weights.flatten(0, -2)[tokens] * mine[tokens]).sum(dim=1).to(w1.device)
        accumulate(gate_up, x)
        for part, route in zip(x.split(CHUNK), routing.split(CHUNK), strict=True):
            hidden = expert_hidden(part, w1, w3, limit)
            if down_weighting == "route":
                hidden = hidden * route.unsqueeze(1)
            accumulate(down, hidden.to(torch.bfloat16))
    return gate_up, down


@dataclass(frozen=True)
class Statistics:
    """What a Hessian says about its calibration.

    Attributes:
        count: rows added.
        dropped: rows with non-finite values.
        trace: sum of squares of all inputs; None where it is not finite.
        dead_inputs: channels that were zero in every row.
        rank: pivots of a Cholesky factorization with complete pivoting above ``k * eps`` times
            the largest (fp32 eps); None if the matrix is not finite.
        rank_deficiency: ``k - rank``. Normal for experts with few tokens: damping fills it.
        condition: largest pivot over the smallest above that bound; None without one. A lower bound
            of the condition number of the rows and columns picked (at full rank, of all).
    """

    count: int
    dropped: int
    trace: float | None
    dead_inputs: int
    rank: int | None
    rank_deficiency: int | None
    condition: float | None


def statistics(hessian: Hessian) -> Statistics:
    """Count, trace, rank and condition.

    Pivots fall with the eigenvalues and cost a third of ``k^3`` multiplications, a fraction of what
    those cost: 1 s for ``k`` = 5120 on one core. Higham 2002, Accuracy and Stability of Numerical
    Algorithms, section 10.3.
    """
    matrix = hessian.matrix.cpu()
    diagonal = matrix.diagonal().double()
    trace = float(diagonal.sum())
    rank: int | None = None
    condition: float | None = None
    if bool(matrix.isfinite().all()):
        bound = len(matrix) * torch.finfo(torch.float32).eps * float(diagonal.max())
        factor, _, rank, _ = lapack.spstrf(matrix.numpy(), tol=bound)
        if rank:
            condition = float(factor[0, 0] / factor[rank - 1, rank - 1]) ** 2
    return Statistics(
        count=hessian.count,
        dropped=hessian.dropped,
        trace=trace if math.isfinite(trace) else None,
        dead_inputs=int((diagonal == 0).sum()),
        rank=rank,
        rank_deficiency=None if rank is None else len(matrix) - rank,
        condition=condition,
    )


@dataclass(frozen=True)
class Finalized:
    """A Hessian made ready for encoding, shared by all matrices that read the same inputs.

    Attributes:
        damped: fp32 ``[k, k]``, ``H / count + sigma_reg mean(diag) I``; None with a fallback.
        fallback: why there is no error feedback, or None.
    """

    damped: Tensor | None
    fallback: str | None


def rotate(matrix: Tensor, scales: Tensor) -> Tensor:
    """``P diag(scales) H diag(scales) P`` for a symmetric fp32 matrix ``[k, k]``."""
    return turn(turn(scales[:, None] * matrix * scales, 0), 1)


def block_ldl(matrix: Tensor, sigma_reg: float) -> tuple[Tensor | None, int]:
    """Factor ``H = L D L^T`` with 16-wide blocks; ``L`` without its (identity) diagonal blocks.

    When the Cholesky factorization fails, ``2 sigma_reg mean(diag)`` is added to the diagonal and
    it is tried again, ten times at most.

    Returns:
        fp32 ``[k, k]`` or None when there is none of finite numbers, and the number of retries.
    """
    k = len(matrix)
    step = 2 * sigma_reg * matrix.diagonal().mean()
    attempt = matrix.clone()
    cholesky, failed = torch.linalg.cholesky_ex(attempt)
    retries = 0
    while failed and retries < RETRIES:
        retries += 1
        attempt.diagonal().add_(step)
        cholesky, failed = torch.linalg.cholesky_ex(attempt)
    if failed:
        return None, retries
    blocks = cholesky.reshape(k // BLOCK, BLOCK, k // BLOCK, BLOCK).diagonal(dim1=0, dim2=2)
    inverses = torch.linalg.solve_triangular(
        blocks.permute(2, 0, 1), torch.eye(BLOCK).expand(k // BLOCK, -1, -1), upper=False
    )
    columns = cholesky.reshape(k, k // BLOCK, BLOCK).transpose(0, 1)
    factor = torch.bmm(columns, inverses).transpose(0, 1).reshape(k, k)
    below = torch.arange(k)[:, None] // BLOCK > torch.arange(k) // BLOCK
    factor = torch.where(below, factor, 0.0)
    return (factor if bool(factor.isfinite().all()) else None), retries


def outcome(factor: Tensor | None, retries: int) -> tuple[str | None, tuple[str, ...]]:
    """Reason of a fallback, or None, and notes on a factorization: the policy of every encoder."""
    if factor is None:
        return f"factorization failed after {retries} retries", ()
    return None, (f"damping raised {retries} times",) if retries else ()


def unusable(matrix: Tensor | None, count: int, min_count: int) -> str | None:
    """Why a Hessian gives no error feedback, or None: the policy of every encoder."""
    if matrix is None:
        return "no Hessian"
    if count < max(min_count, 1):
        return "no calibration rows" if count == 0 else f"{count} calibration rows of {min_count}"
    if not bool(matrix.isfinite().all()):
        return "Hessian is not finite"
    mean = float((matrix.diagonal() / count).mean())
    if not mean >= TINY:
        return "Hessian's mean diagonal is not positive"
    if mean == math.inf:
        return "Hessian's mean diagonal is too large for fp32"
    return None


def finalize(
    matrix: Tensor | None, count: int, sigma_reg: float = 0.025, min_count: int = 1
) -> Finalized:
    """Normalise and damp a Hessian.

    Args:
        matrix: fp32 ``[k, k]``, ``X^T X``; None when there is none. Not changed.
        count: rows in it.
        sigma_reg: damping as a share of the mean diagonal.
        min_count: with fewer rows than this there is no error feedback.

    Returns:
        Never fails: what cannot be used gives a fallback with its reason.
    """
    reason = unusable(matrix, count, min_count)
    if matrix is None or reason:
        return Finalized(None, reason)
    damped = matrix / count
    damped.diagonal().add_(sigma_reg * damped.diagonal().mean())
    return Finalized(damped, None)
