# SPDX-License-Identifier: Apache-2.0
"""Releases in the `bank-plan` layout: native shards without the encoded experts, banks, a plan.

The format of the plan, and how an expert is found, stands in `formats.bank_plan`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import INDEX, REPACK_REPORT, Checkpoint, companions
from trellisbank.errors import ReleaseError
from trellisbank.files import atomic_write, sha256_file, write_json
from trellisbank.formats.bank_plan import PLAN, bank_file
from trellisbank.plan.freeze import expert_rates, plan_slots
from trellisbank.plan.layouts import NATIVE
from trellisbank.release.finish import (
    check_receipts,
    clear,
    copy_files,
    read_shards,
    repack_report,
)
from trellisbank.release.splice import (
    BODY_EXPERT,
    SHARD_SCHEMA,
    body_experts,
    expert_parts,
    link_shard,
    refuse_partial,
    rewrite_shard,
)
from trellisbank.safetensors_io import DTYPES, Part, read_header, write_parts

BANK = "bank"
"""Name of the one bank that a release of ours has."""

MANIFEST = "sha256-manifest.txt"


def native_shard(
    checkpoint: Checkpoint,
    shard: str,
    plan: Mapping[str, Any],
    out_dir: str | os.PathLike[str],
    source_sha256: str,
) -> dict[str, Any]:
    """Make one native shard: the source's tensors but for experts that the plan encodes.

    A shard that loses nothing is a hard link; one that would be empty is not written.

    Args:
        checkpoint: The source.
        shard: File name of the shard.
        plan: Frozen plan.
        out_dir: The release's folder.
        source_sha256: SHA-256 of the source's shard, from its verification.

    Returns:
        The shard's receipt, as of `splice_shard`.

    Raises:
        CheckpointError: The shard holds only some tensors of an expert.
        ReleaseError: The written bytes are not those that were read.
    """
    header = checkpoint.header(shard)
    target = Path(out_dir) / shard
    experts = body_experts(header.tensors)
    for layer, counts in sorted(experts.items()):
        refuse_partial(header.path, layer, counts)
    native = _native(plan)
    kept = [
        name
        for name in header.tensors
        if not (match := BODY_EXPERT.fullmatch(name)) or (int(match[1]), int(match[2])) in native
    ]
    if len(kept) == len(header.tensors):
        return link_shard(header, shard, plan, target, source_sha256)
    if kept:
        return rewrite_shard(header, shard, plan, kept, [], [], target, source_sha256)
    target.unlink(missing_ok=True)
    return {
        "schema": SHARD_SCHEMA,
        "plan": plan["hash"],
        "shard": shard,
        "bytes": 0,
        "tensors": 0,
        "source_sha256": source_sha256,
        "sha256": None,
        "changed": True,
        "dropped": {
            "tensors": len(header.tensors),
            "bytes": sum(info.nbytes for info in header.tensors.values()),
        },
        "kept": [],
        "added": [],
    }


def _native(plan: Mapping[str, Any]) -> set[tuple[int, int | None]]:
    return {(s.layer, s.expert) for s, rate in plan_slots(plan).items() if rate == NATIVE}


def release_plan(plan: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plan JSON that a loader reads.

    A layer's own state is the rate that most of its encoded experts have, the lower one of two; a
    layer without encoded experts is native.
    """
    by_layer: dict[int, dict[int, Any]] = {}
    for slot, rate in plan_slots(plan).items():
        if slot.expert is not None:
            by_layer.setdefault(slot.layer, {})[slot.expert] = rate
    made: dict[str, Any] = {
        "layers": {},
        "keep_native": {},
        "expert_state": {},
        "qdir": f"bank:{BANK}",
    }
    for layer, rates in sorted(by_layer.items()):
        counts = Counter(rate for rate in rates.values() if rate != NATIVE)
        common = min(counts, key=lambda rate: (-counts[rate], rate)) if counts else None
        made["layers"][str(layer)] = NATIVE if common is None else f"K{common}"
        native = sorted(expert for expert, rate in rates.items() if rate == NATIVE)
        if native and common is not None:
            made["keep_native"][str(layer)] = native
        other = {
            str(expert): f"K{rate}"
            for expert, rate in sorted(rates.items())
            if rate not in (NATIVE, common)
        }
        if other:
            made["expert_state"][str(layer)] = other
    return made


def finish_bank_plan(
    checkpoint: Checkpoint,
    plan: Mapping[str, Any],
    shard_receipts: Sequence[Mapping[str, Any]],
    bank: Bank,
    keys: Mapping[tuple[int, int, str], str],
    out_dir: str | os.PathLike[str],
) -> dict[str, Any]:
    """Complete a release whose native shards are written: banks, plan, index, companions, hashes.

    A rerun over a partial folder ends in the same bytes. `config.json` is the source's: the banks
    and the plan stand beside a native checkpoint.

    Args:
        checkpoint: The source.
        plan: Frozen plan.
        shard_receipts: Receipt of every shard of the source.
        bank: Where the encoded experts are.
        keys: Bank key of each (layer, expert, group) that the plan encodes.
        out_dir: The release's folder.

    Returns:
        The report, also written as `repack-report.json`.

    Raises:
        ReleaseError: Receipts, plan and source do not fit, a key lacks, or a file does not belong.
        FormatError: A bank file is missing or damaged.
    """
    out = Path(out_dir)
    receipts = check_receipts(checkpoint, plan, shard_receipts, out)
    tensors, weight_map = read_shards(receipts, out)
    layers = body_experts(checkpoint.names)
    files: dict[str, list[dict[str, Any]]] = {}
    for (layer, expert, group), rate in sorted(
        expert_rates(plan, max(map(len, layers.values()))).items(),
        key=lambda item: (item[0][0], item[0][1], list(GROUPS).index(item[0][2])),
    ):
        if rate != NATIVE:
            place = {"layer": layer, "expert": expert, "group": group, "rate": rate}
            files.setdefault(bank_file(f"exl3/{BANK}", f"K{rate}", layer), []).append(place)
    names = [*companions(checkpoint), "config.json"]
    written = [shard for shard in checkpoint.shards if receipts[shard]["tensors"]]
    # Files of an older plan: banks that are not ours any more, and shards that became empty.
    for path in (out / "exl3" / BANK).glob("K*/L*.safetensors"):
        if path.relative_to(out).as_posix() not in files:
            path.unlink()
    clear(out, {*names, *written, *files, INDEX, PLAN, REPACK_REPORT, MANIFEST})
    banks = []
    for file, places in sorted(files.items()):
        parts = list(_parts(checkpoint, bank, keys, places, out / file))
        # Larger elements first, see `rewrite_shard`.
        parts.sort(key=lambda part: -DTYPES[part.dtype].itemsize)
        write_parts(out / file, parts)
        header = read_header(out / file)
        tensors |= header.tensors
        banks.append({"file": file, "bytes": header.size, "experts": len(places) // len(GROUPS)})
    copied = copy_files(checkpoint, names, out)
    native_bytes = sum(tensors[name].nbytes for name in weight_map)
    write_json(out / INDEX, {"metadata": {"total_size": native_bytes}, "weight_map": weight_map})
    write_json(out / PLAN, release_plan(plan))
    added = [{**place, "key": keys[_at(place)]} for places in files.values() for place in places]
    report = repack_report(plan, receipts, tensors, copied, added) | {"banks": banks}
    write_json(out / REPACK_REPORT, report)
    known = {receipt["shard"]: receipt["sha256"] for receipt in receipts.values()}
    write_manifest(out, known)
    return report


def _at(place: Mapping[str, Any]) -> tuple[int, int, str]:
    return place["layer"], place["expert"], place["group"]


def _parts(
    checkpoint: Checkpoint,
    bank: Bank,
    keys: Mapping[tuple[int, int, str], str],
    places: Sequence[Mapping[str, Any]],
    file: Path,
) -> Iterator[Part]:
    lacking = [place for place in places if _at(place) not in keys]
    if lacking:
        raise ReleaseError(
            "No bank key was given for experts that the plan encodes.",
            file=file,
            found=f"{len(lacking)} missing: "
            + ", ".join(
                f"layer {p['layer']} expert {p['expert']} {p['group']}" for p in lacking[:6]
            ),
            fix="hand over the ledgers of all layers",
        )
    for place in places:
        yield from expert_parts(checkpoint, bank, keys[_at(place)], place)


def write_manifest(folder: Path, known: Mapping[str, str | None] | None = None) -> None:
    """Write `sha256-manifest.txt`: hash and path of every other file, sorted, for `sha256sum -c`.

    Args:
        folder: What is listed.
        known: Hashes that need not be computed again.
    """
    lines = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            lines.append(f"{(known or {}).get(name) or sha256_file(path)}  {name}\n")
    with atomic_write(folder / MANIFEST, "w") as handle:
        handle.writelines(lines)
