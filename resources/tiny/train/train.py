# SPDX-License-Identifier: Apache-2.0
"""Train the small checkpoint, from the committed texts to the released layout.

    python resources/tiny/train/train.py OUT [--seed 1] [--steps 700] [--device cuda]

OUT gets ``checkpoint/`` (tokenizer included) and ``training.csv`` (loss curve with validation
points); a few minutes on one H200. The forward is the library's own: what it reads are fp32
weights put on their storage grid at each step, the gradient passes straight through.
"""

from __future__ import annotations

import argparse
import csv
import io
import math
import shutil
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from pack import write_checkpoint
from tensors import Spec, body_specs, carried_specs, initialize, make_config, on_grid
from tokenizers import Tokenizer
from torch import Tensor

from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.engram import compressed_tokens, hash_ids
from trellisbank.model.forward import Capture, first_state, run_layer
from trellisbank.model.primitives import collapse, rms_norm
from trellisbank.model.weights import layer_tensors

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 256
BOS = 0
LEARNING_RATE, WARM_UP = 3e-3, 40
BALANCE = 2e-3  # a step of the selection bias
BALANCE_UNTIL = (0.6, 0.9)  # full until the first share of the steps, none from the second on


@dataclass(frozen=True)
class Trained:
    """A model in training: configuration, tensors, fp32 weights, hash table."""

    cfg: ModelConfig
    specs: dict[str, Spec]
    values: dict[str, Tensor]
    compressed: np.ndarray


def read_tokens(part: str, tokenizer: Tokenizer) -> list[np.ndarray]:
    """Token ids of each file of a part of the training archive, as rows have it: BOS, then text."""
    data = (ROOT / "texts" / "training.tar.xz").read_bytes()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:xz") as tar:
        texts = [
            tar.extractfile(member).read().decode()  # type: ignore[union-attr]
            for member in tar
            if member.name.startswith(f"{part}/")
        ]
    encoded = tokenizer.encode_batch(texts)
    return [np.array([BOS, *one.ids], dtype=np.int64) for one in encoded]


def batches(files: list[np.ndarray], size: int, seed: int) -> Iterator[Tensor]:
    """Endless batches of windows; each pass has a new order of files and of windows."""
    source = np.random.default_rng(seed)
    left = np.empty((0, WINDOW), dtype=np.int64)
    while True:
        while len(left) < size:
            joined = np.concatenate([files[i] for i in source.permutation(len(files))])
            joined = joined[source.integers(WINDOW) :]
            rows = joined[: len(joined) // WINDOW * WINDOW].reshape(-1, WINDOW)
            left = np.concatenate([left, source.permutation(rows)])
        yield torch.from_numpy(left[:size])
        left = left[size:]


def weights_on_grid(model: Trained) -> dict[str, Tensor]:
    """Weights as a reader of the checkpoint would see them, in its precision; straight-through."""
    result = {}
    for name, spec in model.specs.items():
        weight = model.values[name]
        with torch.no_grad():
            grid = on_grid(spec.kind, weight)[0]
        value = grid + (weight - weight.detach())
        result[name] = value if spec.kind == "f32" else value.bfloat16()
    return result


def forward(
    model: Trained, weights: dict[str, Tensor], ids: Tensor
) -> tuple[Tensor, list[Capture]]:
    """Mean NLL of rows of token ids, and each layer's capture."""
    cfg, device = model.cfg, weights["embed"].device
    state, captures = first_state(cfg, ids, weights["embed"]), []
    for layer in range(cfg.num_hidden_layers):
        prefix = f"layers.{layer}."
        dense = {
            name: weights[prefix + name].float() if spec.role == "wide" else weights[prefix + name]
            for name, spec in layer_tensors(cfg, layer).items()
        }
        stacks = [weights[f"{prefix}ffn.experts.{name}"].unbind() for name in ("w1", "w2", "w3")]
        hashes, memory = None, None
        if layer in cfg.engram_layer_ids:
            hashes = hash_ids(cfg, layer, ids, model.compressed).to(device)
            memory = rows_of(weights[prefix + "engram.embed"])
        experts = list(zip(*stacks, strict=True))
        state, capture = run_layer(
            cfg, layer, state, dense, experts.__getitem__, memory, hashes, rows_at_once=len(ids)
        )
        captures.append(capture)
    hidden = rms_norm(collapse(state.pre_mix, state.stream), weights["norm"], cfg.rms_norm_eps)
    logits = F.linear(hidden[:, :-1].float(), weights["head"].float())
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().to(device)), captures


def rows_of(table: Tensor) -> Callable[[Tensor], Tensor]:
    """Look-up in a table held whole."""
    return lambda ids: F.embedding(ids, table)


def optimizer_of(model: Trained) -> torch.optim.AdamW:
    """AdamW; matrices of linear maps decay, embeddings, tables, norms and mixing do not."""
    frozen = ("gate.bias", "gate.bias_vl")
    learnt = {n: v.requires_grad_() for n, v in model.values.items() if not n.endswith(frozen)}
    tables = ("embed", "engram.q_weight", "engram.k_weight")
    decays = [
        n
        for n, v in learnt.items()
        if v.dim() > 1 and model.specs[n].kind != "f32" and not n.endswith(tables)
    ]
    groups = [
        {"params": [learnt[n] for n in decays], "weight_decay": 0.1},
        {"params": [v for n, v in learnt.items() if n not in decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), foreach=True)


@torch.no_grad()
def balance(model: Trained, captures: list[Capture], rate: float) -> list[float]:
    """Move the selection bias of each layer towards even use; effective experts of each layer."""
    effective = []
    for layer, capture in enumerate(captures):
        bias = model.values[f"layers.{layer}.ffn.gate.bias"]
        counts = torch.bincount(capture.route_indices.flatten(), minlength=len(bias)).float()
        share = counts / counts.sum()
        bias += rate * torch.sign(1 / len(bias) - share)
        effective.append(float(torch.exp(torch.special.entr(share).sum())))
    return effective


def train(
    model: Trained, options: argparse.Namespace, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """Run the steps; returns the loss curve."""
    optimizer = optimizer_of(model)
    source = batches(read_tokens("training", tokenizer), options.batch, options.seed)
    held = np.concatenate(read_tokens("validation", tokenizer))
    held = held[: len(held) // WINDOW * WINDOW].reshape(-1, WINDOW)[: options.validation]
    curve, start = [], time.time()
    for step in range(options.steps):
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / options.steps)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min((step + 1) / WARM_UP, 1) * cosine
        loss, captures = forward(model, weights_on_grid(model), next(source))
        optimizer.zero_grad()
        loss.backward()
        learnt = [p for group in optimizer.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in learnt if p.grad is not None], 1.0)
        optimizer.step()
        low, high = BALANCE_UNTIL
        fade = min(max((high - step / options.steps) / (high - low), 0), 1)
        effective = balance(model, captures, BALANCE * fade)
        last = step + 1 == options.steps
        if step % 10 == 0 or last:
            point: dict[str, Any] = {"step": step + 1, "training_nll": round(loss.item(), 4)}
            if step % 50 == 0 or last:
                with torch.no_grad():
                    weights = weights_on_grid(model)
                    parts = torch.from_numpy(held).split(options.batch)
                    nll = [forward(model, weights, part)[0].item() * len(part) for part in parts]
                point["validation_nll"] = round(sum(nll) / len(held), 4)
            curve.append(point)
            print(point, f"{min(effective):.1f} experts, {time.time() - start:.0f} s", flush=True)
    return curve


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--batch", type=int, default=64, help="windows a step")
    parser.add_argument("--validation", type=int, default=192, help="windows of a validation point")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True

    files = [ROOT / "checkpoint" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    config = make_config(files[0])
    cfg = model_config(config)
    body, carried = body_specs(config), carried_specs(config)
    values = {n: v.to(options.device) for n, v in initialize(body, options.seed).items()}
    model = Trained(cfg, body, values, compressed_tokens(cfg, files[0]))
    curve = train(model, options, Tokenizer.from_file(str(files[0])))

    folder = options.out / "checkpoint"
    folder.mkdir(parents=True, exist_ok=True)
    values = model.values | initialize(carried, options.seed)
    write_checkpoint(folder, config, body | carried, values)
    for file in files:
        shutil.copyfile(file, folder / file.name)
    with open(options.out / "training.csv", "w", newline="") as handle:
        table = csv.DictWriter(handle, ["step", "training_nll", "validation_nll"])
        table.writeheader()
        table.writerows(curve)


if __name__ == "__main__":
    main()
