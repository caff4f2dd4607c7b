# SPDX-License-Identifier: Apache-2.0
"""Which encoder makes a bank's experts: the CPU's, or exllamav3 on a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from trellisbank.quantize import encode_exllamav3, expert
from trellisbank.quantize.expert import Encoded, Options, Work

Choice = Literal["auto", "cpu", "exllamav3"]


@dataclass(frozen=True)
class Backend:
    """An encoder with its parameters.

    Attributes:
        encoder: its name in the bank's keys.
        version: rises when its bytes change.
        device_class: what of this machine its bytes may depend on.
        device: where it takes weights and Hessians.
        encode: encodes works, in any order.
    """

    encoder: str
    version: int
    device_class: str
    device: str
    encode: Callable[[Iterable[Work]], Iterator[Encoded]]


def choose_backend(choice: Choice, options: Options, min_tokens: int, threads: int) -> Backend:
    """The encoder of a job.

    Args:
        choice: ``auto`` takes exllamav3 where it and a CUDA device are there.
        options: parameters of the encoder.
        min_tokens: rows below which a Hessian serves for measuring only.
        threads: CPU threads.

    Raises:
        QuantizeError: exllamav3 was asked for, or found, and cannot be used.
    """
    if choice == "cpu" or choice == "auto" and not encode_exllamav3.available():
        return Backend(
            encoder="cpu",
            version=expert.ENCODER_VERSION,
            device_class=f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}",
            device="cpu",
            encode=partial(
                expert.encode_each, options=options, min_tokens=min_tokens, threads=threads
            ),
        )
    encode_exllamav3.load()
    return Backend(
        encoder=f"exllamav3-{encode_exllamav3.package_version()}",
        version=encode_exllamav3.ENCODER_VERSION,
        device_class=encode_exllamav3.device_class(),
        device=f"cuda:{torch.cuda.current_device()}",
        encode=partial(encode_exllamav3.encode_many, options=options, min_tokens=min_tokens),
    )
