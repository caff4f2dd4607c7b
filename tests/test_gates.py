# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellisbank.errors import GateError
from trellisbank.evaluate.gates import check_reference, enforce, joined, judge, verdict
from trellisbank.safetensors_io import write_tensors

ENDS = st.floats(-1, 1)


@given(st.sampled_from(["kl", "nll_difference", "top1_agreement"]), ENDS, ENDS, ENDS)
def test_a_verdict_is_what_all_of_the_interval_says(quantity, limit, one, other):
    low, high = sorted((one, other))
    good = [x <= limit if quantity != "top1_agreement" else x >= limit for x in (low, high)]
    expected = "accept" if all(good) else "undecided" if any(good) else "reject"
    assert verdict(quantity, limit, low, high) == expected


def test_what_is_not_finite_is_rejected():
    assert verdict("kl", 1.0, None, 0.5) == verdict("top1_agreement", 0.1, 0.5, None) == "reject"


def test_the_worst_verdict_stands_for_all():
    assert joined(["accept", "undecided", "accept"]) == "undecided"
    assert joined(["undecided", "reject", "accept"]) == "reject"
    assert joined(["accept"]) == "accept"


def comparison(path, panel, kl, agreement):
    def quantity(ends, unit):
        return {"unit": unit, "mean": sum(ends) / 2, "low": ends[0], "high": ends[1]}

    found = {"kl": quantity(kl, "nats/token"), "top1_agreement": quantity(agreement, "share")}
    path.write_text(json.dumps({"panel": panel, "quantities": found}))
    return path


@pytest.fixture
def comparisons(tmp_path):
    return [
        comparison(tmp_path / "code", "code", (0.03, 0.04), (0.88, 0.9)),
        comparison(tmp_path / "prose", "prose", (0.04, 0.06), (0.84, 0.86)),
    ]


@pytest.mark.parametrize(
    ("gates", "expected"),
    [
        ({"strict": True}, None),
        ({"kl": 0.07, "top1_agreement": 0.8, "strict": False}, "accept"),
        ({"kl": 0.05}, "undecided"),
        ({"kl": 0.05, "top1_agreement": 0.87}, "reject"),
    ],
)
def test_every_panel_and_limit_counts(comparisons, tmp_path, gates, expected):
    out = tmp_path / "verdict.json"
    judge(recipe="K3", comparisons=comparisons, gates=gates, path=out)
    found = json.loads(out.read_text())
    assert (found["recipe"], found["verdict"]) == ("K3", expected)
    assert len(found["lines"]) == 2 * len(set(gates) - {"strict"})
    if expected in (None, "accept"):
        enforce([out], tmp_path / "passed.json")
        assert json.loads((tmp_path / "passed.json").read_text()) == {"K3": expected}
    else:
        with pytest.raises(GateError, match=r"(?s)K3.*panel prose"):
            enforce([out], tmp_path / "passed.json")
        assert not (tmp_path / "passed.json").exists()


@pytest.mark.parametrize(("nll", "good"), [(3.2, True), (2.9, False), (float("nan"), False)])
def test_a_source_that_is_not_believed_stops(tmp_path, nll, good):
    write_tensors(tmp_path / "hidden.safetensors", {"nll": torch.full((2, 3), nll)})
    arguments = {"hidden": tmp_path / "hidden.safetensors", "panel": "code", "nll": (3.1, 3.3)}
    if good:
        check_reference(**arguments, path=tmp_path / "receipt.json")
        receipt = json.loads((tmp_path / "receipt.json").read_text())
        assert receipt["nll"] == pytest.approx(3.2)
    else:
        with pytest.raises(GateError, match=r"(?s)source_nll.*3.1 to 3.3"):
            check_reference(**arguments, path=tmp_path / "receipt.json")
        assert not (tmp_path / "receipt.json").exists()
