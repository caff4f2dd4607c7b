# SPDX-License-Identifier: Apache-2.0
"""The encoding of a block of experts: Hessians from the captures, missing experts into the bank."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Literal

import torch
from blake3 import blake3

from trellisbank.bank import GROUPS, Bank, expert_key
from trellisbank.checkpoint import Checkpoint, expert_stem, open_checkpoint
from trellisbank.errors import QuantizeError
from trellisbank.files import blake3_file, digest_json, read_json, write_json
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.state import CAPTURED
from trellisbank.quantize.backend import Choice, choose_backend
from trellisbank.quantize.decode_torch import decode
from trellisbank.quantize.expert import CODEBOOK, EncodedMatrix, Options, Work
from trellisbank.quantize.hessian import Capture, Hessian, expert_hessians, statistics
from trellisbank.quantize.output_error import gate_up_error
from trellisbank.safetensors_io import map_tensor, read_header, tensor_bytes

Pathlike = str | os.PathLike[str]
Weighting = Literal["none", "route"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Missing(Work):
    """A work whose result goes into the bank.

    Attributes:
        key: under which it goes there.
        entry: what was wanted: layer, expert, group, rate.
        expert: all matrices of the expert, bf16 `[out, in]`.
    """

    key: str
    entry: dict[str, Any]
    expert: Mapping[str, torch.Tensor]


def map_captures(paths: Sequence[Pathlike], layer: int) -> list[Capture]:
    """Map the captures of all splits of a layer; memory is the page cache's, not ours.

    Raises:
        QuantizeError: A capture is gone, or one of another layer.
    """
    captures = []
    for path in paths:
        if not os.path.exists(path):
            raise QuantizeError(
                "A capture that is needed to encode is gone.",
                file=path,
                layer=layer,
                expected="the FFN inputs of the calibration rows",
                fix="make captures again (target `captures` of the workflow), then run again",
            )
        header = read_header(path)
        if header.metadata.get("layer") != str(layer):
            raise QuantizeError(
                "A capture is of another layer.",
                file=path,
                expected=f"layer {layer}",
                found=f"layer {header.metadata.get('layer')}",
                fix="give the captures of this layer",
            )
        ffn_input, indices, weights = (map_tensor(header, name) for name in CAPTURED)
        captures.append((ffn_input, indices, weights))
    return captures


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
    mapped = map_captures(captures, layer)
    described = []
    for expert in range(cfg.n_routed_experts):
        weights = _weights(checkpoint, layer, expert)
        pair = _hessians(cfg, expert, weights, mapped, down_weighting)
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
    backend: Choice,
    threads: int,
    ledger_path: Pathlike,
    progress: Progress = lambda _: None,
) -> None:
    """Bring the wanted experts of a block into the bank and write the block's ledger.

    What the bank holds already is looked up by key and not encoded again, so an interrupted job
    goes on where it ended. An expert's bytes depend neither on its block nor on `threads`. Where
    the encoder is a GPU, reading and Hessians go on beside it, and writing.

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
        backend: Which encoder.
        threads: CPU threads.
        ledger_path: Written: one entry for each wanted expert, group and rate of the block.
        progress: Told of each expert.

    Raises:
        QuantizeError: The captures are not those of the receipt, a weight cannot be encoded, or
            the encoder asked for is not there.
    """
    checkpoint = open_checkpoint(source)
    cfg = model_config(checkpoint.config)
    first = block * experts_per_block
    experts = range(first, min(first + experts_per_block, cfg.n_routed_experts))
    wanted = [e for e in read_json(wanted_path)["entries"] if e["expert"] in experts]
    wanted.sort(key=lambda entry: entry["expert"])
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
    encoder = choose_backend(backend, options, min_tokens, threads)
    parameters = asdict(options) | {"min_tokens": min_tokens, "down_weighting": down_weighting}
    hashes = {e: _weight_hashes(checkpoint, layer, e) for e in {w["expert"] for w in wanted}}
    keys = [
        expert_key(
            weights=hashes[entry["expert"]],
            captures=digest_json(receipt["captures"]),
            rate=entry["rate"],
            parameters=parameters | {"group": entry["group"]},
            encoder=encoder.encoder,
            encoder_version=encoder.version,
            device_class=encoder.device_class,
        )
        for entry in wanted
    ]
    absent = [(k, entry) for k, entry in zip(keys, wanted, strict=True) if not store.has(k)]
    hits = len(wanted) - len(absent)
    if absent:
        mapped = map_captures(captures, layer)

        def works() -> Iterator[Missing]:
            for expert, own in groupby(absent, key=lambda item: item[1]["expert"]):
                weights = _weights(checkpoint, layer, expert, encoder.device)
                hessians = _hessians(cfg, expert, weights, mapped, down_weighting)
                for key, entry in own:
                    group = entry["group"]
                    yield Missing(
                        stem=f"layers.{layer}.ffn.experts.{expert}",
                        weights={matrix: weights[matrix].T for matrix in GROUPS[group]},
                        hessian=hessians[group],
                        rate=entry["rate"],
                        key=key,
                        entry=entry,
                        expert=weights,
                    )

        with ThreadPoolExecutor(1) as writer:
            # Ahead of the first write, which waits for it.
            check = writer.submit(_check_captures, captures, receipt["captures"])
            writes: list[Future[None]] = []
            for work, encoded in encoder.encode(works()):
                assert isinstance(work, Missing)
                # Not in the writer: torch's number of threads is the encoder's to set.
                more: dict[str, Any] = {}
                if work.entry["group"] == "gate_up":
                    more["expert_error_energy"] = gate_up_error(
                        mapped,
                        work.entry["expert"],
                        work.expert,
                        _stored(work, encoded),
                        cfg.swiglu_limit,
                        down_weighting == "route",
                    )
                writes.append(writer.submit(_put, check, store, work, encoded, more))
                if check.done():
                    check.result()
                progress(
                    f"layer {layer}: expert {work.entry['expert']}, {hits + len(writes)} of "
                    f"{len(wanted)} ({hits} hits)"
                )
            for write in writes:
                write.result()
    write_json(
        ledger_path,
        {
            "schema": "trellisbank/ledger/1",
            "layer": layer,
            "block": block,
            "entries": [store.entry(store.header(key)) for key in keys],
        },
    )


def _put(
    check: Future[None],
    store: Bank,
    work: Missing,
    encoded: dict[str, EncodedMatrix],
    more: dict[str, Any],
) -> None:
    check.result()
    entry = work.entry | _measured(work.key, work.hessian, encoded) | more
    store.put(work.key, _tensors(encoded), entry)


def _stored(work: Missing, encoded: Mapping[str, EncodedMatrix]) -> dict[str, torch.Tensor]:
    """What a release will hold, fp32 `[out, in]`, on the device of the expert."""
    device = work.expert["w1"].device
    return {
        matrix: decode({part: t.to(device) for part, t in of.tensors.items()}, CODEBOOK).T
        for matrix, of in encoded.items()
    }


def _weight_hashes(checkpoint: Checkpoint, layer: int, expert: int) -> dict[str, str]:
    """Hash of each stored tensor of an expert.

    An encoding speaks of all three matrices: the down Hessian needs gate and up, and the error of
    gate and up is measured behind `w2`.
    """
    names = [
        f"{expert_stem(layer, expert, matrix)}.{part}"
        for matrix in ("w1", "w3", "w2")
        for part in ("weight", "scale")
    ]
    return {name: blake3(tensor_bytes(checkpoint.tensor(name))).hexdigest() for name in names}


def _matrix_hash(hessian: Hessian) -> str:
    return blake3(tensor_bytes(hessian.matrix.cpu())).hexdigest()


def _check_captures(paths: Sequence[Pathlike], hashes: Sequence[str]) -> None:
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


def _weights(
    checkpoint: Checkpoint, layer: int, expert: int, device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """The matrices of an expert, bf16 `[out, in]`."""
    return {
        matrix: checkpoint.weight(expert_stem(layer, expert, matrix), device)
        for matrix in ("w1", "w2", "w3")
    }


def _hessians(
    cfg: ModelConfig,
    expert: int,
    weights: Mapping[str, torch.Tensor],
    captures: Sequence[Capture],
    down_weighting: Weighting,
) -> dict[str, Hessian]:
    """Hessians of an expert's matrix groups, where its weights are."""
    w1, w3 = weights["w1"], weights["w3"]
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
        "fallback": next((e.fallback for e in encoded.values() if e.fallback), None),
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
