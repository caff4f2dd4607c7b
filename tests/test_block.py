# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import torch

from cut import cut_checkpoint
from trellisbank.bank import Bank
from trellisbank.checkpoint import open_checkpoint
from trellisbank.errors import QuantizeError
from trellisbank.files import read_json, write_json
from trellisbank.formats import trellis
from trellisbank.model.state import CAPTURED
from trellisbank.quantize import block
from trellisbank.quantize.block import describe_hessians, encode_block, map_captures
from trellisbank.quantize.expert import Options
from trellisbank.safetensors_io import read_file, write_tensors


@pytest.fixture(scope="module")
def layer(tmp_path_factory):
    """Layer 0 of a cut checkpoint with captures of two splits; expert 3 gets no token."""
    folder = tmp_path_factory.mktemp("layer")
    cut_checkpoint(folder / "source")
    torch.manual_seed(0)
    captures = []
    for split in range(2):
        captures.append(folder / f"split{split}.safetensors")
        write_tensors(
            captures[-1],
            {
                "ffn_input": torch.randn(3, 50, 256).bfloat16(),
                "route_indices": torch.rand(3, 50, 3).argsort(dim=2),
                "route_weights": torch.rand(3, 50, 3),
            },
            {"layer": "0"},
        )
    describe_hessians(
        source=folder / "source",
        layer=0,
        captures=captures,
        down_weighting="none",
        receipt_path=folder / "hessians.json",
    )
    return {
        "source": folder / "source",
        "layer": 0,
        "captures": captures,
        "hessians_path": folder / "hessians.json",
        "down_weighting": "none",
        "min_tokens": 16,
        "options": Options(),
        "backend": "cpu",
        "threads": 1,
        "experts_per_block": 2,
    }


def encode(layer, tmp_path, wanted, block=0, **changes):
    """Encode (expert, group, rate) triples; return the ledger's entries."""
    entries = [{"layer": 0, "expert": e, "group": g, "rate": k} for e, g, k in wanted]
    write_json(tmp_path / "wanted.json", {"entries": entries})
    arguments = layer | {"bank": tmp_path / "bank", "block": block} | changes
    encode_block(
        wanted_path=tmp_path / "wanted.json", ledger_path=tmp_path / "ledger.json", **arguments
    )
    return read_json(tmp_path / "ledger.json")["entries"]


def bank_files(tmp_path):
    return {path: path.stat().st_mtime_ns for path in (tmp_path / "bank").glob("*/*")}


def test_hessian_receipt_names_every_expert(layer):
    receipt = read_json(layer["hessians_path"])
    places = [(item["expert"], item["group"]) for item in receipt["experts"]]
    assert places == [(e, g) for e in range(4) for g in ("gate_up", "down")]
    tokens = {item["expert"]: item["tokens"] for item in receipt["experts"]}
    assert tokens[3] == 0 and sum(tokens.values()) == 2 * 3 * 50 * 3
    assert all(item["rank_deficiency"] > 0 for item in receipt["experts"] if item["expert"] == 3)


def test_hits_cost_nothing_and_give_the_same_ledger(layer, tmp_path):
    wanted = [(0, "down", 2), (1, "down", 2)]
    first = encode(layer, tmp_path, wanted[:1])
    both = encode(layer, tmp_path, wanted)
    before = bank_files(tmp_path)
    # The captures are not even read when all is there.
    again = encode(layer, tmp_path, wanted, captures=["gone", "gone"])
    assert again == both and both[:1] == first
    assert bank_files(tmp_path) == before and len(before) == 2
    entry = both[0]
    assert entry["tokens"] > 100 and entry["fallback"] is None
    assert 0 < entry["matrices"]["w2"]["proxy_error"] < 0.1
    assert entry["matrices"]["w2"]["stored_bits"] == 8 * (16 * 8 * 64 + 2 * (128 + 256) + 4)


def test_bytes_depend_on_neither_block_nor_threads(layer, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one = encode(layer, tmp_path / "a", [(1, "down", 2)])
    two = encode(layer, tmp_path / "b", [(1, "down", 2)], experts_per_block=1, block=1, threads=2)
    assert one == two
    paths = [Bank(tmp_path / name / "bank").path(one[0]["key"]) for name in "ab"]
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_every_setting_that_changes_bytes_changes_the_key(layer, tmp_path):
    keys = {
        encode(layer, tmp_path, [(3, "down", 2)], block=1, **changes)[0]["key"]
        for changes in (
            {},
            {"min_tokens": 17},
            {"options": Options(sigma_reg=0.02)},
            {"options": Options(out_scales=False)},
            {"options": Options(refit=False)},
            {"options": Options(scaled_hessian=False)},
        )
    }
    assert len(keys) == 6


def test_expert_without_tokens_falls_back_and_says_so(layer, tmp_path):
    (entry,) = encode(layer, tmp_path, [(3, "down", 2)], block=1)
    assert entry["tokens"] == 0 and "no calibration rows" in entry["fallback"]
    assert entry["matrices"]["w2"]["proxy_error"] is None
    assert 0 < entry["matrices"]["w2"]["relative_frobenius"] < 0.5


def test_captures_of_another_run_are_refused(layer, tmp_path):
    with pytest.raises(QuantizeError, match="hessians rule"):
        encode(layer, tmp_path, [(0, "down", 2)], captures=layer["captures"][::-1])
    with pytest.raises(QuantizeError, match="down_weighting route"):
        encode(layer, tmp_path, [(0, "down", 2)], down_weighting="route")
    with pytest.raises(QuantizeError, match="captures"):
        encode(layer, tmp_path, [(0, "down", 2)], captures=[tmp_path / "gone"] * 2)
    assert not (tmp_path / "ledger.json").exists()


@pytest.mark.parametrize("weighting", ["none", "route"])
def test_the_error_of_gate_and_up_is_measured_at_the_output_of_the_expert(
    layer, tmp_path, weighting
):
    """Against the expert's output token by token, with the stored matrices in place of its own."""
    receipt = tmp_path / "hessians.json"
    describe_hessians(
        source=layer["source"],
        layer=0,
        captures=layer["captures"],
        down_weighting=weighting,
        receipt_path=receipt,
    )
    wanted = [(1, "gate_up", 2), (1, "gate_up", 4), (1, "down", 2)]
    changes = {"hessians_path": receipt, "down_weighting": weighting}
    entries = encode(layer, tmp_path, wanted, **changes)
    source = open_checkpoint(layer["source"])
    own = {m: source.weight(f"layers.0.ffn.experts.1.{m}").double() for m in ("w1", "w2", "w3")}

    def output(x, w1, w3):
        gate, up = (x @ w1.T).clamp(max=10), (x @ w3.T).clamp(-10, 10)
        return (torch.nn.functional.silu(gate) * up) @ own["w2"].T

    for entry in entries[:2]:
        tensors, _ = Bank(tmp_path / "bank").get(entry["key"])
        stored = {}
        for matrix in ("w1", "w3"):
            parts = {part: tensors[f"{matrix}.{part}"] for part in trellis.PARTS}
            stored[matrix] = torch.from_numpy(trellis.decode(*trellis.stored_matrix(parts))).T
        expected = 0.0
        for path in layer["captures"]:
            inputs, chosen, routing = (read_file(path)[name].flatten(0, 1) for name in CAPTURED)
            for x, experts, shares in zip(inputs.double(), chosen, routing, strict=True):
                for share in shares[experts == 1].tolist():
                    lost = output(x, own["w1"], own["w3"]) - output(
                        x, stored["w1"].double(), stored["w3"].double()
                    )
                    expected += (share if weighting == "route" else 1) ** 2 * float(lost @ lost)
        assert entry["expert_error_energy"] == pytest.approx(expected, rel=1e-4)
    assert entries[0]["expert_error_energy"] > 5 * entries[1]["expert_error_energy"]
    assert "expert_error_energy" not in entries[2]


def test_an_expert_without_tokens_has_no_error_at_its_output(layer, tmp_path):
    (entry,) = encode(layer, tmp_path, [(3, "gate_up", 2)], block=1)
    assert entry["expert_error_energy"] is None


def test_overflowing_hessians_are_described_and_fall_back(layer, tmp_path):
    """Finite activations whose squares leave fp32: counted, named, never a crash."""
    huge = []
    for number, path in enumerate(layer["captures"]):
        tensors = read_file(path)
        tensors["ffn_input"] = (tensors["ffn_input"].float() * 1e19).bfloat16()
        huge.append(tmp_path / f"huge{number}.safetensors")
        write_tensors(huge[-1], tensors, {"layer": "0"})
    receipt = tmp_path / "hessians.json"
    describe_hessians(
        source=layer["source"], layer=0, captures=huge, down_weighting="none", receipt_path=receipt
    )
    gate_up = read_json(receipt)["experts"][0]
    assert gate_up["trace"] is None and gate_up["rank"] is None
    wanted = [(0, "gate_up", 2)]
    (entry,) = encode(layer, tmp_path, wanted, captures=huge, hessians_path=receipt)
    assert "not finite" in entry["fallback"]
    assert entry["matrices"]["w1"]["proxy_error"] is None


def test_capture_of_another_layer_is_refused(layer):
    with pytest.raises(QuantizeError, match="layer 1"):
        map_captures(layer["captures"], 1)


def test_what_was_encoded_before_an_error_stays(layer, tmp_path, monkeypatch):
    choose = block.choose_backend

    def halting(*arguments):
        backend = choose(*arguments)

        def encode_one(works):
            yield next(backend.encode(works))
            raise QuantizeError("interrupted")

        return replace(backend, encode=encode_one)

    monkeypatch.setattr(block, "choose_backend", halting)
    with pytest.raises(QuantizeError, match="interrupted"):
        encode(layer, tmp_path, [(0, "down", 2), (1, "down", 2)])
    assert len(bank_files(tmp_path)) == 1
