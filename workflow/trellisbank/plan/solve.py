# SPDX-License-Identifier: Apache-2.0
"""Methods that choose a rate for every slot under a budget.

Slots are taken in their order by name everywhere, so that ties fall the same way each time.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from trellisbank.errors import PlanError
from trellisbank.plan.cost import Bits, Floats, Table, quarters
from trellisbank.plan.layouts import NATIVE, Rate, Slot

LOWEST_RATE, HIGHEST_RATE = 2, 8


def uniform(slots: Sequence[Slot], average_rate: float | str, seed: int) -> dict[Slot, int]:
    """Give all slots the same rate or, at a fractional budget, the two rates next to it.

    The higher rate goes to as equal a number of slots of each group as the budget allows, spread
    evenly over the layers; the seed turns the start of that spread, for each group by itself. The
    average comes as close to the budget as whole slots can, and never above it.

    Args:
        slots: Slots of one layout; those of a group have equal sizes.
        average_rate: Bits a weight (payload), 2 to 8, read as the decimal number it is written
            as: 3.1 is 31/10.
        seed: Turns the spread.

    Returns:
        Slot -> rate, in the order of `slots`.

    Raises:
        PlanError: A budget outside the rates, or no slots.
    """
    budget = Fraction(str(average_rate))
    if not slots or not LOWEST_RATE <= budget <= HIGHEST_RATE:
        raise PlanError(
            "A uniform plan cannot meet its budget.",
            tensor="budget.average_rate",
            expected=f"{LOWEST_RATE} to {HIGHEST_RATE} bits a weight over at least one slot",
            found=f"{average_rate} bits over {len(slots)} slots",
            fix="correct the recipe's budget in the configuration",
        )
    low = int(budget)
    groups: dict[str, list[Slot]] = {}
    for slot in slots:
        groups.setdefault(slot.group, []).append(slot)
    raised: set[Slot] = set()
    spare = (budget - low) * sum(slot.weights for slot in slots)
    for (group, members), count in zip(groups.items(), _counts(groups, spare), strict=True):
        start = int.from_bytes(blake3(f"{seed}/{group}".encode()).digest()[:8]) % len(members)
        places = [(number * len(members) + start) // count for number in range(count)]
        raised.update(members[place] for place in places)
    return {slot: low + (slot in raised) for slot in slots}


def _counts(groups: dict[str, list[Slot]], spare: Fraction) -> tuple[int, ...]:
    """Return how many slots of each group get one bit more for at most `spare` bits.

    All counts of all groups but the last are tried (a layout has one or two groups): most bits
    first, then the most equal counts, then the smaller count in the first group.
    """
    sizes = [members[0].weights for members in groups.values()]
    best: tuple[int, int, tuple[int, ...]] | None = None
    for head in itertools.product(*(range(len(m) + 1) for m in list(groups.values())[:-1])):
        used = sum(count * size for count, size in zip(head, sizes, strict=False))
        if used > spare:
            continue
        last = min(len(list(groups.values())[-1]), int((spare - used) // sizes[-1]))
        counts = (*head, last)
        choice = (-used - last * sizes[-1], max(counts) - min(counts), counts)
        best = choice if best is None else min(best, choice)
    assert best is not None  # nothing raised always fits
    return best[2]


@dataclass(frozen=True)
class Solution:
    """Chosen rates and how good they are.

    Attributes:
        table: What was chosen from, protected slots held at their best rate.
        choice: Column of each slot.
        cost: Predicted loss of all slots whose loss is known.
        bound: No plan within the budget costs less; None for the control arms.
        greedy: Cost of the greedy plan under the same budget, for comparison.
        protected: Slots with a failed measurement; they have the best rate, and no known cost.
    """

    table: Table
    choice: npt.NDArray[np.int64]
    cost: float
    bound: float | None
    greedy: float
    protected: tuple[Slot, ...]

    @property
    def rates(self) -> dict[Slot, Rate]:
        """Slot -> rate, in the order by name."""
        picked = zip(self.table.slots, self.choice, strict=True)
        return {slot: self.table.rates[column] for slot, column in picked}

    def sizes(self) -> dict[str, float | int]:
        """The three ways to state a size: average rate, stored bits a weight, stored bytes."""
        rows = np.arange(len(self.choice))
        payload = int(self.table.payload[rows, self.choice].sum())
        stored = int(self.table.stored[rows, self.choice].sum())
        return {
            "average_rate": payload / self.table.weights,
            "stored_bits_per_weight": stored / self.table.weights,
            "stored_bytes": stored // 8,
        }


def solve(method: str, table: Table, budget: Mapping[str, Any], seed: int = 0) -> Solution:
    """Choose a rate for every slot.

    Args:
        method: `gain` and `frequency` take the steps that save most cost a bit first; `exact` is
            optimal; `random` takes steps in an order drawn from `seed`.
        table: Costs by the method's own measure.
        budget: Exactly one of `average_rate` (payload bits a weight), `stored_bits` (a weight, with
            scales and markers) and `bytes` (stored).
        seed: Order of the random arm.

    Raises:
        PlanError: No such method, or the smallest plan is above the budget.
    """
    held, protected = protect(table)
    size, room = budget_room(held, budget)
    greedy = _greedy(held.cost, size, room)
    if greedy is None:
        rows = np.arange(len(held.slots))
        least = np.where(np.isnan(held.cost), np.iinfo(np.int64).max, size).argmin(axis=1)
        smallest = Solution(held, least, 0.0, None, 0.0, protected).sizes()
        raise PlanError(
            "The smallest plan is larger than the budget.",
            expected=f"at most {_text(budget)}",
            found=f"{smallest['average_rate']:.4f} bits of payload, "
            f"{smallest['stored_bits_per_weight']:.4f} stored bits a weight, "
            f"{smallest['stored_bytes']} bytes, with {len(protected)} of {len(rows)} slots "
            "protected at their best rate because a measurement failed",
            fix="raise the budget, or offer (and encode) a lower rate",
        )
    bound = None
    if method in ("gain", "frequency"):
        choice = greedy
        if method == "gain":
            bound = min(_relaxed(held.cost, size, room)[0], _total(held.cost, greedy))
    elif method == "exact":
        choice, bound = _exact(held.cost, size, room, greedy)
    elif method == "random":
        choice = _random(held, size, room, seed)
    else:
        raise PlanError(
            "A method is unknown.",
            expected="gain, exact, random, frequency (or uniform, which needs no costs)",
            found=method,
            fix="correct the recipe's method in the configuration",
        )
    return Solution(
        held, choice, _total(held.cost, choice), bound, _total(held.cost, greedy), protected
    )


def smallest(table: Table, limit: float) -> Solution:
    """Return the plan of fewest stored bits whose predicted loss is at most `limit`.

    The same problem with loss and size exchanged; `bound` is then the fewest bits that are proven
    to be needed, `greedy` the bits of the greedy plan.

    Raises:
        PlanError: Even the best rates lose more.
    """
    held, protected = protect(table)
    size = np.where(np.isnan(held.cost), np.nan, held.stored.astype(np.float64))
    # Sums of losses are rounded: a limit that is a plan's own loss must not refuse that plan.
    room = limit * (1 + 1e-12)
    greedy = _greedy(size, held.cost, room)
    if greedy is None:
        raise PlanError(
            "No plan stays below the loss.",
            expected=f"a loss of at most {limit}",
            found=f"{np.nanmin(held.cost, axis=1).sum()} with the best rate everywhere",
            fix="allow more loss, or offer (and encode) a higher rate",
        )
    choice, bound = _exact(size, held.cost, room, greedy)
    return Solution(held, choice, _total(held.cost, choice), bound, _total(size, greedy), protected)


def curve(table: Table) -> list[dict[str, float | int]]:
    """Return predicted loss against bytes: the corners of the convex hull of all plans.

    Each corner is a plan, the best one of its size; between two neighbours no plan lies below the
    straight line. Corners where only equal steps follow are kept.

    Returns:
        `average_rate`, `stored_bits_per_weight`, `stored_bytes` and `cost`, by rising size.
    """
    held, protected = protect(table)
    choice, steps = _hull(held.cost, held.stored)
    points = []

    def note() -> None:
        cost = _total(held.cost, choice)
        points.append(Solution(held, choice, cost, None, cost, protected).sizes() | {"cost": cost})

    note()
    for _, row, _, column in sorted(steps):
        choice[row] = column
        note()
    return points


def protect(table: Table) -> tuple[Table, tuple[Slot, ...]]:
    """Hold every slot with a failed measurement at its best rate, at no known cost.

    Returns:
        The table in which such a slot has no other choice, and the slots concerned.
    """
    cost = table.cost.copy()
    quality = [math.inf if rate == NATIVE else quarters(rate) for rate in table.rates]
    protected = []
    for row in np.flatnonzero(np.isposinf(cost).any(axis=1)).tolist():
        best = max(np.flatnonzero(~np.isnan(cost[row])).tolist(), key=lambda c: quality[c])
        cost[row] = np.nan
        cost[row, best] = 0.0
        protected.append(table.slots[row])
    return replace(table, cost=cost), tuple(protected)


def budget_room(table: Table, budget: Mapping[str, Any]) -> tuple[Bits, int]:
    """Return the bits that count for a budget [slots, rates], and how many there may be.

    Raises:
        PlanError: Not exactly one kind of budget, or none that is positive.
    """
    kinds = {"average_rate": table.payload, "stored_bits": table.stored, "bytes": table.stored}
    given = [kind for kind in kinds if budget.get(kind) is not None]
    if len(given) != 1 or not float(budget[given[0]]) > 0:
        raise PlanError(
            "A plan needs one budget.",
            expected=f"one of {', '.join(kinds)}, above zero",
            found=_text(budget) or "none",
            fix="correct the recipe's budget in the configuration",
        )
    amount = Fraction(str(budget[given[0]]))
    room = amount * 8 if given[0] == "bytes" else amount * table.weights
    return kinds[given[0]], math.floor(room)


def rank_bytes(gib: float, tensor_parallel: int, other_bytes: int) -> int:
    """Return the bytes that routed experts may take so that each rank's weights fit.

    Args:
        gib: GiB of weights a rank.
        tensor_parallel: Ranks; routed experts are spread over them evenly.
        other_bytes: What each rank holds beside routed experts.
    """
    return tensor_parallel * (math.floor(Fraction(str(gib)) * 2**30) - other_bytes)


def next_best(solution: Solution, margin: int) -> dict[Slot, set[Rate]]:
    """Return the rates just beyond a plan: what a draft encodes in addition.

    For each matrix group (each layer, where experts have slots of their own) the `margin` steps up
    that save most cost a bit, and the `margin` steps down that lose least.

    Returns:
        Slot -> rates.
    """
    table = solution.table
    found: dict[Slot, set[Rate]] = {}
    ranked: dict[tuple[int, Any], list[tuple[float, int, int]]] = {}
    _, steps = _hull(table.cost, table.stored)
    for slope, row, before, after in steps:
        slot = table.slots[row]
        family = slot.group if slot.expert is None else slot.layer
        at = solution.choice[row]
        if before == at or (before < at < after):
            ranked.setdefault((0, family), []).append((slope, row, after))
        if after == at or (before < at < after):
            ranked.setdefault((1, family), []).append((-slope, row, before))
    for places in ranked.values():
        for _, row, column in sorted(places)[:margin]:
            found.setdefault(table.slots[row], set()).add(table.rates[column])
    return found


def _text(budget: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} {amount}" for kind, amount in budget.items() if amount is not None)


def _total(cost: Floats, choice: npt.NDArray[np.int64]) -> float:
    return math.fsum(cost[np.arange(len(choice)), choice])


Step = tuple[float, int, int, int]
"""Cost change a unit of size (negative), row, column before, column after."""


def _hull(cost: Floats, size: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], list[Step]]:
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


def _greedy(cost: Floats, size: npt.NDArray[Any], room: float) -> npt.NDArray[np.int64] | None:
    """Take the steps that save most a unit of size while they fit; None if nothing fits.

    A step that does not fit ends the raising of its slot, not of the others.
    """
    choice, steps = _hull(cost, size)
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


def _random(table: Table, size: Bits, room: int, seed: int) -> npt.NDArray[np.int64]:
    """Raise slots one rate at a time in an order drawn from the seed, while it fits."""
    ladders: list[list[int]] = []
    for costs, sizes in zip(table.cost.tolist(), size.tolist(), strict=True):
        usable = [column for column, cost in enumerate(costs) if not math.isnan(cost)]
        ladders.append([column for _, column in sorted((sizes[c], c) for c in usable)])
    choice = np.array([ladder[0] for ladder in ladders])
    used = int(size[np.arange(len(choice)), choice].sum())

    def draw(row: int, rung: int) -> tuple[bytes, int, int]:
        name = f"{seed}/{table.slots[row].name}/{rung}"
        return blake3(name.encode()).digest(), row, rung

    heap = [draw(row, 1) for row, ladder in enumerate(ladders) if len(ladder) > 1]
    heapq.heapify(heap)
    while heap:
        _, row, rung = heapq.heappop(heap)
        extra = int(size[row, ladders[row][rung]] - size[row, choice[row]])
        if used + extra > room:
            continue
        choice[row] = ladders[row][rung]
        used += extra
        if rung + 1 < len(ladders[row]):
            heapq.heappush(heap, draw(row, rung + 1))
    return choice


def _relaxed(cost: Floats, size: npt.NDArray[Any], room: float) -> tuple[float, float]:
    """Return the bound of the linear relaxation and its price of a unit of size.

    For any price, sum_i min_k (cost + price size) - price room is below the cost of every plan that
    fits; the price at which greedy steps fill the room makes this bound the tightest.
    """
    choice, steps = _hull(cost, size)
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


def _exact(
    cost: Floats, size: npt.NDArray[Any], room: float, greedy: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], float]:
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
    bound, price = _relaxed(cost, size, room)
    best, upper = greedy, _total(cost, greedy)
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
        if found is not None and _total(cost, found) < upper:
            best, upper = found, _total(cost, found)
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
) -> tuple[npt.NDArray[np.int64] | None, float]:
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


def _by_name(
    cost: Floats, size: npt.NDArray[Any], choice: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Hand out the choices of slots that are alike in the order by name, larger sizes first."""
    alike: dict[bytes, list[int]] = {}
    for row in range(len(choice)):
        alike.setdefault(cost[row].tobytes() + size[row].tobytes(), []).append(row)
    ordered = choice.copy()
    for rows in alike.values():
        by_size = sorted((-size[rows[0], column], column) for column in choice[rows])
        ordered[rows] = [column for _, column in by_size]
    return ordered
