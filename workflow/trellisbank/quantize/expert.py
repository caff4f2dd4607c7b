# SPDX-License-Identifier: Apache-2.0
"""One matrix, or one expert's matrix group: weights and Hessian to EXL3 tensors and measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize.encode_cpu import search_scale, tile_encoder
from trellisbank.quantize.hessian import (
    Finalized,
    Hessian,
    block_ldl,
    finalize,
    outcome,
    rotate,
)
from trellisbank.quantize.ldlq import refit, regularize, round_with_feedback, transform

ENCODER_VERSION = 2
"""Rises whenever the encoder's bytes change, so that a bank never mixes two versions."""

CODEBOOK = "mul1"
"""What is written; the other codebooks are only read."""


@dataclass(frozen=True)
class Options:
    """Parameters of the encoder that change its bytes.

    Attributes:
        sigma_reg: damping of the Hessian, as a share of its mean diagonal.
        out_scales: even out the sizes of the output channels before encoding.
        refit: fit the scales by least squares after encoding.
        scaled_hessian: factor the Hessian with the input scales of each matrix, so that the error
            feedback weighs channels as they are stored, instead of with the signs alone.
    """

    sigma_reg: float = 0.025
    out_scales: bool = True
    refit: bool = True
    scaled_hessian: bool = True


@dataclass(frozen=True)
class EncodedMatrix:
    """A matrix as it will be stored, and what was measured on it.

    All errors are those of the stored tensors, decoded in fp32, against the weight given.

    Attributes:
        tensors: ``trellis`` int16 ``[k/16, n/16, 16 K]``, ``suh`` fp16 ``[k]``, ``svh`` fp16
            ``[n]``, ``mul1`` int32 scalar.
        proxy_error: ``|X E|^2 / |X W|^2`` over the calibration rows (undamped Hessian). None
            without a usable Hessian, or when the rows give no output: never 0 for want of evidence.
        output_error_energy: ``|X E|^2``, summed over rows, not normalised; None without a usable
            Hessian.
        output_energy: ``|X W|^2``; None likewise.
        relative_frobenius: ``|E| / |W|``; 0 for a zero matrix, which is stored exactly.
        g_scale: global scale of the tiles.
        fallback: why the matrix was encoded without error feedback, or None.
        notes: odd things that happened.
        stored_bits: bits of all tensors.
        weights: elements of the matrix.
    """

    tensors: dict[str, Tensor]
    proxy_error: float | None
    output_error_energy: float | None
    output_energy: float | None
    relative_frobenius: float
    g_scale: float
    fallback: str | None
    notes: tuple[str, ...]
    stored_bits: int
    weights: int


def random_signs(seed: str, size: int) -> Tensor:
    """Signs fp32 ``[size]`` of +-1 that depend on ``seed`` alone: the bits of its BLAKE3 stream."""
    stream = blake3(seed.encode()).digest(length=-(-size // 8))
    bits = np.unpackbits(np.frombuffer(stream, dtype=np.uint8), count=size)
    return torch.from_numpy(1.0 - 2.0 * bits.astype(np.float32))


@contextmanager
def _one_torch_thread() -> Iterator[None]:
    """Products of matrices on one thread: their rounding may depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quantize_matrix(
    weight: Tensor,
    hessian: Tensor | None,
    count: int,
    rate: int,
    name: str,
    options: Options = Options(),
    *,
    signs: tuple[Tensor, Tensor] | None = None,
    min_tokens: int = 1,
    threads: int = 1,
) -> EncodedMatrix:
    """Encode one matrix.

    Args:
        weight: ``[k, n]`` (input channels first), any floating dtype, finite; sizes are multiples
            of 128.
        hessian: fp32 ``[k, k]``, ``X^T X``, not normalised; None for none.
        count: rows in it.
        rate: bits a weight, 1..8.
        name: what the signs are derived from: an expert's bytes depend on its own name only.
        options: parameters.
        signs: input signs ``[k]`` and output signs ``[n]`` to use in place of those of the name.
        min_tokens: with fewer rows the Hessian serves for measuring only.
        threads: worker threads; the result does not depend on it.

    Raises:
        QuantizeError: for sizes, rates or weights that cannot be encoded. Hessians never raise.
    """
    check_weight(weight, name)
    k, n = weight.shape
    su, sv = signs or (random_signs(f"{name}/in", k), random_signs(f"{name}/out", n))
    with _one_torch_thread():
        _check_hessian(hessian, k, name)
        ready = finalize(hessian, count, options.sigma_reg, min_tokens)
        return _encode(weight, hessian, ready, su, sv, rate, name, options, threads)


def encode_group(
    weights: Mapping[str, Tensor],
    hessian: Tensor | None,
    count: int,
    rate: int,
    stem: str,
    options: Options = Options(),
    *,
    min_tokens: int = 1,
    threads: int = 1,
) -> dict[str, EncodedMatrix]:
    """Encode the matrices of one expert that read the same inputs.

    They share the Hessian and the input signs; output signs are each matrix's own.

    Args:
        weights: by matrix name (``w1`` and ``w3``, or ``w2``), each ``[k, n]``, input channels
            first.
        hessian: fp32 ``[k, k]``, ``X^T X``, not normalised; None for none.
        count: rows in it.
        rate: bits a weight, 1..8.
        stem: ``layers.{L}.ffn.experts.{E}``.
        options: parameters.
        min_tokens: with fewer rows the Hessian serves for measuring only.
        threads: worker threads; the result does not depend on it.

    Raises:
        QuantizeError: as `quantize_matrix`.
    """
    for name, weight in weights.items():
        check_weight(weight, f"{stem}.{name}")
    k = next(iter(weights.values())).shape[0]
    group = f"{stem}.{'+'.join(weights)}"
    with _one_torch_thread():
        _check_hessian(hessian, k, group)
        signs = random_signs(f"{group}/in", k)
        ready = finalize(hessian, count, options.sigma_reg, min_tokens)
        return {
            name: _encode(
                weight,
                hessian,
                ready,
                signs,
                random_signs(f"{stem}.{name}/out", weight.shape[1]),
                rate,
                f"{stem}.{name}",
                options,
                threads,
            )
            for name, weight in weights.items()
        }


@dataclass(frozen=True)
class Work:
    """One expert's matrices that read the same inputs, to be encoded at one rate.

    Attributes:
        stem: ``layers.{L}.ffn.experts.{E}``.
        weights: by matrix name (``w1`` and ``w3``, or ``w2``), each ``[k, n]``, input channels
            first.
        hessian: of their inputs, on the weights' device.
        rate: bits a weight, 1..8.
    """

    stem: str
    weights: Mapping[str, Tensor]
    hessian: Hessian
    rate: int


Encoded = tuple[Work, dict[str, EncodedMatrix]]


def encode_each(
    works: Iterable[Work], options: Options, min_tokens: int, threads: int
) -> Iterator[Encoded]:
    """Encode on the CPU, one work after the other; arguments as `encode_group`."""
    for work in works:
        yield (
            work,
            encode_group(
                work.weights,
                work.hessian.matrix,
                work.hessian.count,
                work.rate,
                work.stem,
                options,
                min_tokens=min_tokens,
                threads=threads,
            ),
        )


def check_weight(weight: Tensor, name: str) -> None:
    """Refuse a matrix that EXL3 cannot hold.

    Raises:
        QuantizeError: sizes that are not multiples of 128, or entries that are not finite.
    """
    k, n = weight.shape
    if k % trellis.BLOCK or n % trellis.BLOCK or not k or not n:
        raise QuantizeError(
            "matrix sizes do not fit EXL3",
            tensor=name,
            expected=f"in and out multiples of {trellis.BLOCK}",
            found=f"{k} x {n}",
            fix="keep this matrix in its own format",
        )
    bad = weight.numel() - int(weight.isfinite().sum())
    if bad:
        raise QuantizeError(
            "weights are not finite",
            tensor=name,
            expected="finite numbers",
            found=f"{bad} of {weight.numel()} are not",
            fix="verify the source's shard; a damaged matrix cannot be encoded",
        )


def _check_hessian(hessian: Tensor | None, k: int, name: str) -> None:
    if hessian is not None and hessian.shape != (k, k):
        raise QuantizeError(
            "Hessian does not fit its matrix",
            tensor=name,
            expected=f"[{k}, {k}]",
            found=str(list(hessian.shape)),
            fix="pass the sum of outer products of this matrix's inputs",
        )


def _encode(
    weight: Tensor,
    hessian: Tensor | None,
    ready: Finalized,
    signs: Tensor,
    out_signs: Tensor,
    rate: int,
    name: str,
    options: Options,
    threads: int,
) -> EncodedMatrix:
    weight = weight.float().contiguous()  # sums would feel another layout's order
    encode = tile_encoder(rate, CODEBOOK, threads)
    values = trellis.codebook(CODEBOOK).astype(np.float32)
    regular, su, sv = regularize(weight, signs, out_signs, options.out_scales)
    check_scales({"suh": su, "svh": sv}, name)  # squares of the weights may have left fp32
    g = search_scale(regular.numpy(), rate, encode, values)
    factor, fallback = None, ready.fallback
    notes: tuple[str, ...] = ()
    if ready.damped is not None:
        scales = su if options.scaled_hessian else signs
        factor, retries = block_ldl(rotate(ready.damped, scales), options.sigma_reg)
        fallback, notes = outcome(factor, retries)
    quantized, states = round_with_feedback(regular * g, factor, encode, values)
    su = silence(su / g, weight)
    if options.refit and ready.damped is not None and fallback is None:
        in_place = su[:, None] * transform(quantized) * sv
        su, sv = refit(weight, in_place, ready.damped, su, sv)
    suh, svh = su.half(), sv.half()
    tensors = {
        "trellis": torch.from_numpy(trellis.pack(states, rate)),
        "suh": suh,
        "svh": svh,
        CODEBOOK: torch.from_numpy(trellis.marker(CODEBOOK)),
    }
    check_scales(tensors, name)
    stored = trellis.decode(tensors["trellis"].numpy(), suh.numpy(), svh.numpy(), CODEBOOK)
    return measure(weight, torch.from_numpy(stored), tensors, hessian, g, fallback, notes)


def silence(su: Tensor, weight: Tensor) -> Tensor:
    """Input scales ``[k]`` with 0 for input channels of zeros, which are then stored exactly.

    Tiles are never exactly 0, and exllamav3's scale of 0.1 for such channels makes more of that
    than small weights are. In a matrix of zeros the output scales are 0, which is enough.
    """
    zero = ~weight.any(dim=1)
    return su if bool(zero.all()) else su.masked_fill(zero, 0.0)


def check_scales(tensors: Mapping[str, Tensor], name: str) -> None:
    """Refuse scales that left fp16, or fp32 before they were rounded.

    Raises:
        QuantizeError: an entry of ``suh`` or ``svh`` is not finite.
    """
    lost = {part: int((~tensors[part].isfinite()).sum()) for part in ("suh", "svh")}
    if any(lost.values()):
        raise QuantizeError(
            "scales do not fit fp16",
            tensor=name,
            expected=f"magnitudes up to {torch.finfo(torch.float16).max:.0f}",
            found=f"{lost['suh']} input and {lost['svh']} output scales beyond",
            fix="weights of this size cannot be stored as EXL3; verify the source's scales",
        )


def measure(
    weight: Tensor,
    stored: Tensor,
    tensors: dict[str, Tensor],
    hessian: Tensor | None,
    g_scale: float,
    fallback: str | None,
    notes: tuple[str, ...] = (),
) -> EncodedMatrix:
    """What was stored against what was given, wherever they lie.

    Args:
        weight: fp32 ``[k, n]``.
        stored: fp32 ``[k, n]``, the decoded tensors.
        tensors: the tensors, in CPU memory.
        hessian: fp32 ``[k, k]``, ``X^T X``, not normalised; None for none. All zeros measure
            nothing.
        g_scale: global scale of the tiles.
        fallback: why there was no error feedback, or None.
        notes: odd things that happened.
    """
    if bool((weight == 0).all()):
        notes = (*notes, "all weights are zero")
    else:
        lost = {  # where 0 is not what is meant
            "input": (tensors["suh"] == 0) & weight.any(dim=1).cpu(),
            "output": (tensors["svh"] == 0) & weight.any(dim=0).cpu(),
        }
        for side, places in lost.items():
            if count := int(places.sum()):
                notes = (*notes, f"{count} {side} scales underflow fp16")
    error = weight - stored
    energies: tuple[float, float] | tuple[None, None] = (None, None)
    if hessian is not None and bool(hessian.isfinite().all()) and bool(hessian.any()):
        found = (_energy(hessian, error), _energy(hessian, weight))
        if all(map(math.isfinite, found)):
            energies = found
        else:
            notes = (*notes, "output energy is too large for fp32")
    return EncodedMatrix(
        tensors=tensors,
        proxy_error=_ratio(*energies),
        output_error_energy=energies[0],
        output_energy=energies[1],
        relative_frobenius=_norm(error) / (_norm(weight) or 1.0),
        g_scale=g_scale,
        fallback=fallback,
        notes=notes,
        stored_bits=sum(8 * t.numel() * t.element_size() for t in tensors.values()),
        weights=weight.numel(),
    )


def _energy(hessian: Tensor, matrix: Tensor) -> float:
    """``tr(M^T H M)``: products in fp32, the last sum in float64."""
    return float((matrix * (hessian @ matrix)).sum(dtype=torch.float64))


def _ratio(error: float | None, whole: float | None) -> float | None:
    """Their quotient where the Hessian gives one: None without outputs, or if it is indefinite."""
    if error is None or whole is None or error < 0 or whole <= 0:
        return None
    return error / whole


def _norm(matrix: Tensor) -> float:
    return float(matrix.double().norm())
