# SPDX-License-Identifier: Apache-2.0
"""The encoding of a block of experts: Hessians from the captures, missing experts into the bank."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from blake3 import blake3

from trellisbank.bank import GROUPS, Bank, expert_key
from trellisbank.checkpoint import Checkpoint, expert_stem, open_checkpoint
from trellisbank.errors import QuantizeError
from trellisbank.files import blake3_file, digest_json, read_json, write_json
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.quantize.expert import ENCODER_VERSION, EncodedMatrix, Options, encode_group
from trellisbank.quantize.hessian import Capture, Hessian, expert_hessians, statistics
from trellisbank.safetensors_io import map_tensor, read_header, tensor_bytes

Pathlike = str | os.PathLike[str]
Weighting = Literal["none", "route"]
Progress = Callable[[str], None]

ENCODER = "cpu"


def device_class() -> str:
    """What of this machine the encoder's bytes may depend on: processor and vector instructions."""
    return f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"


def map_captures(paths: Sequence[Pathlike]) -> list[Capture]:
    """Map the captures of all splits; memory is the page cache's, not ours."""
    headers = [read_header(path) for path in paths]
    names = ("ffn_input", "route_indices", "route_weights")
    return [tuple(map_tensor(header, name) for name in names) for header in headers]  # type: ignore[misc]


def describe_hessians(
    *,
    source: Pathlike,
    layer: int,
    captures: Sequence[Pathlike],
    down_weighting: Weighting,
    receipt_path: Pathlike,
    progress: Progress = lambda _: None,
) -> None:
    """Write tokens, trace, rank and content hash of both Hessians of every expert of a layer.

    The matrices are not kept: at release size those of a layer take 24.6 GB, and they are rebuilt
    where they are used. One expert's pair is held at a time.
    """
    checkpoint = open_checkpoint(source)
    cfg = model_config(checkpoint.config)
    mapped = map_captures(captures)
    described = []
    for expert in range(cfg.n_routed_experts):
        pair = _hessians(checkpoint, cfg, layer, expert, mapped, down_weighting)
        for group, hessian in pair.items():
            measured = asdict(statistics(hessian))
            measured["tokens"] = measured.pop("count")
            measured["blake3"] = _matrix_hash(hessian)
            described.append({"expert": expert, "group": group} | measured)
        progress(f"layer {layer}: Hessians of expert {expert + 1} of {cfg.n_routed_experts}")
    write_json(
        receipt_path,
        {
            "schema": "trellisbank/hessians/1",
            "layer": layer,
            "down_weighting": down_weighting,
            "captures": [blake3_file(path) for path in captures],
            "experts": described,
        },
    )


def encode_block(
    *,
    source: Pathlike,
    layer: int,
    block: int,
    experts_per_block: int,
    wanted_path: Pathlike,
    hessians_path: Pathlike,
    captures: Sequence[Pathlike],
    bank: Pathlike,
    min_tokens: int,
    options: Options,
    down_weighting: Weighting,
    threads: int,
    ledger_path: Pathlike,
    progress: Progress = lambda _: None,
) -> None:
    """Bring the wanted experts of a block into the bank and write the block's ledger.

    What the bank holds already is looked up by key and not encoded again, so an interrupted job
    goes on where it ended. An expert's bytes depend neither on its block nor on `threads`.

    Args:
        source: Folder of the source.
        layer: Body layer.
        block: Number of the block: experts from `block * experts_per_block` on.
        experts_per_block: Experts of a block.
        wanted_path: What must be in the bank, for the whole layer.
        hessians_path: Receipt of `describe_hessians` for the same captures.
        captures: Captures of all splits, in their order.
        bank: Folder of the bank.
        min_tokens: Routed tokens below which an expert is encoded without its Hessian.
        options: Parameters of the encoder.
        down_weighting: Whether the rows of the down Hessian carry their routing weight.
        threads: CPU threads.
        ledger_path: Written: one entry for each wanted expert, group and rate of the block.
        progress: Told of each expert.

    Raises:
        QuantizeError: The captures are not those of the receipt, or a weight cannot be encoded.
    """
    checkpoint = open_checkpoint(source)
    cfg = model_config(checkpoint.config)
    first = block * experts_per_block
    experts = range(first, min(first + experts_per_block, cfg.n_routed_experts))
    wanted = [e for e in read_json(wanted_path)["entries"] if e["expert"] in experts]
    receipt = read_json(hessians_path)
    if receipt["down_weighting"] != down_weighting or receipt["layer"] != layer:
        raise QuantizeError(
            "The Hessians were described for another layer or weighting.",
            file=hessians_path,
            layer=layer,
            expected=f"layer {layer}, down_weighting {down_weighting}",
            found=f"layer {receipt['layer']}, down_weighting {receipt['down_weighting']}",
            fix="run the hessians rule again",
        )
    store = Bank(bank)
    parameters = asdict(options) | {"min_tokens": min_tokens, "down_weighting": down_weighting}
    mapped: list[Capture] = []
    entries: list[dict[str, Any]] = []
    hits = 0
    for expert in experts:
        mine = [entry for entry in wanted if entry["expert"] == expert]
        if not mine:
            continue
        pair: dict[str, Hessian] = {}
        for entry in mine:
            group, rate = entry["group"], entry["rate"]
            key = expert_key(
                weights=_weight_hashes(checkpoint, layer, expert, group),
                captures=digest_json(receipt["captures"]),
                rate=rate,
                parameters=parameters,
                encoder=ENCODER,
                encoder_version=ENCODER_VERSION,
                device_class=device_class(),
            )
            if store.has(key):
                hits += 1
            else:
                mapped = mapped or _checked_captures(captures, receipt["captures"])
                pair = pair or _hessians(checkpoint, cfg, layer, expert, mapped, down_weighting)
                encoded = encode_group(
                    {m: checkpoint.weight(expert_stem(layer, expert, m)).T for m in GROUPS[group]},
                    pair[group].matrix,
                    pair[group].count,
                    rate,
                    f"layers.{layer}.ffn.experts.{expert}",
                    options,
                    min_tokens=min_tokens,
                    threads=threads,
                )
                store.put(key, _tensors(encoded), entry | _measured(key, pair[group], encoded))
            entries.append(store.entry(store.header(key)))
        progress(f"layer {layer}: expert {expert}, {len(entries)} of {len(wanted)} ({hits} hits)")
    write_json(
        ledger_path,
        {"schema": "trellisbank/ledger/1", "layer": layer, "block": block, "entries": entries},
    )


def _weight_hashes(checkpoint: Checkpoint, layer: int, expert: int, group: str) -> dict[str, str]:
    """Hash of every tensor that an encoding reads: the down Hessian needs gate and up too."""
    matrices = GROUPS["gate_up"] if group == "gate_up" else ("w1", "w3", "w2")
    names = (
        f"{expert_stem(layer, expert, matrix)}.{part}"
        for matrix in matrices
        for part in ("weight", "scale")
    )
    return {name: blake3(tensor_bytes(checkpoint.tensor(name))).hexdigest() for name in names}


def _matrix_hash(hessian: Hessian) -> str:
    return blake3(tensor_bytes(hessian.matrix)).hexdigest()


def _checked_captures(paths: Sequence[Pathlike], hashes: Sequence[str]) -> list[Capture]:
    for path, expected in zip(paths, hashes, strict=True):
        found = blake3_file(path)
        if found != expected:
            raise QuantizeError(
                "A capture is not the one that its Hessians were described from.",
                file=path,
                expected=f"blake3 {expected}",
                found=f"blake3 {found}",
                fix="run the hessians rule of this layer again",
            )
    return map_captures(paths)


def _hessians(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    layer: int,
    expert: int,
    captures: Sequence[Capture],
    down_weighting: Weighting,
) -> dict[str, Hessian]:
    w1, w3 = (checkpoint.weight(expert_stem(layer, expert, m)) for m in GROUPS["gate_up"])
    pair = expert_hessians(captures, expert, w1, w3, cfg.swiglu_limit, down_weighting)
    return dict(zip(("gate_up", "down"), pair, strict=True))


def _tensors(encoded: dict[str, EncodedMatrix]) -> dict[str, torch.Tensor]:
    return {
        f"{matrix}.{part}": tensor
        for matrix, result in encoded.items()
        for part, tensor in result.tensors.items()
    }


def _measured(key: str, hessian: Hessian, encoded: dict[str, EncodedMatrix]) -> dict[str, Any]:
    """The ledger's figures; `fallback` and `notes` are those of the group."""
    notes = [f"{matrix}: {note}" for matrix, e in encoded.items() for note in e.notes]
    if hessian.dropped:
        notes.append(f"{hessian.dropped} non-finite rows left out")
    return {
        "key": key,
        "tokens": hessian.count,
        "hessian": _matrix_hash(hessian),
        "fallback": next(iter(encoded.values())).fallback,
        "notes": notes,
        "matrices": {
            matrix: {
                "proxy_error": e.proxy_error,
                "output_error_energy": e.output_error_energy,
                "output_energy": e.output_energy,
                "relative_frobenius": e.relative_frobenius,
                "g_scale": e.g_scale,
                "stored_bits": e.stored_bits,
                "weights": e.weights,
            }
            for matrix, e in encoded.items()
        },
    }
