# SPDX-License-Identifier: Apache-2.0
"""FP8 weights: E4M3 codes with one E8M0 scale for each block of 32 x 32 values.

The rows of an Engram table are the same format with blocks of 1 x 32.
Source: the layout of DeepSeek-V4.1-Flash (`weight_block_size`, `scale_fmt` ue8m0).
"""

from __future__ import annotations

import torch

from trellisbank.errors import FormatError
from trellisbank.formats import check_codes

BLOCK = (32, 32)
ROW_BLOCK = (1, 32)
# With 4 significant bits and E4M3's own range 2^-9 .. 448, these bytes keep every code in bf16.
SMALLEST_SCALE_BYTE, LARGEST_SCALE_BYTE = 3, 246


def _scale(scales: torch.Tensor, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scales.shape) != expected:
        raise FormatError(
            "FP8 scales do not fit their codes.",
            expected=f"{list(expected)} for {rows} x {columns} codes in blocks of {block}",
            found=list(scales.shape),
            fix="check that weight and scale come from one shard",
        )
    codes = scales.view(torch.uint8)
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (127, 127)
    if low < SMALLEST_SCALE_BYTE or high > LARGEST_SCALE_BYTE:
        raise FormatError(
            "An FP8 scale is NaN or takes its values out of bf16.",
            expected=f"scale bytes {SMALLEST_SCALE_BYTE} to {LARGEST_SCALE_BYTE}",
            found=f"{low} to {high}",
            fix="download the shard again; a sound checkpoint has no such scale",
        )
    scale = codes.view(torch.float8_e8m0fnu).to(torch.float32)
    scale = scale.repeat_interleave(block[1], dim=1)[:, :columns]
    return scale.repeat_interleave(block[0], dim=0)[:rows]


def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """Return the exact bf16 values of FP8 codes.

    Args:
        codes: F8_E4M3 [rows, columns].
        scales: F8_E8M0 (or its bytes) [ceil(rows / block[0]), ceil(columns / block[1])].
        block: Rows and columns that share a scale.

    Returns:
        bf16 [rows, columns]; no value is rounded.

    Raises:
        FormatError: Dtypes or shapes that do not fit, a NaN code (0x7F, 0xFF), a scale byte
            outside 3..246.
    """
    check_codes(codes, torch.float8_e4m3fn, scales)
    rows, columns = codes.shape
    scale = _scale(scales, rows, columns, block)
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise FormatError(
            "An FP8 code is NaN.",
            expected="codes other than 0x7F and 0xFF",
            found="a NaN code",
            fix="download the shard again; a sound checkpoint has no such code",
        )
    return (codes.to(torch.float32) * scale).to(torch.bfloat16)


def requantize(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] = BLOCK
) -> torch.Tensor:
    """Return the codes that dequantize to `weight` under the stored scales: the exact inverse.

    Args:
        weight: bf16 [rows, columns].
        scales: F8_E8M0 (or its bytes) [ceil(rows / block[0]), ceil(columns / block[1])].
        block: Rows and columns that share a scale.

    Returns:
        F8_E4M3 [rows, columns], negative zeros kept.

    Raises:
        FormatError: A value that is not on the grid of its scale.
    """
    rows, columns = weight.shape
    units = weight.to(torch.float32) / _scale(scales, rows, columns, block)
    codes = units.to(torch.float8_e4m3fn)
    wrong = codes.to(torch.float32) != units
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise FormatError(
            "A value is not on the FP8 grid of its scale.",
            expected="an E4M3 number times the scale",
            found=f"{float(units[row, column])} times the scale at [{row}, {column}]",
            fix="requantize only what was dequantized with the same scales",
        )
    return codes
