# SPDX-License-Identifier: Apache-2.0
"""What was measured: ledgers of encoded experts, statistics of the calibration."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.files import read_json

SCHEMA = "trellisbank/ledger/1"

PROBES_SCHEMA = "trellisbank/probes/1"

Pathlike = str | os.PathLike[str]
Entries = dict[tuple[int, int, str, int], dict[str, Any]]
"""(layer, expert, group, rate) -> ledger entry."""


class Layer(NamedTuple):
    """What the calibration says of a layer."""

    gain: float
    """|mean writing vector of the FFN| / rms of the stream after the layer, over all copies."""
    tokens: list[int]
    """Routed tokens of each expert."""


def ledger_entries(path: Pathlike) -> Iterator[dict[str, Any]]:
    """Yield the entries of one ledger file.

    Raises:
        PlanError: Missing, or no ledger.
    """
    ledger = read_json(path, PlanError)
    if ledger.get("schema") != SCHEMA:
        raise PlanError(
            "A file is no ledger.",
            file=path,
            expected=f"schema {SCHEMA}",
            found=ledger.get("schema"),
            fix="give the encoded/{wanted}/L??.B??.json files of a run",
        )
    yield from ledger["entries"]


def read_ledgers(paths: Iterable[Pathlike]) -> Entries:
    """Read ledgers; what stands in several of them must be the same encoding.

    Raises:
        PlanError: A file is no ledger, or two ledgers hold one expert under different keys.
    """
    found: Entries = {}
    for path in paths:
        for entry in ledger_entries(path):
            place = (entry["layer"], entry["expert"], entry["group"], entry["rate"])
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
    return found


def whole_slots(
    entries: Entries, layer: int, experts: int
) -> dict[tuple[str, int], dict[tuple[int, int, str], str]]:
    """Return (group, rate) -> bank keys of all experts, where every expert of a layer is encoded.

    Args:
        entries: What was encoded.
        layer: The layer.
        experts: Routed experts a layer.

    Returns:
        In the order gate_up, down, then rates ascending; keys by (layer, expert, group).
    """
    found: dict[tuple[str, int], dict[tuple[int, int, str], str]] = {}
    for (at, expert, group, rate), entry in sorted(entries.items()):
        if at == layer:
            found.setdefault((group, rate), {})[layer, expert, group] = entry["key"]
    order = list(GROUPS)
    return {
        slot: found[slot]
        for slot in sorted(found, key=lambda slot: (order.index(slot[0]), slot[1]))
        if len(found[slot]) == experts
    }


def read_probes(paths: Iterable[Pathlike]) -> dict[tuple[int, str, int], float]:
    """Read what lowering one matrix group of a layer alone was measured to lose.

    Args:
        paths: `probes/{wanted}/L??.json` of a run.

    Returns:
        (layer, group, rate) -> KL in nats a token; infinite where the probe failed.

    Raises:
        PlanError: Missing, or no probes.
    """
    found: dict[tuple[int, str, int], float] = {}
    for path in paths:
        probes = read_json(path, PlanError)
        if probes.get("schema") != PROBES_SCHEMA:
            raise PlanError(
                "A file holds no probes.",
                file=path,
                expected=f"schema {PROBES_SCHEMA}",
                found=probes.get("schema"),
                fix="give the probes/{wanted}/L??.json files of a run",
            )
        for probe in probes["probes"]:
            loss = probe["kl"]
            # Rounding leaves a KL of nothing some 1e-16 below zero.
            good = loss is not None and loss > -1e-9
            found[probes["layer"], probe["group"], probe["rate"]] = (
                max(loss, 0.0) if good else math.inf
            )
    return found


def read_layers(paths: Iterable[Pathlike]) -> dict[int, Layer]:
    """Read the statistics of the captures and join the splits of each layer.

    The writing vector and the stream's mean square are means over tokens, so splits count by their
    tokens.

    Args:
        paths: `forward/source/{split}/L??.stats.json` of all splits.

    Raises:
        PlanError: A file is missing or holds no statistics, or a gain is not finite.
    """
    splits: dict[int, list[dict[str, Any]]] = {}
    for path in paths:
        statistics = read_json(path, PlanError)
        if not {"layer", "tokens", "expert_tokens", "post_mean"} <= statistics.keys():
            raise PlanError(
                "A file holds no statistics of a layer.",
                file=path,
                expected="layer, tokens, expert_tokens, post_mean, stream_mean_square",
                found=sorted(statistics),
                fix="give the forward/source/{split}/L??.stats.json files of a run",
            )
        splits.setdefault(statistics["layer"], []).append(statistics)
    layers = {}
    for layer, parts in sorted(splits.items()):
        tokens = sum(part["tokens"] for part in parts)
        post = [
            sum(value * part["tokens"] for value, part in zip(values, parts, strict=True)) / tokens
            for values in zip(*(part["post_mean"] for part in parts), strict=True)
        ]
        square = sum(part["stream_mean_square"] * part["tokens"] for part in parts) / tokens
        gain = math.hypot(*post) / math.sqrt(square) if square > 0 else math.nan
        if not math.isfinite(gain):
            raise PlanError(
                "The gain of a layer is not finite.",
                layer=layer,
                expected="a finite writing vector and a stream that is not zero",
                found=f"writing vector {post}, mean square {square}",
                fix="look at non_finite_stream in the statistics of the layer",
            )
        counts = [
            sum(routed) for routed in zip(*(part["expert_tokens"] for part in parts), strict=True)
        ]
        layers[layer] = Layer(gain, counts)
    return layers
