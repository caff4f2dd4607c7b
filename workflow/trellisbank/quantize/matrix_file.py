# SPDX-License-Identifier: Apache-2.0
"""Encoding and decoding one matrix in a file of its own, outside the workflow."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize.expert import quantize_matrix
from trellisbank.safetensors_io import read_file, write_tensors

NO_NAME = "matrix"
"""Name that signs are derived from when none is given."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

ASYMMETRY = 1e-3
"""Largest difference between H and its transpose, as a share of H's largest entry."""


def _one_matrix(path: Path, tensors: Mapping[str, Tensor], names: tuple[str, ...]) -> None:
    for name in names:
        if name not in tensors:
            raise QuantizeError(
                f"tensor {name} is missing",
                file=path,
                expected=", ".join(names),
                found=", ".join(tensors) or "no tensors",
                fix="write the file with these names",
            )


def _inputs(path: Path, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None, int]:
    """W, H and count of a file, checked."""

    def refuse(name: str, what: str, expected: str, found: object, fix: str) -> QuantizeError:
        return QuantizeError(what, file=path, tensor=name, expected=expected, found=found, fix=fix)

    weight, hessian, count = tensors["W"], tensors.get("H"), tensors.get("count")
    if weight.ndim != 2 or weight.dtype not in FLOATS:
        raise refuse(
            "W",
            "W is not a matrix of weights.",
            "two axes (in, out), bf16, fp16 or fp32",
            f"{weight.dtype} {list(weight.shape)}",
            "dequantize the matrix first",
        )
    if count is not None and (count.numel() != 1 or not 0 <= float(count) < math.inf):
        raise refuse(
            "count",
            "The number of calibration rows is no number.",
            "one element, 0 or more",
            count.flatten()[:6].tolist(),
            "store the number of rows that H was summed over",
        )
    if hessian is not None:
        if hessian.dtype not in FLOATS or hessian.shape != weight.shape[:1] * 2:
            raise refuse(
                "H",
                "H does not fit W.",
                f"fp32 {[weight.shape[0]] * 2}",
                f"{hessian.dtype} {list(hessian.shape)}",
                "store X^T X of the inputs X of W",
            )
        hessian = hessian.float()
        apart = (hessian - hessian.T).abs().max()
        if bool(apart > ASYMMETRY * hessian.abs().max()):
            raise refuse(
                "H",
                "H is not symmetric.",
                "X^T X",
                f"entries {float(apart):.3g} from their transpose",
                "store X^T X of the inputs X of W",
            )
    return weight, hessian, 1 if count is None else int(count)


def encode_file(
    in_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    rate: int,
    name: str | None = None,
    signs_path: str | os.PathLike[str] | None = None,
    threads: int = 1,
) -> dict[str, Any]:
    """Encode the matrix of a file (`trellisbank encode`).

    Args:
        in_path: safetensors with ``W`` (in, out) bf16, fp16 or fp32; optionally ``H`` fp32
            (in, in) = ``X^T X`` and ``count`` (1 when absent).
        out_path: gets ``trellis``, ``suh``, ``svh``, ``mul1``.
        rate: bits a weight, 1..8.
        name: what the signs are derived from; ``matrix`` when absent.
        signs_path: safetensors with ``suh`` and ``svh`` whose signs are used instead.
        threads: worker threads.

    Returns:
        ``proxy_error`` (None without a usable ``H``), ``relative_frobenius``, ``g_scale``,
        ``fallback`` (None or the reason), ``notes``, ``seconds``.

    Raises:
        QuantizeError: for missing tensors, wrong shapes, and as `quantize_matrix`.
    """
    tensors = read_file(in_path)
    _one_matrix(Path(in_path), tensors, ("W",))
    weight, hessian, count = _inputs(Path(in_path), tensors)
    signs = None
    if signs_path is not None:
        given = read_file(signs_path)
        _one_matrix(Path(signs_path), given, ("suh", "svh"))
        if given["suh"].shape != weight.shape[:1] or given["svh"].shape != weight.shape[1:]:
            raise QuantizeError(
                "signs do not fit the matrix",
                file=signs_path,
                expected=f"suh [{weight.shape[0]}], svh [{weight.shape[1]}]",
                found=f"suh {list(given['suh'].shape)}, svh {list(given['svh'].shape)}",
                fix="take the signs of an encoding of the same matrix",
            )
        # Regularizing divides by a negative constant: stored input signs are those drawn, negated.
        signs = (_signs_of(-given["suh"]), _signs_of(given["svh"]))
    start = time.perf_counter()
    encoded = quantize_matrix(
        weight,
        hessian,
        count,
        rate,
        name or NO_NAME,
        signs=signs,
        threads=threads,
    )
    seconds = time.perf_counter() - start
    write_tensors(out_path, encoded.tensors)
    return {
        "proxy_error": encoded.proxy_error,
        "relative_frobenius": encoded.relative_frobenius,
        "g_scale": encoded.g_scale,
        "fallback": encoded.fallback,
        "notes": list(encoded.notes),
        "seconds": seconds,
    }


def _signs_of(scales: Tensor) -> Tensor:
    return torch.where(scales < 0, -1.0, 1.0)


def decode_file(in_path: str | os.PathLike[str], out_path: str | os.PathLike[str]) -> None:
    """Decode the matrix of a file (`trellisbank decode`).

    Args:
        in_path: safetensors with ``trellis``, ``suh``, ``svh`` and ``mul1``, ``mcg`` or neither
            (3INST).
        out_path: gets ``inner`` fp16 and ``weight`` fp32, both (in, out).

    Raises:
        QuantizeError: for missing tensors.
        FormatError: for tensors outside the format.
    """
    tensors = read_file(in_path)
    _one_matrix(Path(in_path), tensors, ("trellis", "suh", "svh"))
    stored = trellis.stored_matrix(tensors)
    weight = trellis.decode(*stored)
    inner = trellis.decode_inner(stored[0], stored[3])
    write_tensors(out_path, {"inner": torch.from_numpy(inner), "weight": torch.from_numpy(weight)})
