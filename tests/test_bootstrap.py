# SPDX-License-Identifier: Apache-2.0
"""Intervals: coverage by simulation, pairing, determinism, and what is refused."""

import json

import numpy as np
import pandas as pd
import pytest

from trellisbank.errors import ForwardError
from trellisbank.evaluate import bootstrap
from trellisbank.evaluate.bootstrap import compare, compare_files, mean_intervals, window_means
from trellisbank.evaluate.scores import write_table


def score_table(seed, windows=12, length=9, loss=0.02):
    """A table as `score_tokens` makes it, with windows that differ more than the two models do."""
    random = np.random.default_rng(seed)
    tokens = length - 1
    hard = random.normal(3.0, 0.5, (windows, 1)) + random.normal(0, 1, (windows, tokens))
    kl = random.gamma(0.5, loss, (windows, tokens))
    columns = {
        "row": np.repeat(np.arange(windows), tokens),
        "position": np.tile(np.arange(1, length), windows),
        "token": np.random.default_rng(99).integers(0, 50, windows * tokens),
        "nll_source": hard,
        "nll_release": hard + loss + random.normal(0, 0.05, (windows, tokens)),
        "kl": kl,
        "kl_reverse": 1.1 * kl,
        "agree": random.random((windows, tokens)) < 0.9,
        "p_true_difference": random.normal(0, 0.01, (windows, tokens)),
    }
    return pd.DataFrame({name: np.reshape(value, -1) for name, value in columns.items()})


def test_interval_of_a_paired_difference_covers_as_often_as_it_says():
    """2,000 simulated panels of 64 windows: two arms that share the windows' difficulty.

    The standard error of a coverage of 0.95 over 2,000 panels is 0.005; percentile intervals of
    64 windows are narrow by 1 in 128 (they divide by n, not n - 1).
    """
    random = np.random.default_rng(0)
    panels, windows, truth = 2000, 64, 0.01
    difficulty = random.normal(0, 0.5, (panels, windows))
    # A window's noise is the mean of a skewed loss over its tokens.
    first = difficulty + random.normal(0, 0.02, (panels, windows))
    second = difficulty + truth * random.gamma(2.0, 0.5, (panels, windows))
    second += random.normal(0, 0.02, (panels, windows))
    intervals = mean_intervals(second - first, seed=1, draws=500)
    for method in ("percentile", "bca"):
        low, high = intervals[method].T
        coverage = np.mean((low <= truth) & (truth <= high))
        assert 0.93 <= coverage <= 0.97, method
    # Not paired, the windows' difficulty would drown the difference.
    apart = [
        np.ptp(mean_intervals(arm[:20], seed=1, draws=500)["bca"], axis=1)
        for arm in (first, second)
    ]
    paired = np.ptp(intervals["bca"][:20], axis=1)
    assert (paired < 0.2 * np.hypot(*apart)).all()


def test_percentile_interval_is_the_quantile_of_the_drawn_means():
    values = np.random.default_rng(2).gamma(1.0, 1.0, (1, 20))
    drawn = np.random.default_rng(7).integers(0, 20, (4000, 20))
    expected = np.percentile(values[0][drawn].mean(axis=1), [2.5, 97.5])
    found = mean_intervals(values, seed=8, draws=4000)["percentile"][0]
    np.testing.assert_allclose(found, expected, rtol=0.02)


def test_the_same_seed_gives_the_same_interval_whatever_the_batch(monkeypatch):
    windows = np.random.default_rng(3).gamma(1.0, 1.0, (3, 20))
    first = mean_intervals(windows, seed=5, draws=1000)
    monkeypatch.setattr(bootstrap, "BATCH_VALUES", 600)
    second = mean_intervals(windows, seed=5, draws=1000)
    other = mean_intervals(windows, seed=6, draws=1000)
    for method in ("percentile", "bca"):
        assert np.array_equal(first[method], second[method])
        assert not np.array_equal(first[method], other[method])


def test_comparison_with_the_source():
    table = score_table(1)
    result = compare(table, release="k3", panel="code", seed=11, draws=2000)
    assert (result["windows"], result["tokens"], result["tokens_per_window"]) == (12, 96, 8)
    assert (result["draws"], result["seed"], result["confidence"]) == (2000, 11, 0.95)
    assert result["baseline"] == "source"
    for name, column in (("kl", "kl"), ("top1_agreement", "agree"), ("nll_source", "nll_source")):
        quantity = result["quantities"][name]
        assert quantity["mean"] == pytest.approx(table[column].mean())
        assert quantity["low"] < quantity["mean"] < quantity["high"]
        assert quantity["method"] == "BCa"
    difference = result["quantities"]["nll_difference"]
    assert difference["mean"] == pytest.approx((table.nll_release - table.nll_source).mean())
    alone = result["quantities"]["nll_release"]
    assert difference["high"] - difference["low"] < 0.2 * (alone["high"] - alone["low"])
    assert result == compare(table, release="k3", panel="code", seed=11, draws=2000)


def test_comparison_of_two_releases_is_paired():
    better, worse = score_table(1, loss=0.02), score_table(1, loss=0.08)
    names = {"release": "k2", "panel": "code", "baseline_name": "k3"}
    result = compare(worse, seed=1, baseline=better, draws=2000, **names)
    kl = result["quantities"]["kl_difference"]
    assert result["baseline"] == "k3"
    assert kl["low"] > 0 and kl["mean"] == pytest.approx(worse.kl.mean() - better.kl.mean())


def test_a_source_compared_with_itself_has_intervals_of_zero_width():
    table = score_table(2)
    table["nll_release"] = table["nll_source"]
    table["kl"] = table["kl_reverse"] = table["p_true_difference"] = 0.0
    table["agree"] = True
    quantities = compare(table, release="source", panel="code", seed=0, draws=200)["quantities"]
    for name, value in (("kl", 0.0), ("nll_difference", 0.0), ("top1_agreement", 1.0)):
        quantity = quantities[name]
        assert (quantity["low"], quantity["mean"], quantity["high"]) == (value, value, value)
        assert quantity["method"] == "percentile"


def test_values_that_are_not_finite_leave_no_figure():
    table = score_table(3)
    table.loc[5, ["kl", "nll_release"]] = np.nan
    result = compare(table, release="k3", panel="code", seed=0, draws=200)
    assert result["non_finite_tokens"] == 1
    for name in ("kl", "nll_release", "nll_difference"):
        assert result["quantities"][name]["mean"] is None
        assert result["quantities"][name]["low"] is None
    assert result["quantities"]["nll_source"]["mean"] is not None
    json.dumps(result, allow_nan=False)


def test_windows_that_do_not_match_are_refused():
    table = score_table(4)
    names = {"release": "k2", "panel": "code", "baseline_name": "k3", "seed": 0}
    other_tokens = table.assign(token=table["token"].to_numpy()[::-1])
    fewer = table[table["row"] < 11]
    another_source = table.assign(nll_source=table["nll_source"] + 0.1)
    for baseline, message in (
        (other_tokens, "do not hold the same windows"),
        (fewer, "do not hold the same windows"),
        (another_source, "different sources"),
    ):
        with pytest.raises(ForwardError, match=message):
            compare(table, baseline=baseline, **names)
    with pytest.raises(ForwardError, match="several lengths"):
        window_means(table.iloc[1:])
    with pytest.raises(ForwardError, match="at least two windows"):
        compare(table[table["row"] == 0], release="k2", panel="code", seed=0)


def test_files_carry_their_names(tmp_path):
    for release, loss in (("k3", 0.02), ("k2", 0.08)):
        path = tmp_path / f"{release}.parquet"
        write_table(path, score_table(1, loss=loss), release=release, panel="code")
    result = compare_files(
        tmp_path / "k2.parquet",
        tmp_path / "comparison.json",
        seed=3,
        baseline_path=tmp_path / "k3.parquet",
        draws=500,
    )
    assert (result["release"], result["baseline"], result["panel"]) == ("k2", "k3", "code")
    assert json.loads((tmp_path / "comparison.json").read_text()) == result
