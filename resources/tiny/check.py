# SPDX-License-Identifier: Apache-2.0
"""Show that the small checkpoint has learnt, and that its error grows as bits are taken away.

    python resources/tiny/check.py [--checkpoint DIR] [--device cpu] [--write FIGURES.json]

Prints each figure beside its bar; ends with 1 if one is missed. Some ten minutes on two cores:
all experts are encoded at four rates by the library's own encoder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from ngram import train_trigram, trigram_nll, unigram_entropy
from torch import Tensor

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.evaluate.bootstrap import compare
from trellisbank.evaluate.scores import score_tokens
from trellisbank.formats import trellis
from trellisbank.model import attention
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.engram import compressed_tokens, hash_ids, primes
from trellisbank.model.forward import Capture, finish, first_state, run_layer
from trellisbank.model.moe import ExpertWeights
from trellisbank.model.weights import expert_reader, load_layer, load_shared, memory_reader
from trellisbank.quantize.expert import encode_group
from trellisbank.quantize.hessian import expert_hessians
from trellisbank.rows import build_rows, load_tokenizer, read_ids

ROOT = Path(__file__).resolve().parent
WINDOW, WINDOWS = 256, 64
RATES = (5, 4, 3, 2)
SEED = 1  # of the bootstrap

Experts = Callable[[int], ExpertWeights]
Memory = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Model:
    """The checkpoint under test."""

    checkpoint: Checkpoint
    cfg: ModelConfig
    device: str


def panels(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Rows of calibration and panels, cut as the workflow cuts them."""
    rows: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("calibration", "code", "prose"):
            path = Path(folder) / f"{name}.safetensors"
            build_rows(
                texts=sorted((ROOT / "texts" / name).glob("*.txt")),
                tokenizer_path=checkpoint.path / "tokenizer.json",
                separator=checkpoint.config["bos_token_id"],
                window=WINDOW,
                windows=WINDOWS,
                exclude={"calibration": path.with_stem("calibration")} if rows else None,
                ids_path=path,
                receipt_path=path.with_suffix(".json"),
            )
            rows[name] = read_ids(path)
    return rows


def training_tokens(checkpoint: Checkpoint) -> np.ndarray:
    """The training text as the model saw it: files in the archive's order, BOS before each."""
    tokenizer = load_tokenizer(checkpoint.path / "tokenizer.json")
    with tarfile.open(ROOT / "texts" / "training.tar.xz") as tar:
        texts = [
            tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
            if member.name.startswith("training/")
        ]
    bos = checkpoint.config["bos_token_id"]
    pieces = [[bos, *one.ids] for one in tokenizer.encode_batch(texts, add_special_tokens=False)]
    return np.concatenate([np.array(piece, dtype=np.int64) for piece in pieces])


@torch.inference_mode()
def forward(
    model: Model,
    ids: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    experts: Callable[[int, Experts], Experts] = lambda layer, read: read,
    memory: Callable[[int, Memory], Memory] = lambda layer, read: read,
) -> tuple[Tensor, float, list[Capture]]:
    """Final hidden states, mean NLL and captures.

    Args:
        model: whose weights.
        ids: int64 [rows, S].
        dtype: of the linear maps.
        experts: what to read in place of a layer's routed experts.
        memory: what to read in place of an Engram layer's rows.
    """
    source, cfg, device = model.checkpoint, model.cfg, model.device
    compressed = compressed_tokens(cfg, source.path / "tokenizer.json")
    state, captures = first_state(cfg, ids, load_shared(source, cfg, "embed", device)), []
    for layer in range(cfg.num_hidden_layers):
        hashes, rows = None, None
        if layer in cfg.engram_layer_ids:
            hashes = hash_ids(cfg, layer, ids, compressed).to(device)
            rows = memory(layer, memory_reader(source, layer, device))
        state, capture = run_layer(
            cfg,
            layer,
            state,
            load_layer(source, cfg, layer, device, dtype),
            experts(layer, expert_reader(source, cfg, layer, device, dtype)),
            rows,
            hashes,
        )
        captures.append(capture)
    norm, head = (load_shared(source, cfg, name, device) for name in ("norm", "head"))
    hidden, nll = finish(cfg, state, ids, norm, head)
    return hidden.cpu(), float(nll.double().mean()), captures


def without_compressed_keys(model: Model, ids: Tensor) -> float:
    """NLL when no query selects a latent."""
    select = attention.select
    attention.select = lambda scores, most, ratio: torch.full_like(select(scores, most, ratio), -1)
    try:
        return forward(model, ids)[1]
    finally:
        attention.select = select


def flat_memory(model: Model) -> Callable[[int, Memory], Memory]:
    """Every Engram row becomes the mean row of its own hash table."""

    def replace(layer: int, read: Memory) -> Memory:
        sizes = primes(model.cfg)[model.cfg.engram_layer_ids.index(layer)]
        table = read(torch.arange(sum(sizes))).float()
        means = torch.stack([part.mean(0) for part in table.split(sizes)]).bfloat16()
        return lambda ids: means.expand(*ids.shape, -1)

    return replace


def no_experts(layer: int, read: Experts) -> Experts:
    """Routed experts that add nothing."""

    def zeros(expert: int) -> ExpertWeights:
        w1, w2, w3 = read(expert)
        return w1, torch.zeros_like(w2), w3

    return zeros


def encode_experts(
    model: Model, captures: Sequence[tuple[Tensor, Tensor, Tensor]], rate: int, workers: int
) -> dict[tuple[int, int], ExpertWeights]:
    """All routed experts encoded at one rate and decoded again, by layer and expert."""

    def one(place: tuple[int, int]) -> ExpertWeights:
        layer, expert = place
        w1, w2, w3 = expert_reader(model.checkpoint, model.cfg, layer)(expert)
        hessians = expert_hessians([captures[layer]], expert, w1, w3, model.cfg.swiglu_limit)
        stem = f"layers.{layer}.ffn.experts.{expert}"
        groups = ({"w1": w1.T, "w3": w3.T}, {"w2": w2.T})
        stored = {}
        for weights, hessian in zip(groups, hessians, strict=True):
            coded = encode_group(weights, hessian.matrix, hessian.count, rate, stem)
            for name, matrix in coded.items():
                parts = (matrix.tensors[part].numpy() for part in ("trellis", "suh", "svh"))
                weight = torch.from_numpy(trellis.decode(*parts))
                stored[name] = weight.T.bfloat16().to(model.device)
        return stored["w1"], stored["w2"], stored["w3"]

    cfg = model.cfg
    places = [(i, e) for i in range(cfg.num_hidden_layers) for e in range(cfg.n_routed_experts)]
    with ThreadPoolExecutor(workers) as pool:
        return dict(zip(places, pool.map(one, places), strict=True))


class Report:
    """Figures with their bars, printed as they come."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.figures: dict[str, object] = {}
        self.missed = 0

    def note(self, name: str, value: object, shown: str) -> None:
        """A figure without a bar."""
        self.figures[name] = value
        print(f"{name:44} {shown}", flush=True)

    def hold(self, name: str, value: float, least: float) -> None:
        """A figure that must reach a bar."""
        met = value >= least
        self.missed += not met
        self.figures[name] = round(value, 5)
        print(f"{name:44} {value:9.4f}   bar {least:g}   {'ok' if met else 'MISSED'}", flush=True)


def check_learning(model: Model, rows: dict[str, Tensor], report: Report) -> Tensor:
    """NLL against counting, expert use and ablations; returns the code panel's hidden states."""
    code = rows["code"]
    tokens = training_tokens(model.checkpoint)
    digest = hashlib.sha256(tokens.astype("<i4").tobytes()).hexdigest()
    report.note("training tokens", {"count": tokens.size, "sha256": digest}, f"{tokens.size}")
    trigram = train_trigram(tokens, model.cfg.vocab_size)
    hidden, nll, captures = forward(model, code)
    for panel in ("code", "prose"):
        ids = rows[panel].numpy()
        own = nll if panel == "code" else forward(model, rows[panel])[1]
        entropy, counted = unigram_entropy(ids), trigram_nll(trigram, ids)
        for name, value in (("NLL", own), ("unigram entropy", entropy), ("trigram NLL", counted)):
            report.note(f"{panel} {name}, nats/token", round(value, 5), f"{value:9.4f}")
        if panel == "code":
            report.hold("code, share below unigram entropy", 1 - own / entropy, 0.4)
            report.hold("code, share below trigram", 1 - own / counted, 0.1)
    for layer, capture in enumerate(captures):
        counts = torch.bincount(
            capture.route_indices.flatten().cpu(), minlength=model.cfg.n_routed_experts
        )
        share = counts.double() / counts.sum()
        effective = float(torch.exp(torch.special.entr(share).sum()))
        report.hold(f"layer {layer}, effective experts", effective, 12)
        report.hold(f"layer {layer}, smallest routed share", float(share.min()), 0.02)
    masked = without_compressed_keys(model, code)
    report.hold("NLL rise without compressed keys", masked - nll, 0.05)
    flat = forward(model, code, memory=flat_memory(model))[1]
    report.hold("NLL rise with flat Engram tables", flat - nll, 0.3)
    silent = forward(model, code, experts=no_experts)[1]
    report.hold("NLL rise without routed experts", silent - nll, 0.3)
    return hidden


def check_rates(
    model: Model, rows: dict[str, Tensor], hidden: Tensor, report: Report, workers: int
) -> None:
    """KL to the source at uniform rates, and how far rounding alone takes it."""
    code = rows["code"]
    head = load_shared(model.checkpoint, model.cfg, "head")

    def scored(other: Tensor) -> pd.DataFrame:
        return score_tokens(hidden, head, other, head, code)

    noise = float(scored(forward(model, code, torch.float32)[0])["kl"].mean())
    report.note("KL of fp32 linear maps, nats/token", round(noise, 7), f"{noise:9.6f}")
    captures = [
        (capture.ffn_input.cpu(), capture.route_indices.cpu(), capture.route_weights.cpu())
        for capture in forward(model, rows["calibration"])[2]
    ]
    before = None
    for rate in RATES:
        coded = encode_experts(model, captures, rate, workers)

        def stored(layer: int, read: Experts, coded: dict = coded) -> Experts:
            return lambda expert: coded[layer, expert]

        table = scored(forward(model, code, experts=stored)[0])
        kl, nll = float(table["kl"].mean()), float(table["nll_release"].mean())
        report.note(f"K={rate}, KL and NLL", [round(kl, 6), round(nll, 5)], f"{kl:9.5f} {nll:9.4f}")
        if before is None:
            report.hold("K=5, KL over that of fp32 linear maps", kl / noise, 3)
        else:
            step = compare(table, release="", panel="code", seed=SEED, baseline=before)
            low = step["quantities"]["kl_difference"]["low"]
            report.hold(f"K={rate + 1} to {rate}, low end of KL rise", low, 1e-9)
        before = table


def main() -> int:
    """Check, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "checkpoint")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--write", type=Path, help="JSON of all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)  # operations are small: more threads wait for one another
    checkpoint = open_checkpoint(options.checkpoint)
    model = Model(checkpoint, model_config(checkpoint.config), options.device)
    rows, report = panels(checkpoint), Report()
    hidden = check_learning(model, rows, report)
    check_rates(model, rows, hidden, report, options.workers)
    if options.write:
        options.write.write_text(json.dumps(report.figures, indent=1) + "\n")
    print("all bars met" if not report.missed else f"{report.missed} bars missed")
    return int(report.missed > 0)


if __name__ == "__main__":
    sys.exit(main())
