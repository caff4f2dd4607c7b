# SPDX-License-Identifier: Apache-2.0
"""The report from a made-up run: complete, well formed, self-contained, deterministic."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from trellisbank.errors import ReportError
from trellisbank.evaluate.bootstrap import compare_files
from trellisbank.evaluate.scores import read_table, write_table
from trellisbank.report.figures import kl_by_position
from trellisbank.report.gather import error_by_layer, gather, layer_rates
from trellisbank.report.page import (
    contests,
    findings,
    format_bytes,
    format_number,
    worries,
    write_report,
)

TEMPLATES = Path(__file__).parents[1] / "report"
HOSTILE = 'k2<script>alert("x")</script>&$x^$'
VOID = {"meta", "link", "br", "hr", "img", "input", "use", "path"}


def write(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def score_table(random, rate, windows, length):
    """Scores with the shape of real ones: skewed KL that halves with each bit or so."""
    shape = (windows, length - 1)
    tokens = np.prod(shape)
    source = random.gamma(1.2, 2.1, shape) * random.uniform(0.7, 1.3, (windows, 1))
    kl = random.lognormal(np.log(0.4 * 0.4**rate), 1.4, shape)
    return pd.DataFrame(
        {
            "row": np.repeat(np.arange(windows), length - 1).astype("int32"),
            "position": np.tile(np.arange(1, length), windows).astype("int32"),
            "token": np.arange(tokens).astype("int32") % 97,
            "nll_source": source.reshape(-1),
            "nll_release": (source + kl + random.normal(0, 0.3, shape) * np.sqrt(kl)).reshape(-1),
            "kl": kl.reshape(-1),
            "kl_reverse": 1.05 * kl.reshape(-1),
            "agree": random.random(tokens) > 0.3 * 0.55**rate,
            "rank_source": np.ones(tokens, "int32"),
            "rank_release": np.ones(tokens, "int32"),
            "p_true_difference": random.normal(0, 0.02, tokens),
        }
    )


def make_run(folder, *, layers=6, experts=16, releases=None, windows=8, length=64):
    """Write the files of a made-up run; returns the arguments of `write_report`."""
    releases = releases or {"k3": 3, HOSTILE: 2}
    random = np.random.default_rng(1)
    kinds = ["window only", "full, ratio 2", "reuse", "full, ratio 1", "reindex"]
    weights = {"w1": 32768, "w3": 32768, "w2": 32768}
    manifest = {
        "architecture": "made_up_for_a_test",
        "layers": [kinds[layer % 5] for layer in range(layers)],
        "routed_experts": experts,
        "experts_per_token": 3,
        "tensor_count": 20 * layers + 6 * layers * experts,
        "tensor_bytes": 14_000_000,
    }
    files = {name: [] for name in ("plans", "receipts", "ledgers", "captures", "hessians")}
    files |= {"comparisons": [], "floors": [], "verdicts": [], "scores": [], "records": []}
    routed = random.dirichlet(np.full(experts, 2.5), layers) * 3 * 16384
    routed[layers - 1, experts - 1] = 4
    for layer in range(layers):
        for split in range(2):
            statistics = {
                "layer": layer,
                "tokens": 8192,
                "expert_tokens": (routed[layer] / 2).astype(int).tolist(),
                "post_mean": random.normal(0, 0.6 / (1 + layer / 4), 4).tolist(),
                "stream_mean_square": 0.2 * (1 + layer / 8),
                "non_finite_stream": 0,
                "non_finite_ffn_input": 0,
            }
            files["captures"].append(
                write(folder / f"captures/split{split}/L{layer:02d}.stats.json", statistics)
            )
        hessians = {
            "layer": layer,
            "experts": [
                {"expert": e, "group": group, "dropped": 0, "rank_deficiency": 7 * (e == layer)}
                for e in range(experts)
                for group in ("gate_up", "down")
            ],
        }
        files["hessians"].append(write(folder / f"hessians/L{layer:02d}.json", hessians))
    for name, rate in releases.items():
        for layer in range(layers):
            entries = []
            for expert in range(experts):
                for group, matrices in (("gate_up", ("w1", "w3")), ("down", ("w2",))):
                    fallback = layer == layers - 1 and expert == experts - 1
                    noise = 0.26**rate * (1 + layer / layers) * random.uniform(0.9, 1.1)
                    measured = {
                        "proxy_error": None
                        if fallback
                        else (0.2 + 0.3 * (group == "down")) * noise,
                        "output_error_energy": None if fallback else 900 * noise,
                        "output_energy": None if fallback else 1000.0,
                        "relative_frobenius": np.sqrt(1.6 * 0.26**rate),
                        "g_scale": 1.0,
                        "stored_bits": weights["w1"] * rate + 6200,
                        "weights": weights["w1"],
                    }
                    entries.append(
                        {
                            "layer": layer,
                            "expert": expert,
                            "group": group,
                            "rate": rate,
                            "key": f"{layer}-{expert}-{group}-{rate}",
                            "tokens": int(routed[layer, expert]),
                            "fallback": "fewer than 16 tokens" if fallback else None,
                            "notes": ["w2: damping raised 2 times"] if expert == 3 else [],
                            "matrices": dict.fromkeys(matrices, measured),
                        }
                    )
            ledger = {"layer": layer, "block": 0, "entries": entries}
            files["ledgers"].append(write(folder / f"ledgers/{rate}.L{layer:02d}.json", ledger))
        slots = [
            {"layer": layer, "group": group, "rate": rate}
            for layer in range(layers)
            for group in ("gate_up", "down")
        ]
        plan = {
            "recipe": name,
            "method": "uniform",
            "layout": "cuda-exl3",
            "slots": slots,
            "average_rate": float(rate),
            "stored_bits_per_weight": rate + 0.19,
            "stored_bytes": int(layers * experts * 98304 * (rate + 0.19) / 8),
            "predicted": None,
            "hash": f"{rate:064x}",
        }
        receipt = {
            "plan": plan["hash"],
            "tensors": 500,
            "tensor_bytes": 9_400_000 + 590_000 * rate,
            "dropped": {"tensors": 6 * layers * experts, "bytes": 5_000_000},
            "kept": {"tensors": 20 * layers},
            "added": {"tensors": 12 * layers * experts},
        }
        files["plans"].append(write(folder / f"plan/{rate}.json", plan))
        files["receipts"].append(write(folder / f"receipts/{rate}.json", receipt))
        verdict = folder / f"verdicts/{rate}"
        write(verdict, {"recipe": name, "verdict": None, "lines": []})
        files["verdicts"].append(verdict)
        for panel in ("code", "prose"):
            table = folder / f"scores/{rate}.{panel}.parquet"
            scores = score_table(random, rate, windows, length)
            write_table(table, scores, release=name, panel=panel)
            files["scores"].append(table)
            comparison = folder / f"comparisons/{rate}.{panel}.json"
            compare_files(table, comparison, seed=0, draws=200)
            files["comparisons"].append(comparison)
    for panel in ("code", "prose"):
        table, floor = (folder / f"{kind}/floor.{panel}" for kind in ("scores", "floors"))
        write_table(table, score_table(random, 9, windows, length), release="floor", panel=panel)
        compare_files(table, floor, seed=0, draws=200)
        files["floors"].append(floor)
    record = {
        "rule": "encode",
        "code": "c0ffee",
        "versions": {"python": "3.11.7", "torch": "2.13.0"},
    }
    files["records"].append(write(folder / "records/encode.json", record))
    return {
        "run": "made up <for a test>",
        "templates": TEMPLATES,
        "few_tokens": 16,
        "manifest": write(folder / "manifest.json", manifest),
        **files,
    }


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def page(arguments, tmp_path_factory):
    return write_report(tmp_path_factory.mktemp("report"), **arguments).read_text()


class Outline(HTMLParser):
    """Checks that every element is closed in order and collects what tests ask about."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids, self.links, self.text = [], [], [], [], []
        self.labels = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.note(attributes)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.note(attributes)

    def note(self, attributes):
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            elif name in ("href", "src", "srcset", "data", "action", "xlink:href"):
                self.links.append(value)
            elif name == "aria-labelledby":
                self.labels.append(value)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_page_is_well_formed_and_every_reference_is_inside_it(page):
    outline = Outline(page)
    assert outline.open == []
    assert len(outline.ids) == len(set(outline.ids))
    assert outline.links and all(link.startswith("#") for link in outline.links)
    assert {link[1:] for link in outline.links} <= set(outline.ids)
    assert set(outline.labels) <= set(outline.ids)
    assert outline.tags.count("svg") == outline.tags.count("figcaption") == 15


def test_page_fetches_nothing(page):
    assert not re.search(r"@import|<(script|link|iframe|img|object|embed)\b", page)
    addresses = set(re.findall(r"https?://[^\"'\s)]+", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"url\((.)", page)) <= {"#"}


def test_page_shows_every_layer_release_and_panel(page, arguments):
    outline = Outline(page)
    text = " ".join(outline.text)
    for layer in range(6):
        assert f"L{layer:02d}" in outline.ids
    for name in ("k3", HOSTILE, "code", "prose", "window only", "fewer than 16 tokens", "c0ffee"):
        assert name in text
    for path in arguments["comparisons"]:
        comparison = json.loads(path.read_text())
        for quantity in ("kl", "nll_source"):
            assert format_number(comparison["quantities"][quantity]["low"]) in text
    assert "200 bootstrap draws" in text and "seed 0" in text


def test_first_paragraph_says_verdicts_and_what_is_worse_than_uniform(compared, tmp_path):
    assert findings(read(compared)) == []
    judged = write(
        tmp_path / "verdict",
        {
            "recipe": "k3",
            "verdict": "reject",
            "lines": [{"panel": "code", "quantity": "kl", "verdict": "reject"}],
        },
    )
    data = read(compared | {"verdicts": [judged]})
    difference = data.comparisons[-2]["quantities"]["kl_difference"]
    data.releases[1]["plan"]["method"] = "uniform"
    difference |= {"mean": -0.02, "low": -0.03, "high": -0.01}
    verdict, worse = findings(data)
    assert verdict == {"text": "k3: reject (kl on code reject).", "bad": True}
    assert worse["bad"] and "k3 is worse than uniform rates" in worse["text"]
    assert "0.0200 nats/token more KL, beyond chance" in worse["text"]
    difference["high"] = 0.01
    assert not findings(data)[1]["bad"]


def test_noise_floor_stands_in_every_table_of_losses(page, compared, arguments, tmp_path):
    for path in arguments["floors"]:
        low = json.loads(path.read_text())["quantities"]["kl"]["low"]
        assert format_number(low) in " ".join(Outline(page).text)
    assert page.count("Noise floor</th>") == 2
    both = write_report(tmp_path, **compared).read_text()
    assert both.count("Noise floor</th>") == 3
    without = write_report(tmp_path, **arguments | {"floors": []}).read_text()
    assert "oise floor" not in without


@pytest.fixture(scope="module")
def compared(arguments, tmp_path_factory):
    """The run with its second release planned otherwise and held against the first."""
    folder = tmp_path_factory.mktemp("compared")
    plans = [json.loads(path.read_text()) for path in arguments["plans"]]
    size = plans[1]["stored_bytes"]
    plans[1] |= {
        "method": "exact",
        "layout": "bank-plan",
        "slots": [
            {"layer": layer, "expert": expert, "rate": "native" if layer == expert else 2}
            for layer in range(6)
            for expert in range(16)
        ],
        "predicted": {
            "loss": 0.02,
            "curve": [
                {"stored_bytes": size, "cost": 0.02},
                {"stored_bytes": 2 * size, "cost": 0.0},
            ],
        },
    }
    table, names = read_table(next(p for p in arguments["scores"] if "code" in p.name))
    paths = [folder / "worse.parquet", folder / "base.parquet"]
    for path, release, factor in zip(paths, (HOSTILE, "k3"), (1.5, 1), strict=True):
        worse = table.assign(kl=factor * table["kl"])
        write_table(path, worse, release=release, panel=names["panel"])
    for path in paths:
        compare_files(path, path.with_suffix(".json"), seed=0, draws=200, baseline_path=paths[1])
    return arguments | {
        "plans": [write(folder / f"{i}.json", plan) for i, plan in enumerate(plans)],
        "comparisons": [*arguments["comparisons"], *(p.with_suffix(".json") for p in paths)],
    }


def test_releases_against_each_other_state_payload_and_whether_they_differ(compared, tmp_path):
    equal, worse = contests(read(compared))
    assert (equal["release"], worse["release"]) == ("k3", HOSTILE)
    assert (equal["inside"], worse["inside"]) == (True, False)
    assert (worse["method"], worse["payload"], worse["baseline_payload"]) == ("exact", 2.0, 3.0)
    outline = Outline(write_report(tmp_path, **compared).read_text())
    text = " ".join(outline.text)
    assert "yes: no difference shown" in text
    assert format_number(worse["quantities"]["kl_difference"]["low"], sign=True) in text
    # A figure for each layout and panel, with one line a method, in place of that of all releases.
    for panel in ("code", "prose"):
        for layout in ("cuda-exl3", "bank-plan"):
            assert f"kl-by-method-{layout}-{panel}" in outline.ids
    assert "kl-by-bits" not in outline.ids


def test_plans_show_what_was_predicted_and_the_rates_of_experts(compared, page, tmp_path):
    text = write_report(tmp_path, **compared).read_text()
    outline = Outline(text)
    assert "predicted-loss-exact-bank-plan" in outline.ids and "#plans" in outline.links
    rates = next(f for f in re.findall(r"<figure.*?</figure>", text, re.S) if "expert-rates" in f)
    assert "K=2<" in rates and "native<" in rates
    assert outline.open == [] and len(outline.ids) == len(set(outline.ids))
    # A run of uniform releases has no such section.
    assert "#plans" not in Outline(page).links


def test_figures_of_single_releases_stop_at_six_and_say_so():
    table = score_table(np.random.default_rng(0), 3, 4, 16)
    for count, said in ((6, False), (7, True)):
        figure = kl_by_position({f"r{i}": table for i in range(count)}, "code")
        assert ("The first 6 releases" in figure.caption) == said
        assert "r5<" in figure.svg and "r6<" not in figure.svg


def test_names_are_escaped_in_text_and_figures(page):
    assert "<script" not in page
    assert "made up &lt;for a test&gt;" in page
    # In the legends too, where matplotlib would read dollar signs as mathematics.
    assert page.count("$x^$") > 5


def test_same_files_give_the_same_bytes(page, arguments, tmp_path):
    assert write_report(tmp_path, **arguments).read_text() == page


def read(arguments):
    return gather(
        **{k: v for k, v in arguments.items() if k not in ("run", "templates", "few_tokens")}
    )


def test_worries_are_counted(arguments):
    found = {item["title"].split(" (")[0]: item for item in worries(read(arguments), 16)}
    fallbacks = found["Expert groups encoded without their Hessian"]
    # One expert, both groups, at both rates.
    assert (fallbacks["count"], fallbacks["bad"]) == (4, True)
    assert fallbacks["of"] == f"{6 * 16 * 2 * 2} encoded"
    assert fallbacks["detail"] == "fewer than 16 tokens: 4"
    few = found["Experts with fewer than 16 calibration tokens"]
    assert (few["count"], few["detail"]) == (1, "L05: 15")
    noted = found["Expert groups with a note of the encoder"]
    assert (noted["count"], noted["detail"]) == (24, "w2: damping raised n times: 24")
    deficient = found["Rank-deficient Hessians"]
    assert (deficient["count"], deficient["detail"]) == (12, "down: 6; gate_up: 6")
    assert found["Scored tokens with a value that is not finite"]["count"] == 0


def test_hessians_that_are_not_finite_are_counted(arguments, tmp_path):
    lines = [
        {"group": "gate_up", "dropped": 3, "rank_deficiency": 0},
        {"group": "down", "dropped": 0, "rank_deficiency": None},
        {"group": "down", "dropped": 0, "rank_deficiency": 0},
    ]
    path = write(tmp_path / "L00.json", {"layer": 0, "experts": lines})
    found = worries(read(arguments | {"hessians": [path]}), 16)
    broken = next(item for item in found if item["title"].startswith("Hessians that are not"))
    assert (broken["count"], broken["of"], broken["bad"]) == (2, "3", True)


def test_values_that_are_not_finite_reach_the_page(arguments, tmp_path):
    random = np.random.default_rng(2)
    table = score_table(random, 3, 8, 64)
    table.loc[7, ["kl", "nll_release"]] = np.nan
    write_table(tmp_path / "bad.parquet", table, release="k3", panel="code")
    compare_files(tmp_path / "bad.parquet", tmp_path / "bad.json", seed=0, draws=200)
    changed = arguments | {
        "scores": [tmp_path / "bad.parquet"],
        "comparisons": [tmp_path / "bad.json"],
    }
    text = write_report(tmp_path, **changed).read_text()
    assert "k3 on code: 1" in text
    assert "<b>\u2013</b>" in text


def test_errors_are_summed_by_energy_and_without_fallbacks(arguments):
    matrices = read(arguments).matrices
    table = error_by_layer(matrices).set_index(["layer", "group", "rate"])
    line = table.loc[(5, "gate_up", 3)]
    part = matrices[(matrices.layer == 5) & (matrices.group == "gate_up") & (matrices.rate == 3)]
    measured = part[part.expert != 15]
    assert line["relative_output_error"] == pytest.approx(
        np.sqrt(measured.output_error_energy.sum() / measured.output_energy.sum())
    )
    assert (line["fallbacks"], line["experts"], line["fewest_tokens"]) == (1, 16, 4)
    assert line["proxy_w1"] == pytest.approx(
        measured.loc[measured.matrix == "w1", "proxy_error"].mean()
    )


def test_splits_of_the_calibration_are_added_up(arguments):
    layers = read(arguments).layers
    statistics = [
        json.loads(path.read_text()) for path in arguments["captures"] if "L02" in path.name
    ]
    routed = np.sum([item["expert_tokens"] for item in statistics], axis=0)
    share = routed / routed.sum()
    assert layers.loc[2, "routed"].tolist() == routed.tolist()
    assert layers.loc[2, "tokens"] == 16384
    assert layers.loc[2, "effective"] == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert layers.loc[2, "gain"] == pytest.approx(
        np.linalg.norm(np.mean([item["post_mean"] for item in statistics], axis=0)) / np.sqrt(0.25)
    )


def test_what_is_missing_is_named(arguments, tmp_path):
    with pytest.raises(ReportError, match="No release was made from a plan"):
        write_report(tmp_path, **(arguments | {"receipts": arguments["receipts"][:1]}))
    bad = write(tmp_path / "bad.stats.json", {"layer": 0})
    with pytest.raises(ReportError, match="(?s)lacks a key.*bad.stats.json.*tokens"):
        write_report(tmp_path, **(arguments | {"captures": [bad]}))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (7_206_912_000, "7.21 GB"), (510_286_023_000, "510 GB")],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.07421, "0.0742"),
        (-0.00571, "\u22120.00571"),
        (12345.6, "12,346"),
        (3e-9, "3.00e\u22129"),
        (None, "\u2013"),
        (float("nan"), "\u2013"),
    ],
)
def test_numbers(value, text):
    assert format_number(value) == text


def test_rates_of_single_experts_are_shown_as_the_mean_of_their_layer():
    slots = [{"layer": 0, "expert": expert, "rate": rate} for expert, rate in enumerate([2, 3, 3])]
    slots += [{"layer": 1, "expert": 0, "rate": "native"}, {"layer": 1, "expert": 1, "rate": 5}]
    rates = layer_rates({"slots": slots})
    assert rates[0, "gate_up"] == rates[0, "down"] == 2.67
    assert rates[1, "down"] == 4.62
