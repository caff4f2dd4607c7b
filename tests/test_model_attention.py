# SPDX-License-Identifier: Apache-2.0
"""Attention's parts against plain loops."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from model_a import config
from trellisbank.model import attention


def test_window_positions() -> None:
    found = attention.window_positions(5, 3, torch.device("cpu")).tolist()
    assert found == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [1, 2, 3], [2, 3, 4]]
    assert attention.window_positions(2, 16, torch.device("cpu")).tolist() == [[0, -1], [0, 1]]


@given(st.integers(1, 40), st.integers(1, 4))
def test_a_latent_is_visible_after_its_last_token(length: int, ratio: int) -> None:
    count = length // ratio
    found = attention.visible(length, count, ratio, torch.device("cpu"))
    expected = [[t * ratio + ratio - 1 <= i for t in range(count)] for i in range(length)]
    assert found.tolist() == expected


def scores_of(length: int, ratio: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = length // ratio
    # A permutation has no ties, so the choice is unique.
    rows = [torch.randperm(count, generator=generator) for _ in range(length)]
    scores = (torch.stack(rows) - count // 2).bfloat16()
    seen = attention.visible(length, count, ratio, torch.device("cpu"))
    return scores.masked_fill(~seen, -torch.inf).unsqueeze(0)


@given(st.integers(2, 40), st.integers(1, 2), st.integers(1, 12), st.integers(0, 99))
def test_selection(length: int, ratio: int, most: int, seed: int) -> None:
    scores = scores_of(length, ratio, seed)
    count = scores.shape[-1]
    found = attention.select(scores, most, ratio)
    assert found.dtype == torch.int32 and found.shape == (1, length, min(most, count))
    for query in range(length):
        values = scores[0, query].tolist()
        seen = range((query + 1) // ratio)
        best = sorted(sorted(seen, key=lambda t: -values[t])[:most])
        assert found[0, query].tolist() == best + [-1] * (min(most, count) - len(best))


@given(
    st.integers(2, 40), st.integers(1, 2), st.integers(1, 5), st.integers(1, 4), st.integers(0, 99)
)
def test_candidate_pool(length: int, ratio: int, size: int, kept: int, seed: int) -> None:
    cfg = replace(config(), candidate_block_size=size, candidate_topk_blocks=kept)
    scores = scores_of(length, ratio, seed)
    pool = attention.candidate_pool(cfg, ratio, scores)
    count = scores.shape[-1]
    for query in range(length):
        values = scores[0, query].tolist()
        blocks = {
            block: max(values[block * size : (block + 1) * size])
            for block in range(-(-count // size))
        }
        visible = (query + 1) // ratio
        if visible:
            blocks[(visible - 1) // size] = float("inf")
        best = sorted(blocks, key=lambda block: -blocks[block])[:kept]
        best = [block for block in best if blocks[block] > -float("inf")]
        assert pool[0, query].tolist() == [t // size in best for t in range(count)]


def test_attend_is_softmax_with_a_sink() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, 3, 32, generator=generator).bfloat16()
    keys = torch.randn(2, 9, 32, generator=generator).bfloat16()
    positions = torch.randint(0, 9, (2, 6, 4), generator=generator)
    positions[:, :, 3] = -1
    sink = torch.tensor([-2.0, 0.0, 3.0])
    found = attention.attend(query, keys, positions, sink)
    for row in range(2):
        for token in range(6):
            own = keys[row, positions[row, token, :3]].double()
            scores = query[row, token].double() @ own.T / 32**0.5
            raised = scores.exp()
            shares = raised / (raised.sum(-1, keepdim=True) + sink.double().exp().unsqueeze(-1))
            assert torch.allclose(found[row, token].double(), shares @ own, atol=2**-6)


def test_attend_rounds_weights_for_values_only() -> None:
    """A weight of 1 - 2^-10 is 1 in bf16: kept wide, the result would be another bf16 number."""
    query = torch.zeros(1, 1, 1, 32).bfloat16()
    keys = torch.zeros(1, 2, 32).bfloat16()
    query[..., 0] = 1.0
    keys[0, 0, 0] = 1.0
    keys[0, 1, 0] = 1.0 + 2**-7
    positions = torch.tensor([[[0, 1]]])
    found = attention.attend(query, keys, positions, torch.tensor([-torch.inf]))
    weight = torch.tensor((keys[0, :, 0].float() * 32**-0.5).tolist())
    weight = torch.exp(weight - weight.max())
    expected = (weight.bfloat16().float() * keys[0, :, 0].float()).sum() / weight.sum()
    kept_wide = (weight * keys[0, :, 0].float()).sum() / weight.sum()
    assert found[0, 0, 0, 0] == expected.bfloat16()
    assert weight[0] != weight[0].bfloat16() and expected != kept_wide


def test_attend_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 50, 4, 64, generator=generator).bfloat16()
    keys = torch.randn(1, 80, 64, generator=generator).bfloat16()
    positions = torch.randint(-1, 80, (1, 50, 24), generator=generator)
    positions[..., 0] = 0
    whole = attention.attend(query, keys, positions, torch.zeros(4))
    monkeypatch.setattr(attention, "GATHER_BYTES", 7 * 4 * 24 * 64)
    assert torch.equal(attention.attend(query, keys, positions, torch.zeros(4)), whole)


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_compression_drops_an_incomplete_group(ratio: int) -> None:
    cfg = config()
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 11, cfg.hidden_size, generator=generator).bfloat16()
    value, gate = torch.randn(2, 64, cfg.hidden_size, generator=generator).bfloat16() / 16
    weights = {
        "attn.compressor.norm": torch.ones(64).bfloat16(),
        "attn.compressor.wkv": value if ratio == 1 else value.float(),
        "attn.compressor.wgate": gate.float(),
    }
    found = attention.compress(cfg, ratio, x, weights)
    assert found.shape == (1, 11 // ratio, 64)
    for latent in range(11 // ratio):
        group = x[0, latent * ratio : (latent + 1) * ratio].double()
        shares = (group @ gate.double().T).softmax(0)
        pooled = (group @ value.double().T * shares).sum(0)
        expected = pooled / pooled.square().mean().sqrt()
        assert torch.allclose(found[0, latent].double(), expected, atol=2e-2)
