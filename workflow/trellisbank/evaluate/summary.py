# SPDX-License-Identifier: Apache-2.0
"""Summaries of a score table: over all tokens, by position, and by the source's confidence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

MEASURES = ["nll_source", "nll_release", "kl", "kl_reverse", "p_true_difference"]

POSITIONS = (1, 16, 64, 256, 1024, 4096)
"""First positions of the buckets by position."""

CONFIDENCES = (0.0, 0.1, 0.3, 0.6, 0.9)
"""Lower ends of the buckets by the probability of the source's most probable token."""

Floats = npt.NDArray[np.float64]


def summarize(table: pd.DataFrame) -> dict[str, Any]:
    """Summarize a table of `scores.score_tokens`.

    Returns:
        Windows, tokens; per KL direction mean, median, p90, p95, p99, p99_9 and max (nats; linear
        interpolation); mean NLL of both (nats/token), their difference and perplexities (the
        exponential of the mean) with their ratio; RMS of the true token's probability difference;
        top-1 agreement (share of tokens), and for k = 1 to 5 the share of tokens at which the
        source's most probable token is among the release's k; `by_position` and `by_confidence`
        (`buckets`); `llama_perplexity` (`llama_statistics`); tokens with a value that is not
        finite, and tokens with a negative KL or NLL. A figure with a value that is not finite in
        it is None: such values are counted, never left out.
    """
    values = {name: table[name].to_numpy(np.float64) for name in MEASURES}
    finite = np.logical_and.reduce([np.isfinite(column) for column in values.values()])
    nll = {side: float(values[f"nll_{side}"].mean()) for side in ("source", "release")}
    summary: dict[str, Any] = {
        "windows": int(table["row"].nunique()),
        "tokens": len(table),
        "nll": {
            "source": finite_number(nll["source"]),
            "release": finite_number(nll["release"]),
            "difference": finite_number(nll["release"] - nll["source"]),
        },
        "perplexity": {
            "source": finite_number(np.exp(nll["source"])),
            "release": finite_number(np.exp(nll["release"])),
            "ratio": finite_number(np.exp(nll["release"] - nll["source"])),
        },
        "rms_p_true_difference": finite_number(
            np.sqrt(np.square(values["p_true_difference"]).mean())
        ),
        "top1_agreement": float(table["agree"].mean()),
        "best_among_top": {
            str(k): float(table["best_rank"].between(1, k).mean()) for k in range(1, 6)
        },
        "non_finite_tokens": int((~finite).sum()),
        "negative_tokens": {
            name: int((values[name] < 0).sum())
            for name in ("nll_source", "nll_release", "kl", "kl_reverse")
        },
    }
    for name in ("kl", "kl_reverse"):
        p50, p90, p95, p99, p99_9 = np.percentile(values[name], [50, 90, 95, 99, 99.9])
        summary[name] = {
            "mean": finite_number(values[name].mean()),
            "median": finite_number(p50),
            "p90": finite_number(p90),
            "p95": finite_number(p95),
            "p99": finite_number(p99),
            "p99_9": finite_number(p99_9),
            "max": finite_number(values[name].max()),
        }
    return summary | {
        "by_position": buckets(table, "position", POSITIONS),
        "by_confidence": buckets(table, "best_probability", CONFIDENCES),
        "llama_perplexity": llama_statistics(table),
    }


def buckets(table: pd.DataFrame, column: str, starts: tuple[float, ...]) -> list[dict[str, Any]]:
    """Summarize the tokens of each bucket of a column; empty buckets are left out.

    Args:
        table: Of `scores.score_tokens`.
        column: What to divide by.
        starts: Lower ends of the buckets, ascending; each reaches to the next, the last to the end.

    Returns:
        For each bucket `from` and `below` (None: no end), `tokens`, mean `kl` and
        `nll_difference` (nats/token) and `top1_agreement` (share of tokens). Tokens whose value in
        the column is not finite are in none.
    """
    of = np.digitize(table[column].to_numpy(np.float64), starts) - 1
    finite = np.isfinite(table[column].to_numpy(np.float64))
    lines = []
    for place, start in enumerate(starts):
        part = table[(of == place) & finite]
        if len(part):
            loss = part["nll_release"].to_numpy() - part["nll_source"].to_numpy()
            lines.append(
                {
                    "from": start,
                    "below": starts[place + 1] if place + 1 < len(starts) else None,
                    "tokens": len(part),
                    "kl": finite_number(part["kl"].to_numpy().mean()),
                    "nll_difference": finite_number(loss.mean()),
                    "top1_agreement": float(part["agree"].mean()),
                }
            )
    return lines


def llama_statistics(table: pd.DataFrame) -> dict[str, dict[str, float | None]]:
    """Return what `llama-perplexity --kl-divergence` prints, under its names.

    Q is the release, base the source, p the probability of the true token. Errors are that
    program's: standard errors over tokens as if they were independent, which is too narrow
    wherever tokens of one window are alike; see `bootstrap` for intervals over windows. It scores
    the second half of each window only, here all tokens but the first are in.

    Returns:
        Name to `value` and, where it prints one, `error`. Nats for KLD and ln(PPL), percent of
        probability for p, percent of tokens or of correlation where its names say so.
    """
    base, own = (table[f"nll_{side}"].to_numpy(np.float64) for side in ("source", "release"))
    kl = table["kl"].to_numpy(np.float64)
    change = 100 * table["p_true_difference"].to_numpy(np.float64)
    same = table["agree"].to_numpy(np.float64)
    log_ratio = own - base
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        ppl_own, ppl_base, ratio = (np.exp(x.mean()) for x in (own, base, log_ratio))
        covariance = _product_error(own, base)
        correlation = covariance / (_error(own) * _error(base))
        apart = (
            (ppl_own * _error(own)) ** 2
            + (ppl_base * _error(base)) ** 2
            - 2 * ppl_own * ppl_base * covariance
        )
        square = np.square(change)
        rms = np.sqrt(square.mean())
        figures = {
            "Mean PPL(Q)": (ppl_own, ppl_own * _error(own)),
            "Mean PPL(base)": (ppl_base, ppl_base * _error(base)),
            "Cor(ln(PPL(Q)), ln(PPL(base)))": (100 * correlation, None),
            "Mean ln(PPL(Q)/PPL(base))": (log_ratio.mean(), _error(log_ratio)),
            "Mean PPL(Q)/PPL(base)": (ratio, ratio * _error(log_ratio)),
            "Mean PPL(Q)-PPL(base)": (ppl_own - ppl_base, np.sqrt(max(apart, 0.0))),
            "Mean KLD": (kl.mean(), _error(kl)),
            "Maximum KLD": (kl.max(), None),
            **_percentiles(kl, "KLD", (99.9, 99, 95, 90, 50, 10, 5, 1, 0.1)),
            "Minimum KLD": (kl.min(), None),
            "Mean Δp": (change.mean(), _error(change)),
            "Maximum Δp": (change.max(), None),
            **_percentiles(change, "Δp", (99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1)),
            "Minimum Δp": (change.min(), None),
            "RMS Δp": (rms, 0.5 * _error(square) / rms if rms else 0.0),
            "Same top p": (100 * same.mean(), 100 * _error(same)),
        }
    return {
        name: {"value": finite_number(value)}
        | ({} if error is None else {"error": finite_number(error)})
        for name, (value, error) in figures.items()
    }


def _percentiles(
    values: Floats, name: str, shares: tuple[float, ...]
) -> dict[str, tuple[float, None]]:
    found = np.percentile(values, shares)
    return {
        ("Median" if share == 50 else f"{share:.1f}%") + f" {name}": (float(value), None)
        for share, value in zip(shares, found, strict=True)
    }


def _error(values: Floats) -> float:
    """Standard error of a mean over independent tokens."""
    return float(np.sqrt(_product_error(values, values)))


def _product_error(a: Floats, b: Floats) -> float:
    """Covariance of two means over independent tokens."""
    return float(((a - a.mean()) * (b - b.mean())).mean() / max(len(a) - 1, 1))


def finite_number(value: Any) -> float | None:
    """Return a float for JSON, which has no NaN and no infinities."""
    return float(value) if math.isfinite(value) else None
