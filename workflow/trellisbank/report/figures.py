# SPDX-License-Identifier: Apache-2.0
"""Figures of the report as SVG text: the same numbers give the same bytes.

Lines, ticks and letters take the colour of the page around them (`currentColor`), so one figure
serves a light and a dark page. Series differ in marker and in colour (Okabe and Ito's set, which
stays apart for colour-blind eyes, with a blue light enough for a dark page).
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, MaxNLocator

from trellisbank.plan.layouts import NATIVE, NATIVE_QUARTERS

COLOURS = ["#1c83c4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]
MARKERS = ["o", "s", "^", "D", "v", "P"]
DASHES = ["-", "--", ":", "-."]
# Stands for the page's text colour until the SVG is written; no series has it.
INK = "#010203"
REFERENCE = "#8a8a8a"
# Inches; a figure fits a phone's width without being scaled down.
SIZE = (4.9, 3.1)
POSITION_BUCKETS = 16
LOSS_UNITS = {
    "gain": "gain\u00b2 x tokens x proxy error",
    "exact": "gain\u00b2 x error energy at the output",
    "measured": "added-up KL of probes, nats/token",
}
NATIVE_BITS = NATIVE_QUARTERS / 4
# Releases that figures of single releases show: more lines could not be told apart.
MOST_RELEASES = len(COLOURS)
HISTOGRAM_EDGES = np.arange(-8.0, 2.25, 0.25)
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    # Names are shown as they are, dollar signs included.
    "text.parse_math": False,
    "svg.hashsalt": "trellisbank",
    "font.size": 9.0,
    "font.family": "sans-serif",
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "lines.linewidth": 1.4,
    "lines.markersize": 4.0,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Figure:
    """A drawn figure: an anchor, what it shows in words, and the SVG element."""

    name: str
    caption: str
    svg: str


def draw(name: str, caption: str, paint: Callable[[Axes], None]) -> Figure:
    """Draw one figure of one pair of axes.

    Args:
        name: Anchor; also the prefix of the ids inside, which must differ between the figures of
            one page.
        caption: What is shown, with n and units; it is the text alternative too.
        paint: Draws on the axes.
    """
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=SIZE, layout="constrained")
        FigureCanvasSVG(canvas)
        axes = canvas.add_subplot()
        paint(axes)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            # Some 75 letters stand in a line, six of them in a label's marker and gap.
            fitting = max(1, 75 // (6 + max(map(len, labels))))
            columns = min(len(labels) if len(labels) <= 5 else 4, fitting)
            canvas.legend(handles, labels, loc="outside upper left", ncols=columns)
        buffer = io.StringIO()
        nothing = {"Date": None, "Creator": None, "Format": None, "Type": None}
        canvas.savefig(buffer, format="svg", metadata=nothing)
    return Figure(name, caption, _embed(buffer.getvalue(), name))


def _embed(svg: str, name: str) -> str:
    """Make matplotlib's file an element of a page: no prologue, no fixed size, ids of its own.

    Only ids that something refers to are kept, and of a marker that matplotlib defines twice the
    first: ids are unique in a page.
    """
    svg = svg[svg.index("<svg") :].strip().replace(INK, "currentColor")
    svg = svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:", "")
    left = set(re.findall(r'(?:href="|url\()#([^")]+)', svg))

    def own_id(match: re.Match[str]) -> str:
        if match[1] not in left:
            return ""
        left.remove(match[1])
        return f' id="{name}-{match[1]}"'

    svg = re.sub(r' id="([^"]+)"', own_id, svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    return re.sub(
        r'^<svg [^>]*?(viewBox="[^"]+")[^>]*>',
        rf'<svg \1 role="img" aria-labelledby="{name}-caption">',
        svg,
        count=1,
    )


def _layer_axis(axes: Axes, layers: Iterable[int]) -> None:
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    first, last = min(layers), max(layers)
    axes.set_xlim(first - 0.5, last + 0.5)


def _plain_log(axes: Axes, which: str = "y") -> None:
    """Logarithmic axis with plain numbers at 1, 2 and 5 of each decade."""
    getattr(axes, f"set_{which}scale")("log", subs=[2, 5])
    axis = getattr(axes, f"{which}axis")
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_view_interval()
    narrow = high / low < 1000
    axis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if narrow else ""))


def output_error(errors: pd.DataFrame, group: str, experts: int) -> Figure:
    """Relative error of a matrix group's output by layer, one line a rate."""

    def paint(axes: Axes) -> None:
        for index, (rate, part) in enumerate(errors[errors["group"] == group].groupby("rate")):
            axes.plot(
                part["layer"],
                part["relative_output_error"],
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                label=f"K={rate}",
            )
        axes.set_ylabel("relative output error")
        _layer_axis(axes, errors["layer"])
        _plain_log(axes)

    return draw(
        f"output-error-{group.replace('_', '-')}",
        f"Relative output error of {group} by layer and rate: root of |XE|\u00b2 / |XW|\u00b2, "
        "both summed over the experts that had a Hessian, on calibration tokens "
        f"({experts} experts a layer).",
        paint,
    )


def proxy_error(errors: pd.DataFrame, experts: int) -> Figure:
    """Proxy error of each matrix by layer, colour for the rate and dashes for the matrix."""

    def paint(axes: Axes) -> None:
        for index, (rate, part) in enumerate(errors.groupby("rate")):
            for matrix, dash in zip(("w1", "w3", "w2"), DASHES, strict=False):
                measured = part.dropna(subset=[f"proxy_{matrix}"])
                axes.plot(
                    measured["layer"],
                    measured[f"proxy_{matrix}"],
                    marker=MARKERS[index % len(MARKERS)],
                    color=COLOURS[index % len(COLOURS)],
                    linestyle=dash,
                    label=f"{matrix} K={rate}",
                )
        axes.set_ylabel("proxy error")
        _layer_axis(axes, errors["layer"])
        _plain_log(axes)

    return draw(
        "proxy-error",
        "Proxy error tr(E\u1d40HE) / tr(W\u1d40HW) by layer, matrix and rate, mean over the "
        f"experts that had a Hessian ({experts} experts a layer).",
        paint,
    )


def weight_error(errors: pd.DataFrame, experts: int, references: Mapping[int, float]) -> Figure:
    """Relative Frobenius error of the weights by layer; published values as reference lines."""

    def paint(axes: Axes) -> None:
        by_rate = errors.groupby(["rate", "layer"])["relative_frobenius"].mean().reset_index()
        for index, (rate, part) in enumerate(by_rate.groupby("rate")):
            axes.plot(
                part["layer"],
                part["relative_frobenius"],
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                label=f"K={rate}",
            )
        for rate, value in references.items():
            if rate in set(by_rate["rate"]):
                axes.axhline(value, color=REFERENCE, linestyle=":", label=f"published, K={rate}")
        axes.set_ylabel("relative Frobenius error")
        _layer_axis(axes, errors["layer"])
        axes.set_ylim(bottom=0)

    return draw(
        "weight-error",
        "Relative Frobenius error |E| / |W| of the weights by layer and rate, mean over matrices "
        f"({experts} experts a layer). Dotted: published figure of another model.",
        paint,
    )


def effective_experts(layers: pd.DataFrame, experts: int) -> Figure:
    """Effective number of experts a layer."""

    def paint(axes: Axes) -> None:
        axes.plot(layers["layer"], layers["effective"], marker="o", color=COLOURS[0])
        axes.axhline(experts, color=REFERENCE, linestyle=":")
        axes.set_ylabel("effective experts")
        axes.set_ylim(0, experts * 1.05)
        _layer_axis(axes, layers["layer"])

    return draw(
        "effective-experts",
        "Effective experts a layer: exponential of the entropy of the routed share. Dotted: all "
        f"{experts} used alike. {_tokens(layers)}",
        paint,
    )


def top_share(layers: pd.DataFrame, experts: int) -> Figure:
    """Largest share of the routed tokens that one expert takes."""

    def paint(axes: Axes) -> None:
        axes.plot(layers["layer"], 100 * layers["top_share"], marker="o", color=COLOURS[0])
        axes.axhline(100 / experts, color=REFERENCE, linestyle=":")
        axes.set_ylabel("largest share, % of routed tokens")
        axes.set_ylim(bottom=0)
        _layer_axis(axes, layers["layer"])

    return draw(
        "top-share",
        f"Share of the routed tokens that the busiest expert takes. Dotted: 1/{experts}. "
        f"{_tokens(layers)}",
        paint,
    )


def tokens_per_expert(layers: pd.DataFrame, few_tokens: int) -> Figure:
    """Spread of routed calibration tokens over the experts of each layer."""

    def paint(axes: Axes) -> None:
        counts = np.stack(layers["routed"].to_list())
        low, p10, half, p90, high = np.percentile(counts, [0, 10, 50, 90, 100], axis=1)
        place = layers["layer"].to_numpy()
        axes.fill_between(
            place, p10, p90, color=COLOURS[0], alpha=0.3, linewidth=0, label="p10-p90"
        )
        axes.plot(place, half, marker="o", color=COLOURS[0], label="median")
        axes.plot(place, high, marker="^", color=COLOURS[2], linestyle="none", label="most")
        axes.plot(place, low, marker="v", color=COLOURS[1], linestyle="none", label="fewest")
        axes.axhline(few_tokens, color=REFERENCE, linestyle=":")
        # Linear below one token: an expert may have none.
        axes.set_yscale("symlog", linthresh=1)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_ylim(0, 2 * high.max())
        axes.set_ylabel("routed tokens an expert")
        _layer_axis(axes, place)

    return draw(
        "tokens-per-expert",
        "Calibration tokens an expert by layer. Dotted: below "
        f"{few_tokens} tokens an expert is encoded without a Hessian. {_tokens(layers)}",
        paint,
    )


def gain(layers: pd.DataFrame) -> Figure:
    """How strongly each layer's FFN writes into the stream."""

    def paint(axes: Axes) -> None:
        axes.plot(layers["layer"], layers["gain"], marker="o", color=COLOURS[0])
        axes.set_ylabel("gain")
        axes.set_ylim(bottom=0)
        _layer_axis(axes, layers["layer"])

    return draw(
        "gain",
        "Gain of each layer's FFN: length of its mean writing vector over the RMS of the stream "
        f"(dimensionless). {_tokens(layers)}",
        paint,
    )


def _tokens(layers: pd.DataFrame) -> str:
    return f"n = {int(layers['tokens'].max()):,} calibration tokens a layer."


def kl_by_bits(
    points: Sequence[Mapping[str, Any]], references: Sequence[Mapping[str, Any]]
) -> Figure:
    """Mean KL of each release and panel against its stored bits a weight.

    Args:
        points: `panel`, `bits`, `mean`, `low`, `high` (the interval may be None).
        references: Published: `label`, `bits`, `mean`, `low`, `high`.
    """

    def paint(axes: Axes) -> None:
        panels = sorted({point["panel"] for point in points})
        for index, panel in enumerate(panels):
            mine = sorted((p for p in points if p["panel"] == panel), key=lambda p: p["bits"])
            _bars(axes, mine, COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], panel)
        if references:
            _bars(axes, references, REFERENCE, "x", "published, other model", line="none")
        axes.set_xlabel("stored bits a weight of the routed experts")
        axes.set_ylabel("KL(source || release), nats/token")
        _plain_log(axes)

    return draw(
        "kl-by-bits",
        "Mean KL over the full vocabulary against stored bits a weight, with the interval of the "
        "table. Grey crosses: published builds of another model on other text, for orientation.",
        paint,
    )


def predicted_loss(plans: Sequence[Mapping[str, Any]], method: str, layout: str) -> Figure:
    """What a method predicts of plans of all sizes, and the plans that were frozen.

    Args:
        plans: Frozen plans of one method and layout: `recipe`, `stored_bytes`, `predicted`.
        method: The method.
        layout: The layout.
    """
    power, unit = (9, "GB") if max(plan["stored_bytes"] for plan in plans) > 1e9 else (6, "MB")

    def paint(axes: Axes) -> None:
        for index, plan in enumerate(plans):
            points = plan["predicted"]["curve"]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                [point["stored_bytes"] / 10**power for point in points],
                # Nothing is lost where all keep the source's format; it has no logarithm.
                [point["cost"] or math.nan for point in points],
                color=colour,
                linestyle=DASHES[index % len(DASHES)],
            )
            axes.plot(
                [plan["stored_bytes"] / 10**power],
                [plan["predicted"]["loss"] or math.nan],
                marker=MARKERS[index % len(MARKERS)],
                color=colour,
                linestyle="none",
                label=plan["recipe"],
            )
        axes.set_xlabel(f"stored bytes of the routed experts, {unit}")
        axes.set_ylabel(LOSS_UNITS[method])
        _plain_log(axes)

    return draw(
        f"predicted-loss-{method}-{_anchor(layout)}",
        f"Loss that {method} predicts against stored bytes, layout {layout}: the line joins the "
        "best plans of their sizes (the convex hull of all plans over the rates that were "
        "measured), the marker is the plan that was frozen. Predictions of different methods are "
        "in different units.",
        paint,
    )


def expert_rates(plan: Mapping[str, Any]) -> Figure:
    """How many experts of each layer have which rate, for a plan with one rate an expert."""

    def paint(axes: Axes) -> None:
        slots = pd.DataFrame(plan["slots"])
        slots["bits"] = slots["rate"].map(lambda rate: NATIVE_BITS if rate == NATIVE else rate)
        names = dict(zip(slots["bits"], slots["rate"], strict=True))
        counts = pd.crosstab(slots["layer"], slots["bits"])
        below = np.zeros(len(counts))
        for index, bits in enumerate(counts.columns):
            here = counts[bits].to_numpy()
            axes.bar(
                counts.index,
                here,
                bottom=below,
                color=COLOURS[index % len(COLOURS)],
                width=0.8,
                label=names[bits] if names[bits] == NATIVE else f"K={names[bits]}",
            )
            below = below + here
        axes.set_ylabel("experts")
        _layer_axis(axes, counts.index)

    return draw(
        f"expert-rates-{_anchor(plan['recipe'])}",
        f"Experts of each layer by their rate in release {plan['recipe']} ({plan['method']}, "
        f"{plan['average_rate']:.4g} bits of payload a weight).",
        paint,
    )


def kl_by_method(points: Sequence[Mapping[str, Any]], panel: str, layout: str) -> Figure:
    """Mean KL of the releases of one layout against their stored bits, one line a method.

    Args:
        points: `method`, `bits`, `mean`, `low`, `high` (the interval may be None).
        panel: Name of the panel.
        layout: The layout.
    """

    def paint(axes: Axes) -> None:
        methods = sorted({point["method"] for point in points})
        # Equal sizes would put the intervals on top of one another; the axis is wide beside the
        # steps that keep them apart.
        bits = [point["bits"] for point in points]
        low, high = min(bits) - 0.25, max(bits) + 0.25
        apart = 0.03 * (high - low)
        for index, method in enumerate(methods):
            mine = sorted((p for p in points if p["method"] == method), key=lambda p: p["bits"])
            shift = apart * (index - (len(methods) - 1) / 2)
            mine = [{**point, "bits": point["bits"] + shift} for point in mine]
            _bars(axes, mine, COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)], method)
        axes.set_xlim(low, high)
        axes.set_xlabel("stored bits a weight of the routed experts")
        axes.set_ylabel("KL(source || release), nats/token")
        _plain_log(axes)

    return draw(
        f"kl-by-method-{_anchor(layout)}-{_anchor(panel)}",
        f"Mean KL over the full vocabulary on panel {panel} against stored bits a weight, layout "
        f"{layout}, one line a method, with the interval of the table. Methods of one size stand "
        "side by side. Whether two differ is said by their paired difference in the table "
        "of releases against each other, whose interval is narrower than these.",
        paint,
    )


def _bars(
    axes: Axes,
    points: Sequence[Mapping[str, Any]],
    colour: str,
    marker: str,
    label: str,
    line: str = "-",
) -> None:
    mean = np.array([point["mean"] for point in points])
    bounds = [
        [point["mean"] if point[side] is None else point[side] for point in points]
        for side in ("low", "high")
    ]
    axes.errorbar(
        [point["bits"] for point in points],
        mean,
        yerr=[mean - bounds[0], bounds[1] - mean],
        color=colour,
        marker=marker,
        linestyle=line,
        capsize=3,
        label=label,
    )


def kl_histogram(tables: Mapping[str, pd.DataFrame], panel: str) -> Figure:
    """Distribution of the tokens' KL, one step line a release."""

    def paint(axes: Axes) -> None:
        for index, (release, table) in enumerate(_shown(tables).items()):
            kl = table["kl"].to_numpy()
            kl = kl[np.isfinite(kl)]
            # What lies below the axis, exact zeros with it, is drawn in the first bin.
            bins = np.clip(np.log10(np.maximum(kl, 1e-300)), HISTOGRAM_EDGES[0], None)
            counts, _ = np.histogram(bins, HISTOGRAM_EDGES)
            axes.stairs(
                100 * counts / max(len(table), 1),
                10**HISTOGRAM_EDGES,
                color=COLOURS[index % len(COLOURS)],
                linestyle=DASHES[index % len(DASHES)],
                linewidth=1.4,
                label=release,
            )
        axes.set_xscale("log")
        axes.set_xlabel("KL(source || release) of a token, nats")
        axes.set_ylabel("% of tokens")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))

    return draw(
        f"kl-histogram-{_anchor(panel)}",
        f"Distribution of KL over the tokens of panel {panel}, four bins a decade; values below "
        f"1e-8 stand in the first. {_scored(tables)}",
        paint,
    )


def kl_by_position(tables: Mapping[str, pd.DataFrame], panel: str) -> Figure:
    """Mean KL by position in the window."""

    def paint(axes: Axes) -> None:
        for index, (release, table) in enumerate(_shown(tables).items()):
            position = table["position"].to_numpy()
            width = -(-int(position.max()) // POSITION_BUCKETS)
            mean = table.groupby((position - 1) // width)["kl"].mean()
            axes.plot(
                (mean.index.to_numpy() + 0.5) * width,
                mean.to_numpy(),
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                label=release,
            )
        axes.set_xlabel("position in the window, tokens")
        axes.set_ylabel("mean KL, nats/token")
        axes.set_ylim(bottom=0)

    return draw(
        f"kl-position-{_anchor(panel)}",
        f"Mean KL by position in the window, panel {panel}, at most {POSITION_BUCKETS} buckets. "
        f"{_scored(tables)}",
        paint,
    )


def window_difference(tables: Mapping[str, pd.DataFrame], panel: str) -> Figure:
    """NLL difference of each window against the source's NLL of that window."""

    def paint(axes: Axes) -> None:
        for index, (release, table) in enumerate(_shown(tables).items()):
            means = table.groupby("row")[["nll_source", "nll_release"]].mean()
            axes.plot(
                means["nll_source"],
                means["nll_release"] - means["nll_source"],
                marker=MARKERS[index % len(MARKERS)],
                color=COLOURS[index % len(COLOURS)],
                linestyle="none",
                alpha=0.75,
                label=release,
            )
        axes.axhline(0, color=REFERENCE, linewidth=1)
        axes.set_xlabel("NLL of the source, nats/token")
        axes.set_ylabel("NLL release \u2212 source, nats/token")

    return draw(
        f"window-difference-{_anchor(panel)}",
        f"NLL of each window of panel {panel}, release \u2212 source, against the source's; above "
        f"the line the release is worse. {_scored(tables)}",
        paint,
    )


def _shown(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return dict(itertools.islice(tables.items(), MOST_RELEASES))


def _scored(tables: Mapping[str, pd.DataFrame]) -> str:
    table = next(iter(tables.values()))
    first = f" The first {MOST_RELEASES} releases." if len(tables) > MOST_RELEASES else ""
    return f"n = {table['row'].nunique():,} windows, {len(table):,} tokens a release.{first}"


def _anchor(name: str) -> str:
    return re.sub(r"\W", "-", name)
