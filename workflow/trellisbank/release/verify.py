# SPDX-License-Identifier: Apache-2.0
"""Verification of a release from its own files, against its source, plan and ledger."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from trellisbank.bank import GROUPS
from trellisbank.checkpoint import INDEX, STORAGE, Checkpoint, expert_stem, open_checkpoint
from trellisbank.errors import FormatError, ReleaseError, TrellisbankError
from trellisbank.files import read_json, sha256_file
from trellisbank.formats import trellis
from trellisbank.formats.bank_plan import PLAN, read_bank_plan
from trellisbank.plan.freeze import Entries, expert_rates, plan_rates
from trellisbank.plan.layouts import BANK_PLAN, NATIVE, Rate
from trellisbank.release.bank_plan import MANIFEST
from trellisbank.release.finish import tensor_storage
from trellisbank.release.splice import BODY_EXPERT, body_experts, tensor_hash

SCHEMA = "trellisbank/verify/1"

ERROR_TOLERANCE = 1e-6
"""Largest difference between a decoded sample's relative Frobenius error and its ledger's."""

NAMED = 6
"""How many cases of a finding are named; all are counted."""

Findings = dict[str, list[str]]
"""What is wrong -> where."""


def verify_release(
    source: Checkpoint,
    release_dir: str | os.PathLike[str],
    plan: Mapping[str, Any],
    entries: Entries,
) -> dict[str, Any]:
    """Check a release against everything that it claims, reading the release's own files.

    Args:
        source: The checkpoint that the release was made from.
        release_dir: The release.
        plan: Frozen plan.
        entries: Ledger entry of every (layer, expert, group) of the plan.

    Returns:
        A receipt. `kept` counts the tensors compared, by `inode` (the shard is the source's own
        file) or by `bytes` (both sides hashed); `encoded` the EXL3 matrices whose rate, marker and
        scales were checked; `samples` holds one decoded expert a layer with its relative Frobenius
        error. `findings` is empty for a good release: the caller decides what one means.
    """
    findings: Findings = {}
    receipt: dict[str, Any] = {"schema": SCHEMA, "plan": plan["hash"]}
    census = body_experts(source.names)
    rates = {
        place: rate
        for place, rate in expert_rates(plan, max(map(len, census.values()))).items()
        if rate != NATIVE
    }
    try:
        release = open_checkpoint(release_dir)
        for layer in sorted(set(census) ^ {place[0] for place in expert_rates(plan, 1)}):
            _add(findings, "a layer in the plan or the source only", str(layer))
        _check_index(source, release, rates, plan["layout"], findings)
        receipt["kept"] = _check_kept(source, release, findings)
        receipt["encoded"] = _check_encoded(source, release, rates, findings)
        if plan["layout"] == BANK_PLAN:
            _check_states(release, plan, findings)
            _check_manifest(release, findings)
        else:
            _check_config(release, plan, findings)
            _check_storage(release, findings)
        receipt["samples"] = _check_samples(source, release, plan["hash"], rates, entries, findings)
    except TrellisbankError as trouble:
        # The checks end at what cannot be read; what was found until then stands.
        _add(findings, "something cannot be read", str(trouble))
    receipt["findings"] = [
        {"what": what, "count": len(places), "first": places[:NAMED]}
        for what, places in findings.items()
    ]
    return receipt


def refuse_findings(receipt: Mapping[str, Any], release_dir: str | os.PathLike[str]) -> None:
    """Raise ReleaseError if the verification found anything."""
    if receipt["findings"]:
        raise ReleaseError(
            "The release does not hold what it states.",
            file=release_dir,
            expected="no finding",
            found="; ".join(
                f"{item['what']} ({item['count']}): {', '.join(item['first'])}"
                for item in receipt["findings"]
            ),
            fix="do not ship it; remove the receipts of the shards named and run again",
        )


def _add(findings: Findings, what: str, where: str) -> None:
    findings.setdefault(what, []).append(where)


Rates = Mapping[tuple[int, int, str], Rate]
"""(layer, expert, group) -> rate of what the plan encodes."""


def _check_index(
    source: Checkpoint, release: Checkpoint, rates: Rates, layout: str, findings: Findings
) -> None:
    """Shards as in the source; exactly the tensors that belong; index equal to the headers.

    With banks, shards of encoded experts alone are gone, and the index lists the others alone.
    """
    if layout != BANK_PLAN:
        for shard in sorted(set(source.shards) ^ set(release.shards)):
            _add(findings, "a shard in the source or the release only", shard)
    stored: dict[str, str] = {}
    total = 0
    for shard in release.shards:
        tensors = release.header(shard).tensors
        for name in tensors.keys() & stored.keys():
            _add(findings, "a tensor in two shards", name)
        stored.update(dict.fromkeys(tensors, shard))
        if "/" not in shard:
            total += sum(info.nbytes for info in tensors.values())
    for name, _ in sorted(stored.items() ^ release.weight_map.items()):
        _add(findings, "index and headers differ", name)
    encoded = {(layer, expert) for layer, expert, _ in rates}
    expected = {
        name
        for name in source.names
        if not (match := BODY_EXPERT.fullmatch(name))
        or (int(match[1]), int(match[2])) not in encoded
    }
    expected |= {f"{stem}.{part}" for stem in _encoded_stems(rates) for part in trellis.PARTS}
    for name in sorted(expected - stored.keys()):
        _add(findings, "a tensor is missing", name)
    for name in sorted(stored.keys() - expected):
        _add(findings, "a tensor does not belong", name)
    stated = read_json(release.path / INDEX).get("metadata")
    if stated != {"total_size": total}:
        _add(findings, "the index's metadata is wrong", f"{stated}, {total} bytes in the headers")


def _encoded_stems(rates: Rates) -> dict[str, int]:
    """Return matrix -> rate."""
    return {
        expert_stem(layer, expert, matrix): int(rate)
        for (layer, expert, group), rate in sorted(rates.items())
        for matrix in GROUPS[group]
    }


def _check_kept(source: Checkpoint, release: Checkpoint, findings: Findings) -> dict[str, int]:
    """Every tensor that was not encoded has the bytes of the source, in the same shard."""
    compared = {"inode": 0, "bytes": 0}
    for shard in sorted(set(source.shards) & set(release.shards)):
        theirs, ours = source.header(shard), release.header(shard)
        same_file = os.path.samefile(theirs.path, ours.path)
        for name, info in theirs.tensors.items():
            if name not in ours.tensors:
                continue
            if same_file:
                compared["inode"] += 1
                continue
            compared["bytes"] += 1
            other = ours.tensors[name]
            if (other.dtype, other.shape) != (info.dtype, info.shape):
                _add(findings, "a kept tensor has another dtype or shape", name)
            elif tensor_hash(ours, name) != tensor_hash(theirs, name):
                _add(findings, "a kept tensor has other bytes", name)
    return compared


def _check_encoded(
    source: Checkpoint, release: Checkpoint, rates: Rates, findings: Findings
) -> dict[str, int]:
    """Shapes give the plan's rate; markers and scales are sound."""
    stems = _encoded_stems(rates)
    for stem, rate in stems.items():
        if not source.has(f"{stem}.weight"):
            _add(findings, "the plan names a matrix that the source does not have", stem)
            continue
        out_features, packed = source.info(f"{stem}.weight").shape
        _check_matrix(release, stem, (2 * packed, out_features), rate, findings)
    return {"matrices": len(stems)}


def _check_config(release: Checkpoint, plan: Mapping[str, Any], findings: Findings) -> None:
    """config.json states the rates of the plan."""
    stated: dict[str, dict[str, int]] = {}
    for (layer, group), rate in plan_rates(plan).items():
        stated.setdefault(str(layer), {})[group] = rate
    config = release.config.get("quantization_config", {})
    if config.get("expert_bits") != stated or config.get("bits") != plan["average_rate"]:
        _add(findings, "config.json states other rates than the plan", "quantization_config")


def _check_states(release: Checkpoint, plan: Mapping[str, Any], findings: Findings) -> None:
    """The release's own plan gives every expert the rate of the frozen one."""
    stated = read_bank_plan(release.path)
    for slot in plan["slots"]:
        rate = slot["rate"]
        state = stated.state(slot["layer"], slot["expert"])
        if state != (rate if rate == NATIVE else f"K{rate}"):
            place = f"layer {slot['layer']} expert {slot['expert']}"
            _add(findings, f"{PLAN} states another rate than the plan", place)


def _check_manifest(release: Checkpoint, findings: Findings) -> None:
    """The manifest lists every file of the release, each with its hash."""
    stated = {}
    for line in (release.path / MANIFEST).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        stated[name] = digest
    found = {
        path.relative_to(release.path).as_posix(): path
        for path in release.path.rglob("*")
        if path.is_file()
    }
    for name in sorted(stated.keys() ^ (found.keys() - {MANIFEST})):
        _add(findings, f"a file in {MANIFEST} or the release only", name)
    for name in sorted(stated.keys() & found.keys()):
        if sha256_file(found[name]) != stated[name]:
            _add(findings, f"a file has another hash than in {MANIFEST}", name)


def _check_matrix(
    release: Checkpoint, stem: str, sizes: tuple[int, int], rate: int, findings: Findings
) -> None:
    """Check one EXL3 matrix but for its trellis words, any of which are valid."""
    if not all(release.has(f"{stem}.{part}") for part in trellis.PARTS):
        return  # named as missing already
    k, n = sizes
    for part, (dtype, shape) in trellis.matrix_tensors(k, n, rate).items():
        info = release.info(f"{stem}.{part}")
        if (info.dtype, info.shape) != (dtype, shape):
            _add(
                findings,
                "an EXL3 tensor has another dtype, size or rate than the plan",
                f"{stem}.{part} {info.dtype} {info.shape}, not {dtype} {shape}",
            )
            return
    try:
        trellis.check_marker("mul1", int(_values(release, f"{stem}.mul1", np.int32)[0]))
    except FormatError:
        _add(findings, "a codebook marker is wrong", f"{stem}.mul1")
    for part in ("suh", "svh"):
        if not np.isfinite(_values(release, f"{stem}.{part}", np.float16)).all():
            _add(findings, "scales are not finite", f"{stem}.{part}")


def _values(release: Checkpoint, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Read a small tensor flat."""
    return release.tensor(name).reshape(-1).numpy().view(dtype)


def _check_storage(release: Checkpoint, findings: Findings) -> None:
    """`tensor_storage` names every tensor of the headers and no other, with its true figures."""
    stated = read_json(release.path / STORAGE)
    table = stated.pop("tensor_storage", {})
    if stated != release.config.get("quantization_config"):
        _add(findings, f"{STORAGE} and config.json differ", "quantization_config")
    tensors = {}
    for shard in release.shards:
        tensors.update(release.header(shard).tensors)
    expected = tensor_storage(tensors)
    for module in sorted(expected.keys() | table.keys()):
        if expected.get(module) != table.get(module):
            _add(findings, "tensor_storage does not describe the shards", module)


def _check_samples(
    source: Checkpoint,
    release: Checkpoint,
    plan_hash: str,
    rates: Rates,
    entries: Entries,
    findings: Findings,
) -> list[dict[str, Any]]:
    """Decode one expert a layer, chosen by the plan's hash; its error must be the ledger's."""
    samples = []
    encoded: dict[int, list[int]] = {}
    for layer, expert, group in sorted(rates):
        if group == next(iter(GROUPS)) and source.has(f"{expert_stem(layer, expert, 'w1')}.weight"):
            encoded.setdefault(layer, []).append(expert)
    for layer, experts in encoded.items():
        draw = int.from_bytes(blake3(f"{plan_hash}/{layer}".encode()).digest()[:8])
        expert = experts[draw % len(experts)]
        for group, matrices in GROUPS.items():
            for matrix in matrices:
                stem = expert_stem(layer, expert, matrix)
                parts = {part: release.tensor(f"{stem}.{part}") for part in trellis.PARTS}
                weight = trellis.decode(*trellis.stored_matrix(parts))
                if not np.isfinite(weight).all():
                    _add(findings, "a decoded weight is not finite", stem)
                    continue
                error = _relative_frobenius(weight, source.weight(stem).T.float().numpy())
                stated = entries[layer, expert, group]["matrices"][matrix]["relative_frobenius"]
                if abs(error - stated) > ERROR_TOLERANCE:
                    _add(
                        findings,
                        "a decoded weight has another error than its ledger states",
                        f"{stem}: {error}, not {stated}",
                    )
                samples.append({"tensor": stem, "relative_frobenius": error, "ledger": stated})
    return samples


def _relative_frobenius(
    decoded: npt.NDArray[np.float32], original: npt.NDArray[np.float32]
) -> float:
    """|decoded - original| / |original|, sums in fp64; the absolute error of a zero matrix."""
    error = np.square((decoded - original).astype(np.float64)).sum()
    norm = np.square(original.astype(np.float64)).sum()
    return float(np.sqrt(error / norm if norm else error))
