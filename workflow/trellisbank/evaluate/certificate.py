# SPDX-License-Identifier: Apache-2.0
"""KL certificates: a small folder from which anyone recomputes what is reported of a release.

It holds, for each panel, the token ids, the source's final hidden states, the score tables of the
release and of the noise floor, and both comparisons; and hashes of these files, of the output head
and of the release's receipt. Source and release have the same head, byte for byte, so that a
reader with the release alone makes its scores again without the source.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.errors import CertificateError
from trellisbank.evaluate.bootstrap import compare
from trellisbank.evaluate.scores import checkpoint_head, read_table, score_tokens
from trellisbank.files import blake3_file, digest_json, link_or_copy, read_json, write_json
from trellisbank.model.streamed import forward_rows
from trellisbank.release.splice import tensor_hash
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import map_tensor, read_header

SCHEMA = "trellisbank/certificate/1"
NAME = "certificate.json"
RECEIPT = "repack-report.json"
HEAD = "head.weight"
FILES = {
    "rows": "rows.safetensors",
    "hidden": "source.safetensors",
    "scores": "scores.parquet",
    "comparison": "comparison.json",
    "floor_scores": "floor.parquet",
    "floor": "floor.json",
}
"""What a panel's folder holds, by kind."""

Pathlike = str | os.PathLike[str]
Progress = Callable[[str], None]


def write_certificate(
    *, release: Pathlike, panels: Mapping[str, Mapping[str, Pathlike]], folder: Pathlike
) -> None:
    """Write the certificate of a release.

    Files are hard links where they can be, so that it takes no room beside a run.

    Args:
        release: Folder of the release.
        panels: For each panel the files of the run, by kind (`FILES`).
        folder: Written.

    Raises:
        CheckpointError: The release cannot be read.
    """
    checkpoint = open_checkpoint(release)
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    hashes = {}
    for panel, files in panels.items():
        (out / panel).mkdir(exist_ok=True)
        for kind, name in FILES.items():
            link_or_copy(files[kind], out / panel / name)
            hashes[f"{panel}/{name}"] = blake3_file(out / panel / name)
    content = {
        "schema": SCHEMA,
        "panels": sorted(panels),
        "files": dict(sorted(hashes.items())),
        "head": _head_hash(checkpoint),
        "release": blake3_file(Path(release) / RECEIPT),
    }
    write_json(out / NAME, content | {"hash": digest_json(content)})


def check_certificate(
    folder: Pathlike,
    *,
    release: Pathlike | None = None,
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> list[dict[str, Any]]:
    """Recompute what a certificate states.

    Always: every file has its hash, and both comparisons of a panel follow from its score tables.
    With the release, whose receipt and head must be those of the certificate: it is run over the
    panel's tokens, scored against the source's states, and compared anew. On the kind of machine
    that made the tables the scores are equal. On another one they are not, to the bit; the mean KL
    may then differ by the noise floor of the panel (the upper end of its interval), which is what
    the order of operations does, and so may the mean NLL by that of the floor's NLL.

    Who forges tables, comparisons and hashes together is found by the last step alone; forged
    source states are found by those who have the source.

    Args:
        folder: The certificate.
        release: Folder of the release; None leaves the last step out.
        device: torch device of the release's forward.
        progress: Told of each step.

    Returns:
        A line a panel: `panel`, `windows`, `tokens`, `kl` (mean, low, high), and with the release
        `equal_scores` (every score to the bit), `kl_again` (its mean), `tolerance`.

    Raises:
        CertificateError: Naming what does not hold.
    """
    root = Path(folder)
    content = read_json(root / NAME, CertificateError)
    stated = content.pop("hash", None)
    if content.get("schema") != SCHEMA or stated != digest_json(content):
        raise CertificateError(
            "This is no certificate, or its list was changed.",
            file=root / NAME,
            expected=f"schema {SCHEMA} and its own hash",
            found=f"schema {content.get('schema')}, hash {stated}",
            fix="take the certificate from its origin again",
        )
    for panel in content["panels"]:
        for name in FILES.values():
            _check_hash(root / panel / name, content["files"].get(f"{panel}/{name}"))
    progress(f"{len(content['files'])} files have their hashes")
    checkpoint = None
    if release is not None:
        checkpoint = open_checkpoint(release)
        _check_hash(Path(release) / RECEIPT, content["release"])
        if _head_hash(checkpoint) != content["head"]:
            raise CertificateError(
                "The release has another output head than the certificate.",
                file=release,
                tensor=HEAD,
                expected=content["head"],
                found=_head_hash(checkpoint),
                fix="check the release that the certificate belongs to",
            )
    lines = []
    for panel in content["panels"]:
        files = {kind: root / panel / name for kind, name in FILES.items()}
        table, found = _check_comparison(files["scores"], files["comparison"])
        _, floor = _check_comparison(files["floor_scores"], files["floor"])
        progress(f"{panel}: comparisons follow from the score tables")
        line = {
            "panel": panel,
            "windows": found["windows"],
            "tokens": found["tokens"],
            "kl": {name: found["quantities"]["kl"][name] for name in ("mean", "low", "high")},
        }
        if checkpoint is not None:
            line |= _score_again(checkpoint, files, table, floor, panel, device, progress)
        lines.append(line)
    return lines


def _head_hash(checkpoint: Checkpoint) -> str:
    return tensor_hash(checkpoint.header(checkpoint.shard_of(HEAD)), HEAD)


def _check_hash(path: Path, expected: str | None) -> None:
    found = blake3_file(path) if path.is_file() else None
    if expected is None or found != expected:
        raise CertificateError(
            "A file is not the one that was certified.",
            file=path,
            expected=expected,
            found=found or "no file",
            fix="take it from its origin again",
        )


def _check_comparison(scores: Path, comparison: Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Return a score table and the comparison that follows from it, as stated."""
    table, names = read_table(scores)
    stated = read_json(comparison, CertificateError)
    again = compare(
        table,
        release=names["release"],
        panel=names["panel"],
        seed=stated.get("seed", 0),
        draws=stated.get("draws", 0),
        confidence=stated.get("confidence", 0),
    )
    # Means are sums in numpy's order, which may differ between machines in the last bits.
    if not _alike(stated, again):
        raise CertificateError(
            "A comparison does not follow from its score table.",
            file=comparison,
            expected=again["quantities"]["kl"],
            found=stated.get("quantities", {}).get("kl"),
            fix="take the certificate from its origin again",
        )
    return table, again


def _alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_alike, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return bool(np.isclose(a, b, rtol=1e-9, atol=1e-12))
    return bool(a == b)


def _score_again(
    checkpoint: Checkpoint,
    files: Mapping[str, Path],
    table: pd.DataFrame,
    floor: Mapping[str, Any],
    panel: str,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """Scores of the release, made anew, against those of the certificate."""
    with tempfile.TemporaryDirectory() as scratch:
        hidden = Path(scratch) / "hidden.safetensors"
        forward_rows(
            checkpoint=checkpoint.path,
            rows=files["rows"],
            hidden=hidden,
            device=device,
            progress=progress,
        )
        head = checkpoint_head(checkpoint)
        again = score_tokens(
            map_tensor(read_header(files["hidden"]), "final_hidden"),
            head,
            map_tensor(read_header(hidden), "final_hidden"),
            head,
            read_ids(files["rows"]),
        )
    for quantity, bound in (("kl", "kl"), ("nll_release", "nll_difference")):
        noise = floor["quantities"][bound]
        tolerance = max(abs(noise["low"]), abs(noise["high"]))
        means = _mean(again[quantity]), _mean(table[quantity])
        if not abs(means[0] - means[1]) <= tolerance:
            raise CertificateError(
                "The release does not give the scores of its certificate.",
                file=files["scores"],
                tensor=quantity,
                expected=f"a mean of {means[1]} nats on panel {panel}, to {tolerance:.3g}",
                found=means[0],
                fix="run it on another machine; if it stays, the certificate is of another "
                "release, or its tables were changed",
            )
        if quantity == "kl":
            result = {
                "equal_scores": bool(again.equals(table)),
                "kl_again": means[0],
                "tolerance": tolerance,
            }
    return result


def _mean(values: ArrayLike) -> float:
    return float(np.asarray(values, dtype=np.float64).mean())
