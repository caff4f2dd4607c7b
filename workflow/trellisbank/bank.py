# SPDX-License-Identifier: Apache-2.0
"""The bank: encoded experts by content key, independent of any recipe.

One file holds one (layer, expert, matrix group, rate): the EXL3 tensors of its matrices and,
in its metadata, the ledger entry that was measured while encoding them and a BLAKE3 hash of every
tensor. A hit therefore reproduces the ledger byte for byte. Files never change once written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from trellisbank.errors import CheckpointError, FormatError
from trellisbank.files import canonical_json, digest_json, loads_json
from trellisbank.formats.trellis import PARTS, matrix_tensors
from trellisbank.safetensors_io import (
    DTYPE_NAMES,
    Header,
    TensorInfo,
    read_header,
    read_tensor,
    tensor_bytes,
    write_tensors,
)

GROUPS: dict[str, tuple[str, ...]] = {"gate_up": ("w1", "w3"), "down": ("w2",)}
"""The matrix groups of an expert, each with its matrices in the order of encoding."""

MAKE_AGAIN = (
    "remove the file and the ledgers that name its key (encoded/*/*.json), then run the workflow "
    "again: the expert is encoded anew, with the same bytes"
)


def expert_key(
    weights: Mapping[str, str],
    captures: str,
    rate: int,
    parameters: Mapping[str, Any],
    encoder: str,
    encoder_version: int,
    device_class: str,
) -> str:
    """Return the bank key of one expert's matrix group at one rate.

    The key speaks of everything that decides the encoded bytes, so that a changed setting can never
    meet a stale file.

    Args:
        weights: Hash of each source tensor of the group (codes and scales) by its full name. The
            names belong to the key: the encoder draws its signs from them.
        captures: Hash of the layer's calibration captures, all splits.
        rate: Bits a weight of the trellis.
        parameters: Encoder settings (damping, codebook, fallback policy and so on), JSON values.
        encoder: Name of the encoder.
        encoder_version: Rises when the encoder's bytes change.
        device_class: Device and instruction set, as far as the encoder's bytes depend on them.

    Returns:
        64 hexadecimal digits.
    """
    return digest_json(
        {
            "weights": dict(weights),
            "captures": captures,
            "rate": rate,
            "parameters": dict(parameters),
            "encoder": encoder,
            "encoder_version": encoder_version,
            "device_class": device_class,
        }
    )


def _layout_fault(tensors: Mapping[str, TensorInfo], entry: Mapping[str, Any]) -> str | None:
    """Say why the tensors are not those of the entry's group at its rate; None if they are."""
    group, rate = entry.get("group"), entry.get("rate")
    if group not in GROUPS or not isinstance(rate, int):
        return f"group {group!r} at rate {rate!r} in the ledger entry"
    names = {f"{matrix}.{part}" for matrix in GROUPS[group] for part in PARTS}
    if set(tensors) != names:
        return f"tensors {sorted(tensors)} for group {group}"
    for matrix in GROUPS[group]:
        rows = tensors[f"{matrix}.suh"].shape
        columns = tensors[f"{matrix}.svh"].shape
        if len(rows) != 1 or len(columns) != 1:
            return f"{matrix}.suh {rows} and {matrix}.svh {columns}"
        for part, (dtype, shape) in matrix_tensors(rows[0], columns[0], rate).items():
            info = tensors[f"{matrix}.{part}"]
            if (info.dtype, info.shape) != (dtype, shape):
                return f"{matrix}.{part} as {info.dtype} {info.shape}, not {dtype} {shape}"
    return None


class Bank:
    """A folder of encoded experts; any number of processes may read and write it at once."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        """Name the folder; it is made by the first `put`."""
        self.root = Path(root)

    def path(self, key: str) -> Path:
        """Return where the file of `key` lies, whether or not it is there.

        Raises:
            FormatError: `key` is no key.
        """
        if not re.fullmatch("[0-9a-f]{64}", key):
            raise FormatError(
                "A bank key is malformed.",
                file=self.root,
                expected="64 hexadecimal digits",
                found=repr(key),
                fix="restore the ledger that names it: run its encoding again",
            )
        return self.root / key[:2] / f"{key[2:]}.safetensors"

    def has(self, key: str) -> bool:
        """Say whether `key` can be used, from its header and size alone.

        A file that is truncated, damaged in its header or stands under another key's name counts as
        absent, so that it is encoded again and replaced.
        """
        try:
            self.entry(self.header(key))
        except FormatError:
            return False
        return True

    def put(self, key: str, tensors: Mapping[str, torch.Tensor], entry: Mapping[str, Any]) -> None:
        """Write one encoded matrix group, whole or not at all.

        Writers of one key write the same bytes, each beside the final name, and whoever renames
        last wins; nobody waits.

        Args:
            key: From `expert_key`.
            tensors: `{matrix}.{trellis,suh,svh,mul1}` for the matrices of the entry's group:
                int16 [k/16, n/16, 16 rate], float16 [k], float16 [n], int32 [].
            entry: Ledger entry, JSON values; its `key` is `key`.

        Raises:
            FormatError: The tensors are not those that the entry names.
        """
        infos = {
            name: TensorInfo(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), 0, 0)
            for name, tensor in tensors.items()
        }
        fault = _layout_fault(infos, entry)
        if fault is None and entry.get("key") != key:
            fault = f"key {entry.get('key')} in the ledger entry"
        if fault is not None:
            raise FormatError(
                "An encoded expert does not fit its ledger entry.",
                file=self.path(key),
                expected="the tensors of the entry's group, rate and key",
                found=fault,
                fix="report this: the encoder handed over something else than it measured",
            )
        ordered = dict(sorted(tensors.items()))
        metadata = {
            "blake3": canonical_json(
                {name: blake3(tensor_bytes(t)).hexdigest() for name, t in ordered.items()}
            ),
            "entry": canonical_json(dict(entry)),
        }
        write_tensors(self.path(key), ordered, metadata)

    def header(self, key: str) -> Header:
        """Return the checked header of `key`'s file; no tensor is read.

        Raises:
            FormatError: Missing, truncated, or with a header that cannot be read.
        """
        try:
            return read_header(self.path(key))
        except CheckpointError as trouble:
            missing = not self.path(key).exists()
            raise FormatError(
                "The bank lacks an encoded expert." if missing else "A bank file is damaged.",
                file=self.path(key),
                expected="a whole safetensors file",
                found="no such file" if missing else trouble.what,
                fix=MAKE_AGAIN,
            ) from trouble

    def entry(self, header: Header) -> dict[str, Any]:
        """Return the ledger entry in a bank file's header.

        Raises:
            FormatError: No entry, an entry of another key, or tensors that do not fit it.
        """
        try:
            entry = loads_json(header.metadata["entry"])
            fault = _layout_fault(header.tensors, entry)
            if fault is None and header.path != self.path(entry["key"]):
                fault = f"the entry of key {entry['key']}"
        except (KeyError, ValueError, AttributeError, TypeError) as trouble:
            fault = f"no ledger entry ({trouble!r})"
        if fault is not None:
            raise FormatError(
                "A bank file does not hold what its name says.",
                file=header.path,
                expected="the tensors and the ledger entry of its key",
                found=fault,
                fix=MAKE_AGAIN,
            )
        return dict(entry)

    def tensor(self, header: Header, name: str) -> torch.Tensor:
        """Read one tensor of a bank file and check it against the hash written with it.

        Raises:
            FormatError: The bytes changed since they were written.
        """
        tensor = read_tensor(header, name)
        try:
            expected = loads_json(header.metadata["blake3"])[name]
        except (KeyError, ValueError, TypeError):
            expected = None
        found = blake3(tensor_bytes(tensor)).hexdigest()
        if found != expected:
            raise FormatError(
                "A bank file changed since it was written.",
                file=header.path,
                tensor=name,
                expected=f"blake3 {expected}",
                found=f"blake3 {found}",
                fix=MAKE_AGAIN,
            )
        return tensor

    def get(self, key: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Read one encoded matrix group, every tensor checked against its hash.

        Returns:
            The tensors as given to `put` and the ledger entry.

        Raises:
            FormatError: Missing, truncated or changed.
        """
        header = self.header(key)
        entry = self.entry(header)
        return {name: self.tensor(header, name) for name in header.tensors}, entry
