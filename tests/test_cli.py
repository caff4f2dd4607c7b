# SPDX-License-Identifier: Apache-2.0
import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from cut import cut_checkpoint
from trellisbank.cli import main
from trellisbank.safetensors_io import read_file, write_tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return cut_checkpoint(tmp_path_factory.mktemp("cli") / "checkpoint")


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    generator = torch.Generator().manual_seed(0)
    write_tensors(path, {"input_ids": torch.randint(3, 2000, (2, 40), generator=generator)})
    return path


def run(capsys, *words):
    code = main([str(word) for word in words])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_help_of_every_command():
    listing = subprocess.run(
        [sys.executable, "-m", "trellisbank.cli", "--help"], capture_output=True, text=True
    )
    assert listing.returncode == 0
    releases = ("release-diff", "release-patch", "release-pack")
    for command in ("inspect", "forward", "encode", "decode", "score", "plan", *releases):
        assert command in listing.stdout
        with pytest.raises(SystemExit) as stopped:
            main([command, "--help"])
        assert stopped.value.code == 0


@pytest.mark.parametrize(
    "words", [[], ["encode", "a", "b"], ["forward", "a", "b", "c", "--layers", "x-y"], ["bake"]]
)
def test_wrong_usage_is_2(words, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2


def test_unusable_input_is_1_with_one_message(capsys, tmp_path):
    for words in (
        ["inspect", tmp_path],
        ["decode", tmp_path / "none.safetensors", tmp_path / "out"],
        ["encode", tmp_path / "none.safetensors", tmp_path / "out", "--rate", "3"],
    ):
        code, out, err = run(capsys, *words)
        assert code == 1 and not out
        assert "CheckpointError" in err and "fix:" in err and "Traceback" not in err


def test_inspect(capsys, checkpoint):
    code, out, _ = run(capsys, "inspect", checkpoint)
    assert code == 0 and "2 layers x 4 routed experts" in out and "L01 full, Engram" in out
    code, out, _ = run(capsys, "inspect", checkpoint, "--json")
    assert code == 0 and json.loads(out)["routed_experts"] == 4


def test_forward_in_two_steps_equals_one(capsys, checkpoint, rows, tmp_path):
    assert run(capsys, "forward", checkpoint, rows, tmp_path / "one")[0] == 0
    two = tmp_path / "two"
    code, _, err = run(capsys, "forward", checkpoint, rows, two, "--layers", "0")
    assert code == 0 and "layer 0" in err
    state = two / "L00.state.safetensors"
    assert run(capsys, "forward", checkpoint, rows, two, "--from", state)[0] == 0
    names = {"L00.state.safetensors", "L01.state.safetensors", "final.safetensors"}
    assert {path.name for path in two.iterdir()} == names
    for name in names:
        assert (two / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    final = read_file(two / "final.safetensors")
    assert final["final_hidden"].shape == (2, 40, 256) and final["nll"].shape == (2, 39)


def test_encode_and_decode(capsys, tmp_path):
    torch.manual_seed(0)
    weight, inputs = torch.randn(128, 128), torch.randn(512, 128)
    write_tensors(
        tmp_path / "in.safetensors",
        {"W": weight.bfloat16(), "H": inputs.T @ inputs, "count": torch.tensor(512)},
    )
    encoded, decoded = tmp_path / "encoded.safetensors", tmp_path / "decoded.safetensors"
    words = ["encode", tmp_path / "in.safetensors", encoded, "--rate", 4]
    code, out, _ = run(capsys, *words, "--name", "some.matrix")
    told = json.loads(out)
    assert code == 0 and told.keys() == {
        "proxy_error", "relative_frobenius", "g_scale", "fallback", "notes", "seconds"
    }  # fmt: skip
    assert run(capsys, "decode", encoded, decoded)[0] == 0
    tensors = read_file(decoded)
    assert tensors["inner"].dtype == torch.float16 and tensors["weight"].dtype == torch.float32
    original = weight.bfloat16().float()
    error = (tensors["weight"] - original).norm() / original.norm()
    assert float(error) == pytest.approx(told["relative_frobenius"], rel=1e-3)
    # Another name draws other signs; taking over the signs gives the first bytes again.
    other = tmp_path / "other.safetensors"
    run(capsys, *words[:2], other, *words[3:], "--name", "another")
    assert encoded.read_bytes() != other.read_bytes()
    run(capsys, *words[:2], other, *words[3:], "--name", "another", "--signs", encoded)
    assert encoded.read_bytes() == other.read_bytes()


def test_score_of_a_checkpoint_against_itself_is_exactly_zero(capsys, checkpoint, rows, tmp_path):
    code, out, _ = run(capsys, "score", checkpoint, checkpoint, rows, tmp_path / "out")
    assert code == 0 and json.loads(out)
    table = pd.read_parquet(tmp_path / "out/scores.parquet")
    assert len(table) == 2 * 39
    assert (table["kl"] == 0).all() and (table["nll_source"] == table["nll_release"]).all()
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"scores.parquet", "summary.json"}


TABLE = Path(__file__).parent / "data/published/ledger_per_layer.csv"


def test_plan_from_the_published_table(capsys):
    words = ["plan", TABLE, "--method", "gain", "--target-bpw", "3.5"]
    code, out, _ = run(capsys, *words, "--margin", 4, "--json")
    found = json.loads(out)
    assert code == 0
    raised = [name for name, rate in found["rates"].items() if rate == 4]
    assert len([name for name in raised if "gate_up" in name]) == 19
    assert len([name for name in raised if "down" in name]) == 22
    # Four steps up and four down for each group, as the published lists had.
    assert len(found["margin"]) == 16
    code, out, _ = run(capsys, *words)
    assert code == 0 and "3.5000 bits of payload, 3.5101 stored bits a weight" in out
    code, out, _ = run(capsys, "plan", TABLE, "--curve")
    assert code == 0 and len(out.splitlines()) == 82
    code, out, _ = run(capsys, "plan", TABLE, "--loss", found["loss"], "--json")
    assert code == 0 and json.loads(out)["stored_bytes"] == found["stored_bytes"]
    size = ["--rank-gib", 62.8, "--tensor-parallel", 4, "--other-bytes", 2**33]
    code, out, _ = run(capsys, "plan", TABLE, *size, "--json")
    assert code == 0 and json.loads(out)["stored_bytes"] <= 4 * (62.8 * 2**30 - 2**33)


@pytest.mark.parametrize(
    "words",
    [["--bytes", "1000"], ["--target-bpw", "3", "--rates", "3"], ["--loss", "0"]],
    ids=["too small", "rates of a table", "no such plan"],
)
def test_plans_that_cannot_be_made(capsys, words):
    code, out, err = run(capsys, "plan", TABLE, *words)
    assert code == 1 and not out
    assert "PlanError" in err and "fix:" in err
