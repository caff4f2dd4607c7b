# SPDX-License-Identifier: Apache-2.0
"""Tile encoder for CPUs: least-squares trellis paths on the ring, in fp32 costs.

With ``E = 2^(16 - K)`` nodes, a state ``s`` enters from node ``s >> K`` and leaves to node ``s mod E``;
a path's cost is the sum of ``(value(s_i) - w_i)^2``. A tile's 256 states are found in two passes:

1. from position 128 around to position 127 with a free start; its best path names the node ``z`` in
   front of position 0;
2. from position 0 around to position 255, starting and ending in ``z``, so that the ring closes.

Costs alone are kept; which predecessor won is worked out again along the one path traced back, in the
same arithmetic, which is far cheaper than storing it for every node. Procedure: exllamav3 1.6.5, whose
costs are in half precision; fp32 costs give the same mean squared error (docs/exl3.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis

STATES = 1 << 16
HALF_RING = trellis.RING // 2

LANES = 16
"""fp32 elements of a vector: one AVX-512 register; other processors split it."""

UNROLL = 16
"""Candidates of a node written out one after another before a loop is used."""

Encoder = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint16]]
"""Tiles in ring order, fp32 ``[n, 256]``, to states, uint16 ``[n, 256]``."""


# The relaxation of one position, written as vector code because numba's compiler does not vectorize
# it by itself (a tenth of the speed). Two tiles share every load of the value table.
#
#   K <= 3   a vector holds 16 nodes with successive high bits; the 2^K results for the low bits are
#            interleaved before they are stored.
#   K >= 4   a vector holds 16 nodes with one common predecessor for each candidate.


def _value_table(values: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    """Values of all states in the order in which `_relax` reads them."""
    q = 1 << rate
    if rate <= 3:
        by_bits = values.reshape(q, -1, LANES, q)  # candidate, high bits, lane, low bits
        return np.ascontiguousarray(by_bits.transpose(1, 3, 0, 2)).ravel()
    return np.ascontiguousarray(values.reshape(q, -1, LANES).transpose(1, 0, 2)).ravel()


_F32 = ir.FloatType()
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)
_BITS = ir.VectorType(_I32, LANES)


def _lanes(picks: Sequence[int]) -> ir.Constant:
    return ir.Constant(_BITS, list(picks))


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(_VECTOR, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _lanes([0] * LANES))


def _load(builder: Any, base: Any, index: Any) -> Any:
    pointer = builder.bitcast(builder.gep(base, [index]), _VECTOR.as_pointer())
    return builder.load(pointer, align=4)


def _store(builder: Any, vector: Any, base: Any, index: Any) -> None:
    pointer = builder.bitcast(builder.gep(base, [index]), _VECTOR.as_pointer())
    builder.store(vector, pointer, align=4)


def _least(builder: Any, a: Any, b: Any) -> Any:
    # Costs are never negative, so their bits compare like the numbers; integer minima run beside
    # the floating-point units (a fifth faster).
    a_bits, b_bits = builder.bitcast(a, _BITS), builder.bitcast(b, _BITS)
    least = builder.select(builder.icmp_signed("<", a_bits, b_bits), a_bits, b_bits)
    return builder.bitcast(least, _VECTOR)


def _interleave(builder: Any, vectors: list[Any]) -> list[Any]:
    """Element 0 of every vector, then element 1 of every vector, and so on."""
    if len(vectors) == 1:
        return vectors
    even, odd = _interleave(builder, vectors[0::2]), _interleave(builder, vectors[1::2])
    result = []
    for a, b in zip(even, odd, strict=True):
        for half in (range(LANES // 2), range(LANES // 2, LANES)):
            picks = _lanes([lane for i in half for lane in (i, LANES + i)])
            result.append(builder.shuffle_vector(a, b, picks))
    return result


@intrinsic  # type: ignore[untyped-decorator]
def _fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once, as `_relax` computes it."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args
        )

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic  # type: ignore[untyped-decorator]
def _relax(_context: Any, rate: Any, table: Any, old: Any, new: Any, w: Any) -> Any:
    """``new[t][e] = min over states s with s mod E = e of old[t][s >> K] + (value(s) - w[t])^2``.

    ``old``, ``new`` and ``w`` are pairs, one for each of two tiles; ``rate`` is a compile-time constant.
    """
    if not isinstance(rate, types.IntegerLiteral):
        return None
    signature = types.void(rate, table, old, new, w)
    k = rate.literal_value
    candidates, highs, nodes = 1 << k, 1 << (16 - 2 * k), 1 << (16 - k)

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def pointers(pair_type: Any, pair: Any) -> list[Any]:
            arrays = cgutils.unpack_tuple(builder, pair)
            return [
                context.make_array(kind)(context, builder, array).data
                for kind, array in zip(pair_type, arrays, strict=True)
            ]

        def constant(value: int) -> Any:
            return ir.Constant(_I64, value)

        values = context.make_array(table)(context, builder, args[1]).data
        olds, news = pointers(old, args[2]), pointers(new, args[3])
        targets = [_splat(builder, scalar) for scalar in cgutils.unpack_tuple(builder, args[4])]
        fma = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(_VECTOR, [_VECTOR] * 3), f"llvm.fma.v{LANES}f32"
        )

        def cost(value: Any, tile: int, before: Any) -> Any:
            difference = builder.fsub(value, targets[tile])
            return builder.call(fma, [difference, difference, before])

        if k <= 3:
            with cgutils.for_range(builder, constant(highs // LANES), intp=_I64) as loop:
                high = builder.mul(loop.index, constant(LANES))
                block = builder.mul(loop.index, constant(LANES * candidates * candidates))
                before = [
                    [
                        _load(builder, olds[t], builder.add(high, constant(q * highs)))
                        for t in (0, 1)
                    ]
                    for q in range(candidates)
                ]
                results: list[list[Any]] = [[], []]
                for low in range(candidates):
                    best: list[Any] = [None, None]
                    for q in range(candidates):
                        at = builder.add(block, constant((low * candidates + q) * LANES))
                        value = _load(builder, values, at)
                        for t in (0, 1):
                            c = cost(value, t, before[q][t])
                            best[t] = c if q == 0 else _least(builder, c, best[t])
                    for t in (0, 1):
                        results[t].append(best[t])
                for t in (0, 1):
                    for i, vector in enumerate(_interleave(builder, results[t])):
                        at = builder.add(
                            builder.mul(high, constant(candidates)), constant(i * LANES)
                        )
                        _store(builder, vector, news[t], at)
        else:
            with cgutils.for_range(builder, constant(nodes // LANES), intp=_I64) as loop:
                node = builder.mul(loop.index, constant(LANES))
                block = builder.mul(node, constant(candidates))
                high = builder.lshr(node, constant(k))
                infinity = _splat(builder, ir.Constant(_F32, float("inf")))
                slots = [cgutils.alloca_once_value(builder, infinity) for _ in (0, 1)]
                with cgutils.for_range(builder, constant(candidates // UNROLL), intp=_I64) as part:
                    best = [builder.load(slot) for slot in slots]
                    for j in range(UNROLL):
                        q = builder.add(builder.mul(part.index, constant(UNROLL)), constant(j))
                        at = builder.add(block, builder.mul(q, constant(LANES)))
                        value = _load(builder, values, at)
                        from_node = builder.add(builder.mul(q, constant(highs)), high)
                        for t in (0, 1):
                            before_q = builder.load(builder.gep(olds[t], [from_node]))
                            c = cost(value, t, _splat(builder, before_q))
                            best[t] = _least(builder, c, best[t])
                    for slot, vector in zip(slots, best, strict=True):
                        builder.store(vector, slot)
                for t in (0, 1):
                    _store(builder, builder.load(slots[t]), news[t], node)
        return context.get_dummy_value()

    return signature, code


@njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def _predecessor(values: Any, costs: Any, node: int, w: float, rate: int) -> int:
    """State of the best step into ``node``: least cost, then least candidate."""
    nodes = STATES >> rate
    best_state, best_cost = 0, np.float32(np.inf)
    for q in range(1 << rate):
        state = q * nodes + node
        difference = values[state] - w
        c = _fma(difference, difference, costs[state >> rate])
        if q == 0 or c < best_cost:
            best_state, best_cost = state, c
    return best_state


def _kernel(rate: int) -> Any:
    """Compiled encoder of one rate: pairs of tiles, all of them in one call."""

    # `rate` is a cell of the closure, so numba takes it as a constant; all else is at module level,
    # which its cache on disk needs.
    @njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
    def encode(tiles: Any, states: Any, table: Any, values: Any, costs: Any) -> None:
        count = tiles.shape[0]
        for first in range(0, count, 2):
            a, b = tiles[first], tiles[min(first + 1, count - 1)]
            x, y = costs[0], costs[1]
            # Pass 1. The second half ring needs no history: two rows in turn.
            x[0, :] = np.float32(0.0)
            y[0, :] = np.float32(0.0)
            for i in range(HALF_RING):
                p, n = i % 2, (i + 1) % 2
                w = (a[HALF_RING + i], b[HALF_RING + i])
                _relax(rate, table, (x[p], y[p]), (x[n], y[n]), w)
            for i in range(HALF_RING):
                _relax(rate, table, (x[i], y[i]), (x[i + 1], y[i + 1]), (a[i], b[i]))
            za, zb = np.argmin(x[HALF_RING]), np.argmin(y[HALF_RING])
            for i in range(HALF_RING - 1, -1, -1):
                za = _predecessor(values, x[i], za, a[i], rate) >> rate
                zb = _predecessor(values, y[i], zb, b[i], rate) >> rate
            # Pass 2, closed on that node.
            x[0, :] = np.float32(np.inf)
            y[0, :] = np.float32(np.inf)
            x[0, za] = np.float32(0.0)
            y[0, zb] = np.float32(0.0)
            for i in range(256):
                _relax(rate, table, (x[i], y[i]), (x[i + 1], y[i + 1]), (a[i], b[i]))
            for i in range(255, -1, -1):
                state = _predecessor(values, x[i], za, a[i], rate)
                states[first, i] = state
                za = state >> rate
            if first + 1 < count:
                for i in range(255, -1, -1):
                    state = _predecessor(values, y[i], zb, b[i], rate)
                    states[first + 1, i] = state
                    zb = state >> rate

    return encode


KERNELS = {rate: _kernel(rate) for rate in trellis.RATES}


def tile_encoder(rate: int, codebook: str = "mul1", threads: int = 1) -> Encoder:
    """An encoder of tiles at one rate.

    It owns its buffers (2 x 257 rows of node costs a thread: 34 MB at K = 2, 17 at K = 3), so it is
    not to be called from two threads at once.

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
    table = _value_table(values, rate)
    costs = [
        np.empty((2, trellis.RING + 1, STATES >> rate), dtype=np.float32) for _ in range(threads)
    ]
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
        scales: npt.NDArray[np.float64], tiles: npt.NDArray[np.float32]
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
