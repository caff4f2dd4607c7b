# SPDX-License-Identifier: Apache-2.0
"""The multiple-choice knapsack: one choice a row, least cost, sizes within a room.

`cost` is float64 [rows, choices], NaN where a choice cannot be taken; `size` has its shape, in any
unit, integer or float. Each row has at least one choice. Ties go to the first row.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Choice = npt.NDArray[np.int64]
"""Column of each row."""

Step = tuple[float, int, int, int]
"""Cost change a unit of size (negative), row, column before, column after."""


def hull(cost: Floats, size: npt.NDArray[Any]) -> tuple[Choice, list[Step]]:
    """Return the smallest choice of each row, and the steps up along its lower convex hull.

    Along a hull every step saves less a unit than the one before it. NaN costs or sizes are left
    out; so is a choice that takes more and costs as much as another.
    """
    start = np.zeros(len(cost), dtype=np.int64)
    steps: list[Step] = []
    for row, (costs, sizes) in enumerate(zip(cost.tolist(), size.tolist(), strict=True)):
        usable = [c for c in range(len(costs)) if costs[c] == costs[c] and sizes[c] == sizes[c]]
        usable.sort(key=lambda c: (sizes[c], costs[c], c))
        corners = usable[:1]
        for column in usable[1:]:
            if costs[column] >= costs[corners[-1]]:
                continue
            while len(corners) > 1 and _slope(costs, sizes, corners[-1], column) <= _slope(
                costs, sizes, corners[-2], corners[-1]
            ):
                corners.pop()
            corners.append(column)
        start[row] = corners[0]
        steps += [
            (_slope(costs, sizes, before, after), row, before, after)
            for before, after in itertools.pairwise(corners)
        ]
    return start, steps


def _slope(costs: list[float], sizes: list[float], before: int, after: int) -> float:
    # A smaller cost at the same size is sorted first, so sizes differ.
    return (costs[after] - costs[before]) / (sizes[after] - sizes[before])


def total(cost: Floats, choice: Choice) -> float:
    """Return the cost of a choice, exactly rounded."""
    return math.fsum(cost[np.arange(len(choice)), choice])


def greedy(cost: Floats, size: npt.NDArray[Any], room: float) -> Choice | None:
    """Take the steps that save most a unit of size while they fit; None if nothing fits.

    A step that does not fit ends the raising of its slot, not of the others.
    """
    choice, steps = hull(cost, size)
    used = size[np.arange(len(choice)), choice].sum()
    if used > room:
        return None
    stopped: set[int] = set()
    for _, row, before, after in sorted(steps):
        extra = size[row, after] - size[row, before]
        if row in stopped or used + extra > room:
            stopped.add(row)
            continue
        choice[row] = after
        used += extra
    return choice


def relaxed(cost: Floats, size: npt.NDArray[Any], room: float) -> tuple[float, float]:
    """Return the bound of the linear relaxation and its price of a unit of size.

    For any price, sum_i min_k (cost + price size) - price room is below the cost of every plan that
    fits; the price at which greedy steps fill the room makes this bound the tightest.
    """
    choice, steps = hull(cost, size)
    used = size[np.arange(len(choice)), choice].sum()
    price = 0.0
    for slope, row, before, after in sorted(steps):
        used += size[row, after] - size[row, before]
        if used > room:
            price = -slope
            break
    priced = np.nanmin(cost + price * size, axis=1)
    return math.fsum(priced.tolist()) - price * room, price


TOLERANCE = 5e-7
"""Gap between a plan and its bound, relative to the plan, at which the search may end."""

CORES = (50, 200, 1000)
"""Choices beside the cheapest of each slot that are tried before all that may matter."""

STATES = 20_000
"""Partial plans that are kept at a time; beyond them the gap that is left is stated."""


def exact(
    cost: Floats, size: npt.NDArray[Any], room: float, greedy: Choice
) -> tuple[Choice, float]:
    """Return an optimal choice and the proven bound of its cost.

    The relaxation's price turns costs into an excess over the bound; a choice whose excess alone is
    above the gap of the best plan so far can be in no better one. What remains is a core of slots,
    solved by dynamic programming. Small cores of the choices nearest the bound come first: they
    find good plans, which shrink the core that has to be proven.
    """
    if np.issubdtype(size.dtype, np.integer):
        # Sizes lie on a grid; room between its points is of no use.
        least = np.where(np.isnan(cost), np.iinfo(np.int64).max, size).min(axis=1)
        grid = int(np.gcd.reduce(np.where(np.isnan(cost), 0, size - least[:, None]), axis=None))
        room = int(least.sum()) + (int(room) - int(least.sum())) // max(grid, 1) * max(grid, 1)
    bound, price = relaxed(cost, size, room)
    best, upper = greedy, total(cost, greedy)
    priced = cost + price * size
    excess = priced - np.nanmin(priced, axis=1, keepdims=True)
    ranked = np.sort(excess[excess > 0])
    for count in (*CORES, len(ranked)):
        gap = upper - bound
        whole = count >= len(ranked) or ranked[count] > gap
        if gap <= 0 or (gap <= TOLERANCE * abs(upper) and not whole):
            break
        keep = excess <= (gap if whole else ranked[count])
        found, lower = _core(excess, keep, size, room, price, gap)
        if found is not None and total(cost, found) < upper:
            best, upper = found, total(cost, found)
        if whole:
            bound += lower
            break
    return _by_name(cost, size, best), min(bound, upper)


def _core(
    excess: Floats,
    keep: npt.NDArray[np.bool_],
    size: npt.NDArray[Any],
    room: float,
    price: float,
    gap: float,
) -> tuple[Choice | None, float]:
    """Find the plan of least excess below `gap` among the choices kept.

    The excess of a plan over the bound is that of its choices plus the price of the room that it
    leaves unused. Partial plans are extended slot by slot; one that is neither smaller nor cheaper
    than another goes, and so does one that can no longer fit or end below the gap.

    Returns:
        The plan, None if there is none; and the least excess that is proven for any plan of these
        choices (0 if partial plans had to be given up).
    """
    choice = np.where(keep, excess, np.inf).argmin(axis=1)
    core = np.flatnonzero(keep.sum(axis=1) > 1)
    rows = np.arange(len(size))
    free = room - size[rows, choice].sum()
    columns = [np.flatnonzero(keep[row]) for row in core]
    # Sizes relative to the cheapest choice, so that sums of them stay exact.
    extra = [size[row, of] - size[row, choice[row]] for row, of in zip(core, columns, strict=True)]
    least = np.cumsum([part.min() for part in extra][::-1])[::-1]
    most = np.cumsum([part.max() for part in extra][::-1])[::-1]
    taken, above = np.zeros(1, dtype=size.dtype), np.zeros(1)
    origins = []
    complete = True
    for at, (row, of) in enumerate(zip(core, columns, strict=True)):
        sizes = (taken[:, None] + extra[at]).ravel()
        excesses = (above[:, None] + excess[row, of]).ravel()
        last = at + 1 == len(core)
        smallest_end = sizes + (0 if last else least[at + 1])
        unused = np.maximum(free - sizes - (0 if last else most[at + 1]), 0)
        alive = np.flatnonzero((smallest_end <= free) & (excesses + price * unused < gap))
        # By size, then cost; what takes more must cost less.
        costs = excesses[alive] - price * sizes[alive]
        order = np.lexsort((costs, sizes[alive]))
        costs = costs[order]
        better = np.append(True, costs[1:] < np.minimum.accumulate(costs)[:-1])
        alive = alive[order[better]] if len(order) else alive
        if len(alive) > STATES:
            complete = False
            alive = alive[np.linspace(0, len(alive) - 1, STATES).astype(np.int64)]
        if not len(alive):
            return None, gap if complete else 0.0
        taken, above = sizes[alive], excesses[alive]
        origins.append(alive)
    total = above + price * (free - taken)
    at = int(total.argmin())
    least_excess = float(total[at])
    for row, of, alive in zip(core[::-1], columns[::-1], origins[::-1], strict=True):
        at, column = divmod(int(alive[at]), len(of))
        choice[row] = of[column]
    return choice, least_excess if complete else 0.0


def _by_name(cost: Floats, size: npt.NDArray[Any], choice: Choice) -> Choice:
    """Hand out the choices of slots that are alike in the order by name, larger sizes first."""
    alike: dict[bytes, list[int]] = {}
    for row in range(len(choice)):
        alike.setdefault(cost[row].tobytes() + size[row].tobytes(), []).append(row)
    ordered = choice.copy()
    for rows in alike.values():
        by_size = sorted((-size[rows[0], column], column) for column in choice[rows])
        ordered[rows] = [column for _, column in by_size]
    return ordered
