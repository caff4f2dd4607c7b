# SPDX-License-Identifier: Apache-2.0
"""Plans from ledger files, outside the workflow: one budget, one loss, or the whole curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trellisbank.errors import PlanError
from trellisbank.plan.cost import Table, ledger_table, published_table
from trellisbank.plan.layouts import Rate
from trellisbank.plan.ledger import Pathlike, read_layers, read_ledgers, read_probes
from trellisbank.plan.recipe import describe
from trellisbank.plan.solve import Solution, curve, next_best, smallest, solve


def load_table(
    ledgers: Sequence[Pathlike],
    *,
    statistics: Sequence[Pathlike] = (),
    probes: Sequence[Pathlike] = (),
    method: str,
    layout: str,
    rates: Sequence[Rate] = (),
) -> Table:
    """Return the costs in ledger files.

    Args:
        ledgers: `encoded/{wanted}/L??.B??.json` of a run, or one published table (`.csv`), which
            has statistics, layout and rates of its own.
        statistics: `forward/source/{split}/L??.stats.json` of all splits.
        probes: `probes/{wanted}/L??.json` of a run, for the method `measured`.
        method: Measure of the cost, see `cost.ledger_table`; a published table has one.
        layout: Serving layout.
        rates: What may be chosen; every rate that the ledgers hold if empty.

    Raises:
        PlanError: The files cannot be used.
    """
    if any(str(path).endswith(".csv") for path in ledgers):
        if len(ledgers) > 1 or rates:
            raise PlanError(
                "A published table stands alone.",
                file=ledgers[0],
                expected="one .csv file and no choice of rates",
                found=f"{len(ledgers)} files, rates {list(rates)}",
                fix="give the table without other ledgers and rates",
            )
        return published_table(ledgers[0])
    entries = read_ledgers(ledgers)
    return ledger_table(
        method=method,
        layout=layout,
        entries=entries,
        layers=read_layers(statistics),
        probes=read_probes(probes),
        rates=rates or sorted({rate for _, _, _, rate in entries}),
    )


def plan_within(
    table: Table, method: str, budget: Mapping[str, Any], seed: int = 0, margin: int = 0
) -> dict[str, Any]:
    """Return the plan of a method under a budget, and the rates just beyond it, as JSON values.

    Raises:
        PlanError: The budget cannot be met.
    """
    found = solve(method, table, budget, seed)
    beyond = next_best(found, margin)
    return (
        {"method": method, "budget": dict(budget)}
        | _describe(found)
        | {
            "margin": {
                slot.name: sorted(rates, key=str)
                for slot, rates in sorted(beyond.items(), key=lambda item: item[0].order)
            }
        }
    )


def plan_below(table: Table, loss: float) -> dict[str, Any]:
    """Return the smallest plan whose predicted loss is at most `loss`, as JSON values.

    Raises:
        PlanError: There is none.
    """
    found = smallest(table, loss)
    return (
        {"loss_limit": loss}
        | _describe(found)
        # The exact solver exchanged loss and size, and so did its bounds.
        | {"bound": None, "greedy_loss": None, "bound_bytes": (found.bound or 0) / 8}
    )


def plan_curve(table: Table) -> dict[str, Any]:
    """Return predicted loss against size, as JSON values."""
    return {"curve": curve(table)}


def _describe(found: Solution) -> dict[str, Any]:
    return found.sizes() | describe(found) | {"rates": {s.name: r for s, r in found.rates.items()}}
