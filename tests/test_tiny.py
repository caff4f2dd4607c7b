# SPDX-License-Identifier: Apache-2.0
"""The shipped small checkpoint: what is in it, where, and that its bytes are the published ones."""

import hashlib
import importlib
import json
import re
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from trellisbank.checkpoint import open_checkpoint
from trellisbank.model.config import layer_kind, model_config
from trellisbank.model.engram import compressed_tokens, primes
from trellisbank.model.forward import advance, finish, first_state
from trellisbank.model.weights import layer_tensors, load_shared
from trellisbank.rows import load_tokenizer, text_ids

ROOT = Path(__file__).parents[1] / "resources" / "tiny"
LIMIT_BYTES = 16_000_000


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(ROOT / "checkpoint")


@pytest.fixture(scope="module")
def cfg(checkpoint):
    return model_config(checkpoint.config)


def test_every_shipped_file_has_its_published_hash():
    listed = dict(
        reversed(line.split("  ", 1)) for line in (ROOT / "SHA256SUMS").read_text().splitlines()
    )
    shipped = [p for part in ("checkpoint", "texts") for p in (ROOT / part).rglob("*.*")]
    assert {p.relative_to(ROOT).as_posix() for p in shipped if p.is_file()} <= set(listed)
    for name, digest in listed.items():
        assert hashlib.sha256((ROOT / name).read_bytes()).hexdigest() == digest, name


def test_folder_stays_within_its_size():
    files = [p for p in ROOT.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    assert sum(p.stat().st_size for p in files) <= LIMIT_BYTES


def test_every_layer_kind_occurs(cfg):
    kinds = [layer_kind(cfg, layer) for layer in range(cfg.num_hidden_layers)]
    assert kinds == ["window", "full", "reuse", "full", "reindex", "reuse"]
    assert cfg.compress_ratios == (0, 2, 2, 1, 1, 1)
    assert cfg.sliding_window <= 16 and cfg.index_topk >= 64
    # The pool always holds a full selection, and is smaller than a row of 256 tokens.
    pool = cfg.candidate_topk_blocks * cfg.candidate_block_size
    assert cfg.index_topk + cfg.candidate_block_size <= pool + 1 and pool < 256


def test_engram_sizes_follow_from_the_tokenizer(checkpoint, cfg):
    ids = compressed_tokens(cfg, checkpoint.path / "tokenizer.json")
    assert len(ids) == cfg.vocab_size
    for layer, sizes in zip(cfg.engram_layer_ids, primes(cfg), strict=True):
        shape = checkpoint.info(f"layers.{layer}.engram.embed.weight").shape
        assert shape == (sum(sizes), cfg.engram_head_dim)


def test_census(checkpoint, cfg):
    counts = Counter(checkpoint.info(name).dtype for name in checkpoint.names)
    experts = cfg.num_hidden_layers * cfg.n_routed_experts + 4
    assert counts["I8"] == 3 * experts
    # A scale a weight: MXFP4, 8 FP8 matrices a block and in each of 3 indexes, Engram, main_proj.
    fp8 = 8 * 7 + 3 + 2 * 2 + 1
    assert counts["F8_E4M3"] == fp8 and counts["F8_E8M0"] == 3 * experts + fp8
    assert counts["F32"] == 9 * 7
    assert sum(counts.values()) == len(checkpoint.names) == 868


def test_every_tensor_of_the_forward_is_there(checkpoint, cfg):
    for layer in range(cfg.num_hidden_layers):
        for name, spec in layer_tensors(cfg, layer).items():
            stem = f"layers.{layer}.{name}"
            full = stem if checkpoint.has(stem) else f"{stem}.weight"
            assert checkpoint.info(full).shape == spec.shape, full
        assert checkpoint.has(f"layers.{layer}.ffn.gate.bias_vl")


def test_shards_are_laid_out_as_in_the_release(checkpoint, cfg):
    held = defaultdict(set)
    for name in checkpoint.names:
        family = re.match(r"layers\.\d+(\.engram)?|mtp\.\d+|[a-z_]+", name)
        held[int(checkpoint.shard_of(name)[6:11])].add(family[0])
        if name.endswith(".scale"):
            weight = name.removesuffix("scale") + "weight"
            assert checkpoint.shard_of(weight) == checkpoint.shard_of(name)
    layers = cfg.num_hidden_layers
    assert held == {
        1: {"vision", "aligner", "image_start", "image_end", "image_newline"},
        2: {"embed"},
        **{3 + layer: {f"layers.{layer}"} for layer in range(layers)},
        3 + layers: {"head", "norm"},
        4 + layers: {"mtp.0"},
        5 + layers: {"layers.1.engram"},
        6 + layers: {"layers.3.engram"},
    }
    index = json.loads((checkpoint.path / "model.safetensors.index.json").read_text())
    stored = sum(checkpoint.info(name).nbytes for name in checkpoint.names)
    assert index["metadata"]["total_size"] == stored


def test_texts_are_split_by_file_without_near_duplicates():
    texts = json.loads((ROOT / "texts" / "texts.json").read_text())
    used = set(texts["training"]) | set(texts["validation"])
    used = {name.replace("/", ".").removesuffix(".py") + ".txt" for name in used}
    code, calibration = set(texts["code"]), set(texts["calibration"])
    assert not code & calibration and not (code | calibration) & used
    assert len(code) >= 15
    for panel in ("code", "calibration", "prose"):
        assert {p.name for p in (ROOT / "texts" / panel).iterdir()} == set(texts[panel])
        assert sum(entry["tokens"] for entry in texts[panel].values()) >= 64 * 256
        shared = sum(entry["shared_ngrams"] for entry in texts[panel].values())
        assert shared <= 0.01 * sum(entry["ngrams"] for entry in texts[panel].values())


def test_held_out_code_is_predicted(checkpoint, cfg):
    texts = sorted((ROOT / "texts" / "code").glob("*.txt"))
    stream = text_ids(load_tokenizer(checkpoint.path / "tokenizer.json"), texts, separator=0)
    share = np.unique(stream, return_counts=True)[1] / stream.size
    unigram_entropy = -(share * np.log(share)).sum()
    ids = torch.from_numpy(stream[: stream.size // 256 * 256].reshape(-1, 256)[::20])
    state = first_state(cfg, ids, load_shared(checkpoint, cfg, "embed"))
    for layer in range(cfg.num_hidden_layers):
        state, _ = advance(checkpoint, cfg, layer, ids, state)
    norm, head = (load_shared(checkpoint, cfg, name) for name in ("norm", "head"))
    assert finish(cfg, state, ids, norm, head)[1].mean() < 0.6 * unigram_entropy


def test_trigram_probabilities_sum_to_one(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    ngram = importlib.import_module("ngram")
    tokens = np.random.default_rng(1).geometric(0.2, 500).clip(max=12) - 1
    model = ngram.train_trigram(tokens, 12)
    every = np.arange(12)
    for first, second in [(0, 1), (2, 2), (11, 11)]:  # the last pair has hardly been seen
        first, second = np.full(12, first), np.full(12, second)
        assert model.probability(first, second, every).sum() == pytest.approx(1)
        assert model.probability(None, second, every).sum() == pytest.approx(1)
        assert (model.probability(first, second, every) > 0).all()
    # Text that was counted is likelier than text in another order.
    shuffled = np.random.default_rng(2).permutation(tokens)
    own = ngram.trigram_nll(model, tokens[None])
    assert own < ngram.trigram_nll(model, shuffled[None])
    assert ngram.unigram_entropy(np.array([[0, 1, 0, 1]])) == pytest.approx(np.log(2))
