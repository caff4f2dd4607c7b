# SPDX-License-Identifier: Apache-2.0
"""Paired bootstrap over windows: how sure a mean or a difference of means is.

Tokens of one window depend on each other, so windows are drawn, not tokens; and a window is drawn
with all its scores, so that what both models find hard cancels in a difference.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import DegenerateDataWarning, bootstrap

from trellisbank.errors import ForwardError
from trellisbank.evaluate.scores import read_table
from trellisbank.evaluate.summary import finite_number
from trellisbank.files import write_json

SCHEMA = "trellisbank/comparison/1"
DRAWS = 10_000
CONFIDENCE = 0.95
NATS = "nats/token"
BATCH_VALUES = 1 << 22

Floats = NDArray[np.float64]


def mean_intervals(
    windows: Floats, *, seed: int, draws: int = DRAWS, confidence: float = CONFIDENCE
) -> dict[str, Floats]:
    """Bootstrap the means of several quantities over the same drawn windows.

    Efron and Tibshirani, An Introduction to the Bootstrap (1993), chapters 13 and 14, as
    `scipy.stats.bootstrap` has them. Memory is bounded: the draws are made in batches of
    some 4 million values.

    Args:
        windows: One mean a window, fp64 [quantities, windows], at least two windows.
        seed: Of the numpy generator; the same seed draws the same windows.
        draws: Bootstrap samples.
        confidence: Two-sided coverage aimed at.

    Returns:
        `percentile` and `bca`, each fp64 [quantities, 2] (low, high). A BCa interval is NaN where
        it is not defined: all windows equal, or a value that is not finite.

    Raises:
        ForwardError: Fewer than two windows.
    """
    if windows.ndim != 2 or windows.shape[1] < 2:
        raise ForwardError(
            "An interval needs at least two windows.",
            expected="[quantities, windows] with 2 or more windows",
            found=list(windows.shape),
            fix="build the panel with more windows",
        )
    batch = max(1, BATCH_VALUES // windows.size)
    with warnings.catch_warnings(), np.errstate(invalid="ignore", divide="ignore"):
        warnings.simplefilter("ignore", DegenerateDataWarning)
        bca = bootstrap(
            (windows,),
            np.mean,
            n_resamples=draws,
            batch=batch,
            vectorized=True,
            axis=-1,
            confidence_level=confidence,
            method="BCa",
            rng=np.random.default_rng(seed),
        )
        percentile = bootstrap(
            (windows,),
            np.mean,
            n_resamples=0,
            vectorized=True,
            axis=-1,
            confidence_level=confidence,
            method="percentile",
            bootstrap_result=bca,
        )
    return {
        name: np.stack([result.confidence_interval.low, result.confidence_interval.high], axis=-1)
        for name, result in (("percentile", percentile), ("bca", bca))
    }


def window_means(table: pd.DataFrame) -> pd.DataFrame:
    """Return the mean of every score over each window, one line a window.

    Raises:
        ForwardError: Windows of several lengths, whose means would not weigh the same.
    """
    groups = table.groupby("row", sort=True)
    lengths = groups.size()
    if lengths.nunique() != 1:
        raise ForwardError(
            "The windows of a panel have several lengths.",
            expected="one length",
            found=f"{lengths.min()} to {lengths.max()} tokens",
            fix="build the panel with one window length",
        )
    columns = ["nll_source", "nll_release", "kl", "kl_reverse", "agree", "p_true_difference"]
    # A group's own mean would leave NaN out; a window with one has no mean.
    means = {name: [_mean(group) for _, group in groups[name]] for name in columns}
    return pd.DataFrame(means, index=lengths.index)


def _mean(column: pd.Series[Any]) -> float:
    return float(column.to_numpy(np.float64).mean())


def compare(
    table: pd.DataFrame,
    *,
    release: str,
    panel: str,
    seed: int,
    baseline: pd.DataFrame | None = None,
    baseline_name: str = "source",
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> dict[str, Any]:
    """Compare a release with its source, or with another release scored on the same windows.

    Args:
        table: Score table of the release (`scores.score_tokens`).
        release: Its name.
        panel: Name of the panel.
        seed: Of the draws.
        baseline: Score table of another release against the same source; without it the release
            is compared with the source, whose scores stand in its own table.
        baseline_name: Name of what it is compared with.
        draws: Bootstrap samples.
        confidence: Two-sided coverage aimed at.

    Returns:
        `schema`, `release`, `baseline`, `panel`, `windows`, `tokens`, `tokens_per_window`,
        `resampled`, `draws`, `seed`, `confidence`, `non_finite_tokens`, and `quantities`: name to
        `unit`, `mean`, `low`, `high`, `method` and `percentile` [low, high]. The interval is BCa;
        where that is not defined it is the percentile interval, and `method` says so. A figure
        that is not finite is None.
        Against the source: `nll_source`, `nll_release`, `nll_difference` (release - source), `kl`,
        `kl_reverse`, `top1_agreement`, `p_true_difference`. Against a release: the differences
        `nll_difference`, `kl_difference`, `top1_difference`, all release - baseline.

    Raises:
        ForwardError: The tables do not hold the same tokens of the same windows.
    """
    means = window_means(table)
    if baseline is None:
        quantities = {
            "nll_source": (NATS, means["nll_source"]),
            "nll_release": (NATS, means["nll_release"]),
            "nll_difference": (NATS, means["nll_release"] - means["nll_source"]),
            "kl": (NATS, means["kl"]),
            "kl_reverse": (NATS, means["kl_reverse"]),
            "top1_agreement": ("share of tokens", means["agree"]),
            "p_true_difference": ("probability", means["p_true_difference"]),
        }
    else:
        _check_same_windows(table, baseline)
        other = window_means(baseline)
        quantities = {
            "nll_difference": (NATS, means["nll_release"] - other["nll_release"]),
            "kl_difference": (NATS, means["kl"] - other["kl"]),
            "top1_difference": ("share of tokens", means["agree"] - other["agree"]),
        }
    scores = table[["nll_source", "nll_release", "kl", "kl_reverse"]].to_numpy()
    return {
        "schema": SCHEMA,
        "release": release,
        "baseline": baseline_name,
        "panel": panel,
        "windows": len(means),
        "tokens": len(table),
        "tokens_per_window": len(table) // len(means),
        "resampled": "windows, paired",
        "draws": draws,
        "seed": seed,
        "confidence": confidence,
        "non_finite_tokens": int((~np.isfinite(scores)).any(axis=1).sum()),
        "quantities": _quantities(quantities, seed=seed, draws=draws, confidence=confidence),
    }


def _quantities(
    quantities: Mapping[str, tuple[str, pd.Series[float]]],
    *,
    seed: int,
    draws: int,
    confidence: float,
) -> dict[str, Any]:
    windows = np.array([values for _, values in quantities.values()], dtype=np.float64)
    intervals = mean_intervals(windows, seed=seed, draws=draws, confidence=confidence)
    result = {}
    for index, (name, (unit, _)) in enumerate(quantities.items()):
        percentile, bca = intervals["percentile"][index], intervals["bca"][index]
        defined = bool(np.isfinite(bca).all())
        low, high = bca if defined else percentile
        result[name] = {
            "unit": unit,
            "mean": finite_number(windows[index].mean()),
            "low": finite_number(low),
            "high": finite_number(high),
            "method": "BCa" if defined else "percentile",
            "percentile": [finite_number(bound) for bound in percentile],
        }
    return result


def _check_same_windows(table: pd.DataFrame, baseline: pd.DataFrame) -> None:
    for column in ("row", "position", "token"):
        if not np.array_equal(table[column], baseline[column]):
            raise ForwardError(
                "Two score tables do not hold the same windows, so nothing in them is paired.",
                tensor=column,
                expected=f"{len(baseline)} equal values of '{column}'",
                found=f"{len(table)} values that differ",
                fix="score both releases on the same panel",
            )
    # The source's NLL is one set of numbers; another one means another source or panel.
    apart = np.abs(table["nll_source"].to_numpy() - baseline["nll_source"].to_numpy())
    if np.nanmax(apart, initial=0.0) > 1e-3:
        raise ForwardError(
            "Two score tables were made against different sources.",
            tensor="nll_source",
            expected="equal values, up to rounding",
            found=f"{np.nanmax(apart):.4g} nats apart",
            fix="score both releases against the same source",
        )


def compare_files(
    table_path: str | os.PathLike[str],
    comparison_path: str | os.PathLike[str],
    *,
    seed: int,
    baseline_path: str | os.PathLike[str] | None = None,
    draws: int = DRAWS,
    confidence: float = CONFIDENCE,
) -> dict[str, Any]:
    """Run `compare` on score tables written by `scores.score_files`; names come from the tables.

    Args:
        table_path: Score table of the release.
        comparison_path: JSON written.
        seed: Of the draws.
        baseline_path: Score table of the release it is compared with; the source without it.
        draws: Bootstrap samples.
        confidence: Two-sided coverage aimed at.

    Returns:
        The comparison as written.

    Raises:
        ForwardError: Not score tables, or not of the same windows.
    """
    table, names = read_table(table_path)
    baseline, baseline_name = None, "source"
    if baseline_path is not None:
        baseline, other = read_table(baseline_path)
        baseline_name = other["release"]
    comparison = compare(
        table,
        release=names["release"],
        panel=names["panel"],
        seed=seed,
        baseline=baseline,
        baseline_name=baseline_name,
        draws=draws,
        confidence=confidence,
    )
    write_json(comparison_path, comparison)
    return comparison
