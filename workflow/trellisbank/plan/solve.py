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
from trellisbank.plan import knapsack
from trellisbank.plan.cost import Bits, Table, quarters
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
            optimal, and so is `measured`; `random` takes steps in an order drawn from `seed`.
        table: Costs by the method's own measure.
        budget: Exactly one of `average_rate` (payload bits a weight), `stored_bits` (a weight, with
            scales and markers) and `bytes` (stored).
        seed: Order of the random arm.

    Raises:
        PlanError: No such method, or the smallest plan is above the budget.
    """
    held, protected = protect(table)
    size, room = budget_room(held, budget)
    greedy = knapsack.greedy(held.cost, size, room)
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
    bound, of_greedy = None, knapsack.total(held.cost, greedy)
    if method in ("gain", "frequency"):
        choice = greedy
        if method == "gain":
            bound = min(knapsack.relaxed(held.cost, size, room)[0], of_greedy)
    elif method in ("exact", "measured"):
        choice, bound = knapsack.exact(held.cost, size, room, greedy)
    elif method == "random":
        choice = _random(held, size, room, seed)
    else:
        raise PlanError(
            "A method is unknown.",
            expected="gain, exact, measured, random, frequency (or uniform, which needs no costs)",
            found=method,
            fix="correct the recipe's method in the configuration",
        )
    cost = knapsack.total(held.cost, choice)
    return Solution(held, choice, cost, bound, of_greedy, protected)


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
    greedy = knapsack.greedy(size, held.cost, room)
    if greedy is None:
        raise PlanError(
            "No plan stays below the loss.",
            expected=f"a loss of at most {limit}",
            found=f"{np.nanmin(held.cost, axis=1).sum()} with the best rate everywhere",
            fix="allow more loss, or offer (and encode) a higher rate",
        )
    choice, bound = knapsack.exact(size, held.cost, room, greedy)
    cost = knapsack.total(held.cost, choice)
    return Solution(held, choice, cost, bound, knapsack.total(size, greedy), protected)


def curve(table: Table, most: int | None = None) -> list[dict[str, float | int]]:
    """Return predicted loss against bytes: the corners of the convex hull of all plans.

    Each corner is a plan, the best one of its size; between two neighbours no plan lies below the
    straight line. Corners where only equal steps follow are kept.

    Args:
        table: Costs.
        most: Corners to return at most (two or more), spread evenly with both ends; all if None.

    Returns:
        `average_rate`, `stored_bits_per_weight`, `stored_bytes` and `cost`, by rising size.
    """
    held, protected = protect(table)
    choice, steps = knapsack.hull(held.cost, held.stored)
    points = []

    def note() -> None:
        cost = knapsack.total(held.cost, choice)
        points.append(Solution(held, choice, cost, None, cost, protected).sizes() | {"cost": cost})

    wanted = set(range(len(steps) + 1))
    if most is not None and most < len(wanted):
        wanted = {number * len(steps) // (most - 1) for number in range(most)}
    for number, (_, row, _, column) in enumerate([(0.0, 0, 0, choice[0]), *sorted(steps)]):
        choice[row] = column
        if number in wanted:
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
    _, steps = knapsack.hull(table.cost, table.stored)
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


def _text(budget: Mapping[str, Any]) -> str:
    return ", ".join(f"{kind} {amount}" for kind, amount in budget.items() if amount is not None)
