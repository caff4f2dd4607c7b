# SPDX-License-Identifier: Apache-2.0
"""Verdicts: does what was measured, with its interval, keep to what the configuration asks for?"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from trellisbank.errors import GateError
from trellisbank.files import read_json, write_json
from trellisbank.safetensors_io import read_header, read_tensor

SCHEMA = "trellisbank/verdict/1"

AT_MOST = ("kl", "nll_difference")
"""Quantities with an upper limit; of the others more is better."""

Pathlike = str | os.PathLike[str]


def verdict(quantity: str, limit: float, low: float | None, high: float | None) -> str:
    """Hold an interval against a limit.

    Args:
        quantity: A name of `bootstrap.compare`'s quantities.
        limit: Largest value that is good, for those in `AT_MOST`; else the smallest.
        low: Lower end of the interval; None where it is not finite.
        high: Upper end.

    Returns:
        `accept` where all of the interval is good, `reject` where none is, else `undecided`. What
        is not finite is rejected.
    """
    if low is None or high is None:
        return "reject"
    best, worst = (low, high) if quantity in AT_MOST else (-high, -low)
    limit = limit if quantity in AT_MOST else -limit
    return "accept" if worst <= limit else "reject" if best > limit else "undecided"


def joined(verdicts: Iterable[str]) -> str:
    """Return the worst of several verdicts."""
    order = ("accept", "undecided", "reject")
    return order[max((order.index(one) for one in verdicts), default=0)]


def judge(
    *, recipe: str, comparisons: Iterable[Pathlike], gates: Mapping[str, Any], path: Pathlike
) -> None:
    """Write the verdicts on a release.

    Args:
        recipe: Its name.
        comparisons: Its comparisons with the source, one a panel (`bootstrap.compare_files`).
        gates: Limits by quantity; what else stands there is ignored.
        path: JSON written: `recipe`, the joined `verdict`, and `lines` with `panel`, `quantity`,
            `unit`, `limit`, `mean`, `low`, `high`, `verdict`. Without limits both are empty.
    """
    lines = []
    for comparison in (read_json(path, GateError) for path in comparisons):
        for quantity, found in comparison["quantities"].items():
            if quantity in gates:
                limit, low, high = gates[quantity], found["low"], found["high"]
                lines.append(
                    {
                        "panel": comparison["panel"],
                        "quantity": quantity,
                        "limit": limit,
                        "verdict": verdict(quantity, limit, low, high),
                    }
                    | {name: found[name] for name in ("unit", "mean", "low", "high")}
                )
    overall = joined(line["verdict"] for line in lines) if lines else None
    write_json(path, {"schema": SCHEMA, "recipe": recipe, "verdict": overall, "lines": lines})


def enforce(verdicts: Iterable[Pathlike], path: Pathlike) -> None:
    """Write that all releases were accepted.

    Args:
        verdicts: Written by `judge`.
        path: JSON written: the verdict of each release.

    Raises:
        GateError: A release was rejected, or its intervals leave it open.
    """
    found = {item["recipe"]: item for item in (read_json(one, GateError) for one in verdicts)}
    for name, item in found.items():
        for line in item["lines"]:
            if line["verdict"] != "accept":
                raise GateError(
                    f"Release {name} does not pass its gates: {line['verdict']}.",
                    key=f"gates.{line['quantity']}",
                    expected=f"{'at most' if line['quantity'] in AT_MOST else 'at least'} "
                    f"{line['limit']} {line['unit']} on panel {line['panel']}",
                    found=f"{line['mean']} [{line['low']}, {line['high']}]",
                    fix="see the report; give the recipe more bits, more windows to the panel if "
                    "the verdict is undecided, or change the limit",
                )
    write_json(path, {name: item["verdict"] for name, item in found.items()})


def check_reference(
    *, hidden: Pathlike, panel: str, nll: tuple[float, float], path: Pathlike
) -> None:
    """Write that the source's mean NLL on a panel lies where it must.

    A forward that computes something else than the model usually still gives finite numbers; this
    stops it before anything is encoded from them.

    Args:
        hidden: The source's `hidden.safetensors` of the panel, for its `nll`.
        panel: Its name.
        nll: Smallest and largest mean that is believed, nats/token.
        path: JSON written: `panel`, `nll`, `range`.

    Raises:
        GateError: The mean lies outside, or is not finite.
    """
    mean = float(read_tensor(read_header(hidden), "nll").double().mean())
    low, high = nll
    if not low <= mean <= high:
        raise GateError(
            "The source's NLL is not what it must be, so the forward is not this model's.",
            file=hidden,
            tensor="nll",
            key=f"panels.{panel}.source_nll",
            expected=f"{low} to {high} nats/token",
            found=f"{mean:.4f} nats/token",
            fix="check the source against its origin, the panel's texts, and the range",
        )
    write_json(path, {"schema": SCHEMA, "panel": panel, "nll": mean, "range": [low, high]})
