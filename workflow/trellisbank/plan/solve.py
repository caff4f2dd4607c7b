# SPDX-License-Identifier: Apache-2.0
"""Methods that choose a rate for every slot under a budget."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from blake3 import blake3

from trellisbank.errors import PlanError
from trellisbank.plan.layouts import Slot

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
