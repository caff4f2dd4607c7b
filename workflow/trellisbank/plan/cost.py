# SPDX-License-Identifier: Apache-2.0
"""What each rate costs each slot, in loss and in bits: from ledgers or from a published table.

A cost that was not measured is NaN, and its rate cannot be chosen. A measurement that failed is
infinite, and protects its slot (see `solve.protect`): want of evidence never counts as no error.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.plan.layouts import (
    NATIVE,
    NATIVE_QUARTERS,
    Rate,
    Slot,
    cuda_exl3_slots,
    exl3_overhead,
    layout_slots,
    payload_bits,
    stored_bits,
)
from trellisbank.plan.ledger import Entries, Layer, Pathlike

Floats = npt.NDArray[np.float64]
Bits = npt.NDArray[np.int64]

Probes = Mapping[tuple[int, str, int], float]
"""(layer, group, rate) -> KL in nats a token of that group lowered alone; inf: the probe failed."""

BIT_RATIO = 0.2536
"""Error left by one bit more, where nothing was measured: the median of the published table."""

PUBLISHED = {"experts": 384, "width": 5120, "inner": 2304}
"""Sizes that the published table leaves out (DeepSeek-V4.1-Flash)."""


@dataclass(frozen=True)
class Table:
    """The choices of a plan; rows are slots in the order by name, columns are rates.

    Attributes:
        slots: What gets a rate.
        rates: What it may get, by size.
        cost: float64 [slots, rates], loss that a choice costs; NaN: cannot be chosen; inf: its
            measurement failed.
        payload: int64 [slots, rates], bits of the weights alone.
        stored: int64 [slots, rates], bits with channel scales and markers.
    """

    slots: tuple[Slot, ...]
    rates: tuple[Rate, ...]
    cost: Floats
    payload: Bits
    stored: Bits

    @property
    def weights(self) -> int:
        """Weights of all slots."""
        return sum(slot.weights for slot in self.slots)


def quarters(rate: Rate) -> int:
    """Return the payload of a rate in quarters of a bit a weight, an integer for every rate."""
    return 4 * rate if isinstance(rate, int) else NATIVE_QUARTERS


def blank_table(
    slots: Sequence[Slot], rates: Sequence[Rate], matrix_weights: int, overhead: int
) -> Table:
    """Return the table of what each choice takes, every cost zero.

    Args:
        slots: Slots of one layout.
        rates: What may be chosen.
        matrix_weights: Weights of one matrix.
        overhead: Bits of an EXL3 matrix beside its trellis.

    Raises:
        PlanError: No slots or rates, or the source's format in a layout that has no place for it.
    """
    if not slots or not rates or (NATIVE in rates and any(s.expert is None for s in slots)):
        raise PlanError(
            "A plan cannot choose from these rates.",
            expected="slots, rates, and native rates only where experts have slots of their own",
            found=f"{len(slots)} slots, rates {list(rates)}",
            fix="correct the recipe's rates or its layout in the configuration",
        )
    ordered = tuple(sorted(slots, key=lambda slot: slot.order))
    columns = tuple(sorted(set(rates), key=quarters))
    return Table(
        ordered,
        columns,
        np.zeros((len(ordered), len(columns))),
        np.array([[payload_bits(s, r) for r in columns] for s in ordered], dtype=np.int64),
        np.array(
            [[stored_bits(s, r, matrix_weights, overhead) for r in columns] for s in ordered],
            dtype=np.int64,
        ),
    )


def frequency_table(table: Table, layers: Mapping[int, Layer]) -> Table:
    """Return the costs of the `frequency` arm: routed tokens x 4^-rate, the same for every matrix.

    A slot of all experts of a layer has as many tokens as any other layer's, so that on the
    `cuda-exl3` layout this arm says nothing and only the order by name decides.
    """
    weights = np.array([slot.weights for slot in table.slots], dtype=np.float64)
    tokens = [
        sum(layers[s.layer].tokens) if s.expert is None else layers[s.layer].tokens[s.expert]
        for s in table.slots
    ]
    shrink = np.array([0.0 if r == NATIVE else 2.0 ** (-quarters(r) / 2) for r in table.rates])
    return replace(table, cost=(weights / weights.sum() * tokens)[:, None] * shrink[None, :])


def gain_cost(entry: Mapping[str, Any]) -> float:
    """Return tokens x sum over matrices of the proxy error (published); inf if it failed."""
    return float(entry["tokens"] * _sum(entry, "proxy_error"))


def _sum(entry: Mapping[str, Any], measure: str) -> float:
    return math.fsum(_known(matrix[measure]) for matrix in entry["matrices"].values())


def _known(value: float | None) -> float:
    """Return a measured energy or share, infinite if the measurement failed."""
    return value if value is not None and math.isfinite(value) and value >= 0 else math.inf


def ledger_table(
    *,
    method: str,
    layout: str,
    entries: Entries,
    layers: Mapping[int, Layer],
    rates: Sequence[Rate],
    estimate: bool = False,
    probes: Probes | None = None,
) -> Table:
    """Return the costs of a layout's slots from what was measured.

    `gain` costs gain^2 x tokens x proxy error, summed over experts and matrices. `exact` costs
    gain^2 x the error energy at the experts' outputs, as measured there: that of `w2`, and that of
    `w1` and `w3` through SwiGLU and `w2`. The energies at `w1` and `w3` themselves are in units of
    the activation and cannot be added to those of `w2`.

    `measured` costs what probes lost, in nats a token: a (layer, group) as it was probed, an expert
    its share of the probes of its layer's groups, by the energies of `exact`. Gains play no part.

    An expert that no calibration token reached has no measurement. In a slot of one layer it counts
    as the mean of the others; a slot of its own is protected.

    Args:
        method: `gain`, `exact` or `measured`.
        layout: Serving layout.
        entries: What was encoded.
        layers: Gain of each layer; not read by `measured`.
        rates: What may be chosen; a rate that is not measured for all of a slot is NaN there.
        estimate: Fill unmeasured rates from measured ratios. For drafts alone.
        probes: (layer, group, rate) -> KL, for `measured`.

    Raises:
        PlanError: No entry, a layer without a gain, or a slot without any measurement.
    """
    if not entries:
        raise PlanError(
            "There is nothing to plan from.",
            expected="ledgers with encoded experts",
            found="no entry",
            fix="run the encoding of the base rate first",
        )
    numbers = sorted({place[0] for place in entries})
    probed = _probed(probes or {}, numbers, rates) if method == "measured" else None
    lacking = [number for number in numbers if number not in layers]
    if lacking and probed is None:
        raise PlanError(
            "Layers with a ledger have no gain.",
            layer=lacking[0],
            expected=f"statistics of layers {numbers}",
            found=f"statistics of layers {sorted(layers)}",
            fix="give the statistics of all splits and layers",
        )
    experts = 1 + max(place[1] for place in entries)
    some = next(iter(entries.values()))
    matrix = next(iter(some["matrices"].values()))
    blank = blank_table(
        # Only the product of width and inner size matters to a slot, and ledgers state no other.
        layout_slots(layout, numbers, experts, matrix["weights"], 1),
        rates,
        matrix["weights"],
        matrix["stored_bits"] - some["rate"] * matrix["weights"],
    )
    value, tokens = _values(method, entries, numbers, experts, blank.rates)
    if estimate:
        value = _estimated(value, tokens, blank.rates)
    if probed is not None:
        value = _scaled(value, probed)
    cost = np.empty_like(blank.cost)
    for row, slot in enumerate(blank.slots):
        at = numbers.index(slot.layer)
        groups = [list(GROUPS).index(group) for group in slot.groups]
        part = value[at, groups].sum(axis=0)  # [experts, rates]
        summed = _sum_experts(part, tokens[at]) if slot.expert is None else part[slot.expert]
        if probed is None:
            cost[row] = layers[slot.layer].gain ** 2 * summed
        elif slot.expert is not None:
            cost[row] = summed
        else:
            direct = probed[at, groups[0]]
            cost[row] = np.where(np.isnan(direct) & estimate, summed, direct)
    if NATIVE in blank.rates:
        cost[:, blank.rates.index(NATIVE)] = 0.0
    bare = [slot.name for slot, line in zip(blank.slots, cost, strict=True) if np.isnan(line).all()]
    if bare:
        raise PlanError(
            "Slots have no rate that was encoded whole.",
            tensor=", ".join(bare[:6]),
            expected=f"every expert at one of the rates {list(blank.rates)}",
            found=f"{len(bare)} slots without",
            fix="run the encoding of the base rate first",
        )
    return replace(blank, cost=cost)


def _values(
    method: str, entries: Entries, numbers: list[int], experts: int, rates: Sequence[Rate]
) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return cost [layers, groups, experts, rates] before gains, tokens [layers, experts]."""
    value = np.full((len(numbers), len(GROUPS), experts, len(rates)), np.nan)
    tokens = np.zeros((len(numbers), experts), dtype=np.int64)
    for (layer, expert, group, rate), entry in entries.items():
        at = numbers.index(layer)
        tokens[at, expert] = entry["tokens"]
        if rate not in rates:
            continue
        if method == "gain":
            cost = gain_cost(entry)
        elif group == "down":
            cost = _sum(entry, "output_error_energy")
        else:
            cost = _known(entry.get("expert_error_energy"))
        value[at, list(GROUPS).index(group), expert, rates.index(rate)] = (
            cost if math.isfinite(cost) and entry["tokens"] else math.inf
        )
    return value, tokens


def _probed(probes: Probes, numbers: list[int], rates: Sequence[Rate]) -> Floats:
    """Return what probes lost, [layers, groups, rates]; NaN where there was none.

    Raises:
        PlanError: A group of a layer was not probed at any of the rates.
    """
    found = np.full((len(numbers), len(GROUPS), len(rates)), np.nan)
    columns = sorted(set(rates), key=quarters)
    for (layer, group, rate), loss in probes.items():
        if layer in numbers and rate in columns:
            found[numbers.index(layer), list(GROUPS).index(group), columns.index(rate)] = loss
    bare = np.argwhere(np.isnan(found).all(axis=2)).tolist()
    if bare:
        raise PlanError(
            "Probes are missing.",
            layer=numbers[bare[0][0]],
            tensor=list(GROUPS)[bare[0][1]],
            expected=f"a probe of every layer and group at one of the rates {list(rates)}",
            found=f"{len(bare)} without",
            fix="give the probes of the recipe's base, of all layers",
        )
    return found


def _scaled(value: Floats, probed: Floats) -> Floats:
    """Bring error energies to what the nearest probed rate of their layer and group lost.

    Args:
        value: [layers, groups, experts, rates]; infinite where a measurement failed.
        probed: [layers, groups, rates].

    Returns:
        Nats a token, as `value`. A failed probe makes all of its layer and group infinite.
    """
    scaled = np.full_like(value, np.inf)
    for at, group in np.ndindex(probed.shape[:2]):
        known = np.flatnonzero(~np.isnan(probed[at, group]))
        for column in range(value.shape[3]):
            nearest = int(known[np.abs(known - column).argmin()])
            energies = value[at, group, :, nearest]
            energy, loss = energies[np.isfinite(energies)].sum(), probed[at, group, nearest]
            if energy > 0 and math.isfinite(loss):
                own = value[at, group, :, column]
                scaled[at, group, :, column] = np.where(np.isinf(own), own, own * (loss / energy))
    return scaled


def _estimated(value: Floats, tokens: npt.NDArray[np.int64], rates: Sequence[Rate]) -> Floats:
    """Fill NaN from the nearest measured rate of the same expert and the ratios of its group.

    A ratio is the median over all experts measured at both rates; `BIT_RATIO` where there is none.
    """
    filled = value.copy()
    encoded = [column for column, rate in enumerate(rates) if rate != NATIVE]
    for column in encoded:
        for other in sorted(
            encoded, key=lambda o: abs(quarters(rates[o]) - quarters(rates[column]))
        ):
            for group in range(len(GROUPS)):
                known, base = value[:, group, :, column], value[:, group, :, other]
                both = np.isfinite(known) & np.isfinite(base) & (base > 0)
                bits = (quarters(rates[column]) - quarters(rates[other])) / 4
                ratio = (
                    float(np.median(known[both] / base[both])) if both.any() else BIT_RATIO**bits
                )
                target = filled[:, group, :, column]
                target[...] = np.where(np.isnan(target), base * ratio, target)
    return filled


def _sum_experts(cost: Floats, tokens: npt.NDArray[np.int64]) -> Floats:
    """Sum [experts, rates] over experts; one without tokens counts as the mean of the others."""
    reached = tokens > 0
    if not reached.any():
        return np.where(np.isnan(cost).any(axis=0), np.nan, np.inf)
    total = cost[reached].sum(axis=0) * (len(reached) / np.count_nonzero(reached))
    return np.where(np.isnan(cost).any(axis=0), np.nan, total)


def published_table(path: Pathlike) -> Table:
    """Return the costs of the published table: means over experts, a line a layer, K = 3 and 4.

    cost = gain^2 x sum over the group's matrices of the mean proxy error; tokens drop out. Where
    K = 4 was not measured, K = 3 times the median of the measured ratios (0.2536).

    Raises:
        PlanError: The file is not such a table.
    """
    try:
        with open(path, encoding="utf-8", newline="") as handle:
            lines = list(csv.DictReader(handle))
        low = {
            (int(line["layer"]), group): math.fsum(float(line[f"k3_proxy_{m}"]) for m in matrices)
            for line in lines
            for group, matrices in GROUPS.items()
        }
        high = {
            (int(line["layer"]), "down"): float(line["k4_proxy_w2"])
            for line in lines
            if line["k4_proxy_w2"]
        }
        gains = {int(line["layer"]): float(line["hc_gain_mean"]) for line in lines}
        ratio = statistics.median(value / low[place] for place, value in high.items())
    except (OSError, KeyError, ValueError, TypeError, ZeroDivisionError) as trouble:
        raise PlanError(
            "A file is no table of proxy errors.",
            file=path,
            expected="columns layer, hc_gain_mean, k3_proxy_w1/w3/w2, k4_proxy_w2",
            found=repr(trouble),
            fix="give a table such as the published one, or ledgers of a run",
        ) from trouble
    width, inner, experts = PUBLISHED["width"], PUBLISHED["inner"], PUBLISHED["experts"]
    blank = blank_table(
        cuda_exl3_slots(gains, experts, width, inner),
        [3, 4],
        width * inner,
        exl3_overhead(width, inner),
    )
    cost = [
        [
            gains[s.layer] ** 2 * proxy
            for proxy in (
                low[s.layer, s.group],
                high.get((s.layer, s.group), ratio * low[s.layer, s.group]),
            )
        ]
        for s in blank.slots
    ]
    return replace(blank, cost=np.array(cost))
