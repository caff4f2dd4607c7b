# SPDX-License-Identifier: Apache-2.0
"""The small files of a run, read into tables for the report; every key that is read stands here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from trellisbank.bank import GROUPS
from trellisbank.errors import ReportError
from trellisbank.evaluate.scores import read_table
from trellisbank.files import blake3_file, read_json
from trellisbank.plan.layouts import NATIVE, NATIVE_QUARTERS

Paths = Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Run:
    """What a run measured and made.

    `manifest` is the source's; `releases` holds a plan and its receipt each, in the order of the
    plans given. The tables: `matrices` one line an encoded matrix, `layers` one line a layer of the
    source (routing), `hessians` one line an expert and group. `scores` is keyed (release, panel),
    `floors` by panel, `verdicts` by release.
    """

    manifest: dict[str, Any]
    releases: list[dict[str, Any]]
    matrices: pd.DataFrame
    layers: pd.DataFrame
    hessians: pd.DataFrame
    comparisons: list[dict[str, Any]]
    floors: dict[str, dict[str, Any]]
    verdicts: dict[str, dict[str, Any]]
    scores: dict[tuple[str, str], pd.DataFrame]
    versions: dict[str, list[str]]
    code: dict[str, list[str]]
    hashes: dict[str, str]


def gather(
    *,
    manifest: str | os.PathLike[str],
    plans: Paths,
    receipts: Paths,
    ledgers: Paths,
    captures: Paths,
    hessians: Paths,
    comparisons: Paths,
    floors: Paths,
    verdicts: Paths,
    scores: Paths,
    records: Paths,
) -> Run:
    """Read the files of a run.

    Args:
        manifest: `source/manifest.json`: `architecture`, `layers` (a list with one kind a layer),
            `routed_experts`, `experts_per_token`, `tensor_count`, `tensor_bytes`.
        plans: `plan/{recipe}.json`: `recipe`, `method`, `layout`, `slots` (`layer`, `group`
            or `expert`, `rate`), `average_rate`, `stored_bits_per_weight`, `stored_bytes`, `hash`,
            `predicted` (null, or `loss` and the points of `curve`: `stored_bytes`, `cost`).
        receipts: `repack-report.json` of each release: `plan` (hash), `tensors`, `tensor_bytes`,
            `dropped.tensors`, `dropped.bytes`, `kept.tensors`, `added.tensors`.
        ledgers: `encoded/{wanted}/L??.B??.json`: `entries` with `layer`, `expert`, `group`, `rate`,
            `key`, `tokens`, `fallback` (null or the reason), `notes` (a list of sentences) and, for
            each of `matrices`, `proxy_error`, `output_error_energy`, `output_energy` (null without
            a Hessian), `relative_frobenius`. An entry that stands in several ledgers counts once.
        captures: Statistics of the calibration splits in each layer: `layer`, `tokens`,
            `expert_tokens` (routed tokens of each expert), `post_mean`, `stream_mean_square`,
            `non_finite_stream`, `non_finite_ffn_input`. Splits are added up.
        hessians: `hessians/L??.json`: `layer` and `experts`, each with `group`, `dropped` (rows
            left out because a value was not finite) and `rank_deficiency` (null if the matrix is
            not finite).
        comparisons: As `bootstrap.compare_files` writes them.
        verdicts: As `gates.judge` writes them.
        floors: The same, of the source with its sums in another order: one a panel.
        scores: As `scores.write_table` writes them.
        records: Records of jobs, any number: `rule`, `code`, `versions`.

    Raises:
        ReportError: A file without a key that is read, or a plan without a receipt.
    """
    releases = _releases(plans, receipts)
    tables = [read_table(path) for path in scores]
    read = [(path, _read(path)) for path in records]
    versions: dict[str, set[str]] = {}
    code: dict[str, set[str]] = {}
    for path, record in read:
        code.setdefault(_get(record, "rule", path), set()).add(_get(record, "code", path))
        for name, version in _get(record, "versions", path).items():
            versions.setdefault(name, set()).add(version)
    return Run(
        manifest=_read(manifest),
        releases=releases,
        matrices=_matrices(ledgers),
        layers=_layers(captures),
        hessians=_hessians(hessians),
        comparisons=[_read(path) for path in comparisons],
        verdicts={_get(item, "recipe", path): item for path in verdicts for item in [_read(path)]},
        floors={_get(item, "panel", path): item for path in floors for item in [_read(path)]},
        scores={(names["release"], names["panel"]): table for table, names in tables},
        versions={name: sorted(found) for name, found in sorted(versions.items())},
        code={name: sorted(found) for name, found in sorted(code.items())},
        hashes={"source manifest": blake3_file(manifest)}
        | {f"plan of {item['name']}": item["plan"]["hash"] for item in releases}
        | {f"release {item['name']}": item["receipt_hash"] for item in releases},
    )


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    return read_json(path, ReportError)


def _get(item: dict[str, Any], key: str, path: str | os.PathLike[str]) -> Any:
    try:
        return item[key]
    except KeyError:
        raise ReportError(
            "A file lacks a key that the report reads.",
            file=path,
            key=key,
            expected="the key",
            found=", ".join(sorted(item)) or "nothing",
            fix="make the file again with this version of the workflow",
        ) from None


def _releases(plans: Paths, receipts: Paths) -> list[dict[str, Any]]:
    by_plan = {}
    for path in receipts:
        receipt = _read(path)
        by_plan[_get(receipt, "plan", path)] = (receipt, blake3_file(path))
    releases = []
    for path in plans:
        plan = _read(path)
        found = by_plan.get(_get(plan, "hash", path))
        if found is None:
            raise ReportError(
                "No release was made from a plan.",
                file=path,
                expected=f"a receipt with plan {plan['hash']}",
                found=f"{len(by_plan)} receipts of other plans",
                fix="make the release of this recipe first",
            )
        rates = layer_rates(plan)
        releases.append(
            {
                "name": plan["recipe"],
                "plan": plan,
                "rates": rates,
                "receipt": found[0],
                "receipt_hash": found[1],
            }
        )
    return releases


def layer_rates(plan: dict[str, Any]) -> dict[tuple[int, str], float]:
    """Return (layer, group) -> rate; where experts have rates of their own, their mean."""
    rates: dict[tuple[int, str], list[float]] = {}
    for slot in plan["slots"]:
        bits = NATIVE_QUARTERS / 4 if slot["rate"] == NATIVE else slot["rate"]
        for group in [slot["group"]] if "group" in slot else GROUPS:
            rates.setdefault((slot["layer"], group), []).append(bits)
    return {
        place: bits[0] if len(bits) == 1 else round(sum(bits) / len(bits), 2)
        for place, bits in rates.items()
    }


def _matrices(ledgers: Paths) -> pd.DataFrame:
    columns = ["proxy_error", "output_error_energy", "output_energy", "relative_frobenius"]
    lines = {}
    for path in ledgers:
        for entry in _get(_read(path), "entries", path):
            place = {name: _get(entry, name, path) for name in ("layer", "expert", "group", "rate")}
            for matrix, measured in _get(entry, "matrices", path).items():
                lines[entry["key"], matrix] = (
                    place
                    | {"matrix": matrix, "notes": _get(entry, "notes", path)}
                    | {name: _get(entry, name, path) for name in ("tokens", "fallback")}
                    | {name: _get(measured, name, path) for name in columns}
                )
    names = ["layer", "expert", "group", "rate", "matrix", "tokens", "fallback", "notes"]
    names += columns
    table = pd.DataFrame(list(lines.values()), columns=names)
    table[columns] = table[columns].astype(np.float64)
    return table.sort_values(["layer", "expert", "matrix", "rate"], ignore_index=True)


def _layers(captures: Paths) -> pd.DataFrame:
    by_layer: dict[int, list[dict[str, Any]]] = {}
    for path in captures:
        statistics = _read(path)
        by_layer.setdefault(_get(statistics, "layer", path), []).append(
            {
                name: _get(statistics, name, path)
                for name in (
                    "tokens",
                    "expert_tokens",
                    "post_mean",
                    "stream_mean_square",
                    "non_finite_stream",
                    "non_finite_ffn_input",
                )
            }
        )
    lines = []
    for layer, splits in sorted(by_layer.items()):
        weights = np.array([split["tokens"] for split in splits], dtype=np.float64)
        routed = np.sum([split["expert_tokens"] for split in splits], axis=0)
        share = routed / routed.sum()
        used = share[share > 0]
        post = np.average([split["post_mean"] for split in splits], axis=0, weights=weights)
        square = np.average([split["stream_mean_square"] for split in splits], weights=weights)
        lines.append(
            {
                "layer": layer,
                "tokens": int(weights.sum()),
                "routed": routed,
                "effective": float(np.exp(-(used * np.log(used)).sum())),
                "top_share": float(share.max()),
                "gain": float(np.linalg.norm(post) / np.sqrt(square)),
                "non_finite": sum(
                    split["non_finite_stream"] + split["non_finite_ffn_input"] for split in splits
                ),
            }
        )
    names = ["layer", "tokens", "routed", "effective", "top_share", "gain", "non_finite"]
    return pd.DataFrame(lines, columns=names)


def _hessians(hessians: Paths) -> pd.DataFrame:
    lines = []
    for path in hessians:
        receipt = _read(path)
        layer = _get(receipt, "layer", path)
        for item in _get(receipt, "experts", path):
            missing = _get(item, "rank_deficiency", path)
            lines.append(
                {
                    "layer": layer,
                    "group": _get(item, "group", path),
                    "rank_deficient": missing is not None and missing > 0,
                    "non_finite": missing is None,
                    "dropped": _get(item, "dropped", path),
                }
            )
    names = ["layer", "group", "rank_deficient", "non_finite", "dropped"]
    return pd.DataFrame(lines, columns=names)


def error_by_layer(matrices: pd.DataFrame) -> pd.DataFrame:
    """Sum the errors of the experts of each layer, group and rate.

    Returns:
        One line each: `relative_output_error`, the root of the summed output error energy over the
        summed output energy of the experts that had a Hessian; `proxy_{matrix}`, the mean proxy
        error over those experts; `relative_frobenius`, the mean over experts and matrices;
        `fallbacks`, experts encoded without a Hessian; `fewest_tokens`.
    """
    lines = []
    for (layer, group, rate), part in matrices.groupby(["layer", "group", "rate"]):
        measured = part.dropna(subset=["output_error_energy", "output_energy"])
        energy = measured["output_energy"].sum()
        error = measured["output_error_energy"].sum()
        fallback = part[part["fallback"].notna()]
        lines.append(
            {
                "layer": layer,
                "group": group,
                "rate": rate,
                "relative_output_error": float(np.sqrt(error / energy)) if energy > 0 else np.nan,
                "relative_frobenius": part["relative_frobenius"].mean(),
                "experts": part["expert"].nunique(),
                "fallbacks": fallback["expert"].nunique(),
                "fewest_tokens": int(part["tokens"].min()),
            }
            | {
                f"proxy_{matrix}": part.loc[part["matrix"] == matrix, "proxy_error"].mean()
                for matrix in ("w1", "w3", "w2")
                if (part["matrix"] == matrix).any()
            }
        )
    names = ["layer", "group", "rate", "relative_output_error", "relative_frobenius", "experts"]
    names += ["fallbacks", "fewest_tokens", "proxy_w1", "proxy_w3", "proxy_w2"]
    return pd.DataFrame(lines, columns=names)
