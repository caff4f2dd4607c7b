# SPDX-License-Identifier: Apache-2.0
"""The report as one self-contained HTML page."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from trellisbank.errors import ReportError
from trellisbank.files import atomic_write, read_json
from trellisbank.report import figures
from trellisbank.report.figures import Figure
from trellisbank.report.gather import Paths, Run, error_by_layer, gather

GROUPS = ("gate_up", "down")
LISTED_EXPERTS = 60


def write_report(
    out_dir: str | os.PathLike[str],
    *,
    run: str,
    templates: str | os.PathLike[str],
    few_tokens: int,
    manifest: str | os.PathLike[str],
    plans: Paths,
    receipts: Paths,
    ledgers: Paths,
    captures: Paths,
    hessians: Paths,
    comparisons: Paths,
    scores: Paths,
    floors: Paths = (),
    verdicts: Paths = (),
    records: Paths = (),
) -> Path:
    """Write `index.html` from the small files of a run. The same files give the same bytes.

    The page asks for nothing over a network: its style and figures stand inside. A figure whose
    files are empty is left out; nothing is shown that was not measured, published builds excepted,
    which are marked as such and come from `published.json` of the templates.

    Args:
        out_dir: Folder of the page; made if missing.
        run: Name of the run.
        templates: Folder with `index.html.j2`, `style.css` and `published.json`.
        few_tokens: Routed tokens below which an expert is encoded without a Hessian.
        manifest: Source manifest; the keys read of this and all that follow stand with
            `gather.gather`.
        plans: Frozen plans, in the order in which the page shows them.
        receipts: Repack report of each plan's release.
        ledgers: Ledgers of the encoding.
        captures: Statistics of each layer and calibration split.
        hessians: Receipts of the Hessians of each layer.
        comparisons: Comparisons of each release and panel, with the source or among releases.
        scores: Score tables of each release and panel.
        floors: Comparison of the source with itself, its sums in another order, for each panel.
        verdicts: Verdicts on each release.
        records: Records of jobs, from which versions and code digests are taken.

    Returns:
        Path of the page.

    Raises:
        ReportError: A file without a key that the page needs, or files that do not fit together.
    """
    data = gather(
        manifest=manifest,
        plans=plans,
        receipts=receipts,
        ledgers=ledgers,
        captures=captures,
        hessians=hessians,
        comparisons=comparisons,
        floors=floors,
        verdicts=verdicts,
        scores=scores,
        records=records,
    )
    published = read_json(Path(templates) / "published.json", ReportError)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": format_bytes,
        "number": format_number,
        "count": lambda value: f"{value:,}",
    }
    errors = error_by_layer(data.matrices)
    page = environment.get_template("index.html.j2").render(
        run=run,
        data=data,
        quality=_quality(data),
        against=contests(data),
        findings=findings(data),
        worries=worries(data, few_tokens),
        layers=_layer_lines(data, errors),
        figures=_figures(data, errors, published, few_tokens),
        published=published,
        groups=GROUPS,
    )
    path = Path(out_dir) / "index.html"
    with atomic_write(path, "w") as handle:
        handle.write(page)
    return path


def format_bytes(count: int) -> str:
    """Return bytes in the decimal unit that leaves 1 to 999, three digits: `7.21 GB`."""
    power = min(int(math.log10(count)) // 3, 4) if count else 0
    return f"{count / 1000**power:.3g} {['B', 'kB', 'MB', 'GB', 'TB'][power]}"


def format_number(value: float | None, digits: int = 3, sign: bool = False) -> str:
    """Return a number with this many significant digits, without exponent down to 1e-5.

    None and NaN, which stand for a value that is not finite or was not measured, become a dash.
    """
    if value is None or math.isnan(value):
        return "\u2013"
    if value == 0:
        return "0"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    if abs(value) < 1e-5:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    text = f"+{text}" if sign and value > 0 else text
    return text.replace("-", "\u2212")


def _quality(data: Run) -> list[dict[str, Any]]:
    """Comparisons with the source, in the order of the releases, then by panel."""
    order = {item["name"]: index for index, item in enumerate(data.releases)}
    mine = [item for item in data.comparisons if item["baseline"] == "source"]
    return sorted(mine, key=lambda item: (order.get(item["release"], len(order)), item["panel"]))


def contests(data: Run) -> list[dict[str, Any]]:
    """Return the comparisons between releases, those of the larger loss in KL last.

    Returns:
        Each comparison as it is, with `method` and `payload` of the release, `baseline_payload`
        (average rates), and `inside`: whether the interval of the KL difference holds zero, None
        where it has none.
    """
    plans = {item["name"]: item["plan"] for item in data.releases}
    found = []
    for item in data.comparisons:
        if item["baseline"] == "source":
            continue
        release, baseline = plans.get(item["release"], {}), plans.get(item["baseline"], {})
        difference = item["quantities"]["kl_difference"]
        bounds = (difference["low"], difference["high"])
        found.append(
            item
            | {
                "method": release.get("method"),
                "payload": release.get("average_rate"),
                "baseline_payload": baseline.get("average_rate"),
                "inside": None if None in bounds else bounds[0] <= 0 <= bounds[1],
            }
        )
    return sorted(
        found,
        key=lambda item: (
            item["baseline"],
            item["panel"],
            item["quantities"]["kl_difference"]["mean"] or 0.0,
        ),
    )


def findings(data: Run) -> list[dict[str, Any]]:
    """Return what the first paragraph has to say of each release, in their order.

    Returns:
        `text` and `bad`: the verdict of the gates where there are any; and for a release that is
        worse than a uniform one of the same layout and budget, that it is.
    """
    found = []
    for item in data.releases:
        judged = data.verdicts.get(item["name"])
        if judged and judged["verdict"]:
            failed = [line for line in judged["lines"] if line["verdict"] != "accept"]
            why = "; ".join(
                f"{line['quantity']} on {line['panel']} {line['verdict']}" for line in failed
            )
            found.append(
                {
                    "text": f"{item['name']}: {judged['verdict']}" + (f" ({why})." if why else "."),
                    "bad": judged["verdict"] == "reject",
                }
            )
    for item in contests(data):
        difference = item["quantities"]["kl_difference"]["mean"]
        if item["method"] == "uniform" and difference is not None and difference < 0:
            sure = "the interval leaves room for chance" if item["inside"] else "beyond chance"
            found.append(
                {
                    "text": f"{item['baseline']} is worse than uniform rates ({item['release']}) "
                    f"on panel {item['panel']}: {format_number(-difference)} nats/token more KL, "
                    f"{sure}.",
                    "bad": not item["inside"],
                }
            )
    return found


def worries(data: Run, few_tokens: int) -> list[dict[str, Any]]:
    """Return what a reader should know before trusting the release, each with its count.

    Returns:
        `title`, `count`, `of` (out of how many), `detail` (places, shortened) and `bad` (true where
        the count says that something went wrong, not just that something is uncommon).
    """
    matrices, layers = data.matrices, data.layers
    encoded = matrices.drop_duplicates(["layer", "expert", "group", "rate"])
    fallbacks = encoded[encoded["fallback"].notna()]
    reasons = Counter(fallbacks["fallback"])
    few = [
        (int(layer), expert)
        for layer, routed in zip(layers["layer"], layers["routed"], strict=True)
        for expert, count in enumerate(routed)
        if count < few_tokens
    ]
    experts = sum(len(routed) for routed in layers["routed"])
    hessians = data.hessians
    deficient = hessians[hessians["rank_deficient"]].groupby("group").size()
    noted = encoded[encoded["notes"].map(len) > 0]
    # "damping raised 2 times" and "3 times" are one kind of note.
    kinds = Counter(re.sub(r"\b\d+\b", "n", note) for notes in noted["notes"] for note in notes)
    found = [
        {
            "title": "Expert groups encoded without their Hessian (fallback)",
            "count": len(fallbacks),
            "of": f"{len(encoded):,} encoded",
            "detail": "; ".join(
                f"{reason}: {count:,}" for reason, count in sorted(reasons.items())
            ),
            "bad": len(fallbacks) > 0,
        },
        {
            "title": f"Experts with fewer than {few_tokens} calibration tokens",
            "count": len(few),
            "of": f"{experts:,}",
            "detail": _places(few),
            "bad": len(few) > 0,
        },
        {
            "title": "Expert groups with a note of the encoder",
            "count": len(noted),
            "of": f"{len(encoded):,} encoded",
            "detail": "; ".join(f"{note}: {count:,}" for note, count in sorted(kinds.items())),
            "bad": len(noted) > 0,
        },
        {
            "title": "Rank-deficient Hessians (damped; usual where tokens are fewer than inputs)",
            "count": int(hessians["rank_deficient"].sum()),
            "of": f"{len(hessians):,}",
            "detail": "; ".join(f"{group}: {count:,}" for group, count in deficient.items()),
            "bad": False,
        },
        {
            "title": "Hessians that are not finite, or whose calibration had rows left out for it",
            "count": int((hessians["non_finite"] | (hessians["dropped"] > 0)).sum()),
            "of": f"{len(hessians):,}",
            "detail": "",
            "bad": bool((hessians["non_finite"] | (hessians["dropped"] > 0)).any()),
        },
        {
            "title": "Values that are not finite in the stream or FFN inputs of the calibration",
            "count": int(layers["non_finite"].sum()),
            "of": f"{len(layers)} layers",
            "detail": ", ".join(
                f"L{line.layer:02d}: {line.non_finite:,}"
                for line in layers[layers["non_finite"] > 0].itertuples()
            ),
            "bad": bool(layers["non_finite"].sum()),
        },
    ]
    scored = data.scores.items()
    columns = ["nll_source", "nll_release", "kl", "kl_reverse"]
    broken = {
        key: int((~table[columns].apply(lambda column: column.abs() < math.inf)).any(axis=1).sum())
        for key, table in scored
    }
    negative = {key: int((table["kl"] < 0).sum()) for key, table in scored}
    tokens = f"{sum(len(table) for _, table in scored):,} scored tokens"
    for title, counts in (
        ("Scored tokens with a value that is not finite", broken),
        ("Scored tokens with a KL below 0 (rounding leaves some near \u22121e-16)", negative),
    ):
        found.append(
            {
                "title": title,
                "count": sum(counts.values()),
                "of": tokens,
                "detail": "; ".join(
                    f"{release} on {panel}: {count:,}"
                    for (release, panel), count in counts.items()
                    if count
                ),
                "bad": counts is broken and any(counts.values()),
            }
        )
    return found


def _places(experts: Sequence[tuple[int, int]]) -> str:
    by_layer: dict[int, list[int]] = {}
    for layer, expert in experts[:LISTED_EXPERTS]:
        by_layer.setdefault(layer, []).append(expert)
    text = "; ".join(
        f"L{layer:02d}: {', '.join(map(str, found))}" for layer, found in by_layer.items()
    )
    more = len(experts) - LISTED_EXPERTS
    return f"{text}; and {more:,} more" if more > 0 else text


def _layer_lines(data: Run, errors: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry a layer: kind, routing, each release's rates, each measured rate's errors."""
    measured = {(line["layer"], line["group"], line["rate"]): line for line in _records(errors)}
    routing = {line["layer"]: line for line in _records(data.layers)}
    lines = []
    for layer, kind in enumerate(data.manifest["layers"]):
        rates = sorted({rate for at, _, rate in measured if at == layer})
        lines.append(
            {
                "layer": layer,
                "kind": kind,
                "routing": routing.get(layer),
                "rates": [
                    [release["rates"].get((layer, group)) for group in GROUPS]
                    for release in data.releases
                ],
                "errors": [_error_line(measured, layer, rate) for rate in rates],
            }
        )
    return lines


def _records(table: pd.DataFrame) -> list[dict[str, Any]]:
    return [{str(name): value for name, value in line.items()} for line in table.to_dict("records")]


def _error_line(
    measured: Mapping[tuple[int, str, int], dict[str, Any]], layer: int, rate: int
) -> dict[str, Any]:
    groups = {group: measured.get((layer, group, rate)) for group in GROUPS}
    found = [line for line in groups.values() if line]
    return groups | {
        "rate": rate,
        "fallbacks": sum(line["fallbacks"] for line in found),
        "fewest_tokens": min(line["fewest_tokens"] for line in found),
    }


def _figures(
    data: Run, errors: pd.DataFrame, published: Mapping[str, Any], few_tokens: int
) -> dict[str, list[Figure]]:
    """Figures by section of the page."""
    experts = data.manifest["routed_experts"]
    bits = {item["name"]: item["plan"]["stored_bits_per_weight"] for item in data.releases}
    plans = {item["name"]: item["plan"] for item in data.releases}
    points = [
        {"panel": item["panel"], "bits": bits[item["release"]]}
        | {name: plans[item["release"]][name] for name in ("method", "layout")}
        | {name: item["quantities"]["kl"][name] for name in ("mean", "low", "high")}
        for item in _quality(data)
        if item["release"] in bits and item["quantities"]["kl"]["mean"]
    ]
    drawn: dict[str, list[Figure]] = {"plans": _plan_figures(list(plans.values()))}
    drawn |= {"loss": [], "errors": [], "routing": []}
    arms = sorted({(point["panel"], point["layout"]) for point in points})
    if len({point["method"] for point in points}) > 1:
        drawn["loss"] += [
            figures.kl_by_method(
                [p for p in points if (p["panel"], p["layout"]) == (panel, layout)], panel, layout
            )
            for panel, layout in arms
        ]
    elif points:
        drawn["loss"].append(figures.kl_by_bits(points, published["kl"]))
    for panel in sorted({panel for _, panel in data.scores}):
        tables = {release: table for (release, at), table in data.scores.items() if at == panel}
        drawn["loss"] += [
            figures.window_difference(tables, panel),
            figures.kl_histogram(tables, panel),
            figures.kl_by_position(tables, panel),
        ]
    if len(errors):
        references = {int(rate): value for rate, value in published["weight_error"].items()}
        drawn["errors"] += [
            *(figures.output_error(errors, group, experts) for group in GROUPS),
            figures.proxy_error(errors, experts),
            figures.weight_error(errors, experts, references),
        ]
    if len(data.layers):
        drawn["routing"] += [
            figures.effective_experts(data.layers, experts),
            figures.top_share(data.layers, experts),
            figures.tokens_per_expert(data.layers, few_tokens),
            figures.gain(data.layers),
        ]
    return drawn


def _plan_figures(plans: Sequence[Mapping[str, Any]]) -> list[Figure]:
    """What was predicted, by method and layout, and the rates of releases with one an expert."""
    alike: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for plan in plans:
        if plan["predicted"] is not None:
            alike.setdefault((plan["method"], plan["layout"]), []).append(plan)
    return [
        *(figures.predicted_loss(of, *kind) for kind, of in alike.items()),
        *(figures.expert_rates(plan) for plan in plans if "expert" in plan["slots"][0]),
    ]
