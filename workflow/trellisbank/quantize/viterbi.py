# SPDX-License-Identifier: Apache-2.0
# The compiler's own modules are untyped, and what it compiles is typed by its calls.
# mypy: allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, assignment, call-arg, var-annotated, no-any-return"
"""Least-cost trellis paths on a ring of 256 positions, compiled for the CPU at hand.

With ``E = 2^(16 - K)`` nodes, a state ``s`` enters from node ``s >> K`` and leaves to node
``s mod E``; a path's cost is the sum of ``(value(s_i) - w_i)^2``, in fp32. Two passes a tile:

1. from position 128 around to position 127 with a free start; its best path names the node ``z`` in
   front of position 0;
2. from position 0 around to position 255, starting and ending in ``z``, so that the ring closes.

Costs alone are kept: which predecessor won is worked out again, in the same arithmetic, along the
one path traced back. That is some ten times faster than to remember it for every node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from trellisbank.formats.trellis import RATES, RING

STATES = 1 << 16
HALF = RING // 2

LANES = 16
"""fp32 elements of a vector: one AVX-512 register; for other processors the compiler splits it."""

UNROLL = 16
"""Candidates of a node that are written out one after another before a loop is used."""

# The relaxation of one position is written as vector code because the compiler does not vectorize
# it by itself (a tenth of the speed). Two tiles share every load of the value table.
#
#   K >= 4   a vector holds 16 successive nodes; they have one predecessor for each candidate.
#   K <= 3   a vector holds 16 nodes with the same low K bits and 16 different high parts, whose
#            predecessors are 16 successive nodes. The 2^K results have to be interleaved before
#            they are stored. General interleaving costs half of the time at K = 2, so within each
#            group of 16 the nodes are kept in an order (LANE_BIT) for which moves inside 128-bit
#            lanes and of whole lanes do.

LANE_BIT = {1: (0, 1, 2, 3), 2: (3, 0, 2, 1), 3: (3, 0, 1, 2)}
"""For K <= 3: the bit of a lane's number that holds bit 0, 1, 2, 3 of a node's number."""


def _slots(rate: int) -> npt.NDArray[np.int64]:
    """Place within a group of 16 nodes of each of its nodes."""
    node = np.arange(LANES)
    bits = enumerate(LANE_BIT.get(rate, (0, 1, 2, 3)))
    return np.sum([((node >> j) & 1) << lane for j, lane in bits], axis=0)


# Moves of one interleaving step, as (source vector, source lane) of each lane of result `b`.
# Each brings in the bit that tells the two sources apart and sends one lane bit out, as `b`.
def _zip(b: int, lane: int) -> tuple[int, int]:
    return lane & 1, 8 * b + (lane >> 1)


def _singles(b: int, lane: int) -> tuple[int, int]:
    return lane & 1, (lane & 12) + 2 * b + ((lane >> 1) & 1)


def _pairs(b: int, lane: int) -> tuple[int, int]:
    return (lane >> 1) & 1, (lane & 12) + 2 * b + (lane & 1)


def _quads(b: int, lane: int) -> tuple[int, int]:
    return lane >> 3, 8 * ((lane >> 2) & 1) + 4 * b + (lane & 3)


Move = Callable[[int, int], tuple[int, int]]

MOVES: dict[int, list[tuple[int, Move]]] = {
    1: [(0, _zip)],
    2: [(0, _quads), (1, _singles)],
    3: [(1, _singles), (2, _pairs), (0, _quads)],
}
"""Interleaving at K <= 3, step by step: bit of the low part that enters the lanes, and the move."""

PLACE = {1: (0, 1), 2: (0, 1, 2, 3), 3: (0, 4, 2, 6, 1, 5, 3, 7)}
"""Where interleaved vectors are stored, by the bits sent out in place of those of the low part."""


def _aligned(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Uninitialised fp32 array whose data start at a cache line."""
    size = prod(shape)
    memory = np.empty(size + LANES, dtype=np.float32)
    start = -memory.ctypes.data // memory.itemsize % LANES
    return memory[start : start + size].reshape(shape)


def value_table(values: npt.NDArray[np.float32], rate: int) -> npt.NDArray[np.float32]:
    """Values of all states, fp32 ``[65536]``, in the order in which `_relax` reads them."""
    q = 1 << rate
    if rate <= 3:
        # (candidate, high part, its last four bits, low part)
        by_bits = values.reshape(q, -1, LANES, q)[:, :, np.argsort(_slots(rate))]
        ordered = by_bits.transpose(1, 3, 0, 2)
    else:
        ordered = values.reshape(q, -1, LANES).transpose(1, 0, 2)
    table = _aligned((STATES,))
    table[:] = ordered.reshape(-1)
    return table


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


def _interleave(builder: Any, vectors: list[Any], rate: int) -> list[Any]:
    """Results for each low part to vectors of successive nodes."""
    vectors = list(vectors)
    for bit, move in MOVES[rate]:
        for first in range(len(vectors)):
            second = first | 1 << bit
            if first == second:
                continue
            pair = vectors[first], vectors[second]
            for b, at in enumerate((first, second)):
                moves = [move(b, lane) for lane in range(LANES)]
                picks = _lanes([LANES * source + lane for source, lane in moves])
                vectors[at] = builder.shuffle_vector(*pair, picks)
    return [vectors[PLACE[rate].index(i)] for i in range(len(vectors))]


@intrinsic
def _fma(_context: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` rounded once, as `_relax` computes it."""

    def code(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_F32, [_F32] * 3)
        return builder.call(
            cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.f32"), args
        )

    return types.float32(types.float32, types.float32, types.float32), code


@intrinsic
def _relax(_context: Any, rate: Any, table: Any, old: Any, new: Any, w: Any) -> Any:
    """``new[t][e] = min over states s with s mod E = e of old[t][s >> K] + (value(s) - w[t])^2``.

    ``old``, ``new`` and ``w`` are pairs, one for each of two tiles; ``rate`` is a constant.
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
                    for i, vector in enumerate(_interleave(builder, results[t], k)):
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


@njit(nogil=True, error_model="numpy")
def _trace(
    values: Any,
    costs: Any,
    slots: Any,
    tile: Any,
    node: Any,
    length: int,
    rate: int,
    stride: int,
    states: Any,
    cone: Any,
    winners: Any,
) -> Any:
    """Follow the best path into ``node`` at position ``length`` back to position 0.

    Between two kept rows of costs, ``stride`` positions apart, the nodes from which ``node`` can be
    reached (the cone: ``2^(K d)`` of them ``d`` positions before) are relaxed again. Ties go to the
    least predecessor. Writes the states; returns the node that the path starts from.
    """
    nodes = STATES >> rate
    for end in range(length, 0, -stride):
        row = costs[end // stride - 1]
        width = 1 << (rate * stride)
        low = node >> (rate * stride)
        for c in range(width):
            start = c * (nodes // width) + low
            cone[c] = row[(start & ~15) | slots[start & 15]]
        for depth in range(stride - 1, -1, -1):
            width >>= rate
            w = tile[end - 1 - depth]
            for c in range(width):
                state = c * (nodes // width) + (node >> (rate * depth))
                best_q, best = 0, np.float32(np.inf)
                for q in range(1 << rate):
                    difference = values[q * nodes + state] - w
                    cost = _fma(difference, difference, cone[q * width + c])
                    if cost < best:
                        best_q, best = q, cost
                cone[c] = best
                winners[depth, c] = best_q
        c = 0
        for depth in range(stride):
            width = 1 << (rate * depth)
            q = np.int64(winners[depth, c])
            states[end - 1 - depth] = q * nodes + c * (nodes // width) + (node >> (rate * depth))
            c += q * width
        node = c * (nodes >> (rate * stride)) + (node >> (rate * stride))
    return node


STRIDE = {1: 8, 2: 4, 3: 2}
"""Positions between two rows of costs that are kept, for rates where it is not 1. Rows are large at
low rates, and writing them all takes as long as computing them; so about 4 MB a tile are kept."""


def scratch(rate: int) -> npt.NDArray[np.float32]:
    """Costs of two tiles for `KERNELS`: fp32 ``[2, kept rows + 2, nodes + padding]``.

    Vectors are aligned to cache lines, and 64 bytes of padding keep loads and stores that run side
    by side off the same place of different pages, which processors mistake for each other (together
    a factor of 1.6 at K = 3).
    """
    shape = (2, RING // STRIDE.get(rate, 1) + 3, (STATES >> rate) + LANES)
    return _aligned(shape)


def _kernel(rate: int) -> Any:
    """Encoder of one rate, compiled at its first call."""
    slots = _slots(rate)
    node_at = np.argsort(slots)
    nodes = STATES >> rate
    stride = STRIDE.get(rate, 1)

    # The cells of this closure are constants to the compiler; all else is at module level, as its
    # cache on disk needs.
    @njit(cache=True, nogil=True, error_model="numpy")
    def encode(tiles: Any, states: Any, table: Any, values: Any, costs: Any) -> None:
        count = tiles.shape[0]
        x, y = costs[0, :, :nodes], costs[1, :, :nodes]
        spare = len(x) - 2
        cone = np.empty(256, dtype=np.float32)
        winners = np.empty((stride, 256), dtype=np.uint8)
        for first in range(0, count, 2):
            second = min(first + 1, count - 1)
            a, b = tiles[first], tiles[second]
            # Pass 1: the half ring before position 0, of which no row is kept, and the one after.
            x[spare, :] = np.float32(0.0)
            y[spare, :] = np.float32(0.0)
            for i in range(-HALF, HALF):
                old = spare + i % 2 if i < 0 or i % stride else i // stride
                new = spare + (i + 1) % 2 if i < -1 or (i + 1) % stride else (i + 1) // stride
                _relax(rate, table, (x[old], y[old]), (x[new], y[new]), (a[i], b[i]))
            last = HALF // stride
            z0, z1 = np.argmin(x[last]), np.argmin(y[last])
            z0, z1 = (z0 & ~15) | node_at[z0 & 15], (z1 & ~15) | node_at[z1 & 15]
            z0 = _trace(values, x, slots, a, z0, HALF, rate, stride, states[first], cone, winners)
            z1 = _trace(values, y, slots, b, z1, HALF, rate, stride, states[second], cone, winners)
            # Pass 2: the ring from that node to itself.
            x[0, :] = np.float32(np.inf)
            y[0, :] = np.float32(np.inf)
            x[0, (z0 & ~15) | slots[z0 & 15]] = np.float32(0.0)
            y[0, (z1 & ~15) | slots[z1 & 15]] = np.float32(0.0)
            for i in range(RING):
                old = spare + i % 2 if i % stride else i // stride
                new = spare + (i + 1) % 2 if (i + 1) % stride else (i + 1) // stride
                _relax(rate, table, (x[old], y[old]), (x[new], y[new]), (a[i], b[i]))
            _trace(values, x, slots, a, z0, RING, rate, stride, states[first], cone, winners)
            _trace(values, y, slots, b, z1, RING, rate, stride, states[second], cone, winners)

    return encode


KERNELS = {rate: _kernel(rate) for rate in RATES}
"""``KERNELS[rate](tiles, states, table, values, costs)`` encodes two tiles at a time.

tiles fp32 ``[n, 256]`` in ring order; states uint16 ``[n, 256]``, written; table from
`value_table`; values fp32 ``[65536]``; costs from `scratch`.
"""
