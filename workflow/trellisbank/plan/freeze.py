# SPDX-License-Identifier: Apache-2.0
"""Plans as files: frozen from what was measured, hashed, and checked whenever they are read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.files import blake3_file, digest_json, read_json
from trellisbank.plan.layouts import Slot

SCHEMA = "trellisbank/plan/1"
LEDGER_SCHEMA = "trellisbank/ledger/1"

Entries = dict[tuple[int, int, str], dict[str, Any]]
"""(layer, expert, group) -> ledger entry."""


def freeze(
    *,
    recipe: str,
    method: str,
    layout: str,
    budget: Mapping[str, Any],
    rates: Mapping[Slot, int],
    experts: int,
    ledgers: Sequence[str | os.PathLike[str]],
    root: str | os.PathLike[str],
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

    Returns:
        The plan: slots with their rates, the average rate (payload bits a weight), the stored bits
        a weight with scales and markers, the stored bytes, what was read with its hash, and `hash`
        over all of it.

    Raises:
        PlanError: An expert is in no ledger, in two with different keys, or of another size than
            its slot says.
    """
    of_slot = {(slot.layer, slot.group): (slot, rate) for slot, rate in rates.items()}
    wanted = {(layer, group): rate for (layer, group), (_, rate) in of_slot.items()}
    entries = _entries(wanted, experts, ledgers)
    weights = dict.fromkeys(of_slot, 0)
    stored = 0
    for (layer, _, group), entry in entries.items():
        for matrix in GROUPS[group]:
            measured = entry["matrices"][matrix]
            weights[layer, group] += measured["weights"]
            stored += measured["stored_bits"]
    for place, (slot, _) in of_slot.items():
        if weights[place] != slot.weights:
            raise PlanError(
                "The ledgers speak of experts of another size than the plan.",
                layer=slot.layer,
                tensor=slot.group,
                expected=f"{slot.weights} weights",
                found=f"{weights[place]} weights",
                fix="encode again: source and ledgers do not belong together",
            )
    total = sum(weights.values())
    order = list(GROUPS)
    plan: dict[str, Any] = {
        "schema": SCHEMA,
        "recipe": recipe,
        "method": method,
        "layout": layout,
        "budget": dict(budget),
        "slots": [
            {"layer": layer, "group": group, "rate": wanted[layer, group]}
            for layer, group in sorted(wanted, key=lambda place: (place[0], order.index(place[1])))
        ],
        "average_rate": sum(weights[place] * rate for place, rate in wanted.items()) / total,
        "stored_bits_per_weight": stored / total,
        "stored_bytes": stored // 8,
        "read": sorted(
            (
                {
                    "path": Path(path).resolve().relative_to(Path(root).resolve()).as_posix(),
                    "blake3": blake3_file(path),
                }
                for path in ledgers
            ),
            key=lambda item: item["path"],
        ),
    }
    return {**plan, "hash": digest_json(plan)}


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
    """Return (layer, group) -> rate of a plan."""
    return {(slot["layer"], slot["group"]): slot["rate"] for slot in plan["slots"]}


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
    rates = {
        place: rate for place, rate in plan_rates(plan).items() if kept is None or place[0] in kept
    }
    return _entries(rates, experts, ledgers)


def _ledger_entries(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    ledger = read_json(path, PlanError)
    if ledger.get("schema") != LEDGER_SCHEMA:
        raise PlanError(
            "A file is no ledger.",
            file=path,
            expected=f"schema {LEDGER_SCHEMA}",
            found=ledger.get("schema"),
            fix="give the encoded/{wanted}/L??.B??.json files of a run",
        )
    yield from ledger["entries"]


def _entries(
    rates: Mapping[tuple[int, str], int],
    experts: int,
    ledgers: Sequence[str | os.PathLike[str]],
) -> Entries:
    """Find the entry of every expert of the given slots at the slot's rate."""
    found: Entries = {}
    for path in ledgers:
        for entry in _ledger_entries(path):
            if rates.get((entry["layer"], entry["group"])) != entry["rate"]:
                continue
            place = (entry["layer"], entry["expert"], entry["group"])
            if found.setdefault(place, entry)["key"] != entry["key"]:
                raise PlanError(
                    "Two ledgers disagree about one expert.",
                    file=path,
                    layer=entry["layer"],
                    expert=entry["expert"],
                    expected=f"key {found[place]['key']}",
                    found=f"key {entry['key']}",
                    fix="use ledgers of one run: encoder, settings or captures differ",
                )
    missing = [
        f"layer {layer} expert {expert} {group} K{rate}"
        for (layer, group), rate in sorted(rates.items())
        for expert in range(experts)
        if (layer, expert, group) not in found
    ]
    if missing:
        raise PlanError(
            "The ledgers lack experts that the plan takes.",
            expected=f"{len(rates) * experts} encoded matrix groups",
            found=f"{len(missing)} missing: {', '.join(missing[:6])}"
            + (" and more" if len(missing) > 6 else ""),
            fix="run the encoding of these layers first",
        )
    return found
