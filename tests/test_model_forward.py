# SPDX-License-Identifier: Apache-2.0
"""The forward as a whole: independence of rows, resumption, files, refusals, gradients."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model_a import LAYERS, checkpoint, config, golden
from trellisbank.errors import CheckpointError, ForwardError, TrellisbankError
from trellisbank.model.engram import compressed_tokens, hash_ids
from trellisbank.model.forward import (
    State,
    advance,
    finish,
    first_state,
    forward_files,
    layer_statistics,
    run_layer,
)
from trellisbank.model.state import load_state, save_state
from trellisbank.model.weights import (
    expert_reader,
    layer_tensors,
    load_layer,
    load_shared,
)
from trellisbank.safetensors_io import read_file, read_header, write_tensors


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rows of an odd length: the last group of two is incomplete."""
    path = tmp_path_factory.mktemp("rows") / "rows.safetensors"
    write_tensors(path, {"input_ids": golden()["input_ids"][:2, :51].contiguous()})
    return path


@pytest.fixture(scope="module")
def whole(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    told: list[str] = []
    written = forward_files(checkpoint().path, rows, out, progress=told.append)
    assert [path.name for path in written] == [
        *(f"L0{layer}.state.safetensors" for layer in LAYERS),
        "final.safetensors",
    ]
    assert len(told) == 7
    return out


def test_files(whole: Path) -> None:
    wanted = {
        "stream": ("BF16", (2, 51, 4, 256)),
        "pre_mix": ("F32", (2, 51, 4)),
        "ffn_input": ("BF16", (2, 51, 256)),
        "route_indices": ("I64", (2, 51, 3)),
        "route_weights": ("F32", (2, 51, 3)),
    }
    compressed = {
        "compressed_kv": ("BF16", (2, 25, 64)),
        "index_key": ("BF16", (2, 25, 64)),
        "selection": ("I32", (2, 51, 8)),
    }
    finer = {
        "compressed_kv": ("BF16", (2, 51, 64)),
        "index_key": ("BF16", (2, 51, 64)),
        "selection": ("I32", (2, 51, 8)),
        "candidates": ("U8", (2, 51, 51)),
    }
    for layer, expected in ((0, wanted), (2, wanted | compressed), (5, wanted | finer)):
        header = read_header(whole / f"L0{layer}.state.safetensors")
        found = {name: (info.dtype, info.shape) for name, info in header.tensors.items()}
        assert found == expected
        assert header.metadata["layer"] == str(layer)
    final = read_header(whole / "final.safetensors").tensors
    assert final["final_hidden"].dtype == "BF16" and final["final_hidden"].shape == (2, 51, 256)
    assert final["nll"].dtype == "F32" and final["nll"].shape == (2, 50)


@pytest.mark.parametrize("layer", LAYERS)
def test_resuming_from_any_state_gives_the_same_bytes(
    rows: Path, whole: Path, tmp_path: Path, layer: int
) -> None:
    start = whole / f"L0{layer}.state.safetensors"
    written = forward_files(checkpoint().path, rows, tmp_path, from_state=start)
    assert len(written) == 6 - layer
    for path in written:
        assert path.read_bytes() == (whole / path.name).read_bytes(), path.name


def test_a_range_of_layers(rows: Path, whole: Path, tmp_path: Path) -> None:
    forward_files(checkpoint().path, rows, tmp_path, layers=(0, 1))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["L00.state.safetensors", "L01.state.safetensors"]
    # The number in the file's name serves where metadata has been lost.
    bare = tmp_path / "L01.bare.safetensors"
    write_tensors(bare, read_file(tmp_path / names[1]))
    (written,) = forward_files(checkpoint().path, rows, tmp_path, layers=(2, 2), from_state=bare)
    assert written.read_bytes() == (whole / "L02.state.safetensors").read_bytes()


@pytest.mark.parametrize("layers", [(1, 2), (0, 6), (3, 2)])
def test_a_range_that_cannot_be_run(rows: Path, tmp_path: Path, layers: tuple[int, int]) -> None:
    with pytest.raises(ForwardError, match="range of layers"):
        forward_files(checkpoint().path, rows, tmp_path, layers=layers)


def test_rows_are_independent_to_the_last_bit() -> None:
    """Together, alone, or in another order: the same bytes after every layer."""
    cfg, ids = config(), golden()["input_ids"][:3, :40]
    embed = load_shared(checkpoint(), cfg, "embed")
    together = first_state(cfg, ids, embed)
    alone = first_state(cfg, ids[1:2], embed)
    turned = first_state(cfg, ids[[2, 1]], embed)
    for layer in LAYERS:
        together, _ = advance(checkpoint(), cfg, layer, ids, together)
        alone, _ = advance(checkpoint(), cfg, layer, ids[1:2], alone)
        turned, _ = advance(checkpoint(), cfg, layer, ids[[2, 1]], turned)
        for name, tensor in together.tensors.items():
            assert torch.equal(tensor[1:2], alone.tensors[name]), (layer, name)
            assert torch.equal(tensor[1:], turned.tensors[name].flip(0)), (layer, name)


def test_a_row_sees_nothing_ahead() -> None:
    cfg, ids = config(), golden()["input_ids"][:1, :64]
    other = ids.clone()
    other[:, 50:] = 7
    embed = load_shared(checkpoint(), cfg, "embed")
    state, changed = first_state(cfg, ids, embed), first_state(cfg, other, embed)
    for layer in LAYERS:
        state, _ = advance(checkpoint(), cfg, layer, ids, state)
        changed, _ = advance(checkpoint(), cfg, layer, other, changed)
    difference = (state.stream.float() - changed.stream.float()).flatten(2).norm(dim=-1)[0]
    assert difference[50:].min() > 0.1
    # Products of another number of tokens may differ in last bits, but the median is exact.
    assert difference[:50].median() == 0
    assert (
        difference[:50] > 0.05 * state.stream.float().flatten(2).norm(dim=-1)[0, :50]
    ).sum() <= 2


@cache
def layer_weights(layer: int) -> tuple[dict[str, Tensor], list[Any]]:
    read = expert_reader(checkpoint(), config(), layer)
    return load_layer(checkpoint(), config(), layer), [read(expert) for expert in range(8)]


def test_rows_at_once_differ_in_last_bits_only() -> None:
    cfg, ids = config(), golden()["input_ids"]
    state = first_state(cfg, ids, load_shared(checkpoint(), cfg, "embed"))
    weights, experts = layer_weights(0)
    one, captured = run_layer(cfg, 0, state, weights, experts.__getitem__)
    many, other = run_layer(cfg, 0, state, weights, experts.__getitem__, rows_at_once=3)
    same = (captured.route_indices == other.route_indices).all(-1)
    assert same.float().mean() > 0.997
    error = (one.stream.float() - many.stream.float()).norm(dim=-1) / one.stream.float().norm(
        dim=-1
    )
    assert error.median() <= 5e-4 and error[same].max() <= 1.5e-2


def test_linears_in_fp32_are_another_order_of_the_same_numbers() -> None:
    cfg, ids = config(), golden()["input_ids"]
    narrow, wide = (
        load_layer(checkpoint(), cfg, 1, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    for name, spec in layer_tensors(cfg, 1).items():
        assert torch.equal(narrow[name].float(), wide[name].float())
        assert wide[name].dtype == (torch.float32 if spec.role == "linear" else narrow[name].dtype)
    assert expert_reader(checkpoint(), cfg, 1, dtype=torch.float32)(0)[0].dtype == torch.float32
    states = [first_state(cfg, ids, load_shared(checkpoint(), cfg, "embed"))] * 2
    for layer in (0, 1, 2):
        states = [
            advance(checkpoint(), cfg, layer, ids, state, dtype)[0]
            for state, dtype in zip(states, (torch.bfloat16, torch.float32), strict=True)
        ]
    first, second = (state.stream for state in states)
    assert second.dtype == torch.bfloat16
    assert not torch.equal(first, second)
    assert (first.float() - second.float()).norm() <= 0.02 * first.float().norm()


def test_gradients_reach_every_weight_but_those_that_choose() -> None:
    cfg, ids = config(), golden()["input_ids"][:2, :32]
    leaves: dict[str, Tensor] = {}

    def leaf(name: str, tensor: Tensor) -> Tensor:
        return leaves.setdefault(name, tensor.detach().clone().requires_grad_())

    compressed = compressed_tokens(cfg, checkpoint().path / "tokenizer.json")
    state = first_state(cfg, ids, leaf("embed", load_shared(checkpoint(), cfg, "embed")))
    for layer in LAYERS:
        dense, stored = layer_weights(layer)
        weights = {name: leaf(f"{layer}.{name}", tensor) for name, tensor in dense.items()}

        def experts(number: int, layer: int = layer, stored: list[Any] = stored) -> Any:
            return tuple(
                leaf(f"{layer}.{number}.{place}", tensor)
                for place, tensor in enumerate(stored[number])
            )

        memory = hashes = None
        if layer in cfg.engram_layer_ids:
            size = cfg.engram_num_embeddings[cfg.engram_layer_ids.index(layer)]
            rows = checkpoint().rows(f"layers.{layer}.engram.embed", torch.arange(size))
            memory = leaf(f"{layer}.table", rows).__getitem__
            hashes = hash_ids(cfg, layer, ids, compressed)
        state, _ = run_layer(cfg, layer, state, weights, experts, memory, hashes, rows_at_once=2)
    norm, head = (leaf(name, load_shared(checkpoint(), cfg, name)) for name in ("norm", "head"))
    _, nll = finish(cfg, state, ids, norm, head)
    nll.mean().backward()
    without = {name for name, tensor in leaves.items() if tensor.grad is None}
    choosing = {name for name in leaves if ".indexer." in name or name.endswith(("gate.bias",))}
    assert without == choosing
    for name in leaves.keys() - choosing:
        gradient = leaves[name].grad
        assert gradient is not None
        assert gradient.isfinite().all() and gradient.any(), name


def test_statistics() -> None:
    cfg, ids = config(), golden()["input_ids"][:2]
    state = first_state(cfg, ids, load_shared(checkpoint(), cfg, "embed"))
    state, capture = advance(checkpoint(), cfg, 0, ids, state)
    found = layer_statistics(cfg, state, capture)
    assert found["tokens"] == 192 and sum(found["expert_tokens"]) == 192 * 3
    assert found["expert_tokens"][2] == int((capture.route_indices == 2).sum())
    post = capture.ffn_post.double().flatten(0, 1).mean(0)
    rms = state.stream.double().square().mean().sqrt()
    assert found["gain"] == pytest.approx(float(post.norm() / rms))
    assert found["non_finite_stream"] == found["non_finite_ffn_input"] == 0
    broken = state.stream.clone()
    broken[0, 0, 0, :3] = torch.nan
    found = layer_statistics(cfg, replace(state, stream=broken), capture)
    assert found["non_finite_stream"] == 3


def test_nll_needs_no_full_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg, ids = config(), golden()["input_ids"][:1]
    norm, head = (load_shared(checkpoint(), cfg, name) for name in ("norm", "head"))
    stream, pre_mix = golden()["layers.5.stream"], golden()["layers.5.pre_mix"]
    state = State(stream=stream, pre_mix=pre_mix)
    monkeypatch.setattr("trellisbank.model.forward.VOCABULARY_BLOCK", 100)
    hidden, nll = finish(cfg, state, ids, norm, head)
    logits = hidden.double() @ head.double().T
    expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
    assert torch.allclose(nll[0].double(), expected, atol=1e-5)


def test_rows_of_one_token(tmp_path: Path) -> None:
    """No pair is complete, so the layers at ratio 2 see their window only."""
    path = tmp_path / "rows.safetensors"
    write_tensors(path, {"input_ids": torch.tensor([[5], [6]])})
    forward_files(checkpoint().path, path, tmp_path)
    final = read_file(tmp_path / "final.safetensors")
    assert final["nll"].shape == (2, 0) and final["final_hidden"].isfinite().all()


@pytest.mark.parametrize(
    ("ids", "part"),
    [
        (torch.tensor([[1, 1024]]), "outside the vocabulary"),
        (torch.tensor([[-1, 3]]), "outside the vocabulary"),
        (torch.zeros(1, 4097, dtype=torch.int64), "longer than"),
        (torch.zeros(3, dtype=torch.int64), "no token ids"),
        (torch.zeros(0, 5, dtype=torch.int64), "wrong form"),
        (torch.zeros(1, 5, dtype=torch.int32), "no token ids"),
    ],
)
def test_rows_that_are_refused(tmp_path: Path, ids: Tensor, part: str) -> None:
    path = tmp_path / "rows.safetensors"
    write_tensors(path, {"input_ids": ids})
    with pytest.raises(TrellisbankError, match=part) as caught:
        forward_files(checkpoint().path, path, tmp_path)
    assert {"file", "expected", "found", "fix"} <= set(caught.value.fields)


def test_rows_without_ids_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    write_tensors(path, {"tokens": torch.zeros(1, 5, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match="input_ids"):
        forward_files(checkpoint().path, path, tmp_path)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"pre_mix": None}, "lacks a tensor"),
        ({"selection": None}, "lacks a tensor"),
        ({"stream": torch.zeros(2, 51, 4, 128).bfloat16()}, "does not fit"),
        ({"stream": torch.zeros(2, 51, 4, 256)}, "does not fit"),
        ({"stream": torch.zeros(2, 51, 1024).bfloat16()}, "does not fit"),
        ({"candidates": torch.zeros(2, 51, 50, dtype=torch.uint8)}, "does not fit"),
        ({"compressed_kv": torch.zeros(2, 25, 64).bfloat16()}, "does not fit"),
    ],
)
def test_states_that_are_refused(
    whole: Path, tmp_path: Path, change: dict[str, Tensor | None], part: str
) -> None:
    tensors = read_file(whole / "L03.state.safetensors") | change
    path = tmp_path / "state.safetensors"
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(path, kept, {"layer": "3"})
    with pytest.raises(ForwardError, match=part) as caught:
        load_state(path, config())
    assert {"file", "tensor", "layer", "expected", "found", "fix"} <= set(caught.value.fields)


@pytest.mark.parametrize("metadata", [None, {"layer": "6"}, {"layer": "x"}])
def test_states_of_an_unknown_layer_are_refused(
    whole: Path, tmp_path: Path, metadata: dict[str, str] | None
) -> None:
    path = tmp_path / "state.safetensors"
    write_tensors(path, read_file(whole / "L03.state.safetensors"), metadata)
    with pytest.raises(ForwardError, match="after which layer"):
        load_state(path, config())


def test_a_state_of_other_rows_is_refused(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.safetensors"
    write_tensors(path, {"input_ids": golden()["input_ids"][:2, :50].contiguous()})
    with pytest.raises(ForwardError, match="other rows"):
        forward_files(checkpoint().path, path, tmp_path, from_state=whole / "L03.state.safetensors")


def test_a_state_survives_its_file(whole: Path, tmp_path: Path) -> None:
    state, layer = load_state(whole / "L04.state.safetensors", config())
    save_state(tmp_path / "again.safetensors", state, layer)
    again, number = load_state(tmp_path / "again.safetensors", config())
    assert number == layer == 4
    for name, tensor in state.tensors.items():
        assert (
            torch.equal(tensor, again.tensors[name]) and tensor.dtype == again.tensors[name].dtype
        )


def test_layer_tensors_are_all_that_the_checkpoint_holds() -> None:
    for layer in LAYERS:
        prefix = f"layers.{layer}."
        stored = {
            name.removeprefix(prefix).removesuffix(".weight")
            for name in checkpoint().names
            if name.startswith(prefix) and not name.endswith(".scale") and ".experts." not in name
        }
        assert stored - layer_tensors(config(), layer).keys() <= {
            "ffn.gate.bias_vl",
            "engram.embed",
        }
        assert layer_tensors(config(), layer).keys() <= stored


def test_a_tensor_of_another_shape_is_refused() -> None:
    with pytest.raises(CheckpointError, match="another shape") as caught:
        load_layer(checkpoint(), replace(config(), q_lora_rank=96), 0)
    assert caught.value.fields["tensor"] == "layers.0.attn.wq_a"
    with pytest.raises(CheckpointError, match="missing from the index"):
        load_layer(checkpoint(), replace(config(), num_hidden_layers=7), 6)
