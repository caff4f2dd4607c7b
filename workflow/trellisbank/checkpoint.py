# SPDX-License-Identifier: Apache-2.0
"""A source or a release as one thing: configuration, tensor names, weights whatever their format.

Nothing in a checkpoint is trusted: names never lead out of its folder, headers are checked before
their tensors are read, and no code or pickle of it is ever run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from trellisbank.bank import GROUPS, Bank
from trellisbank.errors import CheckpointError, FormatError
from trellisbank.files import read_json
from trellisbank.formats import bank_plan, fp8_block, mxfp4, trellis
from trellisbank.safetensors_io import Header, TensorInfo, read_header, read_rows, read_tensor

MODEL_TYPE = "deepseek_v41"
INDEX = "model.safetensors.index.json"

STORAGE = "quantization_config.json"
REPACK_REPORT = "repack-report.json"
RELEASE_FILES = {"config.json", INDEX, STORAGE, REPACK_REPORT}
"""Files that a release writes itself."""

WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack"}
"""Files that hold weights: never copied unless the index names them."""


def expert_stem(layer: int, expert: int, matrix: str) -> str:
    """Return the name, up to its last part, of matrix `w1`, `w2` or `w3` of a routed expert."""
    return f"layers.{layer}.ffn.experts.{expert}.{matrix}"


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint; headers are read once, tensors each time they are asked for."""

    path: Path
    config: dict[str, Any]
    weight_map: dict[str, str]
    _headers: dict[str, Header] = field(default_factory=dict, repr=False, compare=False)

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self.weight_map)

    @property
    def shards(self) -> list[str]:
        """File names of all shards, sorted."""
        return sorted(set(self.weight_map.values()))

    def has(self, name: str) -> bool:
        """Whether the index lists the tensor."""
        return name in self.weight_map

    def shard_of(self, name: str) -> str:
        """File name of the shard that holds the tensor; CheckpointError if the index lacks it."""
        try:
            return self.weight_map[name]
        except KeyError:
            raise CheckpointError(
                "A tensor is missing from the index.",
                file=self.path / INDEX,
                tensor=name,
                expected="the tensor in weight_map",
                found=f"{len(self.weight_map)} other tensors",
                fix="check that config.json and index belong to one checkpoint",
            ) from None

    def header(self, shard: str) -> Header:
        """Checked header of a shard."""
        if shard not in self._headers:
            self._headers[shard] = read_header(self.path / shard)
        return self._headers[shard]

    def info(self, name: str) -> TensorInfo:
        """Dtype, shape and place of a tensor, from its shard's header."""
        header = self.header(self.shard_of(name))
        if name not in header.tensors:
            raise CheckpointError(
                "The index names a shard that does not hold the tensor.",
                file=header.path,
                tensor=name,
                expected="the tensor in the shard's header",
                found=f"{len(header.tensors)} other tensors",
                fix="check that index and shards come from one download",
            )
        return header.tensors[name]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor exactly as stored."""
        self.info(name)
        return read_tensor(self.header(self.shard_of(name)), name)

    def stored_as(self, stem: str) -> str:
        """Format of a weight: `exl3`, `mxfp4`, `fp8_block` or `plain`."""
        if self.has(f"{stem}.trellis"):
            return "exl3"
        dtype = self.info(f"{stem}.weight").dtype
        return {"I8": "mxfp4", "F8_E4M3": "fp8_block"}.get(dtype, "plain")

    def weight(self, stem: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A weight in working precision.

        Args:
            stem: Name without its last part, for example `layers.3.attn.wq_a`.
            device: Where it goes; what is stored is moved there first, so that codes of 4 and 8
                bits travel and not what they stand for.

        Returns:
            [out, in]: bf16, exact for MXFP4 and FP8 and rounded once from fp32 for EXL3; a plain
            tensor keeps its dtype.

        Raises:
            CheckpointError: Missing tensor.
            FormatError: Codes or scales that do not follow their format.
        """
        kind = self.stored_as(stem)
        try:
            if kind == "exl3":
                return self._exl3(stem).to(device)
            weight = self.tensor(f"{stem}.weight").to(device)
            if kind == "plain":
                return weight
            scale = self.tensor(f"{stem}.scale").to(device)
            decode = mxfp4.dequantize if kind == "mxfp4" else fp8_block.dequantize
            return decode(weight, scale)
        except FormatError as trouble:
            raise self._located(trouble, stem) from trouble

    def rows(self, stem: str, ids: torch.Tensor) -> torch.Tensor:
        """Rows of an FP8 table (Engram) by byte range; the table is never read whole.

        Args:
            stem: Name without its last part.
            ids: int64 [n].

        Returns:
            bf16 [n, width].

        Raises:
            CheckpointError: An id outside the table.
            FormatError: Codes or scales that do not follow their format.
        """
        parts = []
        for name in (f"{stem}.weight", f"{stem}.scale"):
            self.info(name)
            parts.append(read_rows(self.header(self.shard_of(name)), name, ids))
        try:
            return fp8_block.dequantize(parts[0], parts[1], fp8_block.ROW_BLOCK)
        except FormatError as trouble:
            raise self._located(trouble, stem) from trouble

    def _exl3(self, stem: str) -> torch.Tensor:
        names = ["trellis", "suh", "svh"]
        names += [name for name in trellis.MARKERS if self.has(f"{stem}.{name}")]
        parts = {name: self.tensor(f"{stem}.{name}") for name in names}
        weight = trellis.decode(*trellis.stored_matrix(parts))
        return torch.from_numpy(weight).T.to(torch.bfloat16).contiguous()

    def _located(self, trouble: FormatError, stem: str) -> FormatError:
        shard = next(shard for name, shard in self.weight_map.items() if name.startswith(stem))
        return trouble.located(self.path / shard, stem)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint folder: read and check config.json and the index, no tensor yet.

    Raises:
        CheckpointError: A file is missing or malformed, the architecture is not one we know, or
            the index names a file outside the folder; a bank-plan release lacks an expert.
    """
    path = Path(path)
    config = read_json(path / "config.json")
    if config.get("model_type") != MODEL_TYPE:
        raise CheckpointError(
            "The checkpoint has an architecture that this project does not know.",
            file=path / "config.json",
            tensor="model_type",
            expected=MODEL_TYPE,
            found=config.get("model_type"),
            fix="point `source` at a DeepSeek-V4.1-Flash-style checkpoint",
        )
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            "The index has no weight_map.",
            file=path / INDEX,
            expected="an object from tensor name to shard file",
            found=type(weight_map).__name__,
            fix="restore the index from the checkpoint's origin",
        )
    for name, shard in weight_map.items():
        plain = isinstance(shard, str) and shard == os.path.basename(shard) and "\0" not in shard
        if not plain or not shard.endswith(".safetensors") or shard.startswith("."):
            raise CheckpointError(
                "The index names a shard outside the checkpoint's folder.",
                file=path / INDEX,
                tensor=name,
                expected="the plain name of a .safetensors file beside the index",
                found=shard,
                fix="do not use this checkpoint before you know where it comes from",
            )
    checkpoint = Checkpoint(path, config, weight_map)
    if (path / bank_plan.PLAN).exists():
        _add_banks(checkpoint)
    return checkpoint


def overlay(source: Checkpoint, bank: Bank, keys: Mapping[tuple[int, int, str], str]) -> Checkpoint:
    """Return the source with some experts as the bank has encoded them; nothing is written.

    Every tensor that is taken from the bank is checked against its hash here, once.

    Args:
        source: What all else is read from; not changed.
        bank: Where the encoded experts are.
        keys: (layer, expert, matrix group) -> bank key.

    Raises:
        FormatError: A bank file is missing or changed.
        CheckpointError: A key belongs to another expert or group.
    """
    changed = replace(source, weight_map=dict(source.weight_map), _headers=dict(source._headers))
    for (layer, expert, group), key in keys.items():
        header = bank.header(key)
        entry = bank.entry(header)
        place = (entry["layer"], entry["expert"], entry["group"])
        if place != (layer, expert, group):
            raise CheckpointError(
                "A bank key belongs to another expert.",
                file=header.path,
                layer=layer,
                expert=expert,
                expected=f"layer {layer} expert {expert} {group}",
                found="layer {} expert {} {}".format(*place),
                fix="take the keys from the ledgers of this source",
            )
        for matrix in GROUPS[group]:
            for part in ("weight", "scale"):
                changed.weight_map.pop(f"{expert_stem(layer, expert, matrix)}.{part}", None)
        named = {}
        for name, info in header.tensors.items():
            bank.tensor(header, name)
            matrix, part = name.split(".")
            named[f"{expert_stem(layer, expert, matrix)}.{part}"] = info
        changed._headers[key] = replace(header, tensors=named)
        changed.weight_map.update(dict.fromkeys(named, key))
    return changed


def _add_banks(checkpoint: Checkpoint) -> None:
    """Give a bank-plan release the tensors of its banks; the index lists the native shards."""
    gate = re.compile(r"layers\.(\d+)\.ffn\.gate\.weight")
    experts = {
        int(match[1]): checkpoint.info(name).shape[0]
        for name in checkpoint.names
        if (match := gate.fullmatch(name))
    }
    plan = bank_plan.read_bank_plan(checkpoint.path)
    found, headers = bank_plan.locate(plan, checkpoint.path, experts, checkpoint.weight_map)
    checkpoint.weight_map.update(found)
    checkpoint._headers.update(headers)


def check_shards(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint of which a shard is missing.

    Raises:
        CheckpointError: Naming the first one.
    """
    missing = [shard for shard in checkpoint.shards if not (checkpoint.path / shard).exists()]
    if missing:
        raise CheckpointError(
            "A shard that the index names is missing.",
            file=checkpoint.path / missing[0],
            expected=f"{len(checkpoint.shards)} shards",
            found=f"{len(missing)} of them missing",
            fix="complete the download",
        )


def companions(checkpoint: Checkpoint) -> list[str]:
    """Return the files of a checkpoint that a release copies: all that hold no weights.

    Folders are walked; those whose name begins with a dot (version control, download caches) are
    left out, and so are weights outside the index and the files that a release writes itself.
    A link must end inside the folder or, in a download cache laid out as
    `snapshots/<revision>`, in the `blobs` folder beside `snapshots`.

    Returns:
        Paths relative to the checkpoint, sorted.

    Raises:
        CheckpointError: A link that leads elsewhere, or something that is neither file nor folder.
    """
    root = checkpoint.path.resolve()
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parents[1] / "blobs")
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files + [name for name in folders if Path(folder, name).is_symlink()]:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            if relative in RELEASE_FILES or path.suffix in WEIGHT_SUFFIXES:
                continue
            inside = any(path.resolve().is_relative_to(place) for place in allowed)
            if not inside or not path.is_file():
                raise CheckpointError(
                    "A checkpoint holds something that a release cannot copy.",
                    file=path,
                    expected="a regular file inside the checkpoint's folder",
                    found="a link that leads out of it" if not inside else "no regular file",
                    fix="put a copy of the file in its place, or remove it",
                )
            found.append(relative)
    return sorted(found)
