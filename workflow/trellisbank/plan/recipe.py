# SPDX-License-Identifier: Apache-2.0
"""From a recipe of the configuration to wanted lists and to its frozen plan.

Methods that need no measurement of errors know their rates at once: one wanted list, of the
recipe's name. The others (`MEASURED`) encode a base first, which recipes with the same rates share,
draft a plan from it, encode what the draft names, and freeze a plan from measurements alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trellisbank.files import canonical_json, read_json, write_json
from trellisbank.plan.cost import Table, blank_table, frequency_table, ledger_table
from trellisbank.plan.freeze import freeze
from trellisbank.plan.layouts import (
    CUDA_EXL3,
    Rate,
    Slot,
    Wanted,
    cuda_exl3_slots,
    exl3_overhead,
    in_order,
    layout_slots,
    wanted_entries,
)
from trellisbank.plan.ledger import Entries, read_layers, read_ledgers, read_probes
from trellisbank.plan.solve import Solution, curve, next_best, solve, uniform

Pathlike = str | os.PathLike[str]

MEASURED = ("gain", "exact", "measured")
"""Methods that choose by what was measured while encoding."""

CURVE_POINTS = 101
"""Plans of other sizes that a frozen plan states the predicted loss of, for the report."""

BUDGETS = ("average_rate", "stored_bits", "bytes")


def base_name(recipe: Mapping[str, Any]) -> str:
    """Return the name of a measured recipe's base, such as `base3-234`: what it holds."""
    base = base_slice(recipe)
    return f"base{base['base_rate']}-{''.join(map(str, base['rates']))}"


def base_slice(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a measured recipe's base depends on; recipes that agree on it share the base."""
    return {"base_rate": recipe["base_rate"], "rates": sorted(encoded_rates(recipe))}


def baselines(recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return what each recipe is compared with beside the source, where there is such a thing.

    That is the first `exact` recipe of the same layout and budget; it has no baseline itself.
    """
    first: dict[str, str] = {}
    for name, recipe in recipes.items():
        if recipe["method"] == "exact":
            first.setdefault(_contest(recipe), name)
    found = {name: first.get(_contest(recipe)) for name, recipe in recipes.items()}
    return {name: other for name, other in found.items() if other is not None and other != name}


def _contest(recipe: Mapping[str, Any]) -> str:
    return canonical_json([recipe["layout"], budget_of(recipe)])


def needs_statistics(recipe: Mapping[str, Any]) -> bool:
    """Say whether a method reads the statistics of the captures (gains, routed tokens)."""
    return recipe["method"] in ("gain", "exact", "frequency")


def probed_lists(name: str, recipe: Mapping[str, Any]) -> list[str]:
    """Return the wanted lists whose whole matrix groups are probed for a recipe, by name.

    `measured` probes its base, for the draft; where a matrix group of a layer is a slot, what the
    draft names too, for the plan.
    """
    if recipe["method"] != "measured":
        return []
    return [base_name(recipe)] + [f"{name}.draft"] * (recipe["layout"] == CUDA_EXL3)


def encoded_rates(recipe: Mapping[str, Any]) -> list[int]:
    """Return the rates of a recipe that have to be encoded."""
    return [rate for rate in recipe["rates"] if isinstance(rate, int)]


def budget_of(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the budget of a recipe as it is configured."""
    return {kind: recipe[kind] for kind in BUDGETS if kind in recipe}


def _sizes(manifest: Mapping[str, Any]) -> tuple[range, int, int, int]:
    return (
        range(len(manifest["layers"])),
        manifest["routed_experts"],
        manifest["hidden_size"],
        manifest["moe_intermediate_size"],
    )


def unmeasured_rates(
    recipe: Mapping[str, Any], manifest: Mapping[str, Any], statistics: Iterable[Pathlike] = ()
) -> dict[Slot, Rate]:
    """Return the rates of a recipe that needs no errors: `uniform`, `random`, `frequency`.

    Args:
        recipe: As configured.
        manifest: Of the source.
        statistics: Of the captures; `frequency` counts their tokens.

    Raises:
        PlanError: The budget cannot be met.
    """
    layers, experts, width, inner = _sizes(manifest)
    slots = layout_slots(recipe["layout"], layers, experts, width, inner)
    if recipe["method"] == "uniform":
        return dict(uniform(slots, recipe["average_rate"], recipe["seed"]))
    table = blank_table(slots, recipe["rates"], width * inner, exl3_overhead(width, inner))
    if recipe["method"] == "frequency":
        table = frequency_table(table, read_layers(statistics))
    return solve(recipe["method"], table, budget_of(recipe), recipe["seed"]).rates


def base_wanted(base: Mapping[str, Any], manifest: Mapping[str, Any]) -> dict[int, list[Wanted]]:
    """Return a base (see `base_slice`): every expert at the base rate, one at all rates.

    The one expert a layer, from the middle, gives the ratios between rates from which the draft
    estimates what is not measured yet.
    """
    layers, experts, width, inner = _sizes(manifest)
    slots = cuda_exl3_slots(layers, experts, width, inner)
    wanted = wanted_entries(dict.fromkeys(slots, base["base_rate"]), experts)
    for rate in base["rates"]:
        for layer, entries in wanted_entries(dict.fromkeys(slots, rate), experts).items():
            wanted[layer] += [entry for entry in entries if entry.expert == experts // 2]
    return {layer: in_order(entries) for layer, entries in wanted.items()}


def write_base(
    *,
    recipe: Mapping[str, Any],
    manifest_path: Pathlike,
    statistics: Sequence[Pathlike],
    wanted_paths: Sequence[Pathlike],
) -> None:
    """Write what must be in the bank before anything is measured, one file for each layer.

    Args:
        recipe: A recipe that needs no errors, or a base (`base_slice`).
        manifest_path: Of the source.
        statistics: Of the captures, where the method counts their tokens.
        wanted_paths: One for each layer, in their order.

    Raises:
        PlanError: The budget cannot be met.
    """
    manifest = read_json(manifest_path)
    if "method" in recipe:
        rates = unmeasured_rates(recipe, manifest, statistics)
        wanted = wanted_entries(rates, manifest["routed_experts"])
    else:
        wanted = base_wanted(recipe, manifest)
    _write_wanted(wanted, wanted_paths)


def write_draft(
    *,
    recipe: Mapping[str, Any],
    ledgers: Sequence[Pathlike],
    statistics: Sequence[Pathlike],
    wanted_paths: Sequence[Pathlike],
    probes: Sequence[Pathlike] = (),
) -> None:
    """Write what a draft of the plan names beyond the base: its rates and the next-best ones.

    Rates that were not measured are estimated, here alone, from the ratios that were.

    Raises:
        PlanError: The budget cannot be met, or the ledgers do not cover the base.
    """
    entries = read_ledgers(ledgers)
    table = _table(recipe, entries, statistics, probes, estimate=True)
    experts = 1 + max(place[1] for place in entries)
    draft = solve(recipe["method"], table, budget_of(recipe))
    beyond = next_best(draft, recipe["margin"])
    wanted: dict[int, list[Wanted]] = {layer: [] for layer in range(len(wanted_paths))}
    for slot, rate in draft.rates.items():
        for one in {rate, *beyond.get(slot, ())}:
            for layer, items in wanted_entries({slot: one}, experts).items():
                wanted[layer] += [item for item in items if tuple(item) not in entries]
    _write_wanted({layer: in_order(items) for layer, items in wanted.items()}, wanted_paths)


def _write_wanted(wanted: Mapping[int, list[Wanted]], paths: Sequence[Pathlike]) -> None:
    for layer, path in enumerate(paths):
        entries = [entry._asdict() for entry in wanted[layer]]
        write_json(path, {"schema": "trellisbank/wanted/1", "layer": layer, "entries": entries})


def _table(
    recipe: Mapping[str, Any],
    entries: Entries,
    statistics: Sequence[Pathlike],
    probes: Sequence[Pathlike],
    estimate: bool,
) -> Table:
    return ledger_table(
        method=recipe["method"],
        layout=recipe["layout"],
        entries=entries,
        layers=read_layers(statistics),
        rates=recipe["rates"],
        estimate=estimate,
        probes=read_probes(probes),
    )


def freeze_recipe(
    *,
    name: str,
    recipe: Mapping[str, Any],
    manifest_path: Pathlike,
    ledgers: Sequence[Pathlike],
    statistics: Sequence[Pathlike],
    root: Pathlike,
    plan_path: Pathlike,
    probes: Sequence[Pathlike] = (),
) -> None:
    """Freeze the plan of a recipe from its ledgers; see `freeze`.

    Raises:
        PlanError: The budget cannot be met, or the ledgers lack an expert.
    """
    manifest = read_json(manifest_path)
    predicted = None
    if recipe["method"] in MEASURED:
        table = _table(recipe, read_ledgers(ledgers), statistics, probes, estimate=False)
        found = solve(recipe["method"], table, budget_of(recipe))
        rates = found.rates
        predicted = describe(found) | {"curve": curve(table, CURVE_POINTS)}
    else:
        rates = unmeasured_rates(recipe, manifest, statistics)
    plan = freeze(
        recipe=name,
        method=recipe["method"],
        layout=recipe["layout"],
        budget=budget_of(recipe) | {"seed": recipe["seed"]},
        rates=rates,
        experts=manifest["routed_experts"],
        ledgers=ledgers,
        others=[*statistics, *probes],
        root=root,
        predicted=predicted,
    )
    write_json(plan_path, plan)


def describe(solution: Solution) -> dict[str, Any]:
    """Return what the solver says of a plan: its loss, the proven bound, the greedy plan's loss."""
    return {
        "loss": solution.cost,
        "bound": solution.bound,
        "greedy_loss": solution.greedy,
        "protected": [slot.name for slot in solution.protected],
    }
