# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, and whether it can be re-encoded: census, shapes, exact round trips."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch

from trellisbank.checkpoint import Checkpoint, companions, expert_stem, open_checkpoint
from trellisbank.errors import CheckpointError, FormatError
from trellisbank.files import sha256_file, write_json
from trellisbank.formats import check_codes, fp8_block, mxfp4
from trellisbank.model.config import ModelConfig, layer_kind, model_config
from trellisbank.model.engram import compressed_tokens
from trellisbank.model.weights import layer_tensors
from trellisbank.safetensors_io import DTYPES, Header, TensorInfo, map_tensor

Progress = Callable[[str], None]

# EXL3 rotates blocks of 128 rows and columns.
TRELLIS_SIDE = 128
# Weights of the round trip checked at once: 64 Mi of them need some 1.5 GB.
CHECK_WEIGHTS = 1 << 26


def body_tensors(cfg: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of every tensor of the text body, routed experts excepted.

    Source: the published layout of DeepSeek-V4.1-Flash.
    """
    width = cfg.hidden_size
    yield "embed.weight", "BF16", (cfg.vocab_size, width)
    yield "head.weight", "BF16", (cfg.vocab_size, width)
    yield "norm.weight", "BF16", (width,)
    for layer in range(cfg.num_hidden_layers):
        for part, spec in layer_tensors(cfg, layer).items():
            name = f"layers.{layer}.{part}"
            yield name if spec.role == "bare" else f"{name}.weight", spec.dtype, spec.shape
            if spec.dtype == "F8_E4M3":
                rows, columns = spec.shape
                yield f"{name}.scale", "F8_E8M0", (-(-rows // 32), -(-columns // 32))
    for layer, rows in zip(cfg.engram_layer_ids, cfg.engram_num_embeddings, strict=True):
        name = f"layers.{layer}.engram.embed"
        yield f"{name}.weight", "F8_E4M3", (rows, cfg.engram_head_dim)
        yield f"{name}.scale", "F8_E8M0", (rows, cfg.engram_head_dim // 32)


def expert_shapes(width: int, inner: int) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of an expert's matrices."""
    return {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}


def _expert_tensors(
    checkpoint: Checkpoint, cfg: ModelConfig, layer: int, expert: int
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    shapes = expert_shapes(cfg.hidden_size, cfg.moe_intermediate_size)
    for matrix, (rows, columns) in shapes.items():
        stem = expert_stem(layer, expert, matrix)
        if checkpoint.has(f"{stem}.trellis"):
            stored = checkpoint.info(f"{stem}.trellis").shape
            words = stored[-1] if stored else 0  # the rate; all else is known
            yield f"{stem}.trellis", "I16", (columns // 16, rows // 16, words)
            yield f"{stem}.suh", "F16", (columns,)
            yield f"{stem}.svh", "F16", (rows,)
        else:
            yield f"{stem}.weight", "I8", (rows, columns // 2)
            yield f"{stem}.scale", "F8_E8M0", (rows, columns // 32)


def inspect(checkpoint: Checkpoint) -> dict[str, Any]:
    """Check a checkpoint from its headers alone and say what it holds.

    Every tensor of the text body must be there with its dtype and shape; the index and the shards
    must name the same tensors; the tokenizer must give the compressed vocabulary that the Engram
    hashes are built on. No tensor data is read.

    Returns:
        Manifest: architecture, sizes, layer kinds, census by dtype, every tensor with its dtype,
        shape, bytes and shard.

    Raises:
        CheckpointError: The first thing that does not fit.
    """
    cfg = model_config(checkpoint.config)
    _check_index(checkpoint)
    for name, dtype, shape in body_tensors(cfg):
        _check_tensor(checkpoint, name, dtype, shape)
    formats: Counter[str] = Counter()
    for layer in range(cfg.num_hidden_layers):
        for expert in range(cfg.n_routed_experts):
            formats[checkpoint.stored_as(expert_stem(layer, expert, "w1"))] += 1
            for name, dtype, shape in _expert_tensors(checkpoint, cfg, layer, expert):
                _check_tensor(checkpoint, name, dtype, shape)
    for key in ("hidden_size", "moe_intermediate_size"):
        if getattr(cfg, key) % TRELLIS_SIDE:
            raise CheckpointError(
                "The experts have a size that EXL3 cannot hold.",
                file=checkpoint.path / "config.json",
                tensor=f"text_config.{key}",
                expected=f"a multiple of {TRELLIS_SIDE}",
                found=getattr(cfg, key),
                fix="this checkpoint cannot be re-encoded without padding its experts",
            )
    if cfg.engram_layer_ids:
        compressed_tokens(cfg, checkpoint.path / "tokenizer.json")
    infos = {name: checkpoint.info(name) for name in checkpoint.names}
    return {
        "schema": "trellisbank/source/1",
        "architecture": checkpoint.config["model_type"],
        "layers": [layer_kind(cfg, layer) for layer in range(cfg.num_hidden_layers)],
        "engram_layers": list(cfg.engram_layer_ids),
        "routed_experts": cfg.n_routed_experts,
        "experts_per_token": cfg.num_experts_per_tok,
        "hidden_size": cfg.hidden_size,
        "moe_intermediate_size": cfg.moe_intermediate_size,
        "expert_formats": dict(sorted(formats.items())),
        "tensor_count": len(infos),
        "tensor_bytes": sum(info.nbytes for info in infos.values()),
        "census": _census(infos),
        "shards": {
            shard: {
                "bytes": checkpoint.header(shard).size,
                "tensors": len(checkpoint.header(shard).tensors),
            }
            for shard in checkpoint.shards
        },
        "tensors": {
            name: {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "bytes": info.nbytes,
                "shard": checkpoint.weight_map[name],
            }
            for name, info in infos.items()
        },
    }


def _census(infos: dict[str, TensorInfo]) -> dict[str, dict[str, int]]:
    census: dict[str, dict[str, int]] = {}
    for info in infos.values():
        row = census.setdefault(info.dtype, {"tensors": 0, "elements": 0, "bytes": 0})
        row["tensors"] += 1
        row["elements"] += prod(info.shape)
        row["bytes"] += info.nbytes
    return dict(sorted(census.items()))


def _check_index(checkpoint: Checkpoint) -> None:
    for shard in checkpoint.shards:
        for name in checkpoint.header(shard).tensors:
            if checkpoint.weight_map.get(name) != shard:
                raise CheckpointError(
                    "A shard holds a tensor that is missing from the index.",
                    file=checkpoint.path / shard,
                    tensor=name,
                    expected=f"the index to place it in {shard}",
                    found=checkpoint.weight_map.get(name),
                    fix="check that index and shards come from one download",
                )
    for name in checkpoint.names:
        checkpoint.info(name)


def _check_tensor(checkpoint: Checkpoint, name: str, dtype: str, shape: tuple[int, ...]) -> None:
    info = checkpoint.info(name)
    if (info.dtype, info.shape) != (dtype, shape):
        raise CheckpointError(
            "A tensor does not have the dtype or shape that config.json asks for.",
            file=checkpoint.path / checkpoint.shard_of(name),
            tensor=name,
            expected=f"{dtype} {list(shape)}",
            found=f"{info.dtype} {list(info.shape)}",
            fix="check that config.json and shards belong to one checkpoint",
        )


def inspect_source(
    *, source: str | os.PathLike[str], manifest_path: str | os.PathLike[str]
) -> None:
    """Write the manifest of a source; refuse one whose experts are not all MXFP4.

    Raises:
        CheckpointError: Something does not fit; the message names it.
    """
    checkpoint = open_checkpoint(source)
    manifest = inspect(checkpoint)
    companions(checkpoint)  # refuse now what the release could not copy at the end
    if set(manifest["expert_formats"]) != {"mxfp4"}:
        raise CheckpointError(
            "The routed experts of the source are not stored as MXFP4.",
            file=checkpoint.path,
            expected={"mxfp4": sum(manifest["expert_formats"].values())},
            found=manifest["expert_formats"],
            fix="point `source` at the checkpoint as released, not at one of its releases",
        )
    write_json(manifest_path, manifest)


def verify_shard(
    *,
    source: str | os.PathLike[str],
    shard: str,
    receipt_path: str | os.PathLike[str],
    progress: Progress = lambda _: None,
) -> None:
    """Hash a shard and show that its quantized tensors survive the way to bf16 and back.

    Each MXFP4 and FP8 tensor is dequantized to bf16 and requantized with its stored scales, some
    64 Mi weights at a time, whatever the tensor's size; the bytes must be the same.

    Raises:
        CheckpointError: Truncated file.
        FormatError: Codes or scales that do not survive.
    """
    checkpoint = open_checkpoint(source)
    header = checkpoint.header(shard)
    counts: Counter[str] = Counter()
    exact = {"mxfp4": 0, "fp8_block": 0}
    for name, info in header.tensors.items():
        counts[info.dtype] += 1
        kind = {"I8": "mxfp4", "F8_E4M3": "fp8_block"}.get(info.dtype)
        if kind is None:
            continue
        try:
            _round_trip(header, name, name.removesuffix(".weight") + ".scale", kind)
        except FormatError as trouble:
            raise trouble.located(header.path, name) from trouble
        exact[kind] += 1
        progress(f"{shard}: {name} survives")
    write_json(
        receipt_path,
        {
            "schema": "trellisbank/source-shard/1",
            "shard": shard,
            "bytes": header.size,
            "sha256": sha256_file(header.path),
            "tensors": dict(sorted(counts.items())),
            "exact_round_trips": exact,
        },
    )


def _round_trip(header: Header, name: str, scale: str, kind: str) -> None:
    stored = map_tensor(header, name), map_tensor(header, scale)
    check_codes(stored[0], DTYPES["I8" if kind == "mxfp4" else "F8_E4M3"], stored[1])
    (rows, width), scale_rows = stored[0].shape, stored[1].shape[0]
    # A block of 32 rows shares a scale, unless each row has its own (an Engram table, MXFP4).
    height = 1 if scale_rows == rows else 32
    step = max(CHECK_WEIGHTS // (width * 32) * 32, 32)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part = stored[0][first:last]
        factors = stored[1][first // height : -(-last // height)]
        if kind == "mxfp4":
            back = mxfp4.requantize(mxfp4.dequantize(part, factors), factors)
        else:
            block = (height, 32)
            back = fp8_block.requantize(fp8_block.dequantize(part, factors, block), factors, block)
        if not torch.equal(back.view(torch.uint8), part.view(torch.uint8)):
            raise FormatError(
                "A tensor does not survive dequantization.",
                expected="the same bytes after the way to bf16 and back",
                found=f"other bytes in rows {first} to {last - 1}",
                fix="report the tensor; a sound checkpoint survives",
            )
