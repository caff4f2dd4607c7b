# SPDX-License-Identifier: Apache-2.0
import json
import shutil

import pytest
import torch

from cut import cut_checkpoint
from trellisbank.checkpoint import INDEX, open_checkpoint
from trellisbank.errors import CheckpointError, FormatError, TrellisbankError
from trellisbank.files import read_json, write_json
from trellisbank.safetensors_io import read_file, write_tensors
from trellisbank.source import inspect, inspect_source, verify_shard


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return cut_checkpoint(tmp_path_factory.mktemp("cut") / "checkpoint")


@pytest.fixture
def broken(whole, tmp_path):
    """A copy in which a test may break things."""
    return shutil.copytree(whole, tmp_path / "checkpoint")


def edit(path, change):
    value = read_json(path)
    change(value)
    write_json(path, value)


def edit_tensors(checkpoint, name, change):
    """Change the shard that holds a tensor through its dict of tensors."""
    shard = checkpoint / read_json(checkpoint / INDEX)["weight_map"][name]
    tensors = read_file(shard)
    change(tensors)
    write_tensors(shard, tensors)
    return shard


def test_census_and_layer_kinds(whole):
    manifest = inspect(open_checkpoint(whole))
    assert manifest["layers"] == ["window", "full"]
    assert manifest["engram_layers"] == [1]
    assert manifest["expert_formats"] == {"mxfp4": 2 * 4}
    assert manifest["tensor_count"] == len(manifest["tensors"])
    assert manifest["tensor_bytes"] == sum(t["bytes"] for t in manifest["tensors"].values())


def test_every_shard_survives(whole, tmp_path):
    checkpoint = open_checkpoint(whole)
    trips = {"mxfp4": 0, "fp8_block": 0}
    for shard in checkpoint.shards:
        verify_shard(source=whole, shard=shard, receipt_path=tmp_path / "receipt.json")
        for kind, count in read_json(tmp_path / "receipt.json")["exact_round_trips"].items():
            trips[kind] += count
    scales = sum(name.endswith(".scale") for name in checkpoint.names)
    assert trips["mxfp4"] == 2 * 4 * 3 and sum(trips.values()) == scales


def test_weights_by_format(whole):
    checkpoint = open_checkpoint(whole)
    assert checkpoint.weight("layers.0.ffn.experts.3.w1").shape == (128, 256)
    assert checkpoint.stored_as("layers.0.ffn.shared_experts.w1") == "fp8_block"
    ids = torch.tensor([5, 0, 5])
    rows = checkpoint.rows("layers.1.engram.embed", ids)
    assert rows.dtype == torch.bfloat16 and torch.equal(rows[0], rows[2])


def remove_from_index(name):
    return lambda c: edit(c / INDEX, lambda index: index["weight_map"].pop(name))


def place(name, shard):
    return lambda c: edit(c / INDEX, lambda index: index["weight_map"].update({name: shard}))


def text_config(**changes):
    return lambda c: edit(c / "config.json", lambda config: config["text_config"].update(changes))


W1 = "layers.0.ffn.experts.1.w1.weight"
EMBED = "embed.weight"

BREAKS = {
    "no config": (lambda c: (c / "config.json").unlink(), "config.json"),
    "architecture": (
        lambda c: edit(c / "config.json", lambda config: config.update(model_type="llama")),
        "expected: deepseek_v41",
    ),
    "no index": (lambda c: (c / INDEX).unlink(), INDEX),
    "no weight_map": (lambda c: write_json(c / INDEX, {}), "no weight_map"),
    "missing shard": (
        lambda c: (c / read_json(c / INDEX)["weight_map"][EMBED]).unlink(),
        "cannot be read",
    ),
    "not in the index": (remove_from_index(W1), W1),
    "path outside": (place(W1, "../elsewhere.safetensors"), "outside the checkpoint"),
    "absolute path": (place(W1, "/elsewhere.safetensors"), "outside the checkpoint"),
    "hidden": (place(W1, ".safetensors"), "outside the checkpoint"),
    "no shard name": (place(W1, 3), "outside the checkpoint"),
    "absent tensor": (place("layers.0.more", "model-00002-of-00012.safetensors"), "layers.0.more"),
    "dtype": (
        lambda c: edit_tensors(c, EMBED, lambda t: t.update({EMBED: t[EMBED].float()})),
        "expected: BF16",
    ),
    "shape": (
        lambda c: edit_tensors(c, EMBED, lambda t: t.update({EMBED: t[EMBED][:-1].clone()})),
        "embed.weight",
    ),
    "sizes": (text_config(moe_intermediate_size=96), "moe_intermediate_size|w1"),
    "vocabulary": (text_config(engram_compressed_vocab_size=7), "7"),
    "deep json": (lambda c: (c / INDEX).write_text("[" * 10_000), "should hold JSON"),
}


@pytest.mark.parametrize(("change", "message"), BREAKS.values(), ids=list(BREAKS))
def test_checkpoints_that_are_refused(broken, tmp_path, change, message):
    change(broken)
    with pytest.raises(CheckpointError, match=message) as raised:
        inspect_source(source=broken, manifest_path=tmp_path / "manifest.json")
    assert {"file", "fix"} <= raised.value.fields.keys(), str(raised.value)
    assert not (tmp_path / "manifest.json").exists()


def test_expert_sizes_must_be_multiples_of_128(broken, tmp_path):
    """The same refusal when all tensors agree with the odd size."""
    text_config(moe_intermediate_size=96)(broken)

    def shrink(tensors):
        for name, tensor in tensors.items():
            if ".experts." in name or ".shared_experts." in name:
                rows = ".w2." not in name
                keep = (tensor.shape[0] if rows else tensor.shape[1]) * 96 // 128
                tensors[name] = (tensor[:keep] if rows else tensor[:, :keep]).clone()

    for layer in range(2):
        edit_tensors(broken, f"layers.{layer}.attn_norm.weight", shrink)
    with pytest.raises(CheckpointError, match="multiple of 128"):
        inspect_source(source=broken, manifest_path=tmp_path / "manifest.json")


@pytest.mark.parametrize(
    ("name", "byte"),
    [("layers.0.ffn.experts.1.w1.scale", 255), ("layers.0.attn.wq_a.scale", 1)],
)
def test_scales_that_do_not_survive_name_the_tensor(broken, tmp_path, name, byte):
    def damage(tensors):
        tensors[name].view(torch.uint8)[0, 0] = byte

    shard = edit_tensors(broken, name, damage)
    with pytest.raises(FormatError, match=name.removesuffix(".scale")) as raised:
        verify_shard(source=broken, shard=shard.name, receipt_path=tmp_path / "receipt.json")
    assert str(shard) in str(raised.value)
    assert not (tmp_path / "receipt.json").exists()


def test_release_is_no_source(broken, tmp_path):
    def encode(tensors):
        for part in ("weight", "scale"):
            del tensors[f"layers.0.ffn.experts.1.w1.{part}"]
        tensors["layers.0.ffn.experts.1.w1.trellis"] = torch.zeros(16, 8, 48, dtype=torch.int16)
        tensors["layers.0.ffn.experts.1.w1.suh"] = torch.ones(256).half()
        tensors["layers.0.ffn.experts.1.w1.svh"] = torch.ones(128).half()

    shard = edit_tensors(broken, "layers.0.ffn.experts.1.w1.weight", encode)
    index = read_json(broken / INDEX)
    index["weight_map"] = {
        name: s for name, s in index["weight_map"].items() if ".experts.1.w1." not in name
    } | dict.fromkeys(read_file(shard), shard.name)
    # Only layer 1's own expert 1 lost its entries with the ones above.
    for part in ("weight", "scale"):
        index["weight_map"][f"layers.1.ffn.experts.1.w1.{part}"] = index["weight_map"][
            f"layers.1.ffn.experts.1.w3.{part}"
        ]
    write_json(broken / INDEX, index)
    assert inspect(open_checkpoint(broken))["expert_formats"] == {"exl3": 1, "mxfp4": 7}
    with pytest.raises(TrellisbankError, match="not stored as MXFP4"):
        inspect_source(source=broken, manifest_path=tmp_path / "manifest.json")


def test_nothing_is_unpickled(broken):
    (broken / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    (broken / "modeling.py").write_text("raise SystemExit('run')")
    inspect(open_checkpoint(broken))
    assert json.loads((broken / INDEX).read_text())
