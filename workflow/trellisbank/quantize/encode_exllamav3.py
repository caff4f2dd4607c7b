# SPDX-License-Identifier: Apache-2.0
"""Encoder on a CUDA device: exllamav3's quantizer, a group of experts at a time.

Policies, signs and measures are those of the CPU encoder (`expert`). What an expert's bytes depend
on: its own weights, Hessian and name, the parameters, and the device's arithmetic. They do not
depend on the other experts of its group, since a group always has `GROUP` places: matrix products
of another number of matrices may round otherwise.

exllamav3 has a thread of its own. While it is busy with a group, which leaves gaps on the device
and needs little of the CPU, the caller's thread measures the group before and makes the next one
ready: reading, Hessians and factors.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
    silence,
)
from trellisbank.quantize.hessian import BLOCK, RETRIES, outcome, unusable
from trellisbank.quantize.ldlq import regularize

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
        summary, _, _ = str(trouble).partition("\n")
        raise QuantizeError(
            "The exllamav3 extension cannot be loaded.",
            expected="an extension that compiles with nvcc and loads",
            found=f"{type(trouble).__name__}: {summary}",
            fix="install a CUDA toolkit of torch's major version, or set encode.backend to cpu",
        ) from trouble
    return quantize_exl3, quantize_exl3_batch


@dataclass(frozen=True)
class Ready:
    """A matrix of a work, ready for exllamav3.

    Attributes:
        work: whose it is.
        name: its name there.
        flips: what makes its output signs those of its name (`_flips`).
        record: exllamav3's record of its Hessian.
        fallback: why it is encoded without error feedback, or None.
        notes: odd things that happened.
    """

    work: Work
    name: str
    flips: Tensor
    record: dict[str, Any]
    fallback: str | None
    notes: tuple[str, ...]


Found = tuple[dict[str, Tensor], float]
"""Tensors of a matrix, and the global scale of its tiles."""


def encode_many(works: Iterable[Work], options: Options, min_tokens: int) -> Iterator[Encoded]:
    """Encode works in groups of one rate and shape.

    Args:
        works: weights and Hessians on one device.
        options: parameters.
        min_tokens: with fewer rows a Hessian serves for measuring only.

    Yields:
        Each work with its matrices, tensors in CPU memory, once its group is complete. When works
        cannot be had or made ready, the group that is being encoded comes before the error.

    Raises:
        QuantizeError: as `expert.encode_group`, and as `load`.
    """
    quantizers = load()
    running: tuple[list[list[Ready]], Future[list[Found]]] | None = None
    with ThreadPoolExecutor(1) as thread:
        groups = _groups(works, options, min_tokens)
        while True:
            try:
                group = next(groups, None)
            except Exception:
                if running:
                    yield from _finished(*running)
                raise
            following = group and (group, thread.submit(_quantize, group, options, *quantizers))
            if running:
                yield from _finished(*running)
            if not following:
                return
            running = following


def _groups(
    works: Iterable[Work], options: Options, min_tokens: int
) -> Iterator[list[list[Ready]]]:
    """Works made ready, together where their rates and shapes are the same."""
    waiting: dict[tuple[Any, ...], list[list[Ready]]] = {}
    for work in works:
        kind = (work.rate, *((name, weight.shape) for name, weight in work.weights.items()))
        group = waiting.setdefault(kind, [])
        group.append(_make_ready(work, options, min_tokens))
        if len(group) == GROUP:
            yield waiting.pop(kind)
    yield from waiting.values()


def _make_ready(work: Work, options: Options, min_tokens: int) -> list[Ready]:
    """The matrices of a work, each with a record of its Hessian."""
    hessian = work.hessian
    first = next(iter(work.weights.values()))
    group = f"{work.stem}.{'+'.join(work.weights)}"
    signs = random_signs(f"{group}/in", first.shape[0]).to(first.device)
    reason = unusable(hessian.matrix, hessian.count, min_tokens)
    if reason is None:
        damped = _damped(hessian.matrix, hessian.count, options.sigma_reg)
        turned = _rotated(damped, signs)
    found = []
    for name, weight in work.weights.items():
        check_weight(weight, f"{work.stem}.{name}")
        out_signs = random_signs(f"{work.stem}.{name}/out", weight.shape[1]).to(weight.device)
        record, fallback = _without_feedback(signs), reason
        notes: tuple[str, ...] = ()
        # The refit has nothing to fit in a matrix of zeros and would not end well.
        if reason is None and bool(weight.any()):
            metric = turned
            if options.scaled_hessian:
                _, su, _ = regularize(weight.float(), signs, out_signs, options.out_scales)
                metric = _rotated(damped, su)
            factor, retries = _block_ldl(metric, options.sigma_reg)
            fallback, notes = outcome(factor, retries)
            if factor is not None:
                record = _record(turned, damped, signs, factor)
        flips = _flips(out_signs).to(weight.dtype)
        found.append(Ready(work, name, flips, record, fallback, notes))
    return found


def _quantize(
    group: list[list[Ready]],
    options: Options,
    quantize: Callable[..., Any],
    quantize_batch: Callable[..., Any],
) -> list[Found]:
    """What exllamav3 gives for the matrices of a group, in their order."""
    everything = [ready for readies in group for ready in readies]
    found: dict[int, Found] = {}
    together = []
    for place, ready in enumerate(everything):
        if not ready.record["q_fallback"]:
            together.append(place)
            continue
        weight, used = ready.work.weights[ready.name], _arguments(ready.work, options)
        _, _, tensors = quantize(weight.float() * ready.flips, ready.record, used, False)
        found[place] = tensors, used["g_scale"]
    if together:
        # Places that stay free are given a copy: as many products of the same sizes as ever.
        free = GROUP * len(group[0]) - len(together)
        filled = [everything[place] for place in together + together[-1:] * free]
        arguments = [_arguments(ready.work, options) for ready in filled]
        records = [ready.record | {"L": Handover(ready.record["L"])} for ready in filled]
        for place in together:
            del everything[place].record["L"]
        results = quantize_batch(
            [ready.work.weights[ready.name] * ready.flips for ready in filled], records, arguments
        )
        for place, used, (_, tensors) in zip(together, arguments, results, strict=False):
            found[place] = tensors, used["g_scale"]
    return [found[place] for place in range(len(everything))]


def _finished(group: list[list[Ready]], future: Future[list[Found]]) -> Iterator[Encoded]:
    """The works of a group, measured."""
    results = iter(future.result())
    for readies in group:
        yield (
            readies[0].work,
            {ready.name: _finish(ready, *next(results)) for ready in readies},
        )


def _flips(out_signs: Tensor) -> Tensor:
    """What turns the output signs that exllamav3 draws into those given, ``[n]`` of +-1.

    With the columns of a weight flipped by it, its scales come out flipped by it too.
    """
    device = out_signs.device
    generator = torch.Generator(device).manual_seed(SEED)
    drawn = torch.randn(len(out_signs), generator=generator, device=device) < 0
    return torch.where(drawn, -out_signs, out_signs)


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


def _finish(ready: Ready, tensors: dict[str, Tensor], g_scale: float) -> EncodedMatrix:
    work, name = ready.work, ready.name
    tensors = tensors | {
        "suh": silence(tensors["suh"], work.weights[name]),
        "svh": tensors["svh"] * ready.flips.half(),
    }
    check_scales(tensors, f"{work.stem}.{name}")
    stored = decode(tensors, CODEBOOK)
    return measure(
        work.weights[name].float(),
        stored,
        {part: tensor.cpu() for part, tensor in tensors.items()},
        work.hessian.matrix,
        g_scale,
        ready.fallback,
        ready.notes,
    )


class Handover:
    """A factor in a record, let go of once exllamav3 takes it with ``.to(device)``.

    exllamav3 stacks the factors of a group, 3.4 GB at release size; a tensor in the record would
    stay beside the stack, and be copied to the CPU in the end.
    """

    is_cuda = False

    def __init__(self, factor: Tensor) -> None:
        """Hold it until then."""
        self._held = [factor]

    def to(self, device: torch.device) -> Tensor:
        """Give it away."""
        return self._held.pop().to(device)


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


def _record(turned: Tensor, damped: Tensor, signs: Tensor, factor: Tensor) -> dict[str, Any]:
    """exllamav3's record of a Hessian with a factor, ready for encoding."""
    return {
        "H": turned,
        "L": factor,
        "su": signs[:, None],
        "diag": damped.diagonal().clone(),
        "finalized": True,
        "q_fallback": False,
    }


# In exllamav3's order of operations, so that a record with signs alone holds its very bits.


def _damped(matrix: Tensor, count: int, sigma_reg: float) -> Tensor:
    """`hessian.finalize`."""
    damped = matrix / count
    damped.diagonal().add_(sigma_reg * float(torch.diag(damped).mean()))
    return damped


def _rotated(matrix: Tensor, scales: Tensor) -> Tensor:
    """`hessian.rotate`."""
    rotated = matrix * scales
    rotated *= scales[:, None]
    turn = hadamard(matrix.device)
    for part in rotated.split(len(turn), dim=1):
        part.copy_(part @ turn)
    for part in rotated.split(len(turn), dim=0):
        part.copy_(turn @ part)
    return rotated


def _block_ldl(matrix: Tensor, sigma_reg: float) -> tuple[Tensor | None, int]:
    """`hessian.block_ldl`."""
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
