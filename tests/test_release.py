# SPDX-License-Identifier: Apache-2.0
"""Releases: what is kept, dropped and added, what describes them, and what verification finds."""

import json
import os
import shutil
import struct
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open

from synthetic import (
    EXPERTS,
    LAYERS,
    SIZE,
    encoded_group,
    fill_bank,
    make_checkpoint,
    sha256,
    snapshot,
    write_ledger,
)
from trellisbank import files, safetensors_io
from trellisbank.bank import Bank
from trellisbank.checkpoint import companions, open_checkpoint
from trellisbank.errors import CheckpointError, FormatError, ReleaseError
from trellisbank.files import read_json, write_json
from trellisbank.plan.freeze import freeze, planned_entries
from trellisbank.plan.layouts import Wanted, cuda_exl3_slots, wanted_entries
from trellisbank.plan.solve import uniform
from trellisbank.release.finish import finish_release
from trellisbank.release.splice import splice_shard
from trellisbank.release.verify import refuse_findings, verify_release
from trellisbank.safetensors_io import read_header, read_tensor, write_tensors

BODY = [f"model-{number:05d}-of-00005.safetensors" for number in (2, 3)]
LINKED = [f"model-{number:05d}-of-00005.safetensors" for number in (1, 4, 5)]
CALIBRATION = {"rows": 4, "cols": 32}


def make_run(root):
    """Source, bank, ledgers and plan (gate_up and down of the layers at different rates)."""
    source = make_checkpoint(root / "source")
    bank = Bank(root / "bank")
    slots = cuda_exl3_slots(range(LAYERS), EXPERTS, SIZE, SIZE)
    rates = uniform(slots, 2.5, seed=1)
    assert len(set(rates.values())) == 2
    ledgers = [
        write_ledger(root / f"run/L{layer:02d}.B00.json", fill_bank(bank, items, source))
        for layer, items in wanted_entries(rates, EXPERTS).items()
    ]
    plan = freeze(
        recipe="r",
        method="uniform",
        layout="cuda-exl3",
        budget={"average_rate": 2.5},
        rates=rates,
        experts=EXPERTS,
        ledgers=ledgers,
        root=root / "run",
    )
    entries = planned_entries(plan, EXPERTS, ledgers, root / "run")
    keys = {place: entry["key"] for place, entry in entries.items()}
    return SimpleNamespace(source=source, bank=bank, plan=plan, entries=entries, keys=keys)


def splice(run, shard, out):
    digest = sha256(run.source.path / shard)
    return splice_shard(run.source, shard, run.plan, run.bank, run.keys, out, digest)


def build(run, out):
    receipts = [splice(run, shard, out) for shard in run.source.shards]
    return receipts, finish_release(run.source, run.plan, receipts, out, calibration=CALIBRATION)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a finished release; tests leave it as it is."""
    run = make_run(tmp_path_factory.mktemp("run"))
    stamps = {path: os.stat(path).st_mtime_ns for path in run.source.path.rglob("*")}
    before = snapshot(run.source.path)
    run.release = run.source.path.parent / "release"
    run.receipts, run.report = build(run, run.release)
    assert snapshot(run.source.path) == before
    assert {path: os.stat(path).st_mtime_ns for path in run.source.path.rglob("*")} == stamps
    return run


@pytest.fixture
def copy(run, tmp_path):
    """A copy of the release that a test may damage, shared shards still shared."""
    for shard in LINKED:
        files.link_or_copy(run.source.path / shard, tmp_path / "release" / shard)
    for path in run.release.rglob("*"):
        target = tmp_path / "release" / path.relative_to(run.release)
        if path.is_file() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    return tmp_path / "release"


def findings(run, release):
    receipt = verify_release(run.source, release, run.plan, run.entries)
    return {item["what"]: item["first"] for item in receipt["findings"]}


def test_a_release_verifies(run):
    receipt = verify_release(run.source, run.release, run.plan, run.entries)
    refuse_findings(receipt, run.release)
    kept = len(run.source.names) - LAYERS * EXPERTS * 6
    assert receipt["kept"]["inode"] + receipt["kept"]["bytes"] == kept
    assert receipt["kept"]["bytes"] == LAYERS * 6
    assert receipt["encoded"] == {"matrices": LAYERS * EXPERTS * 3}
    assert len(receipt["samples"]) == LAYERS * 3
    json.dumps(receipt, allow_nan=False)


def test_untouched_shards_are_hard_links_and_body_shards_are_not(run):
    for shard in LINKED:
        assert os.path.samefile(run.source.path / shard, run.release / shard)
    for shard in BODY:
        assert not os.path.samefile(run.source.path / shard, run.release / shard)
        assert read_header(run.release / shard).metadata == {"format": "pt"}


def test_kept_tensors_are_byte_identical_and_hashed_twice(run):
    assert run.report["kept"]["in_changed_shards"].keys() == set(BODY)
    for shard in BODY:
        ours, theirs = read_header(run.release / shard), read_header(run.source.path / shard)
        kept = [name for name in theirs.tensors if "ffn.experts" not in name]
        listed = run.report["kept"]["in_changed_shards"][shard]
        assert [item["tensor"] for item in listed] == kept
        assert all(item["blake3_read"] == item["blake3_written"] for item in listed)
        for name in kept:
            old, new = read_tensor(theirs, name), read_tensor(ours, name)
            assert old.dtype == new.dtype and old.shape == new.shape
            assert torch.equal(old.view(torch.uint8), new.view(torch.uint8))


def test_dropped_tensors_are_counted_exactly_and_drafts_stay_native(run):
    assert run.report["dropped"]["tensors"] == LAYERS * EXPERTS * 6
    assert run.report["added"] == {
        "groups": LAYERS * EXPERTS * 2,
        "tensors": LAYERS * EXPERTS * 3 * 4,
    }
    release = open_checkpoint(run.release)
    gone = set(run.source.names) - set(release.names)
    assert len(gone) == LAYERS * EXPERTS * 6
    assert all(name.startswith("layers.") and ".ffn.experts." in name for name in gone)
    assert release.stored_as("mtp.0.ffn.experts.0.w1") == "mxfp4"
    assert release.stored_as("layers.1.ffn.experts.2.w2") == "exl3"


def test_encoded_tensors_are_those_of_the_bank(run):
    release = open_checkpoint(run.release)
    for (layer, expert, _), key in run.keys.items():
        for name, tensor in run.bank.get(key)[0].items():
            stored = release.tensor(f"layers.{layer}.ffn.experts.{expert}.{name}")
            assert torch.equal(stored, tensor)


def test_the_safetensors_library_reads_every_tensor_at_an_aligned_offset(run):
    for shard in BODY:
        header = read_header(run.release / shard)
        with safe_open(run.release / shard, "pt") as handle:
            assert set(handle.keys()) == set(header.tensors)
            for name, info in header.tensors.items():
                assert info.offset % handle.get_tensor(name).dtype.itemsize == 0


def test_every_tensor_is_in_tensor_storage_under_one_key(run):
    stored = read_json(run.release / "quantization_config.json")
    table = stored.pop("tensor_storage")
    listed = [name for module in table.values() for name in module["stored_tensors"]]
    index = read_json(run.release / "model.safetensors.index.json")
    assert sorted(listed) == sorted(index["weight_map"])
    assert stored == read_json(run.release / "config.json")["quantization_config"]
    assert table["image_start"]["stored_tensors"].keys() == {"image_start"}
    assert set(table["layers.0"]["stored_tensors"]) == {"layers.0.hc_attn_base", "layers.0.odd"}
    assert table["layers.0"].keys() == {"stored_tensors"}
    rate = stored["expert_bits"]["1"]["down"]
    stem = "layers.1.ffn.experts.0.w2"
    assert table[stem] == {
        "stored_tensors": {
            f"{stem}.mul1": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
            f"{stem}.suh": {"shape": [SIZE], "n_bytes": 2 * SIZE, "dtype": "torch.float16"},
            f"{stem}.svh": {"shape": [SIZE], "n_bytes": 2 * SIZE, "dtype": "torch.float16"},
            f"{stem}.trellis": {
                "shape": [SIZE // 16, SIZE // 16, 16 * rate],
                "n_bytes": SIZE * SIZE * rate // 8,
                "dtype": "torch.int16",
            },
        },
        "quant_format": "exl3",
        "bits_per_weight": rate,
        "mul1_multiplier": 2212286765,
    }


def test_configuration_and_companions(run):
    config = read_json(run.release / "config.json")
    quantization = config.pop("quantization_config")
    original = dict(run.source.config)
    assert quantization["original_quantization_config"] == original.pop("quantization_config")
    assert config == original
    assert quantization["quant_method"] == "exl3"
    assert quantization["bits"] == 2.5
    assert quantization["head_bits"] == 16
    assert quantization["calibration"] == CALIBRATION
    own = {"config.json", "model.safetensors.index.json"}
    added = {"quantization_config.json", "repack-report.json"}
    copied = {"tokenizer.json", "LICENSE", "inference/model.py"}
    assert snapshot(run.release).keys() == {*own, *added, *copied, *run.source.shards}
    for name in copied:
        assert (run.release / name).read_bytes() == (run.source.path / name).read_bytes()


def test_two_runs_in_different_folders_give_the_same_bytes_without_paths(run, tmp_path):
    other = make_run(tmp_path / "elsewhere")
    receipts, _ = build(other, tmp_path / "out")
    assert receipts == run.receipts
    assert snapshot(tmp_path / "out") == snapshot(run.release)
    for name in snapshot(run.release):
        if name.endswith(".json"):
            assert str(run.release.parent) not in (run.release / name).read_text()


def test_a_rerun_over_a_partial_release_ends_in_the_same_bytes(run, copy):
    (copy / BODY[0]).write_bytes(b"half a shard of an older plan")
    (copy / "config.json").unlink()
    (copy / "inference" / ".model.py.0123456789abcdef.tmp").write_text("left by a killed writer")
    build(run, copy)
    assert snapshot(copy) == snapshot(run.release)


def test_a_shard_rewritten_over_a_hard_link_leaves_the_source_alone(run, tmp_path):
    before = sha256(run.source.path / BODY[0])
    os.link(run.source.path / BODY[0], tmp_path / BODY[0])
    splice(run, BODY[0], tmp_path)
    assert sha256(run.source.path / BODY[0]) == before
    assert sha256(tmp_path / BODY[0]) == sha256(run.release / BODY[0])


def test_a_kept_tensor_that_reads_back_otherwise_leaves_no_shard(run, tmp_path, monkeypatch):
    def write_badly(path, parts, metadata):
        safetensors_io.write_parts(path, parts, metadata)
        change_bytes(path, "layers.0.attn_norm.weight")

    monkeypatch.setattr("trellisbank.release.splice.write_parts", write_badly)
    with pytest.raises(ReleaseError, match="other bytes than were read"):
        splice(run, BODY[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_across_file_systems_shards_are_copied_and_checked(run, tmp_path, monkeypatch):
    def refuse(source, target):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert splice(run, LINKED[0], tmp_path) in run.receipts
    assert not os.path.samefile(run.source.path / LINKED[0], tmp_path / LINKED[0])
    with pytest.raises(ReleaseError, match="not the shard that was verified"):
        splice_shard(run.source, LINKED[1], run.plan, run.bank, run.keys, tmp_path, "0" * 64)
    assert not (tmp_path / LINKED[1]).exists()


def test_files_that_do_not_belong_are_refused_and_left_alone(run, copy):
    (copy / "model-00009-of-00009.safetensors").write_text("of an older source")
    with pytest.raises(ReleaseError, match="do not belong"):
        finish_release(run.source, run.plan, run.receipts, copy, calibration=CALIBRATION)
    assert (copy / "model-00009-of-00009.safetensors").exists()


def test_links_out_of_the_source_are_refused(tmp_path):
    source = make_checkpoint(tmp_path / "source")
    assert companions(source) == ["LICENSE", "inference/model.py", "tokenizer.json"]
    (source.path / "inside").symlink_to("LICENSE")
    assert "inside" in companions(source)
    secret = tmp_path / "secret"
    secret.write_text("not part of the checkpoint")
    for target in (secret, tmp_path, source.path / "missing"):
        (source.path / "outside").symlink_to(target)
        with pytest.raises(CheckpointError, match="cannot copy"):
            companions(source)
        (source.path / "outside").unlink()


def test_a_download_cache_of_links_is_taken(tmp_path):
    """Every file of a snapshot is a link into the folder of blobs beside the snapshots."""
    plain = make_checkpoint(tmp_path / "plain")
    snapshot = tmp_path / "models/snapshots/0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models/blobs").mkdir()
    for number, path in enumerate(sorted(plain.path.glob("*.*"))):
        path.rename(tmp_path / f"models/blobs/{number}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number}")
    assert companions(open_checkpoint(snapshot)) == ["tokenizer.json"]
    (snapshot / "up").symlink_to("../../../secret")
    with pytest.raises(CheckpointError, match="cannot copy"):
        companions(open_checkpoint(snapshot))


def test_a_missing_or_damaged_bank_file_leaves_no_shard(run, tmp_path):
    bank = Bank(tmp_path / "bank")
    shutil.copytree(run.bank.root, bank.root)
    path = bank.path(run.keys[0, 1, "down"])
    whole = path.read_bytes()
    damaged = SimpleNamespace(**{**vars(run), "bank": bank})
    for data, match in (
        (None, "lacks an encoded expert"),
        (whole[:-1], "damaged"),
        (whole[:-1] + bytes([whole[-1] ^ 1]), "changed since"),
    ):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(FormatError, match=match):
            splice(damaged, BODY[0], tmp_path / "out")
        assert not list((tmp_path / "out").glob("*.safetensors"))


def test_keys_and_plans_that_do_not_fit_the_shard_are_refused(run, tmp_path):
    swapped = dict(run.keys)
    swapped[0, 0, "down"] = run.keys[0, 1, "down"]
    lacking = {place: key for place, key in run.keys.items() if place != (0, 2, "gate_up")}
    for keys, match in ((swapped, "another expert"), (lacking, "No bank key")):
        with pytest.raises(ReleaseError, match=match):
            splice(SimpleNamespace(**{**vars(run), "keys": keys}), BODY[0], tmp_path)
    plan = {**run.plan, "slots": [slot for slot in run.plan["slots"] if slot["layer"] != 0]}
    with pytest.raises(ReleaseError, match="does not cover a layer"):
        splice(SimpleNamespace(**{**vars(run), "plan": plan}), BODY[0], tmp_path)


def test_an_encoded_matrix_of_another_size_is_refused(run, tmp_path):
    place = (0, 0, "down")
    rate = run.entries[place]["rate"]
    key, tensors, entry = encoded_group(Wanted(0, 0, "down", rate), k=256, seed=1)
    bank = Bank(tmp_path / "bank")
    shutil.copytree(run.bank.root, bank.root)
    bank.put(key, tensors, entry)
    other = SimpleNamespace(**{**vars(run), "bank": bank, "keys": {**run.keys, place: key}})
    with pytest.raises(ReleaseError, match="another shape"):
        splice(other, BODY[0], tmp_path / "out")


def test_a_plan_that_names_an_unknown_layer_is_refused(run, copy):
    slots = [*run.plan["slots"], {"layer": 7, "group": "down", "rate": 3}]
    with pytest.raises(ReleaseError, match="other layers"):
        finish_release(
            run.source, {**run.plan, "slots": slots}, run.receipts, copy, calibration=CALIBRATION
        )


def test_receipts_of_another_plan_or_lacking_a_shard_are_refused(run, copy):
    with pytest.raises(ReleaseError, match="do not cover the shards"):
        finish_release(run.source, run.plan, run.receipts[1:], copy, calibration=CALIBRATION)
    older = [{**receipt, "plan": "0" * 64} for receipt in run.receipts]
    with pytest.raises(ReleaseError, match="another plan"):
        finish_release(run.source, run.plan, older, copy, calibration=CALIBRATION)


def test_truncated_shards_are_refused(run, copy, tmp_path):
    with open(copy / BODY[1], "r+b") as handle:
        handle.truncate(os.path.getsize(copy / BODY[1]) - 1)
    with pytest.raises(CheckpointError, match="size that its header states"):
        finish_release(run.source, run.plan, run.receipts, copy, calibration=CALIBRATION)
    assert "something cannot be read" in findings(run, copy)
    source = make_checkpoint(tmp_path / "source")
    with open(source.path / BODY[1], "r+b") as handle:
        handle.truncate(1000)
    with pytest.raises(CheckpointError):
        splice(SimpleNamespace(**{**vars(run), "source": source}), BODY[1], tmp_path)


def test_an_expert_split_over_shards_is_refused(run, tmp_path):
    source = make_checkpoint(tmp_path / "source")
    tensors = {name: source.tensor(name) for name in source.header(BODY[0]).tensors}
    del tensors["layers.0.ffn.experts.1.w3.scale"]
    write_tensors(source.path / BODY[0], tensors)
    other = SimpleNamespace(**{**vars(run), "source": open_checkpoint(source.path)})
    with pytest.raises(CheckpointError, match="only some tensors"):
        splice(other, BODY[0], tmp_path)


def change_bytes(path, name, data=None):
    """Replace the first bytes of a tensor, or flip one bit of it."""
    info = read_header(path).tensors[name]
    with open(path, "r+b") as handle:
        handle.seek(info.offset)
        first = handle.read(1)
        handle.seek(info.offset)
        handle.write(bytes([first[0] ^ 1]) if data is None else data)


STEM = "layers.0.ffn.experts.1.w3"


@pytest.mark.parametrize(
    ("tensor", "data", "what"),
    [
        ("layers.0.attn_norm.weight", None, "a kept tensor has other bytes"),
        (f"{STEM}.mul1", struct.pack("<I", 0xCBAC1FED), "a codebook marker is wrong"),
        (f"{STEM}.suh", struct.pack("<e", float("inf")), "scales are not finite"),
        (f"{STEM}.svh", struct.pack("<e", float("nan")), "scales are not finite"),
    ],
)
def test_verification_finds_changed_bytes(run, copy, tensor, data, what):
    change_bytes(copy / BODY[0], tensor, data)
    assert tensor in findings(run, copy)[what][0]


def test_verification_finds_a_decoded_weight_that_is_not_the_ledgers(run, copy):
    sample = verify_release(run.source, copy, run.plan, run.entries)["samples"][0]["tensor"]
    change_bytes(copy / BODY[0], f"{sample}.trellis", bytes(4096))
    what = "a decoded weight has another error than its ledger states"
    assert findings(run, copy)[what][0].startswith(sample)


def edit_json(path, edit):
    value = read_json(path)
    edit(value)
    write_json(path, value)


def set_rate(value):
    value["quantization_config"]["expert_bits"]["0"]["down"] = 7


@pytest.mark.parametrize(
    ("file", "edit", "what"),
    [
        ("config.json", set_rate, "config.json states other rates than the plan"),
        (
            "quantization_config.json",
            lambda value: value["tensor_storage"].pop("layers.1.attn.wq_a"),
            "tensor_storage does not describe the shards",
        ),
        (
            "quantization_config.json",
            lambda value: value["tensor_storage"].update({"ghost": {"stored_tensors": {}}}),
            "tensor_storage does not describe the shards",
        ),
        (
            "model.safetensors.index.json",
            lambda value: value["weight_map"].pop("norm.weight"),
            "index and headers differ",
        ),
        (
            "model.safetensors.index.json",
            lambda value: value["metadata"].update(total_size=1),
            "the index's metadata is wrong",
        ),
    ],
)
def test_verification_finds_edited_descriptions(run, copy, file, edit, what):
    edit_json(copy / file, edit)
    assert what in findings(run, copy)
    with pytest.raises(ReleaseError, match=what.split(" ", 1)[1]):
        refuse_findings(verify_release(run.source, copy, run.plan, run.entries), copy)


def test_verification_finds_missing_foreign_and_misrated_tensors(run, copy):
    header = read_header(copy / BODY[0])
    tensors = {name: read_tensor(header, name) for name in header.tensors}
    del tensors["layers.0.ffn.experts.2.w1.svh"], tensors["layers.0.ffn.gate.weight"]
    tensors["layers.0.ffn.experts.0.w1.weight"] = torch.zeros(1)
    words = tensors[f"{STEM}.trellis"]
    tensors[f"{STEM}.trellis"] = torch.cat([words, words], dim=-1)
    write_tensors(copy / BODY[0], tensors)
    found = findings(run, copy)
    assert set(found["a tensor is missing"]) == {
        "layers.0.ffn.experts.2.w1.svh",
        "layers.0.ffn.gate.weight",
    }
    assert found["a tensor does not belong"] == ["layers.0.ffn.experts.0.w1.weight"]
    what = "an EXL3 tensor has another dtype, size or rate than the plan"
    assert found[what][0].startswith(f"{STEM}.trellis")


def test_verification_hashes_both_sides_of_a_copied_shard(run, copy):
    shutil.copy(run.source.path / LINKED[0], copy / "copied")
    os.replace(copy / "copied", copy / LINKED[0])
    assert not findings(run, copy)
    change_bytes(copy / LINKED[0], "image_start")
    assert findings(run, copy)["a kept tensor has other bytes"] == ["image_start"]
