# SPDX-License-Identifier: Apache-2.0
"""Write weights as a checkpoint in the released layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tensors import LAYERS, Spec, on_grid
from torch import Tensor

from trellisbank.formats import fp8_block, mxfp4
from trellisbank.safetensors_io import write_tensors

SHARDS = LAYERS + 6  # vision, embedding, one a layer, head, draft, and two for Engram
# Plain bf16 tensors whose name is complete without `.weight`.
BARE = (".bias", "q_weight", "k_weight", "image_start", "image_end", "image_newline")


def stored(stem: str, kind: str, weight: Tensor) -> dict[str, Tensor]:
    """A tensor as it lies in a shard: codes and scales, or plain."""
    values, scale = on_grid(kind, weight)
    if scale is None:
        value = values.bfloat16() if kind == "bf16" else values
        bare = kind == "f32" or stem.endswith(BARE)
        return {stem if bare else f"{stem}.weight": value}
    scales = scale.to(torch.float8_e8m0fnu)
    if kind == "mxfp4":
        codes = mxfp4.requantize(values.bfloat16(), scales)
    else:
        block = fp8_block.BLOCK if kind == "fp8" else fp8_block.ROW_BLOCK
        codes = fp8_block.requantize(values.bfloat16(), scales, block)
    return {f"{stem}.weight": codes, f"{stem}.scale": scales}


def shard_number(stem: str) -> int:
    """Shard of a tensor, from 1, in the order of the release."""
    first, *rest = stem.split(".")
    if first == "layers":
        layer = int(rest[0])
        return {1: SHARDS - 1, 3: SHARDS}[layer] if rest[1] == "engram" else 3 + layer
    return {"embed": 2, "head": 3 + LAYERS, "norm": 3 + LAYERS, "mtp": 4 + LAYERS}.get(first, 1)


def write_checkpoint(
    folder: Path, config: dict[str, Any], specs: dict[str, Spec], values: dict[str, Tensor]
) -> None:
    """Write shards, index and config.json; a tokenizer is not touched.

    Args:
        folder: where to.
        config: the model's configuration.
        specs: every tensor, by stem; routed experts as stacks.
        values: fp32 weights under the same stems.
    """
    shards: dict[int, dict[str, Tensor]] = {}
    for stem, spec in specs.items():
        own = shards.setdefault(shard_number(stem), {})
        weight = values[stem].detach().cpu()
        if spec.kind != "mxfp4":
            own |= stored(stem, spec.kind, weight)
            continue
        block, matrix = stem.rsplit(".", 1)
        for expert, one in enumerate(weight):
            own |= stored(f"{block}.{expert}.{matrix}", spec.kind, one)
    names, size = {}, 0
    for number, tensors in sorted(shards.items()):
        file = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        ordered = {name: tensors[name].contiguous() for name in sorted(tensors)}
        write_tensors(folder / file, ordered, {"format": "pt"})
        names |= {name: file for name in ordered}
        size += sum(tensor.nbytes for tensor in ordered.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    for file, content in (("model.safetensors.index.json", index), ("config.json", config)):
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
