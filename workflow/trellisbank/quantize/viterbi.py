# SPDX-License-Identifier: Apache-2.0
# The compiler's own modules are untyped, and what it compiles is typed by its calls.
# mypy: allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, call-arg, no-any-return"
"""Least-cost trellis paths on a ring of 256 positions, compiled for the CPU at hand.

A path's cost is the sum of ``(value(s_i) - w_i)^2`` in integers (`Grid`). Two passes a tile:

1. from position 128 around to position 127 with a free start; its best path names the node ``z`` in
   front of position 0;
2. from position 0 around to position 255, starting and ending in ``z``, so that the ring closes.

Costs alone are kept: which predecessor won is worked out again, in the same arithmetic, along the
one path traced back. That is some ten times faster than to remember it for every node.
"""

from __future__ import annotations

import warnings
from functools import cache
from math import ceil, prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit, types
from numba.core.errors import NumbaError

from trellisbank.formats import trellis
from trellisbank.formats.trellis import RATES, RING
from trellisbank.quantize.relax import LANES, SOURCE, STATES, layout, relax, relax_plain

HALF = RING // 2

WINDOW = 1 << 14
"""Half the width of a window: differences of two numbers in it do not overflow 16 bits."""

STEPS = 32
"""Positions after which the least cost of a row is subtracted from all."""

WORST = 65535
"""A cost that stays what it is: that of a node which cannot be reached."""

FINEST = {1: -2, 2: -1, 3: 0, 4: 1, 5: 1, 6: 2, 7: 3, 8: 4}
"""Level of the grid at each rate, one with twice the resolution of the one below: the coarsest that
keeps the mean squared error within 0.02 % of fp32 costs at K <= 4, within 0.1 % above."""


SLACK = 1.3
"""Share of the outermost target in view up to which larger ones are taken for it. Less precision
for outliers serves the rest of their tile (mean squared error of Student-t tiles at K = 8: 0.6 %
above exllamav3's with 1, 1.0 % below with 1.3, 1.3 % below with 1.7, where Gaussian ones at K = 5
get 0.2 % worse)."""


class Grid(NamedTuple):
    """Values and targets of tiles as integers.

    The codebook's largest value is ``2^(15 + level)``. Where that exceeds 15 bits, and for targets
    outside the values, a position sees the values through a window: a table of their distances to a
    center, a multiple of ``WINDOW``, cut to ``-WINDOW .. WINDOW - 1``. Cutting only lowers costs.
    So a best path all of whose values were in view is the best path without windows as well, and
    any other tile is encoded again one level below (at the usual scales 2 of 5,376, at K = 8).

    Attributes:
        scale: integer steps in 1.
        reach: centers on either side of 0.
        tables: int16 ``[2 reach + 1, 65536]`` in the order of the layout.
        values: int32 ``[nodes, 2^K]``, uncut, the candidates of each node in a row.
    """

    scale: float
    reach: int
    tables: npt.NDArray[np.int16]
    values: npt.NDArray[np.int32]


def _aligned(shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
    """Uninitialised array whose data start at a cache line."""
    item = np.dtype(dtype).itemsize
    memory: npt.NDArray[Any] = np.empty(prod(shape) + 64 // item, dtype=dtype)
    start = -memory.ctypes.data % 64 // item
    return memory[start : start + prod(shape)].reshape(shape)


def reach(level: int) -> int:
    """Centers on either side of 0: as many as the values need, and one for targets beyond."""
    return max(ceil(2.0 ** (15 + level) / WINDOW), 1)


def suits(level: int, size: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Whether tiles fit a level; ``size`` is their largest magnitude over the codebook's."""
    fits: npt.NDArray[np.bool_] = size * 2.0 ** (15 + level) < SLACK * (reach(level) + 1) * WINDOW
    return fits


@cache
def grid(codebook: str, rate: int, level: int, plain: bool = False) -> Grid:
    """The grid of a codebook in the order of a rate (1 to 9 MB, made once)."""
    values = trellis.codebook(codebook).astype(np.float64)
    scale = 2.0 ** (15 + level) / float(np.abs(values).max())
    whole = np.rint(values * scale).astype(np.int32)
    ordered = whole[layout(rate, plain).states]
    centers = range(-reach(level), reach(level) + 1)
    tables = _aligned((len(centers), STATES), np.int16)
    for m, table in zip(centers, tables, strict=True):
        table[:] = np.clip(ordered - m * WINDOW, -WINDOW, WINDOW - 1)
    candidates = np.ascontiguousarray(whole.reshape(1 << rate, -1).T)
    return Grid(scale, reach(level), tables, candidates)


def to_grid(
    tiles: npt.NDArray[np.float32], grid: Grid
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Targets as distances to their centers, and the centers' numbers, counted from 0."""
    whole = np.rint(tiles * grid.scale)
    last = grid.reach - 1
    center = np.clip(np.rint(whole / WINDOW), -last, last)
    # The outermost values stay in view of all targets but those beyond them.
    beyond = (np.abs(center) == last) & (np.abs(whole - center * WINDOW) >= WINDOW)
    center += np.sign(whole) * beyond
    rest = np.clip(whole - center * WINDOW, 1 - WINDOW, WINDOW - 1)
    return rest.astype(np.int16), center.astype(np.int64) + grid.reach


@njit(nogil=True, error_model="numpy")
def _place(node: Any, slots: Any, copies: int) -> Any:
    """Place of a node's cost in its row."""
    return ((node & ~(LANES - 1)) | slots[node & (LANES - 1)]) * copies


@njit(nogil=True, error_model="numpy")
def _trace(
    values: Any,
    rows: Any,
    slots: Any,
    tile: Any,
    windows: Any,
    reach: int,
    node: Any,
    length: int,
    rate: int,
    stride: int,
    copies: int,
    states: Any,
    cone: Any,
    winners: Any,
) -> Any:
    """Follow the best path into ``node`` at position ``length`` back to position 0.

    Between two kept rows of costs, ``stride`` positions apart, the nodes from which ``node`` can be
    reached (the cone: ``2^(K d)`` of them ``d`` positions before) are relaxed again. Ties go to the
    least predecessor. Writes the states; returns the node that the path starts from, and whether
    all its values were in view.
    """
    nodes = STATES >> rate
    seen = True
    count = 1 << rate
    for end in range(length, 0, -stride):
        row = rows[end // stride - 1]
        width = 1 << (rate * stride)
        low = node >> (rate * stride)
        for c in range(width):
            start = c * (nodes // width) + low
            cone[c] = row[_place(start, slots, copies)]
        for depth in range(stride - 1, -1, -1):
            width >>= rate
            w = np.int32(tile[end - 1 - depth])
            center = np.int32((windows[end - 1 - depth] - reach) * WINDOW)
            for c in range(width):
                candidates = values[c * (nodes // width) + (node >> (rate * depth))]
                best = np.int32(2**31 - 1)
                for q in range(count):
                    value = max(candidates[q] - center, np.int32(-WINDOW))
                    difference = min(value, np.int32(WINDOW - 1)) - w
                    cost = cone[q * width + c] + ((difference * difference) >> np.int32(16))
                    # With the winner's number in its low bits the loop is a plain minimum.
                    best = min(best, (min(cost, np.int32(WORST)) << np.int32(8)) | np.int32(q))
                cone[c] = best >> np.int32(8)
                winners[depth, c] = best & np.int32(255)
        branch = np.int64(0)
        for depth in range(stride):
            width = 1 << (rate * depth)
            winner = np.int64(winners[depth, branch])
            after = branch * (nodes // width) + (node >> (rate * depth))
            states[end - 1 - depth] = winner * nodes + after
            value = values[after, winner] - (windows[end - 1 - depth] - reach) * WINDOW
            seen &= -WINDOW <= value < WINDOW
            branch += winner * width
        node = branch * (nodes >> (rate * stride)) + (node >> (rate * stride))
    return node, seen


@njit(nogil=True, error_model="numpy")
def _lower(row: Any, width: int) -> Any:
    """Subtract the least cost of a row from all; True unless it had grown too far to be exact."""
    low = np.uint16(WORST)
    for i in range(width):
        low = min(low, row[i])
    for i in range(width):
        row[i] -= low
    return low < WORST - WINDOW


STRIDE = {1: 8, 2: 4, 3: 2}
"""Positions between two rows of costs that are kept, for rates where it is not 1. Rows are large at
low rates, and writing them all takes as long as computing them; so about 2 MB a tile are kept."""


def scratch(rate: int) -> npt.NDArray[np.uint16]:
    """Costs of two tiles for a kernel: uint16 ``[2, kept rows + 2, nodes * copies + padding]``.

    Vectors are aligned to cache lines, and 64 bytes of padding keep loads and stores that run side
    by side off the same place of different pages, which processors mistake for each other (together
    a factor of 1.6 at K = 3).
    """
    nodes = (STATES >> rate) * layout(rate).copies
    return _aligned((2, RING // STRIDE.get(rate, 1) + 3, nodes + LANES), np.uint16)


def _kernel(rate: int, plain: bool) -> Any:
    """Encoder of one rate, compiled at its first call."""
    _, slots, copies = layout(rate, plain)
    # Plain loops prefer, of nodes with equal costs, the one that the vector code meets first.
    node_at = np.argsort(layout(rate).slots)
    width = (STATES >> rate) * copies
    stride = STRIDE.get(rate, 1)
    source = SOURCE

    # The cells of this closure are constants to the compiler; all else is at module level, as its
    # cache on disk needs.
    def encode(
        tiles: Any,
        windows: Any,
        reach: int,
        tables: Any,
        values: Any,
        ring: bool,
        states: Any,
        good: Any,
        rows: Any,
    ) -> None:
        assert source  # its cell is part of the cache's key, which knows of this file alone
        count = tiles.shape[0]
        spare = rows.shape[1] - 2
        cone = np.empty(256, dtype=np.int32)
        winners = np.empty((stride, 256), dtype=np.uint8)
        node = np.zeros(2, dtype=np.int64)
        for first in range(0, count, 2):
            pair = (first, min(first + 1, count - 1))
            a, b = tiles[pair[0]], tiles[pair[1]]
            m, n = windows[pair[0]], windows[pair[1]]
            good[pair[0]] = good[pair[1]] = True
            for closing in range(2 if ring else 1):
                # The half ring before position 0, of which no row is kept, comes first in pass 1.
                begin = -HALF if ring and not closing else 0
                end = begin + RING
                for t in range(2):
                    rows[t, spare if begin else 0, :] = WORST if closing else 0
                    if closing:
                        at = _place(node[t], slots, copies)
                        rows[t, 0, at : at + copies] = 0
                for i in range(begin, end):
                    old = spare + i % 2 if i < 0 or i % stride else i // stride
                    new = spare + (i + 1) % 2 if i < -1 or (i + 1) % stride else (i + 1) // stride
                    if i % STEPS == 0 and i > begin:
                        for t in range(2):
                            good[pair[t]] &= _lower(rows[t, old], width)
                    before, after = (rows[0, old], rows[1, old]), (rows[0, new], rows[1, new])
                    # The branch not taken is not compiled.
                    if plain:
                        relax_plain(rate, tables, before, after, (m[i], n[i]), (a[i], b[i]))
                    else:
                        relax(rate, tables, before, after, (m[i], n[i]), (a[i], b[i]))
                for t in range(2):
                    one = pair[t]
                    last = rows[t, end // stride]
                    if not closing:
                        first_least = np.argmin(last[:width])
                        group = (first_least // copies) & ~(LANES - 1)
                        for lane in range(LANES - 1, -1, -1):
                            candidate = group | node_at[lane]
                            if last[_place(candidate, slots, copies)] == last[first_least]:
                                node[t] = candidate
                    z = node[t]
                    good[one] &= last[_place(z, slots, copies)] < WORST
                    node[t], seen = _trace(
                        values,
                        rows[t],
                        slots,
                        tiles[one],
                        windows[one],
                        reach,
                        z,
                        end,
                        rate,
                        stride,
                        copies,
                        states[one],
                        cone,
                        winners,
                    )
                    if closing or not ring:
                        good[one] &= seen and (node[t] == z or not ring)

    try:
        return njit(cache=True, nogil=True, error_model="numpy")(encode)
    except RuntimeError:  # Neither this folder nor the user's can be written to.
        return njit(nogil=True, error_model="numpy")(encode)


_KERNELS = {(rate, plain): _kernel(rate, plain) for rate in RATES for plain in (False, True)}

_SIGNATURE = (
    types.int16[:, ::1],
    types.int64[:, ::1],
    types.int64,
    types.int16[:, ::1],
    types.int32[:, ::1],
    types.boolean,
    types.uint16[:, ::1],
    types.boolean[::1],
    types.uint16[:, :, ::1],
)


class Kernel(NamedTuple):
    """Compiled encoder of one rate.

    Attributes:
        encode: ``encode(rest, windows, reach, tables, values, ring, states, good, rows)`` encodes
            two tiles at a time. ``rest`` int16 and ``windows`` int64 ``[n, 256]`` from `to_grid`;
            ``ring`` False for a single pass from position 0 to 255 whose ends need not meet;
            ``states`` uint16 ``[n, 256]`` and ``good`` bool ``[n]`` (whether the tile suited the
            grid) are written; ``rows`` from `scratch`.
        plain: whether it is the one without vector code.
    """

    encode: Any
    plain: bool


@cache
def kernel(rate: int) -> Kernel:
    """Compile the vector code, or plain loops, which give the same bytes, where that fails."""
    try:
        _KERNELS[rate, False].compile(_SIGNATURE)
    except (NumbaError, RuntimeError) as error:
        warnings.warn(f"K = {rate} is encoded slowly, without vector code: {error}", stacklevel=2)
        _KERNELS[rate, True].compile(_SIGNATURE)
        return Kernel(_KERNELS[rate, True], True)
    return Kernel(_KERNELS[rate, False], False)
