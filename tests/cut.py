# SPDX-License-Identifier: Apache-2.0
"""A cut of a checkpoint that still runs, its first layers and experts: tests of the workflow."""

import re
import shutil
from pathlib import Path

from trellisbank.checkpoint import INDEX, open_checkpoint
from trellisbank.files import read_json, write_json
from trellisbank.safetensors_io import write_tensors

TINY = Path(__file__).parents[1] / "resources/tiny/checkpoint"


def cut_checkpoint(target: Path, source: Path = TINY, layers: int = 2, experts: int = 4) -> Path:
    """Write the first layers and experts of a checkpoint, without its draft layers."""
    opened = open_checkpoint(source)
    target.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target)
    config = read_json(source / "config.json")
    text = config["text_config"]
    engram = [layer for layer in text["engram_layer_ids"] if layer < layers]
    text |= {
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": 0,
        "n_routed_experts": experts,
        "compress_ratios": text["compress_ratios"][:layers],
        "engram_layer_ids": engram,
        "engram_num_embeddings": text["engram_num_embeddings"][: len(engram)],
        "candidate_source_layer_id": -1,
    }
    for key in ("kv_source_layer_ids", "index_source_layer_ids"):
        text[key] = [layer for layer in text[key] if layer < layers]
    write_json(target / "config.json", config)
    shards: dict[str, dict] = {}
    for name in opened.names:
        layer = re.match(r"layers\.(\d+)\.", name)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        if (
            name.startswith("mtp.")
            or (layer and int(layer[1]) >= layers)
            or (expert and int(expert[1]) >= experts)
        ):
            continue
        tensor = opened.tensor(name)
        if ".ffn.gate." in name:
            tensor = tensor[:experts].contiguous()
        shards.setdefault(opened.shard_of(name), {})[name] = tensor
    for shard, tensors in shards.items():
        write_tensors(target / shard, tensors)
    write_json(
        target / INDEX,
        {
            "metadata": {
                "total_size": sum(t.nbytes for ts in shards.values() for t in ts.values())
            },
            "weight_map": {name: shard for shard, ts in shards.items() for name in ts},
        },
    )
    return target
