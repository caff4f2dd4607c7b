# SPDX-License-Identifier: Apache-2.0
"""What two releases differ in, and patches between them."""

import json
import shutil

import pytest

from synthetic import make_checkpoint, snapshot
from test_bank_plan import make_run
from trellisbank.cli import main
from trellisbank.errors import ReleaseError
from trellisbank.files import read_json, write_json
from trellisbank.plan.layouts import NATIVE
from trellisbank.release.diff import apply_patch, diff_releases, write_patch

RELEASES = {
    "base": ("cuda-exl3", [2, 2, 3, 3]),
    "down": ("cuda-exl3", [2, 2, 3, 4]),
    "mixed": ("bank-plan", [3, 2, 3, NATIVE, 3, 5]),
    "other": ("bank-plan", [3, 3, 3, NATIVE, 3, 5]),
}


@pytest.fixture(scope="module")
def releases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("releases")
    make_checkpoint(folder / "source")
    return {name: make_run(folder, *made).release for name, made in RELEASES.items()}


def test_changed_experts_are_named_with_their_rates(releases):
    diff = diff_releases(releases["base"], releases["down"])
    assert diff["experts"] == [
        {
            "layer": 1,
            "expert": expert,
            "before": {"gate_up": "K3", "down": "K3"},
            "after": {"gate_up": "K3", "down": "K4"},
        }
        for expert in range(3)
    ]
    how = {line["file"]: line["how"] for line in diff["files"]}
    shard = "model-00003-of-00005.safetensors"
    told = {"config.json", "quantization_config.json", "repack-report.json"}
    told.add("model.safetensors.index.json")  # it states the bytes of all tensors
    assert {name for name in how if how[name] != "kept"} == {shard, *told}
    # Only the changed matrices of the shard travel: down projections, not what stands beside them.
    line = next(line for line in diff["files"] if line["file"] == shard)
    assert len(line["tensors"]) == 3 * 3 and all(".w2." in name for name in line["tensors"])
    assert diff["bytes_to_ship"] < sum(line["bytes"] for line in diff["files"]) / 2
    single = diff_releases(releases["mixed"], releases["other"])["experts"]
    assert [(item["layer"], item["expert"]) for item in single] == [(0, 1)]


@pytest.mark.parametrize(
    ("a", "b"), [("base", "down"), ("mixed", "other"), ("other", "base"), ("base", "mixed")]
)
def test_a_patch_makes_b_of_a(releases, tmp_path, a, b):
    before = snapshot(releases[a])
    diff = write_patch(releases[a], releases[b], tmp_path / "patch")
    apply_patch(releases[a], tmp_path / "patch", tmp_path / "made")
    assert snapshot(tmp_path / "made") == snapshot(releases[b])
    assert snapshot(releases[a]) == before
    shipped = sum(path.stat().st_size for path in (tmp_path / "patch").rglob("*") if path.is_file())
    # Beside what is counted: the description, and the headers of the tensor files.
    assert diff["bytes_to_ship"] <= shipped <= diff["bytes_to_ship"] + 100_000


def test_equal_releases_ship_nothing(releases):
    diff = diff_releases(releases["base"], releases["base"])
    assert diff["bytes_to_ship"] == 0 and diff["experts"] == [] and diff["removed"] == []


def test_patches_that_do_not_fit_are_refused(releases, tmp_path):
    patch = tmp_path / "patch"
    write_patch(releases["base"], releases["down"], patch)
    with pytest.raises(ReleaseError, match="not that of the release"):
        apply_patch(releases["mixed"], patch, tmp_path / "made")
    with pytest.raises(ReleaseError, match="holds something"):
        apply_patch(releases["base"], patch, patch)
    shard = patch / "tensors/model-00003-of-00005.safetensors"
    damaged = shutil.copytree(patch, tmp_path / "damaged")
    words = bytearray(shard.read_bytes())
    words[-1] ^= 1
    (damaged / shard.relative_to(patch)).write_bytes(words)
    with pytest.raises(ReleaseError, match="came out other"):
        apply_patch(releases["base"], damaged, tmp_path / "made")
    assert not (tmp_path / "made" / shard.name).exists()
    told = read_json(patch / "patch.json")
    told["files"][0]["file"] = "../outside"
    write_json(patch / "patch.json", told)
    with pytest.raises(ReleaseError, match="outside the release"):
        apply_patch(releases["base"], patch, tmp_path / "other")
    with pytest.raises(ReleaseError, match="no release"):
        diff_releases(tmp_path / "nowhere", releases["base"])


def test_commands(releases, tmp_path, capsys):
    a, b, patch = str(releases["mixed"]), str(releases["other"]), str(tmp_path / "patch")
    assert main(["release-diff", a, b, "--patch", patch]) == 0
    assert "L00 E001: gate_up K2 down K2 -> gate_up K3 down K3" in capsys.readouterr().out
    assert main(["release-diff", a, b, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["experts"]) == 1
    assert main(["release-patch", a, patch, str(tmp_path / "made")]) == 0
    assert snapshot(tmp_path / "made") == snapshot(releases["other"])
    assert main(["release-pack", a, str(tmp_path / "packed"), "--part-bytes", "20000"]) == 0
    assert (tmp_path / "packed/reassemble.sh").exists()
