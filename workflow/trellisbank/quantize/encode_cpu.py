# SPDX-License-Identifier: Apache-2.0
"""Tile encoder for CPUs, and the search for the scale at which a matrix's tiles are encoded.

Procedure: exllamav3 1.6.5. Its path costs are in half precision, ours in fp32, which gives the same
mean squared error (docs/exl3.md).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize.viterbi import KERNELS, scratch, value_table

Encoder = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint16]]
"""Tiles in ring order, fp32 ``[n, 256]``, to states, uint16 ``[n, 256]``."""


def tile_encoder(rate: int, codebook: str = "mul1", threads: int = 1) -> Encoder:
    """An encoder of tiles at one rate.

    It owns its buffers (some 8 MB a thread), so it is not to be called from two threads at once.

    Args:
        rate: bits a weight, 1..8.
        codebook: ``mul1``, ``mcg`` or ``3inst``.
        threads: worker threads; the states do not depend on it.

    Returns:
        A function from tiles in ring order, fp32 ``[n, 256]``, to states, uint16 ``[n, 256]``.

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
    values = trellis.codebook(codebook).astype(np.float32)
    table = value_table(values, rate)
    costs = [scratch(rate) for _ in range(threads)]
    kernel = KERNELS[rate]
    pool = ThreadPoolExecutor(threads) if threads > 1 else None

    def encode(tiles: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
        tiles = np.ascontiguousarray(tiles)
        states = np.empty(tiles.shape, dtype=np.uint16)
        if pool is None:
            kernel(tiles, states, table, values, costs[0])
            return states
        share = -(-len(tiles) // (2 * threads)) * 2
        jobs = [
            pool.submit(kernel, tiles[i : i + share], states[i : i + share], table, values, own)
            for i, own in zip(range(0, len(tiles), share), costs, strict=False)
        ]
        for job in jobs:
            job.result()
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


def search_scale(
    weight: npt.NDArray[np.float32],
    rate: int,
    encode: Encoder,
    values: npt.NDArray[np.float32],
) -> float:
    """Global scale at which a regularized matrix is encoded with least error.

    Ten coarse scales on a third of the sample, five fine ones on all of it, then a parabola.

    Args:
        weight: regularized, fp32 ``[k, n]``.
        rate: bits a weight.
        encode: tile encoder of that rate.
        values: fp32 ``[65536]``, its codebook.

    Returns:
        The scale, at least 0.01.
    """
    sample = sample_tiles(weight) * np.float32(DRIFT.get(rate, 1.0))

    def errors(
        scales: npt.NDArray[np.floating], tiles: npt.NDArray[np.float32]
    ) -> npt.NDArray[np.float64]:
        factors = scales.astype(np.float32)[:, None, None]
        scaled = (tiles * factors).reshape(-1, trellis.RING)
        found = values[encode(scaled)].reshape(len(scales), *tiles.shape)
        mean: npt.NDArray[np.float64] = np.square(found / factors - tiles).mean(
            axis=(1, 2), dtype=np.float64
        )
        return mean

    coarse = 0.1 + 0.2 * np.arange(10)
    center = coarse[np.argmin(errors(coarse, sample[::3]))]
    step = 0.075
    fine = center + step * np.arange(-2, 3)
    error = errors(fine, sample)
    best = int(np.argmin(error))
    offset = 0.0
    if 0 < best < 4:
        left, middle, right = error[best - 1 : best + 2]
        curvature = left - 2 * middle + right
        if curvature > 0:
            offset = float(np.clip((left - right) / (2 * curvature), -0.5, 0.5))
    return max(float(fine[best]) + offset * step, 0.01)
