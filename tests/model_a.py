# SPDX-License-Identifier: Apache-2.0
"""The tiny random checkpoint and what the published inference code makes of it."""

import tarfile
import tempfile
from functools import cache
from pathlib import Path

from torch import Tensor

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.forward import State
from trellisbank.safetensors_io import read_file

ARCHIVE = Path(__file__).parent / "data" / "model-a" / "model-a.tar.xz"
LAYERS = range(6)
LENGTH = 96


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="model-a-")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder.name, filter="data")
    return folder


@cache
def checkpoint() -> Checkpoint:
    return open_checkpoint(Path(_folder().name) / "checkpoint")


@cache
def config() -> ModelConfig:
    return model_config(checkpoint().config)


@cache
def golden() -> dict[str, Tensor]:
    return read_file(Path(_folder().name) / "golden.safetensors")


def recorded(layer: int) -> State:
    """The recorded state of row 0 after a layer."""
    held = {
        "stream": golden()[f"layers.{layer}.stream"],
        "pre_mix": golden()[f"layers.{layer}.pre_mix"],
    }
    for before in range(layer + 1):
        for name, key in (
            ("compressed_kv", "compress_kv"),
            ("index_key", "index_k"),
            ("selection", "topk_idxs"),
            ("candidates", "candidates"),
        ):
            if (tensor := golden().get(f"layers.{before}.{key}")) is not None:
                held[name] = tensor
    if "selection" in held:
        chosen = held["selection"]
        held["selection"] = chosen.where(chosen < 0, chosen - LENGTH)
    if "candidates" in held:
        held["candidates"] = held["candidates"].bool()
    return State(**held)
