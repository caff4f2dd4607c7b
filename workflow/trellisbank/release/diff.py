# SPDX-License-Identifier: Apache-2.0
"""What two releases differ in, and a patch that makes one of the other.

A patch holds the files of B that are not in A. Of a safetensors file that A has in another version
it holds the header and the tensors that changed; the others are taken from A.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trellisbank.bank import GROUPS
from trellisbank.errors import ReleaseError
from trellisbank.files import (
    BLOCK_BYTES,
    atomic_write,
    link_or_copy,
    read_json,
    sha256_file,
    write_json,
)
from trellisbank.formats.bank_plan import NATIVE
from trellisbank.release.splice import tensor_hash
from trellisbank.safetensors_io import Header, Part, raw_blocks, read_header, write_parts

SCHEMA = "trellisbank/release-diff/1"
PATCH = "patch.json"
EXPERT = re.compile(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w[123])\.(trellis|weight)")

Pathlike = str | os.PathLike[str]


def diff_releases(a: Pathlike, b: Pathlike) -> dict[str, Any]:
    """Compare two releases file by file and, where files differ, tensor by tensor.

    Every file is hashed, one that both share on the disk once.

    Returns:
        `experts`: those whose rate or bytes changed, with the rate of each matrix group before and
        after; `files`: every file of B, `kept` from A, shipped `whole`, or rebuilt from `tensors`
        (those that ship are named); `base`: sha256 of every file of A that is needed; `removed`:
        files that B no longer has; `bytes_to_ship` and `bytes` of B.

    Raises:
        CheckpointError: A safetensors file that is damaged.
    """
    before, after = _files(Path(a)), _files(Path(b))
    heads_a = {name: read_header(path) for name, path in before.items() if _holds_tensors(name)}
    heads_b = {name: read_header(path) for name, path in after.items() if _holds_tensors(name)}
    where = {tensor: head for head in heads_a.values() for tensor in head.tensors}
    files, base, changed = [], {}, set()
    for name, path in after.items():
        old, digest = before.get(name), sha256_file(path)
        if old is not None and (os.path.samefile(old, path) or sha256_file(old) == digest):
            base[name] = digest
            files.append(_line(name, path, digest, "kept", 0))
            continue
        if not _holds_tensors(name):
            files.append(_line(name, path, digest, "whole", path.stat().st_size))
            continue
        head = heads_b[name]
        new = [tensor for tensor in head.tensors if not _unchanged(where.get(tensor), head, tensor)]
        changed |= set(new)
        for source in sorted({where[tensor].path for tensor in head.tensors.keys() - set(new)}):
            base.setdefault(source.relative_to(a).as_posix(), sha256_file(source))
        ship = sum(head.tensors[tensor].nbytes for tensor in new) + _data_start(path)
        files.append(
            _line(name, path, digest, "tensors", ship)
            | {"tensors": new, "order": list(head.tensors)}
        )
    states = [_states(heads.values()) for heads in (heads_a, heads_b)]
    touched = {(int(m[1]), int(m[2])) for t in changed if (m := EXPERT.match(t))} | {
        place
        for place in states[0].keys() | states[1].keys()
        if states[0].get(place) != states[1].get(place)
    }
    return {
        "schema": SCHEMA,
        "experts": [
            {
                "layer": layer,
                "expert": expert,
                "before": states[0].get((layer, expert)),
                "after": states[1].get((layer, expert)),
            }
            for layer, expert in sorted(touched)
        ],
        "files": files,
        "base": base,
        "removed": sorted(before.keys() - after.keys()),
        "bytes_to_ship": sum(line["ship"] for line in files),
        "bytes": sum(line["bytes"] for line in files),
    }


def write_patch(a: Pathlike, b: Pathlike, out: Pathlike) -> dict[str, Any]:
    """Write the patch that makes B of A into a new folder; return what `diff_releases` says.

    Raises:
        ReleaseError: The folder holds something.
    """
    b, out = Path(b), Path(out)
    _refuse_full(out)
    diff = diff_releases(a, b)
    for line in diff["files"]:
        name = line["file"]
        if line["how"] == "whole":
            _copy(b / name, out / "whole" / name)
        elif line["how"] == "tensors":
            head = read_header(b / name)
            with open(b / name, "rb") as reader, atomic_write(out / "headers" / name) as writer:
                writer.write(reader.read(_data_start(b / name)))
            parts = [_part(head, tensor) for tensor in line["tensors"]]
            write_parts(out / "tensors" / name, parts)
    write_json(out / PATCH, diff)
    return diff


def apply_patch(a: Pathlike, patch: Pathlike, out: Pathlike) -> dict[str, Any]:
    """Make B in a new folder from A and a patch; A is only read, and shared where it is kept.

    Every file of A that is used is checked first, and every file made is checked against B's hash.

    Returns:
        The patch's description.

    Raises:
        ReleaseError: A is not the release that the patch was made for, the patch is damaged, or the
            folder holds something. A file that came out wrong is removed.
    """
    a, patch, out = Path(a), Path(patch), Path(out)
    _refuse_full(out)
    diff = read_json(patch / PATCH, ReleaseError)
    if diff.get("schema") != SCHEMA:
        raise ReleaseError(
            "A folder holds no patch.",
            file=patch / PATCH,
            expected=f"schema {SCHEMA}",
            found=diff.get("schema"),
            fix="give the folder that `trellisbank release-diff --patch` wrote",
        )
    for name in [*diff["base"], *(line["file"] for line in diff["files"])]:
        if name.startswith("/") or ".." in Path(name).parts:
            raise ReleaseError(
                "A patch names a file outside the release.",
                file=patch / PATCH,
                found=name,
                fix="do not use this patch before you know where it comes from",
            )
    for name, digest in diff["base"].items():
        _check(a / name, digest, "A file is not that of the release that the patch was made for.")
    heads = [read_header(a / name) for name in diff["base"] if _holds_tensors(name)]
    where = {tensor: head for head in heads for tensor in head.tensors}
    for line in diff["files"]:
        name, target = line["file"], out / line["file"]
        if line["how"] == "kept":
            link_or_copy(a / name, target)
        elif line["how"] == "whole":
            _copy(patch / "whole" / name, target)
        else:
            shipped = read_header(patch / "tensors" / name)
            with atomic_write(target) as writer:
                writer.write((patch / "headers" / name).read_bytes())
                for tensor in line["order"]:
                    head = shipped if tensor in shipped.tensors else where[tensor]
                    for block in raw_blocks(head, tensor):
                        writer.write(block)
        _check(target, line["sha256"], "A file came out other than the patch says.", remove=True)
    return diff


def _files(folder: Path) -> dict[str, Path]:
    """Return every file of a release by its relative path, sorted."""
    if not folder.is_dir():
        raise ReleaseError(
            "There is no release.",
            file=folder,
            expected="a folder",
            fix="check the path",
        )
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return dict(sorted(found.items()))


def _holds_tensors(name: str) -> bool:
    return name.endswith(".safetensors")


def _line(name: str, path: Path, digest: str, how: str, ship: int) -> dict[str, Any]:
    size = path.stat().st_size
    return {"file": name, "how": how, "bytes": size, "ship": ship, "sha256": digest}


def _data_start(path: Path) -> int:
    """Return where the data of a safetensors file begins."""
    with open(path, "rb") as handle:
        return 8 + int(struct.unpack("<Q", handle.read(8))[0])


def _unchanged(old: Header | None, new: Header, tensor: str) -> bool:
    if old is None:
        return False
    before, after = old.tensors[tensor], new.tensors[tensor]
    return (before.dtype, before.shape) == (after.dtype, after.shape) and (
        tensor_hash(old, tensor) == tensor_hash(new, tensor)
    )


def _states(headers: Iterable[Header]) -> dict[tuple[int, int], dict[str, str]]:
    """Return the rate of each matrix group of every body routed expert."""
    group_of = {matrix: group for group, matrices in GROUPS.items() for matrix in matrices}
    states: dict[tuple[int, int], dict[str, str]] = {}
    for header in headers:
        for name, info in header.tensors.items():
            if match := EXPERT.fullmatch(name):
                rate = f"K{info.shape[-1] // 16}" if match[4] == "trellis" else NATIVE
                place = states.setdefault((int(match[1]), int(match[2])), {})
                place[group_of[match[3]]] = rate
    return states


def _part(header: Header, tensor: str) -> Part:
    info = header.tensors[tensor]
    return Part(tensor, info.dtype, info.shape, lambda: raw_blocks(header, tensor))


def _copy(source: Path, target: Path) -> None:
    with open(source, "rb") as reader, atomic_write(target) as writer:
        shutil.copyfileobj(reader, writer, BLOCK_BYTES)


def _refuse_full(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise ReleaseError(
            "The folder to write to holds something.",
            file=folder,
            expected="a folder that is empty or does not exist",
            fix="name a new folder",
        )


def _check(path: Path, digest: str, what: str, remove: bool = False) -> None:
    found = sha256_file(path) if path.is_file() else "no file"
    if found != digest:
        if remove:
            path.unlink(missing_ok=True)
        raise ReleaseError(
            what,
            file=path,
            expected=f"sha256 {digest}",
            found=f"sha256 {found}" if path.is_file() else "no file",
            fix="check which release the patch was made for, and fetch the patch again",
        )
