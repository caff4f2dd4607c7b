# SPDX-License-Identifier: Apache-2.0
"""Safetensors files: untrusted headers checked by hand, data by byte range, streamed writing.

A file is an 8-byte little-endian header length, a JSON header and a data area without gaps
(safetensors format, https://github.com/huggingface/safetensors). The header is read here rather
than by the library because nothing may be allocated, and nothing believed, before it is checked.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trellisbank.errors import CheckpointError
from trellisbank.files import BLOCK_BYTES, atomic_write, canonical_json, loads_json

HEADER_LIMIT_BYTES = 100_000_000

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "F32": torch.float32,
    "I64": torch.int64,
    "F64": torch.float64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: safetensors dtype name, shape, first byte in the file, bytes."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A checked header: every range lies inside the file and none overlaps another."""

    path: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    size: int


@dataclass(frozen=True)
class Part:
    """One tensor to write: `data` yields its bytes, in any number of pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], Iterable[bytes | memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes that `data` must yield."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _tensor_info(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    def refuse(what: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(
            what,
            file=path,
            tensor=name,
            expected=expected,
            found=found,
            fix="download the shard again and compare its sha256 with the published one",
        )

    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise refuse("A header entry is malformed.", "dtype, shape, data_offsets", entry)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise refuse("A tensor has a dtype that does not belong here.", sorted(DTYPES), dtype)
    if not isinstance(shape, list) or len(shape) > 8 or not all(map(_is_count, shape)):
        raise refuse("A tensor has an impossible shape.", "at most 8 non-negative sizes", shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        raise refuse("A tensor has impossible offsets.", "two non-negative offsets", offsets)
    begin, end = offsets
    nbytes = prod(shape) * DTYPES[dtype].itemsize
    if end - begin != nbytes:
        raise refuse(
            "A tensor's byte range does not fit its shape.",
            f"{nbytes} bytes for {dtype} {shape}",
            f"{end - begin} bytes",
        )
    return TensorInfo(dtype, tuple(shape), start + begin, nbytes)


def read_header(path: str | os.PathLike[str]) -> Header:
    """Read and check the header of a safetensors file without touching its data.

    Args:
        path: The file. Its header may have at most 100 MB.

    Returns:
        The checked header; tensors in the order of their bytes.

    Raises:
        CheckpointError: The file is missing or truncated, or its header is malformed: wrong JSON,
            unknown dtype, range outside the file, overlap, gap, name twice.
    """
    path = Path(path)
    again = "download the shard again and compare its sha256 with the published one"
    try:
        with open(path, "rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            prefix = handle.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - 8):
                raise CheckpointError(
                    "A safetensors file has an impossible header length.",
                    file=path,
                    expected=f"2 to {min(HEADER_LIMIT_BYTES, max(size - 8, 0))} bytes",
                    found=f"{length} bytes in a file of {size}",
                    fix=again,
                )
            text = handle.read(length)
    except OSError as trouble:
        raise CheckpointError(
            "A safetensors file cannot be read.", file=path, found=trouble.strerror, fix=again
        ) from trouble
    try:
        table = loads_json(text)
    except (ValueError, RecursionError) as trouble:
        raise CheckpointError(
            "A safetensors header is not JSON.", file=path, found=str(trouble), fix=again
        ) from trouble
    if not isinstance(table, dict):
        raise CheckpointError(
            "A safetensors header holds no object.",
            file=path,
            found=type(table).__name__,
            fix=again,
        )
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(
            "A safetensors header has malformed metadata.",
            file=path,
            expected="an object of strings",
            fix=again,
        )
    start = 8 + length
    found = {name: _tensor_info(path, name, entry, start) for name, entry in table.items()}
    tensors = dict(sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)))
    end = start
    for name, info in tensors.items():
        if info.offset != end:
            raise CheckpointError(
                "A safetensors file has overlapping tensors or a gap between them.",
                file=path,
                tensor=name,
                expected=f"first byte at {end}",
                found=f"first byte at {info.offset}",
                fix=again,
            )
        end += info.nbytes
    if end != size:
        raise CheckpointError(
            "A safetensors file does not have the size that its header states.",
            file=path,
            expected=f"{end} bytes",
            found=f"{size} bytes",
            fix=again,
        )
    return Header(path, tensors, metadata, size)


def tensor_info(header: Header, name: str) -> TensorInfo:
    """Return where `name` lies; CheckpointError if the file does not hold it."""
    try:
        return header.tensors[name]
    except KeyError:
        raise CheckpointError(
            "A file does not hold a tensor that is needed.",
            file=header.path,
            tensor=name,
            expected="the tensor",
            found=f"{len(header.tensors)} other tensors",
            fix="check that index and shards come from one download",
        ) from None


def _as_tensor(data: np.ndarray[Any, Any], dtype: str, shape: Sequence[int]) -> torch.Tensor:
    if not data.size:  # numpy gives it a stride that torch cannot view
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    return torch.from_numpy(data).view(DTYPES[dtype]).reshape(tuple(shape))


def read_tensor(header: Header, name: str) -> torch.Tensor:
    """Read one tensor by its byte range, in the dtype in which it is stored.

    Raises:
        CheckpointError: No such tensor, or the file ends before its last byte.
    """
    info = tensor_info(header, name)
    data = np.fromfile(header.path, dtype=np.uint8, count=info.nbytes, offset=info.offset)
    if data.size != info.nbytes:
        raise CheckpointError(
            "A file became shorter than its header states.",
            file=header.path,
            tensor=name,
            expected=f"{info.nbytes} bytes",
            found=f"{data.size} bytes",
            fix="stop whatever writes to the checkpoint and download the shard again",
        )
    return _as_tensor(data, info.dtype, info.shape)


def read_rows(header: Header, name: str, ids: torch.Tensor) -> torch.Tensor:
    """Read some rows (first axis) of a tensor by byte range; the rest is never touched.

    Args:
        header: Header of the file.
        name: Tensor of at least one axis.
        ids: int64 [n], each inside the tensor; sorted ids read fastest.

    Returns:
        Tensor [n, ...] in the stored dtype.

    Raises:
        CheckpointError: No such tensor, or an id outside it.
    """
    info = tensor_info(header, name)
    rows = info.shape[0] if info.shape else 0
    wanted = ids.numpy()
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < rows):
        raise CheckpointError(
            "A row is wanted that its table does not have.",
            file=header.path,
            tensor=name,
            expected=f"ids 0 to {rows - 1}",
            found=f"ids {wanted.min()} to {wanted.max()}",
            fix="check the Engram sizes of config.json against the shard",
        )
    table = map_tensor(header, name)
    if not wanted.size:
        return table[:0]
    # Indexing as bytes: torch cannot index FP8.
    bytes_of_rows = table.reshape(rows, -1).view(torch.uint8)[ids]
    return bytes_of_rows.view(table.dtype).reshape(wanted.size, *info.shape[1:])


def map_tensor(header: Header, name: str) -> torch.Tensor:
    """Map a tensor of a file into memory: only the pages that are read take any.

    Writing to the tensor changes the process's copy of a page, never the file.

    Raises:
        CheckpointError: No such tensor.
    """
    info = tensor_info(header, name)
    if not info.nbytes:
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    data = np.memmap(
        header.path, dtype=np.uint8, mode="c", offset=info.offset, shape=(info.nbytes,)
    )
    return _as_tensor(data, info.dtype, info.shape)


def read_file(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """Read all tensors of a (small) file of ours: a state, a capture, a bank entry."""
    header = read_header(path)
    return {name: read_tensor(header, name) for name in header.tensors}


def raw_blocks(header: Header, name: str) -> Iterator[bytes]:
    """Yield the stored bytes of a tensor in blocks of at most 4 MiB."""
    info = tensor_info(header, name)
    with open(header.path, "rb") as handle:
        handle.seek(info.offset)
        left = info.nbytes
        while left:
            block = handle.read(min(left, BLOCK_BYTES))
            if not block:
                raise CheckpointError(
                    "A file became shorter than its header states.",
                    file=header.path,
                    tensor=name,
                    fix="stop whatever writes to the checkpoint and download the shard again",
                )
            left -= len(block)
            yield block


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor as safetensors stores them (row-major, little-endian)."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def write_parts(
    path: str | os.PathLike[str], parts: Sequence[Part], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file part by part, in the order given, whole or not at all.

    Memory is one piece of one part. The header is padded with blanks to a multiple of 8 bytes.

    Raises:
        CheckpointError: A part yields another number of bytes than its shape has.
    """
    table: dict[str, Any] = {}
    if metadata:
        table["__metadata__"] = dict(sorted(metadata.items()))
    end = 0
    for part in parts:
        table[part.name] = {
            "data_offsets": [end, end + part.nbytes],
            "dtype": part.dtype,
            "shape": list(part.shape),
        }
        end += part.nbytes
    # canonical_json sorts the names; readers order tensors by their offsets.
    header = canonical_json(table).encode()
    header += b" " * (-len(header) % 8)
    with atomic_write(path) as handle:
        handle.write(struct.pack("<Q", len(header)) + header)
        for part in parts:
            begin = handle.tell()
            for piece in part.data():
                handle.write(piece)
            if handle.tell() - begin != part.nbytes:
                raise CheckpointError(
                    "A tensor does not have the bytes that its shape asks for.",
                    file=path,
                    tensor=part.name,
                    expected=f"{part.nbytes} bytes",
                    found=f"{handle.tell() - begin} bytes",
                )


def tensor_part(name: str, tensor: torch.Tensor) -> Part:
    """Return the part that writes `tensor` under `name`."""
    return Part(
        name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: [tensor_bytes(tensor)]
    )


def write_tensors(
    path: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write tensors held in memory, in the order of the mapping, whole or not at all."""
    write_parts(path, [tensor_part(name, tensor) for name, tensor in tensors.items()], metadata)
