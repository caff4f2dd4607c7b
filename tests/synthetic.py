# SPDX-License-Identifier: Apache-2.0
"""Small synthetic checkpoints and encoded experts: valid in form, random in content."""

import hashlib
import json
from pathlib import Path

import numpy as np
import torch

from trellisbank.bank import GROUPS, Bank, expert_key
from trellisbank.checkpoint import Checkpoint, expert_stem, open_checkpoint
from trellisbank.files import write_json
from trellisbank.formats import trellis
from trellisbank.plan.layouts import Wanted
from trellisbank.plan.ledger import SCHEMA as LEDGER_SCHEMA
from trellisbank.safetensors_io import write_tensors

LAYERS, EXPERTS, SIZE = 2, 3, 128


def encoded_group(wanted: Wanted, k: int = SIZE, n: int = SIZE, seed: int = 0):
    """Return bank key, EXL3 tensors and ledger entry; any trellis words are valid."""
    draw = np.random.default_rng([seed, *map(int, wanted[:2]), len(wanted.group), wanted.rate])
    tensors, measured = {}, {}
    for matrix in GROUPS[wanted.group]:
        words = draw.integers(-(1 << 15), 1 << 15, (k // 16, n // 16, 16 * wanted.rate))
        tensors[f"{matrix}.trellis"] = torch.from_numpy(words.astype(np.int16))
        tensors[f"{matrix}.suh"] = torch.from_numpy(draw.normal(0, 0.1, k).astype(np.float16))
        tensors[f"{matrix}.svh"] = torch.from_numpy(draw.normal(0, 1, n).astype(np.float16))
        tensors[f"{matrix}.mul1"] = torch.from_numpy(trellis.marker("mul1"))
        measured[matrix] = {
            "relative_frobenius": 0.5,
            "weights": k * n,
            "stored_bits": 8 * sum(t.nbytes for name, t in tensors.items() if matrix in name),
        }
    weights = {f"{expert_stem(wanted.layer, wanted.expert, m)}.weight": "0" for m in measured}
    key = expert_key(weights, "captures", wanted.rate, {"seed": seed}, "random", 1, "any")
    entry = {**wanted._asdict(), "key": key, "tokens": 7, "fallback": None, "matrices": measured}
    return key, tensors, entry


def true_error(checkpoint: Checkpoint, stem: str, tensors, matrix: str) -> float:
    """Return the relative Frobenius error of an encoded matrix."""
    parts = (tensors[f"{matrix}.{part}"].numpy() for part in ("trellis", "suh", "svh"))
    decoded = torch.from_numpy(trellis.decode(*parts)).double()
    original = checkpoint.weight(stem).T.double()
    return float((decoded - original).norm() / original.norm())


def fill_bank(bank: Bank, wanted, checkpoint: Checkpoint | None = None) -> list[dict]:
    """Encode (at random) what is wanted; return its ledger entries."""
    entries = []
    for item in wanted:
        key, tensors, entry = encoded_group(item)
        if checkpoint is not None:
            for matrix, measured in entry["matrices"].items():
                stem = expert_stem(item.layer, item.expert, matrix)
                measured["relative_frobenius"] = true_error(checkpoint, stem, tensors, matrix)
        bank.put(key, tensors, entry)
        entries.append(entry)
    return entries


def write_ledger(path: Path, entries: list[dict]) -> Path:
    """Write a ledger file of one block."""
    layer = entries[0]["layer"]
    write_json(path, {"schema": LEDGER_SCHEMA, "layer": layer, "block": 0, "entries": entries})
    return path


def make_checkpoint(folder: Path) -> Checkpoint:
    """Write a checkpoint of two body layers, a draft stage, a vision shard and companions."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(torch.bfloat16)

    def mxfp4(stem: str) -> dict[str, torch.Tensor]:
        scales = torch.randint(118, 124, (SIZE, SIZE // 32), dtype=torch.uint8)
        return {
            f"{stem}.weight": torch.randint(-128, 128, (SIZE, SIZE // 2), dtype=torch.int8),
            f"{stem}.scale": scales.view(torch.float8_e8m0fnu),
        }

    def layer(prefix: str) -> dict[str, torch.Tensor]:
        tensors = {
            f"{prefix}.hc_attn_base": torch.randn(24),
            f"{prefix}.attn_norm.weight": bf16(SIZE),
            f"{prefix}.ffn.gate.weight": bf16(EXPERTS, SIZE),
            f"{prefix}.attn.wq_a.weight": torch.randn(SIZE, SIZE).to(torch.float8_e4m3fn),
            f"{prefix}.attn.wq_a.scale": torch.full((4, 4), 120, dtype=torch.uint8).view(
                torch.float8_e8m0fnu
            ),
            # An odd number of bytes: what follows must still start where its elements may.
            f"{prefix}.odd": torch.arange(5, dtype=torch.uint8),
        }
        for expert in range(EXPERTS):
            for matrix in ("w1", "w2", "w3"):
                tensors |= mxfp4(f"{prefix}.ffn.experts.{expert}.{matrix}")
        return tensors

    shards = [
        {"vision.patch.weight": bf16(4, 4), "image_start": bf16(SIZE)},
        *(layer(f"layers.{number}") for number in range(LAYERS)),
        {"embed.weight": bf16(32, SIZE), "head.weight": bf16(32, SIZE), "norm.weight": bf16(SIZE)},
        layer("mtp.0"),
    ]
    weight_map, total = {}, 0
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)
    config = {
        "model_type": "deepseek_v41",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]},
        "text_config": {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS},
    }
    write_json(folder / "config.json", config)
    (folder / "tokenizer.json").write_text(json.dumps({"model": "bpe"}))
    (folder / "LICENSE").write_text("as you like it\n")
    (folder / "inference").mkdir()
    (folder / "inference" / "model.py").write_text("raise SystemExit('never run')\n")
    (folder / "extra.bin").write_bytes(b"weights outside the index")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download.lock").write_text("")
    return open_checkpoint(folder)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def snapshot(folder: Path) -> dict[str, str]:
    """Return file -> SHA-256 for everything below a folder."""
    return {
        path.relative_to(folder).as_posix(): sha256(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
