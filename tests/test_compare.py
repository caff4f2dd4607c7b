# SPDX-License-Identifier: Apache-2.0
import shutil

import pytest
import torch

from cut import cut_checkpoint
from trellisbank.checkpoint import expert_stem, open_checkpoint
from trellisbank.files import read_json
from trellisbank.quantize.compare import compare_encodings, probe_grid
from trellisbank.safetensors_io import read_file, write_tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return cut_checkpoint(tmp_path_factory.mktemp("source") / "checkpoint", layers=2, experts=4)


@pytest.fixture(scope="module")
def capture(tmp_path_factory):
    torch.manual_seed(0)
    tensors = {
        "ffn_input": torch.randn(2, 30, 256).bfloat16(),
        "route_indices": torch.rand(2, 30, 4).argsort(dim=2)[..., :3],
        "route_weights": torch.rand(2, 30, 3),
    }
    path = tmp_path_factory.mktemp("capture") / "capture.safetensors"
    write_tensors(path, tensors, {"layer": "0"})
    return path, tensors


def damaged(source, target, experts, name):
    """A copy in which matrix `name` of some experts of layer 0 has other codes."""
    shutil.copytree(source, target)
    opened = open_checkpoint(target)
    shard = opened.shard_of(f"{expert_stem(0, 0, name)}.weight")
    tensors = read_file(target / shard)
    for expert in experts:
        tensors[f"{expert_stem(0, expert, name)}.weight"] ^= 0x11
    write_tensors(target / shard, tensors)
    return target


def test_errors_are_those_of_the_definition(source, capture, tmp_path):
    path, tensors = capture
    broken = damaged(source, tmp_path / "broken", [1, 2], "w3")
    found = compare_encodings(
        source=source, first=source, second=broken, layer=0, captures=[path, path]
    )
    x = tensors["ffn_input"].flatten(0, 1).double()
    whole = error = weighted_whole = weighted_error = 0.0
    true, coded = open_checkpoint(source), open_checkpoint(broken)
    for expert in range(4):
        mine = tensors["route_indices"].flatten(0, 1) == expert
        route = (tensors["route_weights"].flatten(0, 1) * mine).sum(1).double()
        rows, route = x[mine.any(1)], route[mine.any(1), None]
        for name in ("w1", "w3"):
            weight = true.weight(expert_stem(0, expert, name)).double()
            wrong = weight - coded.weight(expert_stem(0, expert, name)).double()
            whole += (rows @ weight.T).square().sum()
            error += (rows @ wrong.T).square().sum()
            weighted_whole += (route * (rows @ weight.T)).square().sum()
            weighted_error += (route * (rows @ wrong.T)).square().sum()
    gate_up = found["groups"]["gate_up"]
    expected = pytest.approx([0, float(error / whole) ** 0.5], rel=1e-5)
    assert gate_up["unweighted"]["relative_output_error"] == expected
    expected = pytest.approx([0, float(weighted_error / weighted_whole) ** 0.5], rel=1e-5)
    assert gate_up["route_weighted"]["relative_output_error"] == expected
    assert gate_up["unweighted"]["experts_better"] == [2, 0]
    assert found["groups"]["down"]["unweighted"]["relative_output_error"] == [0, 0]
    assert found["rows"] == 2 * 60


def test_rows_that_are_not_finite_are_left_out_and_counted(source, capture, tmp_path):
    _, tensors = capture
    paths = []
    for value in (float("nan"), 0.0):  # rows of zeros add nothing
        inputs = tensors["ffn_input"].clone()
        inputs[1, 7] = value
        paths.append(tmp_path / f"{value}.safetensors")
        write_tensors(paths[-1], tensors | {"ffn_input": inputs}, {"layer": "0"})
    broken = damaged(source, tmp_path / "broken", [1], "w1")
    found, expected = (
        compare_encodings(source=source, first=source, second=broken, layer=0, captures=[path])
        for path in paths
    )
    for metric, figures in found["groups"]["gate_up"].items():
        errors = expected["groups"]["gate_up"][metric]["relative_output_error"]
        assert figures["relative_output_error"] == pytest.approx(errors, rel=1e-9)
        assert figures["experts_better"] == [1, 0]
    assert found["groups"]["down"]["unweighted"]["experts_better"] == [0, 0]
    assert found["dropped"] == {"gate_up": 3, "down": 3}
    assert expected["dropped"] == {"gate_up": 0, "down": 0}


def test_probe_has_a_control_of_the_same_rows(source, tmp_path):
    probe_grid(source=source, layers=[0], rates=[2], path=tmp_path / "probe.json", threads=2)
    probe = read_json(tmp_path / "probe.json")
    assert [(line["matrix"], line["rate"]) for line in probe["lines"]] == [("w1", 2), ("w2", 2)]
    assert 0.9 < probe["mean_ratio"]["2"] < 1.1
