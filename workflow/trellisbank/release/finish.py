# SPDX-License-Identifier: Apache-2.0
"""What a release holds beside its shards: companions, index, configurations, repack report."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trellisbank.bank import GROUPS
from trellisbank.checkpoint import (
    INDEX,
    RELEASE_FILES,
    REPACK_REPORT,
    STORAGE,
    Checkpoint,
    companions,
    expert_stem,
)
from trellisbank.errors import ReleaseError
from trellisbank.files import UNFINISHED, atomic_write, sha256_file, write_json
from trellisbank.formats.trellis import MARKERS, PARTS
from trellisbank.plan.freeze import plan_rates, plan_slots
from trellisbank.plan.layouts import NATIVE
from trellisbank.release.splice import DROPPED_PATTERN, TENSORS_PER_EXPERT, body_experts
from trellisbank.safetensors_io import DTYPES, TensorInfo, read_header

SCHEMA = "trellisbank/repack/1"
EXL3_VERSION = "1.6.5"
"""The exllamav3 whose format this is; loaders read it from `quantization_config.version`."""


def tensor_storage(tensors: Mapping[str, TensorInfo]) -> dict[str, dict[str, Any]]:
    """Return the `tensor_storage` table: every tensor under exactly one leaf module.

    The module is the tensor's name up to its last dot; a name without a dot is its own module.
    """
    table: dict[str, dict[str, Any]] = {}
    for name, info in sorted(tensors.items()):
        module = name.rpartition(".")[0] or name
        entry = table.setdefault(module, {"stored_tensors": {}})
        entry["stored_tensors"][name] = {
            "shape": list(info.shape),
            "n_bytes": info.nbytes,
            "dtype": str(DTYPES[info.dtype]),
        }
        if name == f"{module}.trellis":
            rate, half = divmod(info.shape[-1], 16)
            entry["quant_format"] = "exl3"
            entry["bits_per_weight"] = info.shape[-1] / 16 if half else rate
            entry["mul1_multiplier"] = MARKERS["mul1"]
    return table


def split_hint(inner: int, ranks: int) -> list[int]:
    """Return how many of an expert's inner channels each rank of tensor parallelism takes.

    EXL3 matrices are rotated in blocks of 128 channels, so ranks take whole blocks: 2304 over four
    is 512, 640, 640, 512 instead of 576 each. What is left over goes to the ranks in the middle.

    Args:
        inner: Inner channels of an expert, a multiple of 128.
        ranks: Ranks, at most one a block.
    """
    blocks, over = divmod(inner // 128, ranks)
    first = (ranks - over) // 2
    return [128 * (blocks + (first <= rank < first + over)) for rank in range(ranks)]


def split_hints(inner: int) -> dict[str, list[int]]:
    """Return the hint for every usual number of ranks whose equal share cuts through a block."""
    return {
        str(ranks): split_hint(inner, ranks)
        for ranks in (2, 4, 8, 16)
        if inner % (128 * ranks) and ranks <= inner // 128
    }


def quantization_config(
    checkpoint: Checkpoint,
    plan: Mapping[str, Any],
    *,
    calibration: Mapping[str, int],
    out_scales: str,
) -> dict[str, Any]:
    """Return the `quantization_config` of a release's config.json.

    Args:
        checkpoint: The source; its own entry is nested as `original_quantization_config`.
        plan: Frozen plan.
        calibration: `rows` and `cols` (tokens a row) of the calibration.
        out_scales: `always`, `never` or `auto`, as the encoder was told.
    """
    expert_bits: dict[str, dict[str, int]] = {}
    for (layer, group), rate in plan_rates(plan).items():
        expert_bits.setdefault(str(layer), {})[group] = rate
    config = {
        "quant_method": "exl3",
        "version": EXL3_VERSION,
        "bits": plan["average_rate"],
        "head_bits": 8 * DTYPES[checkpoint.info("head.weight").dtype].itemsize,
        "calibration": {"rows": calibration["rows"], "cols": calibration["cols"]},
        "out_scales": out_scales,
        "codebook": "mul1",
        "expert_bits": expert_bits,
    }
    layer, experts = min(body_experts(checkpoint.names).items())
    inner = checkpoint.info(f"{expert_stem(layer, min(experts), 'w1')}.weight").shape[0]
    if hints := split_hints(inner):
        config["expert_split"] = hints
    original = checkpoint.config.get("quantization_config")
    if original is not None:
        config["original_quantization_config"] = copy.deepcopy(original)
    return config


def finish_release(
    checkpoint: Checkpoint,
    plan: Mapping[str, Any],
    shard_receipts: Sequence[Mapping[str, Any]],
    out_dir: str | os.PathLike[str],
    *,
    calibration: Mapping[str, int],
    out_scales: str = "always",
) -> dict[str, Any]:
    """Complete a release whose shards are written: companions, index, configurations, report.

    Every file is written whole or not at all and always again, so a rerun over a partial folder
    ends in the same bytes. What killed writers left is removed; any other file that does not belong
    is refused, not removed.

    Args:
        checkpoint: The source.
        plan: Frozen plan.
        shard_receipts: Receipt of every shard.
        out_dir: The release's folder.
        calibration: `rows` and `cols` of the calibration.
        out_scales: As the encoder was told.

    Returns:
        The report, also written as `repack-report.json`.

    Raises:
        ReleaseError: A shard lacks, is of another plan or has another size than its receipt; the
            plan names a layer that the source does not have; the counts do not add up; a file does
            not belong.
    """
    out = Path(out_dir)
    receipts = check_receipts(checkpoint, plan, shard_receipts, out)
    tensors, weight_map = read_shards(receipts, out)
    names = companions(checkpoint)
    clear(out, {*names, *checkpoint.shards, *RELEASE_FILES})
    copied = copy_files(checkpoint, names, out)
    config = quantization_config(checkpoint, plan, calibration=calibration, out_scales=out_scales)
    total = sum(info.nbytes for info in tensors.values())
    write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(out / "config.json", {**checkpoint.config, "quantization_config": config})
    write_json(out / STORAGE, {**config, "tensor_storage": tensor_storage(tensors)})
    report = repack_report(plan, receipts, tensors, copied)
    write_json(out / REPACK_REPORT, report)
    return report


def read_shards(
    receipts: Mapping[str, Mapping[str, Any]], out: Path
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Return tensors and weight map of the shards that were written, from their headers.

    Raises:
        ReleaseError: A shard has another size than its receipt.
    """
    tensors: dict[str, TensorInfo] = {}
    weight_map: dict[str, str] = {}
    for shard, receipt in receipts.items():
        if not receipt["tensors"]:
            continue
        if not (out / shard).exists():
            raise ReleaseError(
                "A shard of the release is gone.",
                file=out / shard,
                expected=f"{receipt['bytes']} bytes",
                found="no file",
                fix="remove the shard's receipt and run again",
            )
        header = read_header(out / shard)
        if header.size != receipt["bytes"]:
            raise ReleaseError(
                "A shard of the release is not the one of its receipt.",
                file=header.path,
                expected=f"{receipt['bytes']} bytes",
                found=f"{header.size} bytes",
                fix="remove the shard's receipt and run again",
            )
        tensors.update(header.tensors)
        weight_map.update(dict.fromkeys(header.tensors, shard))
    return tensors, weight_map


def copy_files(checkpoint: Checkpoint, names: Sequence[str], out: Path) -> list[dict[str, Any]]:
    """Copy files of the source; return name, bytes and sha256 of each."""
    copied = []
    for name in names:
        with open(checkpoint.path / name, "rb") as reader, atomic_write(out / name) as writer:
            shutil.copyfileobj(reader, writer)
        size = (out / name).stat().st_size
        copied.append({"file": name, "bytes": size, "sha256": sha256_file(out / name)})
    return copied


def repack_report(
    plan: Mapping[str, Any],
    receipts: Mapping[str, Mapping[str, Any]],
    tensors: Mapping[str, TensorInfo],
    copied: Sequence[Mapping[str, Any]],
    banks: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the report of a release: what was dropped, added, kept and copied.

    Args:
        plan: Frozen plan.
        receipts: Of every shard of the source.
        tensors: All tensors of the release.
        copied: See `copy_files`.
        banks: Matrix groups that stand in banks instead of shards.
    """
    changed = [receipt for receipt in receipts.values() if receipt["changed"]]
    added = [*banks, *(item for receipt in changed for item in receipt["added"])]
    return {
        "schema": SCHEMA,
        "plan": plan["hash"],
        "layout": plan["layout"],
        "average_rate": plan["average_rate"],
        "stored_bits_per_weight": plan["stored_bits_per_weight"],
        "tensors": len(tensors),
        "tensor_bytes": sum(info.nbytes for info in tensors.values()),
        "dropped": {
            "pattern": DROPPED_PATTERN,
            "tensors": sum(receipt["dropped"]["tensors"] for receipt in changed),
            "bytes": sum(receipt["dropped"]["bytes"] for receipt in changed),
        },
        "added": {
            "groups": len(added),
            "tensors": len(PARTS) * sum(len(GROUPS[item["group"]]) for item in added),
        },
        "kept": {
            "tensors": sum(
                len(receipt["kept"]) if receipt["changed"] else receipt["tensors"]
                for receipt in receipts.values()
            ),
            "in_changed_shards": {receipt["shard"]: receipt["kept"] for receipt in changed},
        },
        "shards": [
            {
                name: receipt[name]
                for name in ("shard", "changed", "bytes", "tensors", "sha256", "source_sha256")
            }
            for receipt in receipts.values()
        ],
        "copied": copied,
    }


def check_receipts(
    checkpoint: Checkpoint,
    plan: Mapping[str, Any],
    shard_receipts: Sequence[Mapping[str, Any]],
    out: Path,
) -> dict[str, Mapping[str, Any]]:
    """Return the receipts by shard, sorted, once they cover source and plan exactly."""
    receipts = {receipt["shard"]: receipt for receipt in shard_receipts}
    if sorted(receipts) != checkpoint.shards:
        raise ReleaseError(
            "The receipts do not cover the shards of the source.",
            file=out,
            expected=f"{len(checkpoint.shards)} shards",
            found=f"differing: {sorted(set(receipts) ^ set(checkpoint.shards))[:6]}",
            fix="splice every shard of the source once",
        )
    for shard, receipt in receipts.items():
        if receipt["plan"] != plan["hash"]:
            raise ReleaseError(
                "A shard was made from another plan.",
                file=out / shard,
                expected=f"plan {plan['hash']}",
                found=f"plan {receipt['plan']}",
                fix="splice the shard again",
            )
    census = body_experts(checkpoint.names)
    slots = plan_slots(plan)
    planned = {slot.layer for slot in slots}
    if planned != set(census):
        raise ReleaseError(
            "The plan speaks of other layers than the source has.",
            file=checkpoint.path,
            expected=f"layers {sorted(census)}",
            found=f"layers {sorted(planned)}",
            fix="freeze the recipe again for this checkpoint",
        )
    native = sum(rate == NATIVE for rate in slots.values())
    expected = TENSORS_PER_EXPERT * (sum(len(layer) for layer in census.values()) - native)
    dropped = sum(
        receipt["dropped"]["tensors"] for receipt in receipts.values() if receipt["changed"]
    )
    if dropped != expected:
        raise ReleaseError(
            "The shards did not drop the native experts exactly.",
            file=out,
            expected=f"{expected} tensors: encoded experts x {TENSORS_PER_EXPERT}",
            found=f"{dropped} tensors",
            fix="check that the source's index lists every tensor of its shards",
        )
    return dict(sorted(receipts.items()))


def clear(out: Path, expected: set[str]) -> None:
    """Remove what killed writers left; refuse other files that are not part of the release."""
    foreign = []
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out).as_posix()
        if name in expected or (path.is_dir() and not path.is_symlink()):
            continue
        if UNFINISHED.fullmatch(path.name):
            path.unlink()
        else:
            foreign.append(name)
    if foreign:
        raise ReleaseError(
            "The release's folder holds files that do not belong to it.",
            file=out,
            found=", ".join(foreign[:6]) + (" and more" if len(foreign) > 6 else ""),
            fix="move them away, or remove the folder and run again",
        )
