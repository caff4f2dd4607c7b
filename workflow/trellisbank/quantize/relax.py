# SPDX-License-Identifier: Apache-2.0
# The compiler's own modules are untyped, and what it compiles is typed by its calls.
# mypy: allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-untyped, no-any-return"
"""One step of the trellis search for two tiles: all 65,536 states, in 16-bit integers.

A state ``s`` enters from node ``s >> K`` and leaves to node ``s mod 2^(16 - K)``. A step turns the
least costs of all nodes at one position into those at the next:

    new[e] = min over states s with s mod 2^(16 - K) = e of old[s >> K] + (value(s) - w)^2 // 65536

The sum saturates at 65,535. Costs are exact functions of integers, so that `relax` (vector code)
and `relax_plain` (loops, for processors on which the vector code does not compile) agree bit for
bit. Four vector operations a state are what has to be done; `relax` reaches nine tenths of the
speed of these alone (benchmarks/encode_cpu.py), and everything here serves to add no fifth:

- no saturating subtraction, which runs on half as many units: value tables are cut to a window
  around ``w`` (viterbi.py) in which no difference overflows;
- the value table is in the order in which it is read, a vector a time (`Layout`);
- costs of predecessors come as vectors too, or (K >= 4) as 32-bit broadcasts, which the load units
  do alone; a 16-bit broadcast would be a vector operation more. Hence the `Layout.copies`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from trellisbank.files import blake3_file

SOURCE = int(blake3_file(Path(__file__))[:12], 16)
"""Digest of this file, for the cache of what is compiled from it elsewhere."""

STATES = 1 << 16

LANES = 32
"""Elements of a vector: one AVX-512 register; for other processors the compiler splits it."""

UNROLL = 16
"""Candidates of a node that are written out one after another before a loop is used."""


class Layout(NamedTuple):
    """Order in memory of a rate's values and costs.

    Attributes:
        states: int64 ``[65536]``, the state at each place of the value table.
        slots: int64 ``[32]``, place of each node within its group of 32 in a row of costs.
        copies: times that each cost is stored, side by side.
    """

    states: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    copies: int


# At K <= 3 a vector of results holds 32 nodes with the same low K bits, since these have 32
# successive predecessors, and 2^K such vectors have to be interleaved before they are stored. Any
# order of the 32 nodes of a stored group will do if the table follows it. LANE_BIT gives orders
# that K moves make which every processor has as one instruction: of words, of quadruples of words
# within 128 bits, of whole 128-bit blocks. (K = 1 is left to the compiler.)

LANE_BIT = {1: (0, 1, 2, 3, 4), 2: (0, 4, 1, 3, 2), 3: (0, 4, 2, 1, 3)}
"""The bit of a lane's number that holds bit 0..4 of a node's number."""

Move = tuple[tuple[int, ...], int]
"""Where each bit of a result's lane number comes from in the source's (OTHER: it tells the two
sources apart), and the bit of the source's lane number that tells the two results apart."""

OTHER = -1
WORDS: Move = ((OTHER, 0, 1, 3, 4), 2)
QUADS: Move = ((0, 1, OTHER, 3, 4), 2)
BLOCKS: Move = ((0, 1, 2, 4, OTHER), 3)
ALL: Move = ((OTHER, 0, 1, 2, 3), 4)

MOVES = {
    1: ((0, ALL),),
    2: ((0, WORDS), (1, BLOCKS)),
    3: ((0, WORDS), (2, QUADS), (1, BLOCKS)),
}
"""Bit of the low part that enters the lanes, and the move that brings it there, in turn."""

LEFT = {1: (0,), 2: (1, 0), 3: (0, 2, 1)}
"""Which bit of the number of a stored vector each bit of the low part has then been changed for."""


def layout(rate: int, plain: bool = False) -> Layout:
    """What `relax` reads and writes, or `relax_plain`: everything in its natural order."""
    q = 1 << rate
    states: npt.NDArray[np.int64] = np.arange(STATES)
    slots: npt.NDArray[np.int64] = np.arange(LANES)
    if plain:
        return Layout(states, slots, 1)
    if rate <= 3:
        slots = np.sum([((slots >> j) & 1) << b for j, b in enumerate(LANE_BIT[rate])], axis=0)
        # (candidate, high part, its last five bits, low part)
        by_bits = states.reshape(q, -1, LANES, q)[:, :, np.argsort(slots)]
        states = by_bits.transpose(1, 3, 0, 2).reshape(-1)
    elif rate == 4:  # a vector spans two high parts, side by side like their predecessors' costs
        states = states.reshape(q, -1, 2, LANES // 2).transpose(1, 0, 3, 2).reshape(-1)
    else:
        states = states.reshape(q, -1, LANES).transpose(1, 0, 2).reshape(-1)
    return Layout(states, slots, 1 if rate <= 4 else 2)


@njit(nogil=True, error_model="numpy")
def relax_plain(rate: int, tables: Any, old: Any, new: Any, windows: Any, w: Any) -> None:
    """`relax` in plain loops over the natural order."""
    nodes, highs, lows = STATES >> rate, STATES >> (2 * rate), 1 << rate
    for t in range(2):
        values, before, after = tables[windows[t]], old[t], new[t]
        target = np.int32(w[t])
        after[:nodes] = 65535
        for high in range(highs):
            for q in range(lows):
                cost = np.int32(before[q * highs + high])
                for low in range(lows):
                    node = high * lows + low
                    difference = np.int32(values[q * nodes + node]) - target
                    square = (difference * difference) >> np.int32(16)
                    after[node] = min(np.int32(after[node]), cost + square)


_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_I16, LANES)
_WIDE = ir.VectorType(_I32, LANES)
_PAIRS = ir.VectorType(_I32, LANES // 2)


def constant(value: int) -> Any:
    """A 64-bit integer."""
    return ir.Constant(_I64, value)


def splat(builder: Any, scalar: Any, kind: Any = _VECTOR) -> Any:
    """A vector of copies of a scalar."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    lanes = ir.Constant(ir.VectorType(_I32, kind.count), [0] * kind.count)
    return builder.shuffle_vector(first, undefined, lanes)


def _at(builder: Any, base: Any, index: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(base, [index]), kind.as_pointer())


def load(builder: Any, base: Any, index: Any) -> Any:
    """The vector that starts at an element of an array."""
    return builder.load(_at(builder, base, index, _VECTOR), align=2)


def store(builder: Any, vector: Any, base: Any, index: Any) -> None:
    """Write a vector from an element of an array on."""
    builder.store(vector, _at(builder, base, index, _VECTOR), align=2)


def _call(builder: Any, name: str, a: Any, b: Any) -> Any:
    kind = ir.FunctionType(_VECTOR, [_VECTOR] * 2)
    name = f"llvm.{name}.v{LANES}i16"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), (a, b))


def least(builder: Any, a: Any, b: Any) -> Any:
    """Unsigned minimum."""
    return _call(builder, "umin", a, b)


def cost(builder: Any, value: Any, target: Any, before: Any) -> Any:
    """``before + (value - target)^2 // 65536``, saturating: three of a state's four operations."""
    difference = builder.sext(builder.sub(value, target), _WIDE)
    square = builder.lshr(builder.mul(difference, difference), ir.Constant(_WIDE, [16] * LANES))
    return _call(builder, "uadd.sat", before, builder.trunc(square, _VECTOR))


def _pick(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(_WIDE, lanes))


def _lanes(move: Move, result: int) -> list[int]:
    """Source lane (of both sources in a row) of each lane of result 0 or 1."""
    sources, out = move
    lanes = []
    for lane in range(LANES):
        source = result << out
        for bit, origin in enumerate(sources):
            source |= ((lane >> bit) & 1) << (5 if origin == OTHER else origin)
        lanes.append(source)
    return lanes


def _interleave(builder: Any, vectors: list[Any], rate: int) -> list[Any]:
    """Results for each low part to the vectors in which they are stored."""
    vectors = list(vectors)
    for bit, move in MOVES[rate]:
        for first in range(len(vectors)):
            second = first | 1 << bit
            if first != second:
                pair = vectors[first], vectors[second]
                vectors[first] = _pick(builder, *pair, _lanes(move, 0))
                vectors[second] = _pick(builder, *pair, _lanes(move, 1))
    bits = LEFT[rate]
    place = [sum(((i >> j) & 1) << b for j, b in enumerate(bits)) for i in range(len(vectors))]
    return [vectors[place.index(i)] for i in range(len(vectors))]


def _low_rates(b: Any, k: int, values: Any, olds: Any, news: Any, targets: Any) -> None:
    """Code for K <= 3; all results of a group of predecessors stay in registers."""
    lows, highs = 1 << k, STATES >> (2 * k)
    with cgutils.for_range(b, constant(highs // LANES), intp=_I64) as loop:
        high = b.mul(loop.index, constant(LANES))
        block = b.mul(high, constant(lows * lows))
        best: list[list[Any]] = [[None] * lows for _ in olds]
        starts = [b.add(high, constant(q * highs)) for q in range(lows)]
        for low in range(lows):
            for q in range(lows):
                at = b.add(block, constant((low * lows + q) * LANES))
                for t, target in enumerate(targets):
                    c = cost(b, load(b, values[t], at), target, load(b, olds[t], starts[q]))
                    best[t][low] = least(b, c, best[t][low]) if q else c
        group = b.mul(high, constant(lows))
        for new, results in zip(news, best, strict=True):
            for i, vector in enumerate(_interleave(b, results, k)):
                store(b, vector, new, b.add(group, constant(i * LANES)))


def _high_rates(b: Any, k: int, values: Any, olds: Any, news: Any, targets: Any) -> None:
    """Code for K >= 4; a vector's predecessors are two successive costs for each candidate."""
    candidates, highs, nodes = 1 << k, STATES >> (2 * k), STATES >> k
    copies = 1 if k == 4 else 2
    with cgutils.for_range(b, constant(nodes // LANES), intp=_I64) as loop:
        node = b.mul(loop.index, constant(LANES))
        block = b.mul(node, constant(candidates))
        high = b.mul(b.lshr(node, constant(k)), constant(copies))
        worst = ir.Constant(_VECTOR, [0xFFFF] * LANES)
        slots = [cgutils.alloca_once_value(b, worst) for _ in olds]
        with cgutils.for_range(b, constant(candidates // UNROLL), intp=_I64) as part:
            best = [b.load(slot) for slot in slots]
            for j in range(UNROLL):
                q = b.add(b.mul(part.index, constant(UNROLL)), constant(j))
                at = b.add(block, b.mul(q, constant(LANES)))
                origin = b.add(b.mul(q, constant(highs * copies)), high)
                for t, target in enumerate(targets):
                    pair = b.load(_at(b, olds[t], origin, _I32), align=2)
                    before = b.bitcast(splat(b, pair, _PAIRS), _VECTOR)
                    c = cost(b, load(b, values[t], at), target, before)
                    best[t] = least(b, c, best[t])
            for slot, vector in zip(slots, best, strict=True):
                b.store(vector, slot)
        for new, slot in zip(news, slots, strict=True):
            vector = b.load(slot)
            if k == 4:
                parts = [[2 * (n % 16) + n // 16 for n in range(LANES)]]
            else:
                parts = [[LANES // 2 * i + n // 2 for n in range(LANES)] for i in (0, 1)]
            for i, lanes in enumerate(parts):
                at = b.add(b.mul(node, constant(copies)), constant(i * LANES))
                store(b, _pick(b, vector, vector, lanes), new, at)


@intrinsic
def relax(_context: Any, rate: Any, tables: Any, old: Any, new: Any, windows: Any, w: Any) -> Any:
    """One step for two tiles, in the order of `layout`.

    ``rate`` is a constant; ``tables`` int16 ``[windows, 65536]``; ``old``, ``new`` (rows of uint16
    costs), ``windows`` (which table) and ``w`` (int16) are pairs, one for each tile.
    """
    if not isinstance(rate, types.IntegerLiteral):
        return None
    k = rate.literal_value

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def data(kind: Any, array: Any) -> Any:
            return context.make_array(kind)(context, builder, array).data

        def rows(kinds: Any, pair: Any) -> list[Any]:
            return [
                data(kind, row)
                for kind, row in zip(kinds, cgutils.unpack_tuple(builder, pair), strict=True)
            ]

        base = data(tables, args[1])
        values = [
            builder.gep(base, [builder.mul(window, constant(STATES))])
            for window in cgutils.unpack_tuple(builder, args[4])
        ]
        targets = [splat(builder, scalar) for scalar in cgutils.unpack_tuple(builder, args[5])]
        write = _low_rates if k <= 3 else _high_rates
        write(builder, k, values, rows(old, args[2]), rows(new, args[3]), targets)
        return context.get_dummy_value()

    return types.void(rate, tables, old, new, windows, w), code
