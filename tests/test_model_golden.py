# SPDX-License-Identifier: Apache-2.0
"""The forward against what the published inference code gives, layer by layer and end to end.

With the same torch build and bf16 dot instructions every comparison is exact. The bars are for
other machines: they are twice what other orders of operations change.
"""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model_a import LAYERS, checkpoint, config, golden, recorded
from trellisbank.model.attention import attention
from trellisbank.model.engram import compressed_tokens, hash_ids
from trellisbank.model.forward import Capture, State, advance, finish, first_state
from trellisbank.model.hyper_connections import expand, mixes, sinkhorn
from trellisbank.model.primitives import collapse, rms_norm
from trellisbank.model.weights import load_layer, load_shared

MEDIAN, P99, MOST = 5e-4, 8e-3, 1.5e-2
PRE_MIX = 5e-3
ROUTE_FLIPS = 0.003


def ids() -> Tensor:
    return golden()["input_ids"][:1]


def start() -> State:
    return first_state(config(), ids(), load_shared(checkpoint(), config(), "embed"))


@cache
def forced(layer: int) -> tuple[State, Capture]:
    """A layer from the recorded state before it."""
    before = recorded(layer - 1) if layer else start()
    return advance(checkpoint(), config(), layer, ids(), before)


@cache
def free() -> list[State]:
    """All layers, each from our own state before it."""
    states = [start()]
    for layer in LAYERS:
        states.append(advance(checkpoint(), config(), layer, ids(), states[-1])[0])
    return states[1:]


def relative_error(stream: Tensor, reference: Tensor) -> Tensor:
    wide, other = stream.float().flatten(2), reference.float().flatten(2)
    return ((wide - other).norm(dim=-1) / other.norm(dim=-1)).flatten()


def route_flips(layer: int) -> Tensor:
    ours = forced(layer)[1].route_indices.sort(-1).values
    theirs = golden()[f"layers.{layer}.route_indices"].sort(-1).values
    return (ours != theirs).any(-1).flatten()


def selection_flips(layer: int) -> Tensor:
    ours, theirs = forced(layer)[0].selection, recorded(layer).selection
    if ours is None or theirs is None:
        return torch.zeros(ids().shape[1], dtype=torch.bool)
    return (ours != theirs).any(-1).flatten()


@pytest.mark.parametrize("layer", LAYERS)
def test_stream_of_a_layer(layer: int) -> None:
    state, _ = forced(layer)
    same = ~(route_flips(layer) | selection_flips(layer))
    error = relative_error(state.stream, recorded(layer).stream)
    assert error.median() <= MEDIAN
    assert error[same].quantile(0.99) <= P99
    assert error[same].max() <= MOST
    difference = (state.pre_mix - recorded(layer).pre_mix).abs().amax(-1).flatten()
    assert difference[same].max() <= PRE_MIX


def test_experts_differ_hardly_ever() -> None:
    flips = torch.cat([route_flips(layer) for layer in LAYERS])
    assert flips.sum() <= max(1, ROUTE_FLIPS * len(flips))
    for layer in LAYERS:
        ours = forced(layer)[1].route_weights.flatten(0, 1)[~route_flips(layer)]
        theirs = golden()[f"layers.{layer}.route_weights"].flatten(0, 1)[~route_flips(layer)]
        assert torch.allclose(ours.sort(-1).values, theirs.sort(-1).values, atol=1e-2)


@pytest.mark.parametrize("layer", [1, 3, 4])
def test_selection_differs_at_near_ties_only(layer: int) -> None:
    scores = golden()[f"layers.{layer}.index_score"][0].float()
    ours = forced(layer)[0].selection
    theirs = recorded(layer).selection
    assert ours is not None and theirs is not None
    assert ours.dtype == torch.int32 and ours.shape == theirs.shape
    for query in selection_flips(layer).nonzero().flatten().tolist():
        mine, other = (set(chosen[0, query].tolist()) - {-1} for chosen in (ours, theirs))
        assert len(mine) == len(other)
        swapped = scores[query][sorted(mine ^ other)]
        # bf16 has 8 significant bits: one step is at most 2^-7 of the value.
        assert swapped.max() - swapped.min() <= swapped.abs().max() * 2**-7


@pytest.mark.parametrize("layer", [1, 3])
def test_compressed_keys(layer: int) -> None:
    state, _ = forced(layer)
    for name in ("compressed_kv", "index_key"):
        ours, theirs = getattr(state, name), getattr(recorded(layer), name)
        assert ours.dtype == torch.bfloat16 and ours.shape == theirs.shape
        # On the fp4 grid a last bit before the rounding is a whole step in a few entries.
        assert (ours != theirs).float().mean() <= 0.005


def test_candidate_pool() -> None:
    ours, theirs = forced(3)[0].candidates, recorded(3).candidates
    assert ours is not None and theirs is not None
    assert (ours != theirs).any(-1).sum() <= 1
    assert not theirs[0, -1].all(), "the pool must bite in this model"


@pytest.mark.parametrize("layer", LAYERS)
def test_mixing_coefficients(layer: int) -> None:
    """The attention's from the recorded stream (Engram layers change it first), all else given."""
    cfg, weights = config(), load_layer(checkpoint(), config(), layer)
    before = recorded(layer - 1).stream if layer else start().stream
    if layer not in cfg.engram_layer_ids:
        names = (f"hc_attn_{part}" for part in ("fn", "base", "scale"))
        _, post, comb = mixes(cfg, before, *(weights[name] for name in names))
        for part, ours in (("post", post), ("comb", comb)):
            assert torch.allclose(ours, golden()[f"layers.{layer}.hc_attn_{part}"], atol=2e-6)
    ours = forced(layer)[1].ffn_post
    assert (ours - golden()[f"layers.{layer}.hc_ffn_post"]).abs().max() <= PRE_MIX


@pytest.mark.parametrize("layer", [0, 2, 4, 5])
def test_comb_before_the_experts(layer: int) -> None:
    """From the recorded stream through the attention sublayer, put together here."""
    cfg, weights = config(), load_layer(checkpoint(), config(), layer)
    before = recorded(layer - 1) if layer else start()
    coefficients = {
        part: [weights[f"{part}_{name}"] for name in ("fn", "base", "scale")]
        for part in ("hc_attn", "hc_ffn")
    }
    _, post, comb = mixes(cfg, before.stream, *coefficients["hc_attn"])
    x = rms_norm(collapse(before.pre_mix, before.stream), weights["attn_norm"], cfg.rms_norm_eps)
    output, _ = attention(cfg, layer, x, weights, before)
    middle = expand(output, before.stream, post, comb)
    _, post, comb = mixes(cfg, middle, *coefficients["hc_ffn"])
    assert (comb - golden()[f"layers.{layer}.hc_ffn_comb"]).abs().max() <= PRE_MIX
    assert (comb - golden()[f"layers.{layer}.hc_ffn_comb"]).abs().median() <= 1e-5


def test_sinkhorn_ends_on_columns() -> None:
    """Few rounds on steep logits: columns sum to one, rows do not."""
    logits = 8 * torch.randn(50, 4, 4, generator=torch.Generator().manual_seed(0))
    comb = sinkhorn(logits, rounds=5, eps=1e-6)
    assert torch.allclose(comb.sum(-2), torch.ones(()), atol=1e-5)
    assert (comb.sum(-1) - 1).abs().max() > 0.05


def test_hash_ids_are_exact() -> None:
    cfg = config()
    compressed = compressed_tokens(cfg, checkpoint().path / "tokenizer.json")
    for place, layer in enumerate(cfg.engram_layer_ids):
        ours = hash_ids(cfg, layer, ids(), compressed)
        assert torch.equal(ours, golden()["engram_hash_ids"][:, :, place])


def test_finish_from_the_recorded_state() -> None:
    norm, head = (load_shared(checkpoint(), config(), name) for name in ("norm", "head"))
    hidden, nll = finish(config(), recorded(5), ids(), norm, head)
    error = (hidden.float() - golden()["final_hidden"].float()).abs()
    assert error.max() <= 2**-7 * golden()["final_hidden"].abs().max()
    assert nll.shape == (1, 95) and nll.dtype == torch.float32
    assert torch.allclose(nll, golden()["nll"], atol=1e-4)


def test_free_running() -> None:
    """Errors add up, flips included; bars for a random model, which is chaotic."""
    norm, head = (load_shared(checkpoint(), config(), name) for name in ("norm", "head"))
    hidden, nll = finish(config(), free()[-1], ids(), norm, head)
    ours, theirs = (F.linear(h.float(), head.float()) for h in (hidden, golden()["final_hidden"]))
    assert (ours - theirs).abs().median() <= 0.15
    assert abs(float(nll.mean() - golden()["nll"].mean())) <= 0.04
    error = relative_error(free()[-1].stream, recorded(5).stream)
    assert error.median() <= 0.08
    assert error.quantile(0.99) <= 0.5
