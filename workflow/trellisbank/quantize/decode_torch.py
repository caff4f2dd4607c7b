# SPDX-License-Identifier: Apache-2.0
"""EXL3 decoding and rotation in torch, on whatever device: the same numbers as formats.trellis.

The inner matrix is exact. The weight is a product in fp32, as there, but with its sums in another
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from trellisbank.formats import trellis


@cache
def hadamard(device: torch.device) -> Tensor:
    """``H128 / sqrt(128)``, fp32 ``[128, 128]``."""
    identity = np.eye(trellis.BLOCK, dtype=np.float32)
    return torch.from_numpy(trellis.hadamard128(identity, 0)).to(device)


def turn(matrix: Tensor, axis: int) -> Tensor:
    """``P M`` (axis 0) or ``M P`` (axis 1) of an fp32 matrix: butterflies on a CPU, else a product.

    The order of sums on a CPU is that of `trellis.hadamard128` on any machine.
    """
    if matrix.device.type == "cpu":
        return torch.from_numpy(trellis.hadamard128(matrix.numpy(), axis))
    blocks, across = hadamard(matrix.device), matrix.shape[1]
    if axis == 0:
        return (blocks @ matrix.reshape(-1, trellis.BLOCK, across)).view(matrix.shape)
    return (matrix.reshape(-1, trellis.BLOCK) @ blocks).view(matrix.shape)


@cache
def _tables(device: torch.device, codebook: str) -> tuple[Tensor, Tensor]:
    """The codebook, fp32 ``[65536]``, and the ring position of each element of a tile."""
    values = torch.from_numpy(trellis.codebook(codebook).astype(np.float32))
    return values.to(device), torch.from_numpy(trellis.ELEMENT_TO_RING).to(device)


def decode_inner(packed: Tensor, codebook: str) -> Tensor:
    """The inner matrix, fp32 ``[k, n]``, of a trellis int16 ``[k/16, n/16, 16 rate]``."""
    values, position = _tables(packed.device, codebook)
    rate = packed.shape[-1] // trellis.TILE
    words = packed.contiguous().view(torch.int32).long() & 0xFFFFFFFF
    # 16 bits of the stream from `start` lie within 64: a word and the one after it.
    pairs = (words << 32) | words.roll(-1, dims=-1)
    start = ((position + 1) * rate - 16) % (trellis.RING * rate)
    states = (pairs[..., start >> 5] >> (48 - (start & 31))) & 0xFFFF
    tiles: Tensor = values[states].unflatten(-1, (trellis.TILE, trellis.TILE))
    return tiles.transpose(1, 2).flatten(2, 3).flatten(0, 1)


def decode(tensors: Mapping[str, Tensor], codebook: str) -> Tensor:
    """The stored weight, fp32 ``[k, n]``, of ``trellis``, ``suh`` and ``svh``."""
    inner = decode_inner(tensors["trellis"], codebook)
    k, n = inner.shape
    turn = hadamard(inner.device)
    left = (turn @ inner.view(-1, trellis.BLOCK, n)).view(k, n)
    left *= tensors["suh"].float()[:, None]
    return (left.view(-1, trellis.BLOCK) @ turn).view(k, n) * tensors["svh"].float()
