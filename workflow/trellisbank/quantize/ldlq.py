# SPDX-License-Identifier: Apache-2.0
"""Regularizing a matrix, rounding it with error feedback (LDLQ), and refitting its scales.

Everything is fp32. Throughout, ``W = diag(su) P_k W_reg P_n diag(sv)``. Procedure: exllamav3 1.6.5
(docs/exl3.md); LDLQ itself: Chee et al. 2023, QuIP, https://arxiv.org/abs/2307.13304.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trellisbank.formats.trellis import from_tiles, to_tiles
from trellisbank.quantize.decode_torch import turn
from trellisbank.quantize.encode_cpu import Encoder
from trellisbank.quantize.hessian import BLOCK

RMS = 1.24371088
"""Root mean square of a regularized matrix before its global scale: the spread of the first EXL3
codebooks (exllamav3's constant; the scale search makes up for another codebook's spread)."""

SPAN = 128
"""Rows whose feedback is summed before it is passed on; sets the order of fp32 sums only."""


def transform(matrix: Tensor) -> Tensor:
    """``P_k M P_n``."""
    return turn(turn(matrix, 0), 1)


def _off_zero(scales: Tensor) -> Tensor:
    """Add 1e-10, as exllamav3 does, except to scales that this would bring nearer to 0 by half."""
    moved = scales + 1e-10
    return torch.where(moved.abs() < scales.abs() / 2, scales, moved)


def regularize(
    weight: Tensor, su: Tensor, sv: Tensor, out_scales: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale columns and rows to equal size and rotate, so that all tiles look Gaussian.

    Args:
        weight: fp32 ``[k, n]``.
        su: input signs, fp32 ``[k]``.
        sv: output signs, fp32 ``[n]``.
        out_scales: also even out the columns' sizes.

    Returns:
        ``W_reg`` with root mean square `RMS`, and the scales ``su``, ``sv`` with their signs;
        ``sv`` is 0 for columns that are zero throughout; rows of zeros have the mean scale of all,
        so that a factor made with it neither favours nor forgets them (exllamav3: 0.1, at any size
        of the others).
    """
    columns = weight.square().mean(dim=0).sqrt()
    if columns.mean() > 1e-30:
        columns = columns / columns.mean()
    zero = columns < 1e-30
    if out_scales:
        sv = _off_zero(sv * columns.masked_fill(zero, 0.1))
    scaled = weight / sv
    sv = sv.masked_fill(zero, 0.0)
    scaled = turn(scaled, 1)
    rows = scaled.square().mean(dim=1).sqrt()
    rows = rows.masked_fill(rows < 1e-30, float(rows.mean()) or 0.1)
    su = _off_zero(su * rows / -RMS)
    scaled = scaled / su[:, None]
    return turn(scaled, 0), su, sv


def round_with_feedback(
    weight: Tensor, factor: Tensor | None, encode: Encoder, values: npt.NDArray[np.float32]
) -> tuple[Tensor, npt.NDArray[np.uint16]]:
    """Encode a regularized matrix from its last 16 rows to its first, passing errors on.

    Block ``b`` encodes ``W[b] + sum over rows r below it of L[r, b]^T (W - Q)[r]``.

    Args:
        weight: fp32 ``[k, n]``.
        factor: fp32 ``[k, k]`` from `hessian.block_ldl`; None for no feedback.
        encode: tile encoder.
        values: fp32 ``[65536]``, the codebook.

    Returns:
        ``Q`` fp32 ``[k, n]`` and the states uint16 ``[k/16, n/16, 256]``.
    """
    k, n = weight.shape
    states = np.empty((k // BLOCK, n // BLOCK, 256), dtype=np.uint16)
    quantized = torch.empty_like(weight)
    if factor is None:
        states[:] = encode(to_tiles(weight.numpy())).reshape(states.shape)
        tiles = values[states.reshape(-1, 256)]
        return torch.from_numpy(from_tiles(tiles, k, n)), states
    fed_back = torch.zeros_like(weight)
    for end in range(k, 0, -SPAN):
        start = end - SPAN
        error = torch.zeros(SPAN, n)
        for row in range(end - BLOCK, start - 1, -BLOCK):
            rows = slice(row, row + BLOCK)
            target = weight[rows] + fed_back[rows]
            done = row + BLOCK
            if done < end:
                target += factor[done:end, rows].T @ error[done - start :]
            found = encode(to_tiles(target.numpy()))
            quantized[rows] = torch.from_numpy(from_tiles(values[found], BLOCK, n))
            states[row // BLOCK] = found
            error[row - start : done - start] = weight[rows] - quantized[rows]
        if start:
            fed_back[:start] += factor[start:end, :start].T @ error
    return quantized, states


def refit(
    weight: Tensor, quantized: Tensor, damped: Tensor, su: Tensor, sv: Tensor
) -> tuple[Tensor, Tensor]:
    """Least-squares scales for a fixed trellis: columns, rows, and both once more.

    Args:
        weight: fp32 ``[k, n]``.
        quantized: ``diag(su) P Q P diag(sv)``, fp32 ``[k, n]``.
        damped: fp32 ``[k, k]``, the normalised, damped Hessian.
        su: fp32 ``[k]``.
        sv: fp32 ``[n]``.

    Returns:
        The new ``su`` and ``sv``. Lowers the output error by 2 to 7 percent (measured). Channels
        whose sums leave fp32 keep their scales.
    """
    wanted = damped @ weight
    for _ in range(2):
        projected = (quantized * wanted).sum(dim=0)
        energy = (quantized * (damped @ quantized)).sum(dim=0)
        c = projected / energy
        c = torch.where(c.isfinite() & (energy > 1e-30), c, 1.0)
        quantized, sv = quantized * c, sv * c
        normal = (quantized @ quantized.T) * damped
        normal.diagonal().add_(1e-6 * normal.diagonal().mean())
        r, _ = torch.linalg.solve_ex(normal, (quantized * wanted).sum(dim=1))
        r = torch.where(r.isfinite() & (r > 0), r, 1.0)
        quantized, su = quantized * r[:, None], su * r
    return su, sv
