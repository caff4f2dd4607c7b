# SPDX-License-Identifier: Apache-2.0
"""Plans as files: frozen from what was measured, hashed, and checked whenever they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.files import blake3_file, digest_json, read_json
from trellisbank.plan.layouts import ALL, NATIVE, Rate, Slot, payload_bits
from trellisbank.plan.ledger import read_ledgers

SCHEMA = "trellisbank/plan/1"

Entries = dict[tuple[int, int, str], dict[str, Any]]
"""(layer, expert, group) -> ledger entry."""


def freeze(
    *,
    recipe: str,
    method: str,
    layout: str,
    budget: Mapping[str, Any],
    rates: Mapping[Slot, Rate],
    experts: int,
    ledgers: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    predicted: Mapping[str, Any] | None = None,
    others: Sequence[str | os.PathLike[str]] = (),
) -> dict[str, Any]:
    """Make the plan of a recipe from the ledgers of what was encoded for it.

    Args:
        recipe: Name of the recipe.
        method: How the rates were chosen.
        layout: Serving layout that the slots belong to.
        budget: The recipe's budget as configured, JSON values.
        rates: Rate of each slot.
        experts: Routed experts a layer.
        ledgers: Ledger files; they may hold more than the plan takes.
        root: Folder that the paths in the plan are relative to.
        predicted: What the solver says of the plan, JSON values.
        others: Other files that the rates were chosen from.

    Returns:
        The plan: slots with their rates, the average rate (payload bits a weight), the stored bits
        a weight with scales and markers, the stored bytes, what was read with its hash, and `hash`
        over all of it.

    Raises:
        PlanError: An expert is in no ledger, in two with different keys, or of another size than
            its slot says.
    """
    slots = sorted(rates, key=lambda slot: slot.order)
    entries = _entries({slot: rates[slot] for slot in slots}, experts, ledgers)
    stored = 0
    for slot in slots:
        if rates[slot] == NATIVE:
            stored += payload_bits(slot, NATIVE)
            continue
        measured = [
            entries[slot.layer, expert, group]["matrices"][matrix]
            for expert, group in slot.places(experts)
            for matrix in GROUPS[group]
        ]
        stored += sum(matrix["stored_bits"] for matrix in measured)
        weights = sum(matrix["weights"] for matrix in measured)
        if weights != slot.weights:
            raise PlanError(
                "The ledgers speak of experts of another size than the plan.",
                layer=slot.layer,
                tensor=slot.name,
                expected=f"{slot.weights} weights",
                found=f"{weights} weights",
                fix="encode again: source and ledgers do not belong together",
            )
    total = sum(slot.weights for slot in slots)
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "recipe": recipe,
        "method": method,
        "layout": layout,
        "budget": dict(budget),
        "slots": [_slot_json(slot) | {"rate": rates[slot]} for slot in slots],
        "average_rate": sum(payload_bits(slot, rates[slot]) for slot in slots) / total,
        "stored_bits_per_weight": stored / total,
        "stored_bytes": stored // 8,
        "predicted": None if predicted is None else dict(predicted),
        "read": sorted(
            (
                {
                    "path": Path(path).resolve().relative_to(Path(root).resolve()).as_posix(),
                    "blake3": blake3_file(path),
                }
                for path in (*ledgers, *others)
            ),
            key=lambda item: item["path"],
        ),
    }
    return {**plan, "hash": digest_json(plan)}


def _slot_json(slot: Slot) -> dict[str, Any]:
    """A slot of one expert names it, a slot of a layer names its group."""
    place = {"group": slot.group} if slot.expert is None else {"expert": slot.expert}
    return {"layer": slot.layer, **place}


def load_plan(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a frozen plan and check it against its own hash.

    Raises:
        PlanError: Missing, no plan of ours, or changed after it was frozen.
    """
    plan = read_json(path, PlanError)
    if plan.get("schema") != SCHEMA:
        raise PlanError(
            "A file is no plan.",
            file=path,
            expected=f"schema {SCHEMA}",
            found=plan.get("schema"),
            fix="give the plan/{recipe}.json of a run",
        )
    found = digest_json({name: value for name, value in plan.items() if name != "hash"})
    if found != plan.get("hash"):
        raise PlanError(
            "A plan was changed after it was frozen.",
            file=path,
            expected=f"hash {plan.get('hash')}",
            found=f"hash {found}",
            fix="remove the file and freeze the recipe again; change rates in the configuration",
        )
    return plan


def plan_rates(plan: Mapping[str, Any]) -> dict[tuple[int, str], int]:
    """Return (layer, group) -> rate of a plan of the `cuda-exl3` layout."""
    return {(slot["layer"], slot["group"]): slot["rate"] for slot in plan["slots"]}


def plan_slots(plan: Mapping[str, Any]) -> dict[Slot, Rate]:
    """Return the slots of a plan of any layout with their rates; sizes are not in a plan."""
    return {
        Slot(item["layer"], item.get("group", ALL), 0, item.get("expert")): item["rate"]
        for item in plan["slots"]
    }


def expert_rates(plan: Mapping[str, Any], experts: int) -> dict[tuple[int, int, str], Rate]:
    """Return (layer, expert, group) -> rate of a plan of any layout."""
    return {
        (slot.layer, expert, group): rate
        for slot, rate in plan_slots(plan).items()
        for expert, group in slot.places(experts)
    }


def planned_entries(
    plan: Mapping[str, Any],
    experts: int,
    ledgers: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
    layers: Iterable[int] | None = None,
) -> Entries:
    """Return the ledger entry of every expert that a plan takes from the bank.

    Args:
        plan: A frozen plan.
        experts: Routed experts a layer.
        ledgers: Ledger files among those that the plan read: all, or those of `layers`.
        root: Folder that the plan's paths are relative to.
        layers: Layers wanted; all if None.

    Raises:
        PlanError: A ledger is not one that the plan read, changed since, or lacks an expert.
    """
    read = {item["path"]: item["blake3"] for item in plan["read"]}
    for path in ledgers:
        relative = Path(path).resolve().relative_to(Path(root).resolve()).as_posix()
        found = blake3_file(path)
        if read.get(relative) != found:
            raise PlanError(
                "A ledger is not the one that the plan was frozen from.",
                file=path,
                expected=f"blake3 {read.get(relative, 'of a file that the plan read')}",
                found=f"blake3 {found}",
                fix="freeze the recipe again",
            )
    kept = None if layers is None else set(layers)
    rates = {s: rate for s, rate in plan_slots(plan).items() if kept is None or s.layer in kept}
    return _entries(rates, experts, ledgers)


def _entries(
    rates: Mapping[Slot, Rate],
    experts: int,
    ledgers: Sequence[str | os.PathLike[str]],
) -> Entries:
    """Find the entry of every expert of the given slots at the slot's rate; none for native."""
    encoded = read_ledgers(ledgers)
    places = [
        (slot.layer, expert, group, rate)
        for slot, rate in sorted(rates.items(), key=lambda item: item[0].order)
        if isinstance(rate, int)
        for expert, group in slot.places(experts)
    ]
    missing = [
        f"layer {layer} expert {expert} {group} K{rate}"
        for layer, expert, group, rate in places
        if (layer, expert, group, rate) not in encoded
    ]
    if missing:
        raise PlanError(
            "The ledgers lack experts that the plan takes.",
            expected=f"{len(places)} encoded matrix groups",
            found=f"{len(missing)} missing: {', '.join(missing[:6])}"
            + (" and more" if len(missing) > 6 else ""),
            fix="run the encoding of these layers first",
        )
    return {place[:3]: encoded[place] for place in places}
