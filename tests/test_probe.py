# SPDX-License-Identifier: Apache-2.0
"""Overlays of the bank over the source, and what probes measure with them."""

import pytest
import torch

from cut import cut_checkpoint
from synthetic import encoded_group, write_ledger
from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import expert_stem, open_checkpoint, overlay
from trellisbank.errors import CheckpointError, FormatError, PlanError
from trellisbank.evaluate.probe import probe_layer
from trellisbank.evaluate.scores import score_tokens
from trellisbank.files import read_json
from trellisbank.formats import trellis
from trellisbank.model.config import model_config
from trellisbank.model.forward import advance, finish, first_state
from trellisbank.model.state import save_state
from trellisbank.model.weights import load_shared
from trellisbank.plan.layouts import Wanted
from trellisbank.plan.ledger import read_probes
from trellisbank.safetensors_io import write_tensors

LAYERS, EXPERTS, WIDTH, INNER = 2, 4, 256, 128


def encode(bank, layer, expert, group, rate, spoil=False):
    """Put a random encoding into the bank; spoiled scales are infinite."""
    sizes = (WIDTH, INNER) if group == "gate_up" else (INNER, WIDTH)
    key, tensors, entry = encoded_group(Wanted(layer, expert, group, rate), *sizes)
    if spoil:
        for matrix in GROUPS[group]:
            tensors[f"{matrix}.svh"].fill_(torch.inf)
    bank.put(key, tensors, entry)
    return entry


@torch.inference_mode()
def run(checkpoint, ids, folder=None):
    """The forward of a checkpoint from its first layer; keeps its states if a folder is given."""
    cfg = model_config(checkpoint.config)
    state = first_state(cfg, ids, load_shared(checkpoint, cfg, "embed"))
    for layer in range(LAYERS):
        state, _ = advance(checkpoint, cfg, layer, ids, state)
        if folder:
            save_state(folder / f"L{layer:02d}.state.safetensors", state, layer)
    norm, head = (load_shared(checkpoint, cfg, name) for name in ("norm", "head"))
    return finish(cfg, state, ids, norm, head)[0]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A source, its states on two rows, a bank and ledgers of two lists."""
    folder = tmp_path_factory.mktemp("probe")
    source = open_checkpoint(cut_checkpoint(folder / "source"))
    ids = torch.randint(3, 2000, (2, 24), generator=torch.Generator().manual_seed(0))
    write_tensors(folder / "rows.safetensors", {"input_ids": ids})
    hidden = run(source, ids, folder)
    write_tensors(folder / "hidden.safetensors", {"final_hidden": hidden})
    bank = Bank(folder / "bank")
    for layer in range(LAYERS):
        base = [encode(bank, layer, e, g, 3) for e in range(EXPERTS) for g in GROUPS]
        base.append(encode(bank, layer, 2, "down", 2))
        write_ledger(folder / f"base/L{layer:02d}.json", base)
        draft = [encode(bank, layer, e, "down", 2) for e in (0, 1, 3)]
        draft += [encode(bank, layer, e, "gate_up", 4) for e in (0, 1, 3)]
        draft += [encode(bank, layer, e, "down", 5, spoil=e == 1) for e in range(EXPERTS)]
        write_ledger(folder / f"draft/L{layer:02d}.json", draft)
    return folder, source, bank, ids, hidden


def probe(folder, layer, lists, out):
    probe_layer(
        source=folder / "source",
        bank=folder / "bank",
        layer=layer,
        rows=folder / "rows.safetensors",
        state_before=folder / "L00.state.safetensors" if layer else None,
        hidden=folder / "hidden.safetensors",
        ledgers=[folder / f"{lists[-1]}/L{layer:02d}.json"],
        base=[folder / f"{name}/L{layer:02d}.json" for name in lists[:-1]],
        probes_path=out,
    )
    return read_json(out)


def keys(folder, name, layer, group, rate):
    return {
        (layer, entry["expert"], group): entry["key"]
        for entry in read_json(folder / f"{name}/L{layer:02d}.json")["entries"]
        if (entry["group"], entry["rate"]) == (group, rate)
    }


@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_probe_from_a_kept_state_is_the_whole_forward_with_one_group_lowered(
    made, layer, tmp_path
):
    folder, source, bank, ids, hidden = made
    probes = probe(folder, layer, ["base"], tmp_path / "probes.json")
    assert (probes["windows"], probes["tokens"]) == (2, 46)
    # K = 2 is encoded for one expert alone and cannot be probed.
    assert [(p["group"], p["rate"]) for p in probes["probes"]] == [("gate_up", 3), ("down", 3)]
    head = load_shared(source, model_config(source.config), "head")
    for item in probes["probes"]:
        lowered = overlay(source, bank, keys(folder, "base", layer, item["group"], 3))
        table = score_tokens(hidden, head, run(lowered, ids), head, ids)
        assert item["kl"] == table["kl"].mean() > 0.01


def test_a_draft_is_probed_for_what_its_base_lacks_and_a_failed_probe_says_so(made, tmp_path):
    folder, *_ = made
    probes = probe(folder, 1, ["base", "draft"], tmp_path / "probes.json")
    found = {(p["group"], p["rate"]): p["kl"] for p in probes["probes"]}
    # Base and draft together have K = 2 whole; of gate_up at K = 4 an expert is missing.
    assert set(found) == {("down", 2), ("down", 5)}
    assert found["down", 2] > 0 and found["down", 5] is None
    read = read_probes([tmp_path / "probes.json"])
    assert read == {(1, "down", 2): found["down", 2], (1, "down", 5): float("inf")}
    with pytest.raises(PlanError, match="holds no probes"):
        read_probes([folder / "base/L00.json"])


def test_an_overlay_takes_what_it_is_told_from_the_bank_and_the_rest_from_the_source(made):
    folder, source, bank, *_ = made
    taken = keys(folder, "base", 1, "gate_up", 3)
    del taken[1, 3, "gate_up"]
    before = dict(source.weight_map)
    changed = overlay(source, bank, taken)
    for expert in range(EXPERTS):
        for matrix in ("w1", "w2", "w3"):
            stem = expert_stem(1, expert, matrix)
            if matrix == "w2" or expert == 3:
                assert changed.stored_as(stem) == "mxfp4"
                assert torch.equal(changed.weight(stem), source.weight(stem))
                continue
            tensors, _ = bank.get(taken[1, expert, "gate_up"])
            parts = {part: tensors[f"{matrix}.{part}"] for part in trellis.PARTS}
            stored = torch.from_numpy(trellis.decode(*trellis.stored_matrix(parts)))
            assert torch.equal(changed.weight(stem), stored.T.to(torch.bfloat16))
    assert source.weight_map == before and not set(taken.values()) & set(source._headers)


def test_an_overlay_refuses_other_experts_and_changed_bank_files(made, tmp_path):
    folder, source, *_ = made
    bank = Bank(tmp_path / "bank")
    key = encode(bank, 0, 1, "down", 3)["key"]
    with pytest.raises(CheckpointError, match="another expert") as caught:
        overlay(source, bank, {(0, 2, "down"): key})
    assert caught.value.fields["found"] == "layer 0 expert 1 down"
    data = bytearray(bank.path(key).read_bytes())
    data[-1] ^= 1
    bank.path(key).write_bytes(data)
    with pytest.raises(FormatError, match="changed since it was written"):
        overlay(source, bank, {(0, 1, "down"): key})
