# SPDX-License-Identifier: Apache-2.0
"""Releases with one rate an expert: how they are read, refused, verified and packed."""

import itertools
import json
import os
import shutil
import subprocess
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cut import cut_checkpoint
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
from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import open_checkpoint
from trellisbank.errors import CheckpointError, ReleaseError
from trellisbank.files import read_json, write_json
from trellisbank.formats import trellis
from trellisbank.formats.bank_plan import PLAN, BankPlan
from trellisbank.model.streamed import forward_rows
from trellisbank.plan.freeze import freeze, planned_entries
from trellisbank.plan.layouts import (
    NATIVE,
    Wanted,
    bank_plan_slots,
    layout_slots,
    wanted_entries,
)
from trellisbank.release.bank_plan import finish_bank_plan, native_shard, release_plan
from trellisbank.release.finish import finish_release, split_hint, split_hints
from trellisbank.release.pack import pack_release
from trellisbank.release.splice import splice_shard
from trellisbank.release.verify import verify_release
from trellisbank.safetensors_io import read_file, read_header, read_tensor, write_tensors

CALIBRATION = {"rows": 4, "cols": 32}
MIXED = [3, 2, 3, NATIVE, 3, 5]
"""Rates of the experts of both layers."""


def make_run(root, layout, rates):
    """A finished release of a layout; slots take their rates in the order by name."""
    source = open_checkpoint(root / "source")
    bank = Bank(root / "bank")
    slots = layout_slots(layout, range(LAYERS), EXPERTS, SIZE, SIZE)
    picked = dict(zip(slots, rates, strict=True))
    run = root / f"{layout}-{len(list(root.iterdir()))}"
    ledgers = [
        write_ledger(run / f"L{layer:02d}.B00.json", fill_bank(bank, items, source))
        for layer, items in wanted_entries(picked, EXPERTS).items()
        if items
    ]
    plan = freeze(
        recipe="r",
        method="exact",
        layout=layout,
        budget={"average_rate": 5},
        rates=picked,
        experts=EXPERTS,
        ledgers=ledgers,
        root=run,
    )
    entries = planned_entries(plan, EXPERTS, ledgers, run)
    keys = {place: entry["key"] for place, entry in entries.items()}
    made = SimpleNamespace(source=source, bank=bank, plan=plan, entries=entries, keys=keys)
    made.release = run / "release"
    made.report = build(made, made.release)
    return made


def build(run, out):
    hashes = {shard: sha256(run.source.path / shard) for shard in run.source.shards}
    if run.plan["layout"] == "cuda-exl3":
        receipts = [
            splice_shard(run.source, shard, run.plan, run.bank, run.keys, out, digest)
            for shard, digest in hashes.items()
        ]
        return finish_release(run.source, run.plan, receipts, out, calibration=CALIBRATION)
    receipts = [
        native_shard(run.source, shard, run.plan, out, digest) for shard, digest in hashes.items()
    ]
    return finish_bank_plan(run.source, run.plan, receipts, run.bank, run.keys, out)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("root")
    make_checkpoint(folder / "source")
    return folder


@pytest.fixture(scope="module")
def run(root):
    return make_run(root, "bank-plan", MIXED)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run.release, tmp_path / "release")


def findings(run, release):
    receipt = verify_release(run.source, release, run.plan, run.entries)
    return {item["what"]: item["first"] for item in receipt["findings"]}


def test_a_release_verifies_and_names_its_counts(run):
    receipt = verify_release(run.source, run.release, run.plan, run.entries)
    assert receipt["findings"] == []
    assert receipt["encoded"] == {"matrices": 5 * 3}
    kept = len(run.source.names) - 5 * 6
    assert receipt["kept"]["inode"] + receipt["kept"]["bytes"] == kept
    assert run.report["dropped"]["tensors"] == 5 * 6
    assert run.report["added"] == {"groups": 10, "tensors": 5 * 3 * 4}
    assert [bank["file"] for bank in run.report["banks"]] == [
        f"exl3/bank/{place}.safetensors" for place in ("K2/L00", "K3/L00", "K3/L01", "K5/L01")
    ]
    json.dumps(receipt, allow_nan=False)


def test_the_plan_that_a_loader_reads(run):
    assert read_json(run.release / PLAN) == {
        "layers": {"0": "K3", "1": "K3"},
        "keep_native": {"1": [0]},
        "expert_state": {"0": {"1": "K2"}, "1": {"2": "K5"}},
        "qdir": "bank:bank",
    }
    assert (run.release / "config.json").read_bytes() == (
        run.source.path / "config.json"
    ).read_bytes()


def test_every_expert_reads_as_the_bank_and_the_source_have_it(run):
    release = open_checkpoint(run.release)
    for (layer, expert, _), key in run.keys.items():
        for name, tensor in run.bank.get(key)[0].items():
            stem = f"layers.{layer}.ffn.experts.{expert}"
            assert torch.equal(release.tensor(f"{stem}.{name}"), tensor)
            assert release.stored_as(f"{stem}.{name.partition('.')[0]}") == "exl3"
    assert release.stored_as("layers.1.ffn.experts.0.w1") == "mxfp4"
    for stem in ("layers.1.ffn.experts.0.w2", "layers.0.attn.wq_a", "mtp.0.ffn.experts.0.w1"):
        assert torch.equal(release.weight(stem), run.source.weight(stem))


def test_both_layouts_give_the_same_weights_for_the_same_rates(root):
    experts = make_run(root, "bank-plan", [2] * 3 + [3] * 3)
    groups = make_run(root, "cuda-exl3", [2, 2, 3, 3])
    for field in ("average_rate", "stored_bits_per_weight", "stored_bytes"):
        assert experts.plan[field] == groups.plan[field]
    one, two = open_checkpoint(experts.release), open_checkpoint(groups.release)
    assert one.names == two.names
    stems = [name.rpartition(".")[0] for name in one.names if name.endswith(".trellis")]
    assert len(stems) == LAYERS * EXPERTS * 3
    for stem in stems:
        assert torch.equal(one.weight(stem), two.weight(stem))


def test_both_layouts_give_the_same_logits_for_the_same_rates(tmp_path):
    """Two releases from one bank, each run from its own files."""
    source = open_checkpoint(cut_checkpoint(tmp_path / "source"))
    bank, ledgers, experts, sizes = Bank(tmp_path / "bank"), [], 4, {"gate_up": (256, 128)}
    for layer in range(LAYERS):
        entries = []
        for expert, group in itertools.product(range(experts), GROUPS):
            k, n = sizes.get(group, (128, 256))
            key, tensors, entry = encoded_group(Wanted(layer, expert, group, 2 + layer), k, n)
            bank.put(key, tensors, entry)
            entries.append(entry)
        ledgers.append(write_ledger(tmp_path / f"L{layer:02d}.B00.json", entries))
    ids = torch.randint(3, 2000, (2, 40), generator=torch.Generator().manual_seed(0))
    write_tensors(tmp_path / "rows.safetensors", {"input_ids": ids})
    results = {}
    for layout in ("cuda-exl3", "bank-plan", "source"):
        folder = tmp_path / layout
        if layout != "source":
            slots = layout_slots(layout, range(LAYERS), experts, 256, 128)
            plan = freeze(
                recipe=layout,
                method="exact",
                layout=layout,
                budget={"average_rate": 2.5},
                rates={slot: 2 + slot.layer for slot in slots},
                experts=experts,
                ledgers=ledgers,
                root=tmp_path,
            )
            found = planned_entries(plan, experts, ledgers, tmp_path)
            keys = {place: entry["key"] for place, entry in found.items()}
            build(SimpleNamespace(source=source, bank=bank, plan=plan, keys=keys), folder)
        out = tmp_path / f"{layout}.safetensors"
        forward_rows(checkpoint=folder, rows=tmp_path / "rows.safetensors", hidden=out)
        results[layout] = read_file(out)
        # One head for all: equal final states are equal logits.
        results[layout]["head"] = open_checkpoint(folder).tensor("head.weight")
    one, two, original = results.values()
    for name, tensor in one.items():
        assert torch.equal(tensor, two[name]) and tensor.isfinite().all()
    assert not torch.equal(one["final_hidden"], original["final_hidden"])


def test_a_new_plan_over_an_old_release_leaves_nothing_of_it(root, run, copy):
    other = make_run(root, "bank-plan", [2, 2, 2, 3, 3, 5])
    build(other, copy)
    assert snapshot(copy) == snapshot(other.release)
    build(run, copy)
    assert snapshot(copy) == snapshot(run.release)
    (copy / "exl3/bank/K3/notes.txt").write_text("not ours")
    with pytest.raises(ReleaseError, match="do not belong"):
        build(run, copy)


def test_a_shard_of_experts_alone_is_left_out(root, tmp_path):
    source = shutil.copytree(root / "source", tmp_path / "source")
    shard = "model-00002-of-00005.safetensors"
    header = read_header(source / shard)
    tensors = {name: read_tensor(header, name) for name in header.tensors}
    experts = {name: tensor for name, tensor in tensors.items() if ".ffn.experts." in name}
    write_tensors(source / "experts.safetensors", experts)
    write_tensors(source / shard, {n: t for n, t in tensors.items() if n not in experts})
    index = read_json(source / "model.safetensors.index.json")
    index["weight_map"] |= dict.fromkeys(experts, "experts.safetensors")
    write_json(source / "model.safetensors.index.json", index)
    run = make_run(tmp_path, "bank-plan", [2, 2, 3, 3, 3, 3])
    assert not (run.release / "experts.safetensors").exists()
    assert os.path.samefile(run.release / shard, source / shard)
    assert findings(run, run.release) == {}


def set_plan(edit):
    def change(folder):
        plan = read_json(folder / PLAN)
        edit(plan)
        write_json(folder / PLAN, plan)

    return change


def move_bank(folder):
    (folder / "exl3/bank/K5/L01.safetensors").rename(folder / "exl3/bank/K2/L01.safetensors")
    set_plan(lambda plan: plan["expert_state"]["1"].update({"2": "K2"}))(folder)


@pytest.mark.parametrize(
    ("change", "match", "found"),
    [
        (
            lambda folder: (folder / "exl3/bank/K3/L00.safetensors").unlink(),
            "in no bank",
            "2 experts: layer 0 expert 0 K3, layer 0 expert 2 K3",
        ),
        (
            set_plan(lambda plan: plan["expert_state"]["0"].update({"0": "K7"})),
            "in no bank",
            "1 experts: layer 0 expert 0 K7",
        ),
        (move_bank, "another rate", "1 experts: layer 1 expert 2 K2"),
        (
            set_plan(lambda plan: plan.update(keep_native={})),
            "native where the plan says otherwise",
            "1 experts: layer 1 expert 0 K3",
        ),
        (
            set_plan(lambda plan: plan["layers"].pop("0")),
            "native where the plan says otherwise",
            "2 experts: layer 0 expert 0 native, layer 0 expert 2 native",
        ),
    ],
    ids=["bank gone", "rate of no bank", "wrong rate", "native in all-EXL3", "layer left out"],
)
def test_releases_that_do_not_hold_together_are_refused(copy, change, match, found):
    change(copy)
    with pytest.raises(CheckpointError, match=match) as caught:
        open_checkpoint(copy)
    assert caught.value.fields["found"] == found


@pytest.mark.parametrize(
    "edit",
    [
        {"qdir": "bank:/etc"},
        {"qdir": "bank:../../bank"},
        {"qdir": "bank:"},
        {"qdir": "disk:bank"},
        {"layers": {"0": "K9"}},
        {"layers": ["K3"]},
        {"expert_state": {"0": "K3"}},
        {"keep_native": {"zero": [1]}},
    ],
)
def test_malformed_plans_are_refused(copy, edit):
    set_plan(lambda plan: plan.update(edit))(copy)
    with pytest.raises(CheckpointError, match="malformed"):
        open_checkpoint(copy)


def test_banks_are_searched_in_their_order(copy, run):
    stem = "layers.0.ffn.experts.1.w1"
    assert open_checkpoint(copy).shard_of(f"{stem}.trellis") == "exl3/bank/K2/L00.safetensors"
    shutil.copytree(copy / "exl3/bank/K2", copy / "exl3/newer/K2")
    set_plan(lambda plan: plan.update(qdir="bank:newer,bank"))(copy)
    release = open_checkpoint(copy)
    assert release.shard_of(f"{stem}.trellis") == "exl3/newer/K2/L00.safetensors"
    # What the first bank lacks is found in the second.
    other = "layers.0.ffn.experts.0.w1.trellis"
    assert release.shard_of(other) == "exl3/bank/K3/L00.safetensors"


rates = st.sampled_from([2, 3, 5, NATIVE])


@given(st.lists(st.lists(rates, min_size=4, max_size=4), min_size=1, max_size=3))
def test_states_resolve_to_the_rates_that_were_planned(layers):
    slots = bank_plan_slots(range(len(layers)), 4, 128, 128)
    plan = {
        "slots": [
            {"layer": slot.layer, "expert": slot.expert, "rate": layers[slot.layer][slot.expert]}
            for slot in slots
        ]
    }
    made = release_plan(plan)
    read = BankPlan(
        None,
        {int(layer): state for layer, state in made["layers"].items()},
        {int(layer): frozenset(of) for layer, of in made["keep_native"].items()},
        {
            int(layer): {int(expert): state for expert, state in states.items()}
            for layer, states in made["expert_state"].items()
        },
        ("bank",),
    )
    for slot in slots:
        rate = layers[slot.layer][slot.expert]
        assert read.state(slot.layer, slot.expert) == (rate if rate == NATIVE else f"K{rate}")
    assert read.state(99, 0) == NATIVE


def test_verification_finds_changed_files_and_states(run, copy, root):
    (copy / "LICENSE").write_text("as they like it\n")
    (copy / "tokenizer.json").unlink()
    found = findings(run, copy)
    assert found["a file has another hash than in sha256-manifest.txt"] == ["LICENSE"]
    assert found["a file in sha256-manifest.txt or the release only"] == ["tokenizer.json"]
    other = make_run(root, "bank-plan", [2, 2, 3, NATIVE, 3, 5])
    found = findings(run, other.release)
    assert found["exl3/plan.json states another rate than the plan"] == ["layer 0 expert 0"]


def test_missing_keys_are_refused(run, tmp_path):
    keys = {place: key for place, key in run.keys.items() if place != (0, 1, "down")}
    with pytest.raises(ReleaseError, match="No bank key") as caught:
        build(SimpleNamespace(**{**vars(run), "keys": keys}), tmp_path / "out")
    assert caught.value.fields["found"] == "1 missing: layer 0 expert 1 down"


def test_a_packed_release_is_joined_checked_and_the_same_again(run, tmp_path):
    out = tmp_path / "upload"
    split = pack_release(run.release, out, 20_000)
    assert split and max(p.stat().st_size for p in out.rglob("*part*")) == 20_000
    damaged = shutil.copytree(out, tmp_path / "damaged")
    subprocess.run(["sh", out / "reassemble.sh"], check=True, capture_output=True)
    assert snapshot(out) == snapshot(run.release)
    part = next(damaged.rglob("*.part01"))
    part.write_bytes(bytes(part.stat().st_size))
    done = subprocess.run(["sh", damaged / "reassemble.sh"], capture_output=True, text=True)
    assert done.returncode != 0 and part.name in done.stdout + done.stderr
    assert all((damaged / f"{name}.part00").exists() for name in split)
    with pytest.raises(ReleaseError, match="packed"):
        pack_release(run.release, damaged, 20_000)


def test_ranks_take_whole_blocks():
    assert split_hint(2304, 4) == [512, 640, 640, 512]
    assert split_hints(2304) == {
        "4": [512, 640, 640, 512],
        "8": [256, 256, 256, 384, 384, 256, 256, 256],
        "16": [128] * 7 + [256] * 2 + [128] * 7,
    }
    assert split_hints(2048) == {} == split_hints(128)


@given(st.integers(1, 64), st.integers(1, 16))
def test_a_split_covers_the_width(blocks, ranks):
    split = split_hint(128 * blocks, ranks)
    assert sum(split) == 128 * blocks and len(split) == ranks
    assert all(width % 128 == 0 for width in split) and max(split) - min(split) <= 128
    assert split == split[::-1] or (blocks % ranks - ranks) % 2


def test_a_peers_loader_finds_rate_and_codebook_of_cuda_exl3_modules(root):
    """The rate comes from the trellis' shape, the codebook from the marker that is present."""
    run = make_run(root, "cuda-exl3", [2, 3, 5, 4])
    config = read_json(run.release / "config.json")["quantization_config"]
    assert config["quant_method"] == "exl3"
    assert config["expert_bits"] == {"0": {"gate_up": 2, "down": 3}, "1": {"gate_up": 5, "down": 4}}
    release = open_checkpoint(run.release)
    modules = {name.rpartition(".")[0] for name in release.names if name.endswith(".trellis")}
    storage = read_json(run.release / "quantization_config.json")["tensor_storage"]
    for module in modules:
        _, layer, *_, matrix = module.split(".")
        rate, rest = divmod(release.info(f"{module}.trellis").shape[-1], 16)
        group = "down" if matrix == "w2" else "gate_up"
        assert rest == 0 and rate == config["expert_bits"][layer][group]
        markers = [marker for marker in ("mul1", "mcg") if release.has(f"{module}.{marker}")]
        assert markers == ["mul1"] == [config["codebook"]]
        value = int(release.tensor(f"{module}.mul1")) & 0xFFFFFFFF
        assert value == trellis.MARKERS["mul1"] == storage[module]["mul1_multiplier"]
        assert storage[module]["bits_per_weight"] == rate
