# SPDX-License-Identifier: Apache-2.0
"""Encoder on a CUDA device: exllamav3's quantizer, a group of experts at a time.

Policies, signs and measures are those of the CPU encoder (`expert`). What an expert's bytes depend
on: its own weights, Hessian and name, the parameters, and the device's arithmetic. They do not
depend on the other experts of its group, since a group always has `GROUP` places: matrix products
of another number of matrices may round otherwise.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from trellisbank.errors import QuantizeError
from trellisbank.quantize.decode_torch import decode, hadamard
from trellisbank.quantize.expert import (
    CODEBOOK,
    Encoded,
    EncodedMatrix,
    Options,
    Work,
    check_scales,
    check_weight,
    measure,
    random_signs,
)
from trellisbank.quantize.hessian import BLOCK, RETRIES, unusable

PACKAGE = "exllamav3"

ENCODER_VERSION = 1
"""Rises whenever the bytes change for another reason than exllamav3's version."""

GROUP = 16
"""Experts encoded together: enough tiles a call to fill the device."""

SEED = 0
"""Seed of the output signs that exllamav3 draws; they are replaced by those of the name."""


def package_version() -> str | None:
    """Version of the installed exllamav3; None without it."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        return None


def available() -> bool:
    """Whether there are a CUDA device and the package."""
    return torch.cuda.is_available() and package_version() is not None


def device_class() -> str:
    """Model of the GPU and its compute capability: rounding of matrix products differs by both."""
    major, minor = torch.cuda.get_device_capability()
    return f"cuda-{torch.cuda.get_device_name().lower().replace(' ', '-')}-{major}.{minor}"


def load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """exllamav3's `quantize_exl3` and `quantize_exl3_batch`; the first import compiles for minutes.

    Raises:
        QuantizeError: no CUDA device, no package, or an extension that does not build.
    """
    if not torch.cuda.is_available():
        raise QuantizeError(
            "The exllamav3 encoder needs a CUDA device.",
            expected="torch.cuda.is_available()",
            found=f"none that torch {torch.__version__} can use",
            fix="run this job where a GPU is, or set encode.backend to cpu",
        )
    if package_version() is None:
        raise QuantizeError(
            "The exllamav3 package is missing.",
            expected="exllamav3 1.6.5",
            found="nothing of that name",
            fix="install envs/cuda.txt (make run LOCK=cuda), or set encode.backend to cpu",
        )
    if torch.cuda.get_device_capability() == (9, 0):
        # The faster of its tile kernels, which it takes by itself on other devices only; states
        # are the same (docs/performance.md).
        os.environ.setdefault("EXL3_QT_OPTIMIZED", "1")
    try:
        from exllamav3.modules.quant.exl3_lib.quantize import quantize_exl3, quantize_exl3_batch
    except (ImportError, OSError, RuntimeError) as trouble:
        raise QuantizeError(
            "The exllamav3 extension cannot be loaded.",
            expected="an extension that compiles with nvcc and loads",
            found=f"{type(trouble).__name__}: {str(trouble).splitlines()[0]}",
            fix="install a CUDA toolkit of torch's major version, or set encode.backend to cpu",
        ) from trouble
    return quantize_exl3, quantize_exl3_batch


def encode_many(works: Iterable[Work], options: Options, min_tokens: int) -> Iterator[Encoded]:
    """Encode works in groups of one rate and shape.

    Args:
        works: weights and Hessians on one device.
        options: parameters.
        min_tokens: with fewer rows a Hessian serves for measuring only.

    Yields:
        Each work with its matrices, tensors in CPU memory, once its group is complete.

    Raises:
        QuantizeError: as `expert.encode_group`, and as `load`.
    """
    waiting: dict[tuple[Any, ...], list[Work]] = {}
    for work in works:
        kind = (work.rate, *((name, weight.shape) for name, weight in work.weights.items()))
        group = waiting.setdefault(kind, [])
        group.append(work)
        if len(group) == GROUP:
            yield from _encode_group(waiting.pop(kind), options, min_tokens)
    for group in waiting.values():
        yield from _encode_group(group, options, min_tokens)


Place = tuple[Work, str, dict[str, Any]]
"""A matrix of a work, by name, and its Hessian's record."""


def _encode_group(works: list[Work], options: Options, min_tokens: int) -> Iterator[Encoded]:
    quantize, quantize_batch = load()
    together: list[Place] = []
    notes: dict[str, tuple[str, ...]] = {}
    done: dict[tuple[str, str], EncodedMatrix] = {}
    for work in works:
        first = next(iter(work.weights.values()))
        name = f"{work.stem}.{'+'.join(work.weights)}/in"
        signs = random_signs(name, first.shape[0]).to(first.device)
        hessian, record, retries = work.hessian, None, 0
        reason = unusable(hessian.matrix, hessian.count, min_tokens)
        if reason is None:
            record, retries = _record(hessian.matrix, hessian.count, signs, options.sigma_reg)
            if record is None:
                reason = f"factorization failed after {retries} retries"
        notes[work.stem] = (f"damping raised {retries} times",) if record and retries else ()
        for matrix, weight in work.weights.items():
            check_weight(weight, f"{work.stem}.{matrix}")
            # The refit has nothing to fit in a matrix of zeros and would not end well.
            if record is not None and bool(weight.any()):
                together.append((work, matrix, record))
                continue
            flips, used = _flips(work, matrix), _arguments(work, options)
            alone = weight.float() * flips
            _, _, tensors = quantize(alone, _without_feedback(signs), used, False)
            done[work.stem, matrix] = _finish(
                work, matrix, tensors, flips, used, reason, notes[work.stem]
            )
    if together:
        work, matrix, record = together[-1]
        # Places that stay free are given a copy: as many products of the same sizes as ever.
        free = range(GROUP * len(work.weights) - len(together))
        filled = together + [(work, matrix, dict(record)) for _ in free]
        turned = [_flips(work, matrix) for work, matrix, _ in filled]
        arguments = [_arguments(work, options) for work, _, _ in filled]
        results = quantize_batch(
            [
                work.weights[name] * flips
                for (work, name, _), flips in zip(filled, turned, strict=True)
            ],
            [record for _, _, record in filled],
            arguments,
        )
        for place, flips, used, (_, tensors) in zip(
            together, turned, arguments, results, strict=False
        ):
            work, matrix, _ = place
            done[work.stem, matrix] = _finish(
                work, matrix, tensors, flips, used, None, notes[work.stem]
            )
    for work in works:
        yield work, {matrix: done[work.stem, matrix] for matrix in work.weights}


def _flips(work: Work, matrix: str) -> Tensor:
    """What turns the output signs that exllamav3 draws into those of the name, ``[n]`` of +-1.

    With the columns of a weight flipped by it, its scales come out flipped by it too.
    """
    weight = work.weights[matrix]
    size, device = weight.shape[1], weight.device
    generator = torch.Generator(device).manual_seed(SEED)
    drawn = torch.randn(size, generator=generator, device=device) < 0
    own = random_signs(f"{work.stem}.{matrix}/out", size).to(device)
    return torch.where(drawn, -own, own).to(weight.dtype)


def _arguments(work: Work, options: Options) -> dict[str, Any]:
    device = next(iter(work.weights.values())).device
    return {
        "K": work.rate,
        CODEBOOK: True,
        "seed": SEED,
        "devices": [device],
        "sigma_reg": options.sigma_reg,
        "apply_out_scales": options.out_scales,
        "no_refit": not options.refit,
    }


def _finish(
    work: Work,
    matrix: str,
    tensors: dict[str, Tensor],
    flips: Tensor,
    arguments: dict[str, Any],
    fallback: str | None,
    notes: tuple[str, ...],
) -> EncodedMatrix:
    tensors = tensors | {"svh": tensors["svh"] * flips.half()}
    check_scales(tensors, f"{work.stem}.{matrix}")
    stored = decode(tensors, CODEBOOK)
    return measure(
        work.weights[matrix].float(),
        stored,
        {part: tensor.cpu() for part, tensor in tensors.items()},
        work.hessian.matrix,
        arguments["g_scale"],
        fallback,
        notes,
    )


def _without_feedback(signs: Tensor) -> dict[str, Any]:
    """exllamav3's record of a Hessian that cannot be used."""
    return {
        "H": torch.empty(0),
        "L": None,
        "su": signs[:, None],
        "diag": None,
        "finalized": True,
        "q_fallback": True,
    }


def _record(
    matrix: Tensor, count: int, signs: Tensor, sigma_reg: float
) -> tuple[dict[str, Any] | None, int]:
    """exllamav3's record of a Hessian, ready for encoding; and how often damping was raised.

    `hessian.finalize` in exllamav3's order of operations, so that a record holds its very bits,
    but with the input signs given and nothing moved to the CPU. None if no factor was found.
    """
    rotated = matrix / count
    rotated.diagonal().add_(sigma_reg * float(torch.diag(rotated).mean()))
    diagonal = rotated.diagonal().clone()
    turn = hadamard(matrix.device)
    rotated *= signs
    for part in rotated.split(len(turn), dim=1):
        part.copy_(part @ turn)
    rotated *= signs[:, None]
    for part in rotated.split(len(turn), dim=0):
        part.copy_(turn @ part)
    factor, retries = _block_ldl(rotated, sigma_reg)
    if factor is None:
        return None, retries
    record = {
        "H": rotated,
        "L": factor,
        "su": signs[:, None],
        "diag": diagonal,
        "finalized": True,
        "q_fallback": False,
    }
    return record, retries


def _block_ldl(matrix: Tensor, sigma_reg: float) -> tuple[Tensor | None, int]:
    """`hessian.block_ldl` in exllamav3's order of operations."""
    factor, failed = torch.linalg.cholesky_ex(matrix)
    retries = 0
    attempt = matrix.clone() if failed else matrix
    while failed and retries < RETRIES:
        retries += 1
        attempt.diagonal().add_(2 * sigma_reg * attempt.diagonal().mean())
        factor, failed = torch.linalg.cholesky_ex(attempt)
    if failed:
        return None, retries
    factor = factor.contiguous()
    blocks = factor.view(len(factor) // BLOCK, BLOCK, -1, BLOCK).diagonal(dim1=0, dim2=2)
    inverses = torch.linalg.inv(blocks.permute(2, 0, 1))
    for columns, inverse in zip(factor.split(BLOCK, dim=1), inverses, strict=True):
        columns.copy_(columns @ inverse)
    blocks.zero_()
    return (factor if bool(factor.isfinite().all()) else None), retries
