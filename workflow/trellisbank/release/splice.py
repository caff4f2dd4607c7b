# SPDX-License-Identifier: Apache-2.0
"""The shards of a release in the `cuda-exl3` layout: body routed experts as EXL3, the rest kept.

Same shard names and count as the source. A shard without body routed experts is a hard link; any
other is rewritten, its untouched tensors byte for byte. `docs/release.md` describes the result.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3

from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import Checkpoint, expert_stem
from trellisbank.errors import CheckpointError, ReleaseError
from trellisbank.files import link_or_copy, sha256_file
from trellisbank.formats.trellis import PARTS
from trellisbank.plan.freeze import plan_rates
from trellisbank.safetensors_io import (
    DTYPES,
    Header,
    Part,
    raw_blocks,
    read_header,
    tensor_bytes,
    write_parts,
)

SHARD_SCHEMA = "trellisbank/shard/1"
DROPPED_PATTERN = "layers.{layer}.ffn.experts.{expert}.{w1,w2,w3}.{weight,scale}"
BODY_EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.(weight|scale)")
TENSORS_PER_EXPERT = 6


def body_experts(names: Iterable[str]) -> dict[int, dict[int, int]]:
    """Count the native tensors of body routed experts: layer -> expert -> tensors (6 if whole)."""
    counts: dict[int, dict[int, int]] = {}
    for name in names:
        if match := BODY_EXPERT.fullmatch(name):
            layer = counts.setdefault(int(match[1]), {})
            layer[int(match[2])] = layer.get(int(match[2]), 0) + 1
    return counts


def tensor_hash(header: Header, name: str) -> str:
    """Return the BLAKE3 hash (hex) of a tensor's stored bytes."""
    hasher = blake3()
    for block in raw_blocks(header, name):
        hasher.update(block)
    return hasher.hexdigest()


def splice_shard(
    checkpoint: Checkpoint,
    shard: str,
    plan: Mapping[str, Any],
    bank: Bank,
    keys: Mapping[tuple[int, int, str], str],
    out_dir: str | os.PathLike[str],
    source_sha256: str,
) -> dict[str, Any]:
    """Make one shard of a release.

    Memory is one block of 4 MiB or one encoded tensor, whichever is larger.

    Args:
        checkpoint: The source; its files keep their bytes and time stamps.
        shard: File name of the shard.
        plan: Frozen plan.
        bank: Where the encoded experts are.
        keys: Bank key of each (layer, expert, group) of the shard's layers.
        out_dir: The release's folder.
        source_sha256: SHA-256 of the source's shard, from its verification.

    Returns:
        The shard's receipt: what was dropped, kept (with hashes read and written) and added.

    Raises:
        ReleaseError: The plan or the keys do not cover the shard's experts, an encoded expert does
            not fit its place, or the written bytes are not those that were read.
        FormatError: A bank file is missing or damaged.
    """
    header = checkpoint.header(shard)
    target = Path(out_dir) / shard
    experts = body_experts(header.tensors)
    if not experts:
        return link_shard(header, shard, plan, target, source_sha256)
    kept = [name for name in header.tensors if not BODY_EXPERT.fullmatch(name)]
    parts: list[Part] = []
    added = []
    for layer, counts in sorted(experts.items()):
        refuse_partial(header.path, layer, counts)
        rates = {group: rate for (at, group), rate in plan_rates(plan).items() if at == layer}
        if set(rates) != set(GROUPS):
            raise ReleaseError(
                "The plan does not cover a layer of the checkpoint.",
                file=header.path,
                layer=layer,
                expected=f"a rate for {' and '.join(GROUPS)}",
                found=f"rates {rates}",
                fix="freeze the recipe again for this checkpoint",
            )
        for expert in sorted(counts):
            for group in GROUPS:
                key = keys.get((layer, expert, group))
                if key is None:
                    raise ReleaseError(
                        "No bank key was given for an expert of the shard.",
                        file=header.path,
                        tensor=group,
                        layer=layer,
                        expert=expert,
                        fix="hand over the ledgers of all layers in the shard",
                    )
                place = {"layer": layer, "expert": expert, "group": group, "rate": rates[group]}
                parts += expert_parts(checkpoint, bank, key, place)
                added.append({**place, "key": key})
    return rewrite_shard(header, shard, plan, kept, parts, added, target, source_sha256)


def rewrite_shard(
    header: Header,
    shard: str,
    plan: Mapping[str, Any],
    kept: Sequence[str],
    parts: Sequence[Part],
    added: Sequence[Mapping[str, Any]],
    target: Path,
    source_sha256: str,
) -> dict[str, Any]:
    """Write a shard: some of the source's tensors byte for byte, and new ones.

    Args:
        header: Of the source's shard.
        shard: Its name.
        plan: Frozen plan.
        kept: Tensors that are copied; the others are dropped.
        parts: New tensors.
        added: What the receipt says of the new tensors.
        target: Where the shard goes.
        source_sha256: SHA-256 of the source's shard.

    Returns:
        The shard's receipt.

    Raises:
        ReleaseError: The written bytes are not those that were read.
    """
    read: dict[str, str] = {}
    copied = frozenset(kept)
    dropped = [name for name in header.tensors if name not in copied]
    everything = [_kept_part(header, name, read) for name in kept] + list(parts)
    # Larger elements first, as the safetensors library orders them: every tensor then starts at a
    # multiple of its element size, which readers that map the file need. Otherwise the order of
    # the source, then layer, expert, matrix.
    everything.sort(key=lambda part: -DTYPES[part.dtype].itemsize)
    write_parts(target, everything, header.metadata)
    written = read_header(target)
    hashes = {name: tensor_hash(written, name) for name in kept}
    for name in kept:
        if hashes[name] != read[name]:
            target.unlink()
            raise ReleaseError(
                "A kept tensor was written with other bytes than were read.",
                file=target,
                tensor=name,
                expected=f"blake3 {read[name]}",
                found=f"blake3 {hashes[name]}",
                fix="check the disk and the memory of this machine, then run again",
            )
    return {
        **_receipt(plan, shard, written, source_sha256),
        "changed": True,
        "sha256": sha256_file(target),
        "dropped": {
            "pattern": DROPPED_PATTERN,
            "tensors": len(dropped),
            "bytes": sum(header.tensors[name].nbytes for name in dropped),
            "experts": {str(layer): len(counts) for layer, counts in body_experts(dropped).items()},
        },
        "kept": [
            {
                "tensor": name,
                "bytes": written.tensors[name].nbytes,
                "blake3_read": read[name],
                "blake3_written": hashes[name],
            }
            for name in kept
        ],
        "added": list(added),
    }


def _receipt(
    plan: Mapping[str, Any], shard: str, written: Header, source_sha256: str
) -> dict[str, Any]:
    return {
        "schema": SHARD_SCHEMA,
        "plan": plan["hash"],
        "shard": shard,
        "bytes": written.size,
        "tensors": len(written.tensors),
        "source_sha256": source_sha256,
    }


def link_shard(
    header: Header, shard: str, plan: Mapping[str, Any], target: Path, source_sha256: str
) -> dict[str, Any]:
    """Give the release a shard that it shares with the source; a copy is hashed."""
    if not link_or_copy(header.path, target):
        found = sha256_file(target)
        if found != source_sha256:
            target.unlink()
            raise ReleaseError(
                "The copy of a shard is not the shard that was verified.",
                file=target,
                expected=f"sha256 {source_sha256}",
                found=f"sha256 {found}",
                fix="verify the source again, then run again",
            )
    receipt = _receipt(plan, shard, read_header(target), source_sha256)
    return {**receipt, "changed": False, "sha256": source_sha256}


def refuse_partial(path: Path, layer: int, counts: Mapping[int, int]) -> None:
    """Raise CheckpointError for an expert of which the shard holds only a part."""
    for expert, count in counts.items():
        if count != TENSORS_PER_EXPERT:
            raise CheckpointError(
                "A shard holds only some tensors of a routed expert.",
                file=path,
                layer=layer,
                expert=expert,
                expected=f"{TENSORS_PER_EXPERT} tensors: {DROPPED_PATTERN}",
                found=f"{count} tensors",
                fix="a release needs each expert in one shard; repack the source",
            )


def _kept_part(header: Header, name: str, hashes: dict[str, str]) -> Part:
    """Return the part that copies a tensor; its hash as read goes to `hashes`."""

    def blocks() -> Iterator[bytes]:
        hasher = blake3()
        for block in raw_blocks(header, name):
            hasher.update(block)
            yield block
        hashes[name] = hasher.hexdigest()

    info = header.tensors[name]
    return Part(name, info.dtype, info.shape, blocks)


def expert_parts(
    source: Checkpoint, bank: Bank, key: str, place: Mapping[str, Any]
) -> Iterator[Part]:
    """Yield the parts of one encoded matrix group, read from the bank when they are written.

    Args:
        source: Whose native matrices they stand for.
        bank: Where they are.
        key: Their key.
        place: `layer`, `expert`, `group` and `rate` that the plan takes.

    Raises:
        ReleaseError: The bank's file is of another place, rate or shape.
        FormatError: It is missing or damaged.
    """
    header = bank.header(key)
    entry = bank.entry(header)
    if any(entry.get(name) != value for name, value in place.items()):
        raise ReleaseError(
            "A bank file is of another expert, group or rate than the plan takes.",
            file=header.path,
            layer=place["layer"],
            expert=place["expert"],
            expected=dict(place),
            found={name: entry.get(name) for name in place},
            fix="freeze the recipe again from the ledgers of this run",
        )
    for matrix in GROUPS[place["group"]]:
        stem = expert_stem(place["layer"], place["expert"], matrix)
        out_features, packed = source.info(f"{stem}.weight").shape
        stored = (header.tensors[f"{matrix}.suh"].shape, header.tensors[f"{matrix}.svh"].shape)
        if stored != ((2 * packed,), (out_features,)):
            raise ReleaseError(
                "An encoded matrix has another shape than the one that it replaces.",
                file=header.path,
                tensor=stem,
                expected=f"{2 * packed} in-features, {out_features} out-features",
                found=f"suh {stored[0]}, svh {stored[1]}",
                fix="encode again from this checkpoint",
            )
        for part in PARTS:
            yield _bank_part(bank, header, f"{matrix}.{part}", f"{stem}.{part}")


def _bank_part(bank: Bank, header: Header, stored: str, name: str) -> Part:
    info = header.tensors[stored]
    return Part(name, info.dtype, info.shape, lambda: [tensor_bytes(bank.tensor(header, stored))])
