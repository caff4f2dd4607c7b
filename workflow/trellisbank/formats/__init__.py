# SPDX-License-Identifier: Apache-2.0
"""Stored number formats: exact readers, and exact inverses where the format allows one."""

import torch

from trellisbank.errors import FormatError


def check_codes(codes: torch.Tensor, dtype: torch.dtype, scales: torch.Tensor) -> None:
    """Refuse tensors that are not two matrices of the format's dtypes, or that are empty.

    Raises:
        FormatError: Another dtype, another number of axes, no values.
    """
    for name, tensor, dtypes in (
        ("codes", codes, (dtype,)),
        ("scales", scales, (torch.float8_e8m0fnu, torch.uint8)),
    ):
        if tensor.dtype not in dtypes or tensor.ndim != 2 or not tensor.numel():
            raise FormatError(
                f"Quantized {name} have a wrong dtype or shape.",
                expected=f"{dtypes[0]}, two axes, not empty",
                found=f"{tensor.dtype} {list(tensor.shape)}",
                fix="check that weight and scale come from one shard",
            )
