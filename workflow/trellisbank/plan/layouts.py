# SPDX-License-Identifier: Apache-2.0
"""What a serving layout lets a plan choose, how large each choice is, what it asks of the bank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.formats.bank_plan import NATIVE as NATIVE  # part of what a layout offers

Rate = int | str
"""Bits a weight of the trellis, or `NATIVE`."""

NATIVE_QUARTERS = 17
"""Quarters of a bit that MXFP4 takes a weight: 4 bits of code, 8 bits of scale for 32 weights."""

CUDA_EXL3, BANK_PLAN = "cuda-exl3", "bank-plan"
ALL = "all"
"""Group of a slot that covers all three matrices."""


class Slot(NamedTuple):
    """One thing that a plan gives a rate.

    A matrix group of all experts of a layer (`cuda-exl3`), or one expert whole (`bank-plan`).
    """

    layer: int
    group: str
    weights: int
    """Number of weights that the slot's rate applies to."""
    expert: int | None = None
    """The expert; None for all of the layer."""

    @property
    def order(self) -> tuple[int, int, int]:
        """Place in the order by name: layer, expert, then gate_up before down."""
        group = list(GROUPS).index(self.group) if self.group in GROUPS else 0
        return self.layer, -1 if self.expert is None else self.expert, group

    @property
    def name(self) -> str:
        """Such as `L07.gate_up` or `L07.E012`."""
        part = self.group if self.expert is None else f"E{self.expert:03d}"
        return f"L{self.layer:02d}.{part}"

    @property
    def groups(self) -> list[str]:
        """Matrix groups that the slot covers."""
        return list(GROUPS) if self.group == ALL else [self.group]

    def places(self, experts: int) -> Iterator[tuple[int, str]]:
        """Yield (expert, group) of everything that the slot covers, expert by expert."""
        members = range(experts) if self.expert is None else [self.expert]
        return ((expert, group) for expert in members for group in self.groups)


class Wanted(NamedTuple):
    """One encoded expert that must be in the bank."""

    layer: int
    expert: int
    group: str
    rate: int


def cuda_exl3_slots(layers: Iterable[int], experts: int, width: int, inner: int) -> list[Slot]:
    """Return the slots of the `cuda-exl3` layout: its kernels take one K a (layer, group).

    Args:
        layers: Body layers with routed experts.
        experts: Routed experts a layer.
        width: Model width (in-features of `w1`, `w3`).
        inner: Expert width (in-features of `w2`).

    Returns:
        (layer, gate_up) and (layer, down) of each layer, in that order.
    """
    return [
        Slot(layer, group, len(matrices) * experts * width * inner)
        for layer in sorted(layers)
        for group, matrices in GROUPS.items()
    ]


def bank_plan_slots(layers: Iterable[int], experts: int, width: int, inner: int) -> list[Slot]:
    """Return the slots of the `bank-plan` layout: one K an expert, over all three matrices.

    Args:
        layers: Body layers with routed experts.
        experts: Routed experts a layer.
        width: Model width.
        inner: Expert width.

    Returns:
        (layer, expert), by layer, then expert.
    """
    return [
        Slot(layer, ALL, 3 * width * inner, expert)
        for layer in sorted(layers)
        for expert in range(experts)
    ]


def layout_slots(
    layout: str, layers: Iterable[int], experts: int, width: int, inner: int
) -> list[Slot]:
    """Return the slots of a layout by its name; see the function of each.

    Raises:
        PlanError: No such layout.
    """
    known = {CUDA_EXL3: cuda_exl3_slots, BANK_PLAN: bank_plan_slots}
    if layout not in known:
        raise PlanError(
            "A layout is unknown.",
            expected=" or ".join(known),
            found=layout,
            fix="correct the recipe's layout in the configuration",
        )
    return known[layout](layers, experts, width, inner)


def payload_bits(slot: Slot, rate: Rate) -> int:
    """Return the bits of a slot's weights, without the scales and markers of EXL3."""
    if isinstance(rate, int):
        return slot.weights * rate
    return slot.weights * NATIVE_QUARTERS // 4


def stored_bits(slot: Slot, rate: Rate, matrix_weights: int, overhead: int) -> int:
    """Return the bits of everything that is stored for a slot.

    Args:
        slot: The slot.
        rate: Its rate; the source's format has its scales in its rate already.
        matrix_weights: Weights of one matrix.
        overhead: Bits of channel scales and marker of one EXL3 matrix, see `exl3_overhead`.
    """
    matrices = 0 if rate == NATIVE else slot.weights // matrix_weights
    return payload_bits(slot, rate) + matrices * overhead


def exl3_overhead(width: int, inner: int) -> int:
    """Return the bits of an EXL3 matrix beside its trellis: fp16 channel scales, int32 marker."""
    return 16 * (width + inner) + 32


def wanted_entries(rates: Mapping[Slot, Rate], experts: int) -> dict[int, list[Wanted]]:
    """Return what must be in the bank for these rates, a list for each layer.

    Args:
        rates: Rate of each slot; slots in the source's own format want nothing.
        experts: Routed experts a layer.

    Returns:
        Layer -> entries in the order of experts; both groups of an expert stand together, so that
        an encoding job reads each expert once.
    """
    layers: dict[int, list[Wanted]] = {slot.layer: [] for slot in sorted(rates)}
    for slot, rate in rates.items():
        if isinstance(rate, int):
            layers[slot.layer] += (
                Wanted(slot.layer, expert, group, rate) for expert, group in slot.places(experts)
            )
    return {layer: in_order(entries) for layer, entries in layers.items()}


def in_order(entries: Iterable[Wanted]) -> list[Wanted]:
    """Return wanted entries once each, by layer, expert, group and rate."""
    groups = list(GROUPS)
    return sorted(set(entries), key=lambda e: (e.layer, e.expert, groups.index(e.group), e.rate))
