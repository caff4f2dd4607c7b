# SPDX-License-Identifier: Apache-2.0
"""Engram: hash constants of the release, ids by hand, the gate, and the readers."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from model_a import checkpoint, config
from trellisbank.errors import CheckpointError, ForwardError
from trellisbank.model import engram
from trellisbank.model.weights import memory_reader

RELEASE = replace(
    config(),
    engram_layer_ids=(1, 14),
    engram_n_heads=8,
    engram_vocab_size=16_000_000,
    engram_num_embeddings=(384_006_168, 384_016_682),
    engram_compressed_vocab_size=99_092,
)


def test_primes_of_the_release() -> None:
    first, second = engram.primes(RELEASE)
    assert (len(first), first[0], first[-1]) == (24, 16_000_057, 16_000_463)
    assert (len(second), second[0], second[-1]) == (24, 16_000_477, 16_000_889)


def test_multipliers_of_the_release() -> None:
    assert engram.multipliers(RELEASE, 1).tolist() == [
        76632096046245,
        4839876093313,
        35959672319349,
        73987337458391,
    ]
    assert engram.multipliers(RELEASE, 14).tolist() == [
        67716810739261,
        51510806800915,
        30921347202721,
        82619226485591,
    ]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (1, [10250667, 124972355, 130904169, 266647502, 381142068]),
        (14, [13402985, 120176944, 128818944, 260141385, 370522085]),
    ],
)
def test_ids_of_the_release(layer: int, expected: list[int]) -> None:
    row = np.array([40, 30, 20, 10])
    ids = engram.hash_compressed(RELEASE, layer, row, pad=0)[-1]
    assert ids[[0, 7, 8, 16, 23]].tolist() == expected


def test_ids_by_hand_with_padding() -> None:
    """Lookback beyond the row is the pad; integers of any size, one token at a time."""
    cfg, row, pad = config(), [5, 700, 5, 9], 3
    ids = engram.hash_compressed(cfg, 3, np.array(row), pad)
    multipliers = engram.multipliers(cfg, 3).tolist()
    sizes = engram.primes(cfg)[1]
    for position in range(len(row)):
        seen = [row[position - j] if position >= j else pad for j in range(4)]
        mixed = seen[0] * multipliers[0]
        expected, offset = [], 0
        for back in (1, 2, 3):
            mixed ^= seen[back] * multipliers[back]
            for size in sizes[2 * (back - 1) : 2 * back]:
                expected.append(mixed % size + offset)
                offset += size
        assert ids[position].tolist() == expected


def test_a_row_shorter_than_the_ngram() -> None:
    whole = engram.hash_compressed(config(), 1, np.array([[5, 700, 9]]), 3)
    assert (engram.hash_compressed(config(), 1, np.array([[5, 700]]), 3) == whole[:, :2]).all()


def test_tables_must_have_the_size_of_their_hash_functions() -> None:
    with pytest.raises(CheckpointError, match="another size"):
        engram.primes(replace(config(), engram_num_embeddings=(1362, 1553)))


def test_compressed_tokens_share_ids_where_text_looks_alike() -> None:
    path = checkpoint().path / "tokenizer.json"
    ids = engram.compressed_tokens(config(), path)
    assert ids.max() + 1 == config().engram_compressed_vocab_size
    assert engram.compressed_tokens(config(), path) is ids, "computed once a tokenizer"
    vocabulary = json.loads(path.read_text())["model"]["vocab"]
    assert ids[vocabulary["A"]] == ids[vocabulary["a"]]
    assert ids[vocabulary["A"]] != ids[vocabulary["b"]]
    first = {int(value): place for place, value in reversed(list(enumerate(ids)))}
    assert list(first.values()) == sorted(first.values()) or sorted(first) == list(
        range(len(first))
    )
    order = [int(value) for place, value in enumerate(ids) if first[int(value)] == place]
    assert order == list(range(len(first))), "numbered by first appearance"


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    path = checkpoint().path / "tokenizer.json"
    with pytest.raises(CheckpointError, match="compressed vocabulary"):
        engram.compressed_tokens(replace(config(), engram_compressed_vocab_size=808), path)
    for content in (None, "{}", "no JSON"):
        if content is not None:
            (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(CheckpointError, match="cannot be read"):
            engram.compressed_tokens(config(), tmp_path / "tokenizer.json")


def test_ids_that_the_tokenizer_lacks_are_refused() -> None:
    compressed = np.arange(10)
    with pytest.raises(ForwardError, match="no place in the tokenizer"):
        engram.hash_ids(config(), 1, torch.tensor([[1, 10]]), compressed)


def test_gate_and_statistics_of_each_copy() -> None:
    """One token in plain arithmetic."""
    cfg = replace(config(), hidden_size=4, hc_mult=2)
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(1, 2, 4, generator=generator).bfloat16()
    memory = torch.randn(1, 1, 8, generator=generator).bfloat16()
    weights = {
        "engram.wkv": torch.randn(12, 8, generator=generator).bfloat16(),
        "engram.q_weight": torch.randn(2, 4, generator=generator).bfloat16(),
        "engram.k_weight": torch.randn(2, 4, generator=generator).bfloat16(),
    }
    found = engram.engram(cfg, stream, memory, weights)
    mixed = (memory[0, 0] @ weights["engram.wkv"].T).tolist()
    for copy in range(2):
        x, key = stream[0, copy].tolist(), mixed[4 * copy : 4 * copy + 4]
        query_weight = weights["engram.q_weight"][copy].tolist()
        key_weight = weights["engram.k_weight"][copy].tolist()
        dot = sum(
            a * b * c * d for a, b, c, d in zip(x, query_weight, key_weight, key, strict=True)
        )
        rms = [math.sqrt(sum(v * v for v in values) / 4) for values in (x, key)]
        match = dot / (rms[0] * rms[1]) / math.sqrt(4)
        signed = math.copysign(math.sqrt(max(abs(match), 1e-6)), match)
        gate = 1 / (1 + math.exp(-signed))
        expected = [a + gate * value for a, value in zip(x, mixed[8:], strict=True)]
        assert found[0, copy].tolist() == pytest.approx(expected, rel=2**-7, abs=2**-7)


def test_rows_are_read_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.Tensor] = []

    def read(ids: torch.Tensor) -> torch.Tensor:
        asked.append(ids)
        return ids.unsqueeze(-1) * torch.ones(3)

    found = engram.unique_rows(read)(torch.tensor([[4, 2], [2, 9]]))
    assert asked[0].tolist() == [2, 4, 9]
    assert found[..., 0].tolist() == [[4, 2], [2, 9]]
    stored = memory_reader(checkpoint(), 1)(torch.tensor([[7, 0], [7, 1361]]))
    assert stored.shape == (2, 2, 64) and stored.dtype == torch.bfloat16
    assert torch.equal(stored[0, 0], stored[1, 0]) and not torch.equal(stored[0, 1], stored[1, 1])
