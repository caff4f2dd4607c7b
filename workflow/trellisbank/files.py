# SPDX-License-Identifier: Apache-2.0
"""Files written whole or not at all, hashes, hard links and canonical JSON."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from blake3 import blake3

from trellisbank.errors import CheckpointError, TrellisbankError

BLOCK_BYTES = 1 << 22
JSON_LIMIT_BYTES = 256 << 20
UNFINISHED = re.compile(r"\..+\.[0-9a-f]{16}\.tmp")
"""Names of files that a killed writer leaves; they may be removed once no writer runs."""


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str], mode: str = "wb") -> Iterator[IO[Any]]:
    """Open a file beside `path` that takes its name only when the block ends without an error.

    The bytes are flushed to the disk before the rename, and the folder after it, so that neither a
    killed writer nor a lost power supply leaves a partial file under the final name. The name
    beside is drawn at random: two writers of one path, even on two hosts, never share it.

    Raises:
        OSError: When the disk refuses; the file beside is removed.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = _beside(path)
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(beside, mode, encoding=encoding) as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def canonical_json(value: Any) -> str:
    """Return the one JSON text that is hashed for `value`: sorted keys, no blanks, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )


def digest_json(value: Any) -> str:
    """Return the BLAKE3 hash (hex) of the canonical JSON of `value`."""
    return blake3(canonical_json(value).encode()).hexdigest()


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write `value` as readable JSON with sorted keys, whole or not at all."""
    with atomic_write(path, "w") as handle:
        json.dump(value, handle, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
        handle.write("\n")


def read_json(
    path: str | os.PathLike[str], error: type[TrellisbankError] = CheckpointError
) -> dict[str, Any]:
    """Read a JSON object and refuse what a careful reader refuses.

    Args:
        path: File to read, at most 256 MiB (the index of a 510 GB release has 20 MB).
        error: Class of the error raised.

    Returns:
        The object. Names that stand twice, NaN and infinities are refused.

    Raises:
        TrellisbankError: Of class `error`: missing, too large, not UTF-8, not JSON, not an object.
    """
    try:
        size = os.path.getsize(path)
        if size > JSON_LIMIT_BYTES:
            raise error(
                "A JSON file is larger than any that belongs here.",
                file=path,
                expected=f"at most {JSON_LIMIT_BYTES} bytes",
                found=f"{size} bytes",
                fix="check that this is the file you meant",
            )
        value = loads_json(Path(path).read_bytes())
    except OSError as trouble:
        raise error(
            "A JSON file cannot be read.",
            file=path,
            found=trouble.strerror,
            fix="check the path; complete the download if the file is missing",
        ) from trouble
    except (ValueError, RecursionError) as trouble:
        raise error(
            "A file that should hold JSON does not.",
            file=path,
            expected="a JSON object in UTF-8 with each name once",
            found=str(trouble),
            fix="restore the file from its origin",
        ) from trouble
    if not isinstance(value, dict):
        raise error(
            "A JSON file holds no object.",
            file=path,
            expected="an object",
            found=type(value).__name__,
            fix="restore the file from its origin",
        )
    return value


def loads_json(text: bytes | str) -> Any:
    """Parse JSON; raise ValueError for a name that stands twice, NaN, infinities, not UTF-8."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        table = dict(pairs)
        if len(table) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the name {twice!r} stands twice")
        return table

    def refuse(name: str) -> Any:
        raise ValueError(f"{name} is not JSON")

    def finite(number: str) -> float:
        value = float(number)
        if not math.isfinite(value):
            raise ValueError(f"the number {number} is too large")
        return value

    if isinstance(text, bytes):
        text = text.decode("utf-8")
    return json.loads(text, object_pairs_hook=once, parse_constant=refuse, parse_float=finite)


def _hash_file(path: str | os.PathLike[str], hasher: Any) -> str:
    with open(path, "rb") as handle:
        while block := handle.read(BLOCK_BYTES):
            hasher.update(block)
    return str(hasher.hexdigest())


def blake3_file(path: str | os.PathLike[str]) -> str:
    """Return the BLAKE3 hash (hex) of a file, read in blocks of 4 MiB."""
    return _hash_file(path, blake3())


def sha256_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 hash (hex) of a file, read in blocks of 4 MiB."""
    return _hash_file(path, hashlib.sha256())


def link_or_copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> bool:
    """Give `target` the bytes of `source`: a hard link, or a copy across file systems.

    The name appears whole or not at all; a file that has it already is replaced. The source keeps
    its bytes and time stamps.

    Returns:
        True for a hard link, False for a copy.
    """
    source, target = Path(source), Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists() and os.path.samefile(source, target):
        return True
    beside = _beside(target)
    try:
        os.link(source.resolve(), beside)
    except OSError as trouble:
        if trouble.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        with open(source, "rb") as reader, atomic_write(target) as writer:
            shutil.copyfileobj(reader, writer, BLOCK_BYTES)
        return False
    os.replace(beside, target)
    return True
