# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights: 4-bit E2M1 codes, one E8M0 scale for 32 consecutive values of a row.

Byte `j` of a row holds value `2j` in its low and value `2j + 1` in its high nibble. Bit 3 of a
nibble is the sign; code 8, negative zero, occurs in released checkpoints and is kept.
Source: OCP Microscaling Formats (MX) v1.0, and the layout of DeepSeek-V4.1-Flash.
"""

from __future__ import annotations

import torch

from trellisbank.errors import FormatError
from trellisbank.formats import check_codes

GROUP = 32
# Magnitude 6 times a scale byte of 253 leaves bf16; 0.5 times 2^-127 still is a bf16 subnormal.
LARGEST_SCALE_BYTE = 252
VALUES = torch.tensor(
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
)

# The two values of a byte.
PAIRS = torch.stack((VALUES.repeat(16), VALUES.repeat_interleave(16)), dim=-1)


def _check_scales(scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    if tuple(scales.shape) != (rows, columns // GROUP) or columns % GROUP:
        raise FormatError(
            "MXFP4 scales do not fit their codes.",
            expected=f"[{rows}, {columns // GROUP}] for {rows} rows of {columns} values",
            found=list(scales.shape),
            fix="check that weight and scale come from one shard",
        )
    codes = scales.view(torch.uint8)
    if codes.numel() and int(codes.max()) > LARGEST_SCALE_BYTE:
        raise FormatError(
            "An MXFP4 scale is NaN or too large for bf16.",
            expected=f"scale bytes 0 to {LARGEST_SCALE_BYTE}",
            found=int(codes.max()),
            fix="download the shard again; a sound checkpoint has no such scale",
        )
    scale = codes.view(torch.float8_e8m0fnu).to(torch.float32)
    return scale.repeat_interleave(GROUP, dim=1)


def dequantize(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the exact bf16 values of MXFP4 codes.

    Args:
        codes: int8 [rows, columns / 2], two codes a byte.
        scales: F8_E8M0 (or its bytes) [rows, columns / 32].

    Returns:
        bf16 [rows, columns]; no value is rounded.

    Raises:
        FormatError: Dtypes or shapes that do not fit, or a scale byte above 252.
    """
    check_codes(codes, torch.int8, scales)
    rows, half = codes.shape
    scale = _check_scales(scales, rows, 2 * half)
    values = PAIRS.to(codes.device)[codes.view(torch.uint8).int()].view(rows, 2 * half)
    return (values * scale).to(torch.bfloat16)


def requantize(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the codes that dequantize to `weight` under the stored scales: the exact inverse.

    The scales are needed because a block of values often fits a smaller scale as well.

    Args:
        weight: bf16 [rows, columns].
        scales: F8_E8M0 (or its bytes) [rows, columns / 32].

    Returns:
        int8 [rows, columns / 2], negative zeros kept.

    Raises:
        FormatError: A value that is not on the grid of its scale.
    """
    rows, columns = weight.shape
    scale = _check_scales(scales, rows, columns)
    # Division by a power of two is exact except where fp32 underflows, which no grid value does.
    units = weight.to(torch.float32) / scale
    magnitude = torch.searchsorted(VALUES[:8].contiguous(), units.abs().contiguous())
    nibbles = magnitude + 8 * torch.signbit(units)
    back = VALUES[nibbles.clamp(max=15)]
    wrong = (magnitude > 7) | (back != units)
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        raise FormatError(
            "A value is not on the MXFP4 grid of its scale.",
            expected="0, 0.5, 1, 1.5, 2, 3, 4 or 6 times the scale",
            found=f"{float(units[row, column])} times the scale at [{row}, {column}]",
            fix="requantize only what was dequantized with the same scales",
        )
    packed = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return packed.to(torch.uint8).view(torch.int8)
