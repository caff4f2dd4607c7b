# SPDX-License-Identifier: Apache-2.0
"""A release as a folder to upload: large files in parts, with a script that joins them.

The release itself is only read; small files are hard links to it.
"""

from __future__ import annotations

import os
from pathlib import Path

from trellisbank.errors import ReleaseError
from trellisbank.files import BLOCK_BYTES, atomic_write, link_or_copy, sha256_file
from trellisbank.release.bank_plan import MANIFEST, write_manifest

SCRIPT = "reassemble.sh"
WHOLE = "sha256-manifest.whole.txt"
"""The manifest of the release as it is before and after."""

HEAD = f"""#!/bin/sh
# Checks the parts, joins them, checks every whole file, then removes the parts and itself.
set -eu
cd "$(dirname "$0")"
sha256sum -c --quiet {MANIFEST}
"""

TAIL = f"""sha256sum -c --quiet {WHOLE}
mv {WHOLE} {MANIFEST}
"""


def pack_release(
    release: str | os.PathLike[str], out: str | os.PathLike[str], part_bytes: int
) -> list[str]:
    """Write a folder in which no file of a release is larger than a limit.

    Args:
        release: A release of any layout; only read.
        out: A folder that does not exist or is empty.
        part_bytes: Size of a part.

    Returns:
        The files that were split.

    Raises:
        ReleaseError: `out` holds something, the limit is not positive, or the name of a large file
            cannot stand in a shell script.
    """
    release, out = Path(release), Path(out)
    if part_bytes < 1 or (out.exists() and any(out.iterdir())):
        raise ReleaseError(
            "A release cannot be packed so.",
            file=out,
            expected="an empty folder and a part size of at least one byte",
            found=f"parts of {part_bytes} bytes" if part_bytes < 1 else "files in the folder",
            fix="name a new folder",
        )
    split: dict[str, list[str]] = {}
    hashes = {}
    for path in sorted(release.rglob("*")):
        name = path.relative_to(release).as_posix()
        if not path.is_file() or name == MANIFEST:
            continue
        hashes[name] = sha256_file(path)
        if path.stat().st_size <= part_bytes:
            link_or_copy(path, out / name)
            continue
        if not all(letter.isalnum() or letter in "._-/" for letter in name):
            raise ReleaseError(
                "A large file has a name that cannot stand in a shell script.",
                file=path,
                expected="letters, digits, '.', '_', '-'",
                fix="rename the file in the source",
            )
        split[name] = [name + suffix for suffix in _split(path, out / name, part_bytes)]
    with atomic_write(out / WHOLE, "w") as handle:
        handle.writelines(f"{digest}  {name}\n" for name, digest in hashes.items())
    with atomic_write(out / SCRIPT, "w") as handle:
        handle.write(HEAD)
        handle.writelines(f"cat {' '.join(parts)} > {name}\n" for name, parts in split.items())
        handle.write(TAIL)
        handle.writelines(f"rm {' '.join(parts)}\n" for parts in split.values())
        handle.write(f"rm {SCRIPT}\n")
    (out / SCRIPT).chmod(0o755)
    write_manifest(out, {name: digest for name, digest in hashes.items() if name not in split})
    return list(split)


def _split(path: Path, target: Path, part_bytes: int) -> list[str]:
    """Write the parts of a file beside `target`; return their suffixes."""
    count = -(-path.stat().st_size // part_bytes)
    digits = max(2, len(str(count - 1)))
    suffixes = [f".part{number:0{digits}d}" for number in range(count)]
    with open(path, "rb") as reader:
        for suffix in suffixes:
            left = part_bytes
            with atomic_write(target.with_name(target.name + suffix)) as writer:
                while left and (block := reader.read(min(left, BLOCK_BYTES))):
                    writer.write(block)
                    left -= len(block)
    return suffixes
