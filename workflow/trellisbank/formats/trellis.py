# SPDX-License-Identifier: Apache-2.0
"""EXL3 trellis storage: codebooks, packing, tile order and decoding.

A weight matrix ``W`` of shape ``[k, n]`` (input channels, output channels) is stored as

    W = diag(suh) . P_k . Q . P_n . diag(svh)

with ``P_m`` the block-diagonal Sylvester-Hadamard matrix of ``m / 128`` blocks ``H128 / sqrt(128)``
and ``Q`` decoded from 16x16 tiles. A tile is a ring of 256 positions; position ``i`` contributes
``rate`` fresh bits, and the 16 stream bits that end with them are its state, which a fixed table
turns into an fp16 value.

Source: exllamav3 1.6.5, read and run on an H200 (docs/exl3.md). States and ``Q`` are exact; ``W``
is computed in fp32 and so lies closer to the formula than exllamav3's own half-precision paths.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from trellisbank.errors import FormatError

Element = TypeVar("Element", bound=np.generic)

BLOCK = 128
"""Sizes of a matrix are multiples of this: one Hadamard block."""

TILE = 16
"""Rows and columns of a tile."""

RING = 256
"""Positions of a tile's ring, one for each weight."""

RATES = tuple(range(1, 9))
"""Integer bits a weight that the format knows."""

MARKERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}
"""Value of the int32 scalar ``{stem}.{codebook}`` (as uint32); 3INST has no marker."""

PARTS = ("trellis", "suh", "svh", "mul1")
"""Tensors of one matrix as this project writes it (mul1 codebook)."""

HADAMARD_NORM = np.float32(0.08838834764831845)
"""1 / sqrt(128), applied once a side."""


def _element_of_ring() -> npt.NDArray[np.int64]:
    """Row-major element of a 16x16 tile for every ring position (tensor-core fragment order)."""
    i = np.arange(RING)
    thread, j = i // 8, i % 8
    row = 2 * (thread % 4) + (j & 1) + 8 * ((j >> 1) & 1)
    column = thread // 4 + 8 * (j >> 2)
    element: npt.NDArray[np.int64] = row * TILE + column
    return element


RING_TO_ELEMENT = _element_of_ring()
"""``RING_TO_ELEMENT[i]`` is the row-major element (0..255) at ring position ``i``."""

ELEMENT_TO_RING = np.argsort(RING_TO_ELEMENT)
"""The inverse permutation."""


@cache
def codebook(name: str) -> npt.NDArray[np.float16]:
    """Values of all 65,536 states, fp16 ``[65536]``, read-only.

    Args:
        name: ``mul1`` (what Trellisbank writes), ``mcg`` or ``3inst``.

    Raises:
        FormatError: for an unknown name.
    """
    state = np.arange(1 << 16, dtype=np.uint32)
    if name == "mul1":
        # The bytes of the product sum to at most 1020, so 0x6400 + sum is the half 1024 + sum; the
        # multiply-add is exact in float64 and is rounded to half once.
        x = state * np.uint32(MARKERS["mul1"])
        total = sum((x >> np.uint32(shift)) & np.uint32(0xFF) for shift in (0, 8, 16, 24))
        scale, offset = (
            np.array([0x1EEE, 0xC931], dtype=np.uint16).view(np.float16).astype(np.float64)
        )
        values = ((1024.0 + np.asarray(total)) * scale + offset).astype(np.float16)
    elif name in ("mcg", "3inst"):
        if name == "mcg":
            x = state * np.uint32(MARKERS["mcg"])
        else:
            x = state * np.uint32(89226354) + np.uint32(64248484)
        halves = (
            ((x & np.uint32(0x8FFF8FFF)) ^ np.uint32(0x3B603B60)).view(np.float16).reshape(-1, 2)
        )
        values = halves.astype(np.float32).sum(axis=1).astype(np.float16)
    else:
        raise FormatError(
            "unknown codebook",
            expected="mul1, mcg or 3inst",
            found=name,
            fix="use a known codebook",
        )
    values.flags.writeable = False
    table: npt.NDArray[np.float16] = values
    return table


def check_marker(name: str, value: int) -> None:
    """Refuse a marker scalar that does not state a codebook's own multiplier.

    Args:
        name: the marker's name, ``mul1`` or ``mcg`` (a tensor without marker is 3INST).
        value: the stored scalar, int32 or uint32.

    Raises:
        FormatError: for another name or value.
    """
    expected = MARKERS.get(name)
    if int(value) & 0xFFFFFFFF != expected:
        raise FormatError(
            f"wrong codebook marker {name}",
            expected="mul1 or mcg" if expected is None else f"0x{expected:08X}",
            found=f"0x{int(value) & 0xFFFFFFFF:08X}",
            fix="fetch the file again; a codebook with another multiplier is not supported",
        )


Stored = tuple[npt.NDArray[np.int16], npt.NDArray[np.float16], npt.NDArray[np.float16], str]
"""``trellis``, ``suh``, ``svh`` and the name of the codebook: the arguments of `decode`."""


def stored_matrix(tensors: Mapping[str, torch.Tensor]) -> Stored:
    """Take a matrix's tensors as they were read from a file.

    Args:
        tensors: ``trellis`` int16, ``suh`` and ``svh`` fp16, and the marker ``mul1`` or ``mcg``
            (int32, one element); without a marker the codebook is 3INST.

    Raises:
        FormatError: a tensor of another dtype, or a marker that is not its codebook's.
    """
    arrays = {}
    for name in ("trellis", "suh", "svh", *(name for name in MARKERS if name in tensors)):
        stored = tensors[name]
        expected = {"trellis": torch.int16, "suh": torch.float16, "svh": torch.float16}.get(name)
        if stored.dtype != (expected or torch.int32) or (not expected and stored.numel() != 1):
            raise FormatError(
                f"The EXL3 tensor {name} is of another kind.",
                expected=str(expected) if expected else "torch.int32, one element",
                found=f"{stored.dtype} {list(stored.shape)}",
                fix="fetch the file again; a sound one has no such tensor",
            )
        arrays[name] = stored.numpy()
    codebook_name = "3inst"
    for name in MARKERS.keys() & arrays.keys():
        check_marker(name, int(arrays[name].item()))
        codebook_name = name
    return arrays["trellis"], arrays["suh"], arrays["svh"], codebook_name


def matrix_tensors(k: int, n: int, rate: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Safetensors dtype and shape of each of `PARTS` for a ``[k, n]`` matrix at a rate."""
    return {
        "trellis": ("I16", (k // TILE, n // TILE, TILE * rate)),
        "suh": ("F16", (k,)),
        "svh": ("F16", (n,)),
        "mul1": ("I32", ()),
    }


def marker(name: str) -> npt.NDArray[np.int32]:
    """The int32 scalar to store beside a trellis of codebook ``name`` (``mul1`` or ``mcg``)."""
    return np.array(MARKERS[name], dtype=np.uint32).view(np.int32)


def check_sizes(k: int, n: int) -> None:
    """Refuse matrix sizes that the format cannot hold.

    Raises:
        FormatError: when ``k`` or ``n`` is not a positive multiple of 128.
    """
    if k <= 0 or n <= 0 or k % BLOCK or n % BLOCK:
        raise FormatError(
            "matrix sizes do not fit EXL3",
            expected=f"positive multiples of {BLOCK}",
            found=f"{k} x {n}",
            fix="leave this matrix as it is, or pad it with zeros to the next multiple",
        )


def rate_of(trellis: npt.NDArray[np.int16]) -> int:
    """Bits a weight of a packed trellis ``[..., 16 * rate]``.

    Raises:
        FormatError: for another dtype or a last axis that is not 16, 32, .. 128.
    """
    words = trellis.shape[-1] if trellis.ndim else 0
    if trellis.dtype != np.int16 or words % TILE or words // TILE not in RATES:
        raise FormatError(
            "not a packed trellis of an integer rate",
            expected="int16 with a last axis of 16 * K, K = 1..8",
            found=f"{trellis.dtype} {list(trellis.shape)}",
            fix="check the tensor's name and file; half-integer rates are not supported",
        )
    return words // TILE


def pack(states: npt.NDArray[np.uint16], rate: int) -> npt.NDArray[np.int16]:
    """Pack ring states ``uint16 [..., 256]`` to ``int16 [..., 16 * rate]``.

    Stream bits are most significant first within little-endian 32-bit words.

    Raises:
        FormatError: when the states are not a closed ring at this rate.
    """
    if states.dtype != np.uint16 or states.shape[-1:] != (RING,) or rate not in RATES:
        raise FormatError(
            "not states of rings",
            expected="uint16 [..., 256] and a rate of 1..8",
            found=f"{states.dtype} {list(states.shape)}, rate {rate}",
            fix="pass the encoder's states",
        )
    mask = np.uint16((1 << rate) - 1)
    symbols = states & mask
    if not np.array_equal(states, (np.roll(states, 1, axis=-1) << np.uint16(rate)) | symbols):
        raise FormatError(
            "states are not a closed ring",
            expected="state(i) = (state(i-1) << K | symbol) mod 65536, state(-1) = state(255)",
            found=f"another sequence at K = {rate}",
            fix="pass the rate that the states were encoded with",
        )
    shifts = np.arange(rate - 1, -1, -1, dtype=np.uint16)
    bits = ((symbols[..., None] >> shifts) & np.uint16(1)).astype(np.uint8)
    stream = np.packbits(bits.reshape(*states.shape[:-1], RING * rate), axis=-1)
    return stream.view(">u4").astype("<u4").view("<i2").astype(np.int16, copy=False)


def unpack(trellis: npt.NDArray[np.int16]) -> npt.NDArray[np.uint16]:
    """States ``uint16 [..., 256]`` in ring order of a packed trellis ``int16 [..., 16 * rate]``."""
    return _states(trellis, np.arange(RING))


def _states(
    trellis: npt.NDArray[np.int16], positions: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint16]:
    """States at the given ring positions, in their order."""
    rate = rate_of(trellis)
    words = np.ascontiguousarray(trellis).view("<u4").astype(np.uint32, copy=False)
    # 16 bits of the stream from `start` lie within 64: a word and the one after it.
    pairs = (words.astype(np.uint64) << np.uint64(32)) | np.roll(words, -1, axis=-1)
    start = ((positions + 1) * rate - 16) % (RING * rate)
    windows = np.take(pairs, start >> 5, axis=-1)
    windows >>= (48 - (start & 31)).astype(np.uint64)
    return windows.astype(np.uint16)


def _check_trellis(trellis: npt.NDArray[np.int16]) -> tuple[int, int]:
    """Sizes ``(k, n)`` of a matrix's trellis ``[k/16, n/16, 16 * rate]``."""
    rate_of(trellis)
    if trellis.ndim != 3:
        raise FormatError(
            "a trellis has three axes",
            expected="[k/16, n/16, 16 * K]",
            found=str(list(trellis.shape)),
            fix="check the tensor's name and file",
        )
    k, n = trellis.shape[0] * TILE, trellis.shape[1] * TILE
    check_sizes(k, n)
    return k, n


def decode_inner(
    trellis: npt.NDArray[np.int16], table: str | npt.NDArray[np.float16] = "mul1"
) -> npt.NDArray[np.float16]:
    """The inner matrix ``Q``, fp16 ``[k, n]``, exact.

    Args:
        trellis: int16 ``[k/16, n/16, 16 * rate]``.
        table: a codebook's name or its values.

    Raises:
        FormatError: for shapes, sizes or rates outside the format.
    """
    k, n = _check_trellis(trellis)
    values = codebook(table) if isinstance(table, str) else table
    inner = np.empty((k, n), dtype=np.float16)
    for rows in range(0, k, BLOCK):
        inner[rows : rows + BLOCK] = _inner_rows(
            trellis[rows // TILE : (rows + BLOCK) // TILE], values
        )
    return inner


def _inner_rows(
    trellis: npt.NDArray[np.int16], values: npt.NDArray[Element]
) -> npt.NDArray[Element]:
    """Rows of ``Q`` for a few tile rows, in the dtype of ``values``."""
    tile_rows, tile_columns, _ = trellis.shape
    tiles = values[_states(trellis, ELEMENT_TO_RING)].reshape(tile_rows, tile_columns, TILE, TILE)
    return tiles.transpose(0, 2, 1, 3).reshape(tile_rows * TILE, tile_columns * TILE)


def from_tiles(tiles: npt.NDArray[Element], k: int, n: int) -> npt.NDArray[Element]:
    """Matrix ``[k, n]`` of tiles in ring order ``[k/16 * n/16, 256]`` (tile rows first)."""
    elements = tiles[..., ELEMENT_TO_RING].reshape(k // TILE, n // TILE, TILE, TILE)
    return elements.transpose(0, 2, 1, 3).reshape(k, n)


def to_tiles(matrix: npt.NDArray[Element]) -> npt.NDArray[Element]:
    """Tiles in ring order ``[k/16 * n/16, 256]`` of a matrix ``[k, n]``."""
    k, n = matrix.shape
    elements = matrix.reshape(k // TILE, TILE, n // TILE, TILE).transpose(0, 2, 1, 3)
    return elements.reshape(-1, RING)[:, RING_TO_ELEMENT]


def _butterflies(x: npt.NDArray[np.float32]) -> None:
    """Unnormalised Walsh-Hadamard transform along axis 0 of ``[128, ...]``, in place."""
    half = 1
    while half < BLOCK:
        pairs = x.reshape(BLOCK // (2 * half), 2, half, *x.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        difference = low - high
        low += high
        high[...] = difference
        half *= 2


def hadamard128(x: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
    """``P . x`` along ``axis``: a Walsh-Hadamard transform of each 128 elements, over sqrt(128).

    Args:
        x: fp32, with a multiple of 128 elements along ``axis``.
        axis: the axis to transform.

    Returns:
        A new fp32 array of the same shape; twice the function gives ``x`` back (to rounding).
    """
    front = np.moveaxis(x, axis, 0)
    result = np.empty_like(x)
    target = np.moveaxis(result, axis, 0)
    for start in range(0, front.shape[0], BLOCK):
        block = np.array(front[start : start + BLOCK], dtype=np.float32, order="C")
        _butterflies(block)
        target[start : start + BLOCK] = block * HADAMARD_NORM
    return result


def decode(
    trellis: npt.NDArray[np.int16],
    suh: npt.NDArray[np.float16],
    svh: npt.NDArray[np.float16],
    codebook_name: str = "mul1",
) -> npt.NDArray[np.float32]:
    """The stored weight, fp32 ``[k, n]`` (input channels first).

    Works 128 rows at a time, so memory is the result and some megabytes.

    Args:
        trellis: int16 ``[k/16, n/16, 16 * rate]``.
        suh: fp16 ``[k]``, input scales with signs.
        svh: fp16 ``[n]``, output scales with signs.
        codebook_name: ``mul1``, ``mcg`` or ``3inst``.

    Raises:
        FormatError: for shapes, dtypes or sizes outside the format.
    """
    k, n = _check_trellis(trellis)
    for name, vector, size in (("suh", suh, k), ("svh", svh, n)):
        if vector.dtype != np.float16 or vector.shape != (size,):
            raise FormatError(
                f"{name} does not fit its trellis",
                expected=f"float16 [{size}]",
                found=f"{vector.dtype} {list(vector.shape)}",
                fix="fetch the file again or re-encode the tensor",
            )
    values = codebook(codebook_name).astype(np.float32)
    rows_scale = suh.astype(np.float32) / np.float32(BLOCK)  # both sides' 1 / sqrt(128), exact
    columns_scale = svh.astype(np.float32)
    weight = np.empty((k, n), dtype=np.float32)
    for start in range(0, k, BLOCK):
        rows = slice(start, start + BLOCK)
        block = _inner_rows(trellis[start // TILE : (start + BLOCK) // TILE], values).astype(
            np.float32
        )
        _butterflies(block)
        block *= rows_scale[rows, None]
        # The columns' transform runs on a transposed copy: numpy is slow on short inner loops.
        turned = np.ascontiguousarray(block.reshape(n, BLOCK).T)
        _butterflies(turned)
        np.multiply(turned.T.reshape(BLOCK, n), columns_scale, out=weight[rows])
    return weight
