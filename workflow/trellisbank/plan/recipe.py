# SPDX-License-Identifier: Apache-2.0
"""From a recipe of the configuration to wanted lists and to its frozen plan."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from trellisbank.files import read_json, write_json
from trellisbank.plan.freeze import freeze
from trellisbank.plan.layouts import Slot, cuda_exl3_slots, wanted_entries
from trellisbank.plan.solve import uniform

Pathlike = str | os.PathLike[str]


def recipe_rates(recipe: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[Slot, int]:
    """Return the rates of a uniform recipe: known before anything is encoded.

    Raises:
        PlanError: The budget lies outside what the encoder has rates for.
    """
    slots = cuda_exl3_slots(
        range(len(manifest["layers"])),
        manifest["routed_experts"],
        manifest["hidden_size"],
        manifest["moe_intermediate_size"],
    )
    return uniform(slots, recipe["average_rate"], recipe["seed"])


def write_wanted(
    *, recipe: Mapping[str, Any], manifest_path: Pathlike, wanted_paths: Sequence[Pathlike]
) -> None:
    """Write what a recipe needs in the bank, one file for each layer, in the order of layers.

    Raises:
        PlanError: The budget lies outside what the encoder has rates for.
    """
    manifest = read_json(manifest_path)
    wanted = wanted_entries(recipe_rates(recipe, manifest), manifest["routed_experts"])
    for layer, path in enumerate(wanted_paths):
        entries = [entry._asdict() for entry in wanted[layer]]
        write_json(path, {"schema": "trellisbank/wanted/1", "layer": layer, "entries": entries})


def freeze_recipe(
    *,
    name: str,
    recipe: Mapping[str, Any],
    manifest_path: Pathlike,
    ledgers: Sequence[Pathlike],
    root: Pathlike,
    plan_path: Pathlike,
) -> None:
    """Freeze the plan of a recipe from its ledgers; see `freeze`."""
    manifest = read_json(manifest_path)
    plan = freeze(
        recipe=name,
        method=recipe["method"],
        layout=recipe["layout"],
        budget={"average_rate": recipe["average_rate"], "seed": recipe["seed"]},
        rates=recipe_rates(recipe, manifest),
        experts=manifest["routed_experts"],
        ledgers=ledgers,
        root=root,
    )
    write_json(plan_path, plan)
