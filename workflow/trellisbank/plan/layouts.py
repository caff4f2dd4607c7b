# SPDX-License-Identifier: Apache-2.0
"""What a serving layout lets a plan choose, and what a choice asks of the bank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from trellisbank.bank import GROUPS


class Slot(NamedTuple):
    """One thing that a plan gives a rate: a matrix group of all experts of a layer."""

    layer: int
    group: str
    weights: int
    """Number of weights that the slot's rate applies to."""


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


def wanted_entries(rates: Mapping[Slot, int], experts: int) -> dict[int, list[Wanted]]:
    """Return what must be in the bank for these rates, a list for each layer.

    Args:
        rates: Rate of each slot.
        experts: Routed experts a layer.

    Returns:
        Layer -> entries in the order of experts; both groups of an expert stand together, so that
        an encoding job reads each expert once.
    """
    slots = sorted(rates, key=lambda slot: (slot.layer, list(GROUPS).index(slot.group)))
    layers: dict[int, list[Wanted]] = {slot.layer: [] for slot in slots}
    for expert in range(experts):
        for slot in slots:
            layers[slot.layer].append(Wanted(slot.layer, expert, slot.group, rates[slot]))
    return layers
