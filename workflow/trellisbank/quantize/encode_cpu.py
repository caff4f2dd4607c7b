# SPDX-License-Identifier: Apache-2.0
"""Tile encoder for CPUs, and the search for the scale at which a matrix's tiles are encoded.

Procedure: exllamav3 1.6.5. Its path costs are in half precision, ours in 16-bit integers, which
gives the same mean squared error (docs/exl3.md).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize import viterbi


class Encoder(Protocol):
    """A function from tiles in ring order to states."""

    def __call__(self, tiles: npt.NDArray[np.float32], ring: bool = True) -> npt.NDArray[np.uint16]:
        """Encode.

        Args:
            tiles: fp32 ``[n, 256]``.
            ring: False for paths whose ends do not meet, in half the time: good for comparing
                scales, not for storing.

        Returns:
            uint16 ``[n, 256]``.

        Raises:
            QuantizeError: if a tile is not finite.
        """


def tile_encoder(rate: int, codebook: str = "mul1", threads: int = 1) -> Encoder:
    """An encoder of tiles at one rate.

    It owns its buffers (some 4 MB a thread), so it is not to be called from two threads at once.

    Args:
        rate: bits a weight, 1..8.
        codebook: ``mul1``, ``mcg`` or ``3inst``.
        threads: worker threads; the states do not depend on it.

    Raises:
        QuantizeError: for an unknown rate.
    """
    if rate not in trellis.RATES:
        raise QuantizeError(
            "rate outside the format",
            expected="1..8 bits a weight",
            found=rate,
            fix="choose another",
        )
    largest = float(np.abs(trellis.codebook(codebook)).max())
    kernel = viterbi.kernel(rate)
    buffers = [viterbi.scratch(rate) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def encode_at(
        level: int, tiles: npt.NDArray[np.float32], ring: bool
    ) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.bool_]]:
        grid = viterbi.grid(codebook, rate, level, kernel.plain)
        rest, windows = viterbi.to_grid(tiles, grid)
        states = np.empty(tiles.shape, dtype=np.uint16)
        good = np.empty(len(tiles), dtype=np.bool_)

        def work(start: int, stop: int, rows: npt.NDArray[np.uint16]) -> None:
            part = slice(start, stop)
            kernel.encode(
                rest[part],
                windows[part],
                grid.reach,
                grid.tables,
                grid.values,
                ring,
                states[part],
                good[part],
                rows,
            )

        if pool is None:
            work(0, len(tiles), buffers[0])
        else:
            share = -(-len(tiles) // (2 * threads)) * 2
            starts = range(0, len(tiles), share)
            jobs = [
                pool.submit(work, i, i + share, rows)
                for i, rows in zip(starts, buffers, strict=False)
            ]
            try:
                for job in jobs:
                    job.result()
            except BaseException:
                # Other jobs may go on for a while, in buffers that are theirs from now on.
                buffers[:] = [viterbi.scratch(rate) for _ in buffers]
                raise
        return states, good

    def encode(tiles: npt.NDArray[np.float32], ring: bool = True) -> npt.NDArray[np.uint16]:
        size = np.abs(tiles).max(axis=1, initial=0.0).astype(np.float64) / largest
        if not np.isfinite(size).all():
            raise QuantizeError(
                "tiles are not finite",
                expected="finite numbers",
                found=f"{int((~np.isfinite(size)).sum())} of {len(size)} tiles with others",
                fix="verify the weights and the Hessian that their feedback comes from",
            )
        states = np.empty(tiles.shape, dtype=np.uint16)
        left = np.ones(len(tiles), dtype=np.bool_)
        level = viterbi.FINEST[rate]
        while left.any():
            now = np.flatnonzero(left & viterbi.suits(level, size))
            if len(now):
                states[now], good = encode_at(level, tiles[now], ring)
                left[now] = ~good
            level -= 1
        return states

    return encode


DRIFT = {1: 1.08, 2: 1.018, 3: 1.004}
"""Feedback enlarges the tiles that are encoded; the sample is enlarged likewise (exllamav3)."""


def sample_tiles(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Tiles to search the scale on: three wrapped diagonals, the largest and the smallest tiles."""
    rows, columns = weight.shape[0] // trellis.TILE, weight.shape[1] // trellis.TILE
    longest = max(rows, columns)
    tiles = trellis.to_tiles(weight)
    steps = np.arange(longest)[:, None]
    diagonals = (steps % rows * columns + (steps + np.arange(3)) % columns).ravel()
    extremes = min(max(8, 3 * longest // 16), (rows * columns + 1) // 2)
    order = np.argsort(np.square(tiles).mean(axis=1), kind="stable")
    picks = np.concatenate([diagonals, order[::-1][:extremes], order[:extremes]])
    picked: npt.NDArray[np.float32] = tiles[picks]
    return picked


USUAL = {1: 0.82, 2: 0.78, 3: 0.75, 4: 0.73, 5: 0.70, 6: 0.67, 7: 0.64, 8: 0.61}
"""Scales at which regularized matrices are encoded best."""

STEP, LOWEST, HIGHEST = 0.075, 0.025, 1.9
"""Between scales that are tried, and the ends of their range (exllamav3)."""


def search_scale(
    weight: npt.NDArray[np.float32],
    rate: int,
    encode: Encoder,
    values: npt.NDArray[np.float32],
) -> float:
    """Global scale at which a regularized matrix is encoded with least error.

    The vertex of a parabola through the least error on a grid and its neighbours. exllamav3 tries
    ten scales from 0.1 to 1.9 on a third of the sample, then five around the best on all of it. But
    the error has one valley, for regularized matrices in the same place, so it is looked for from
    there, mostly with three scales; and on open paths. This takes a fifth of the time; docs/exl3.md
    says how far apart the scales found are.

    Args:
        weight: regularized, fp32 ``[k, n]``.
        rate: bits a weight.
        encode: tile encoder of that rate.
        values: fp32 ``[65536]``, its codebook.

    Returns:
        The scale, 0.025 to 1.9.
    """
    sample = sample_tiles(weight) * np.float32(DRIFT.get(rate, 1.0))
    known: dict[int, float] = {}

    def scale(step: float) -> float:
        return min(max(USUAL[rate] + STEP * step, LOWEST), HIGHEST)

    def error(step: int) -> float:
        if step not in known:
            factor = np.float32(scale(step))
            found = values[encode(sample * factor, ring=False)]
            known[step] = float(np.square(found / factor - sample).mean(dtype=np.float64))
        return known[step]

    best = 0
    while (lower := min((best, best - 1, best + 1), key=error)) != best:
        best = lower
    left, middle, right = error(best - 1), error(best), error(best + 1)
    curvature = left - 2 * middle + right
    offset = float(np.clip((left - right) / (2 * curvature), -0.5, 0.5)) if curvature > 0 else 0.0
    return scale(best + offset)
