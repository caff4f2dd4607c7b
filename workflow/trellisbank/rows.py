# SPDX-License-Identifier: Apache-2.0
"""Texts to token rows: the splits that calibrate and the panels that judge.

A split or panel is a set of windows of one length, cut without overlap from the token stream of
its texts. A panel drops every window that shares a long n-gram with the calibration rows.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from tokenizers import Tokenizer

from trellisbank.checkpoint import Checkpoint
from trellisbank.errors import CheckpointError, ConfigError
from trellisbank.files import blake3_file, write_json
from trellisbank.safetensors_io import read_file, write_tensors

# Windows of unrelated texts share shorter runs (licence lines, import blocks) by chance.
SHARED_NGRAM = 32


def read_ids(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read the token ids of a rows file: `input_ids`, int64 [rows, tokens].

    Raises:
        CheckpointError: The file is malformed or holds no such tensor.
    """
    ids = read_file(path).get("input_ids")
    if ids is None or ids.ndim != 2 or ids.dtype != torch.int64:
        raise CheckpointError(
            "A rows file holds no token ids.",
            file=path,
            tensor="input_ids",
            expected="int64 [rows, tokens]",
            found=None if ids is None else f"{ids.dtype} {list(ids.shape)}",
            fix="write rows with the build_rows rule, or save `input_ids` as int64",
        )
    return ids


def find_texts(patterns: Sequence[str]) -> list[str]:
    """Return the files that names and patterns stand for, in their order, each pattern sorted.

    Raises:
        ConfigError: A name or pattern without a file.
    """
    found: list[str] = []
    for pattern in patterns:
        files = sorted(glob.glob(pattern))
        if not files:
            raise ConfigError(
                "A text of the rows does not exist.",
                file=pattern,
                expected="a file, or a pattern that some file fits",
                found="nothing",
                fix="correct `texts` in the configuration",
            )
        found += files
    return found


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Load a checkpoint's tokenizer.json; no other file and no code of it is used.

    Raises:
        CheckpointError: The file is missing or is no tokenizer.
    """
    try:
        return Tokenizer.from_file(os.fspath(path))
    except Exception as trouble:  # the library raises bare Exception for every kind of trouble
        raise CheckpointError(
            "The tokenizer cannot be read.",
            file=path,
            found=str(trouble),
            fix="restore tokenizer.json from the checkpoint's origin",
        ) from trouble


def start_token(checkpoint: Checkpoint) -> int:
    """Return the token id that stands before each text: the checkpoint's `bos_token_id`.

    Raises:
        CheckpointError: config.json does not name one.
    """
    found = checkpoint.config.get("bos_token_id")
    if not isinstance(found, int) or isinstance(found, bool) or found < 0:
        raise CheckpointError(
            "The checkpoint names no token that begins a text.",
            file=checkpoint.path / "config.json",
            tensor="bos_token_id",
            expected="a token id",
            found=found,
            fix="restore config.json from the checkpoint's origin",
        )
    return found


def text_ids(tokenizer: Tokenizer, texts: Sequence[Path], separator: int) -> np.ndarray[Any, Any]:
    """Token ids of all texts, each after one `separator` token: int64 [tokens]."""
    pieces: list[int] = []
    for text in texts:
        try:
            words = text.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as trouble:
            raise ConfigError(
                "A text of the rows cannot be read.",
                file=text,
                expected="UTF-8 text",
                found=str(trouble),
                fix="correct `texts` in the configuration",
            ) from trouble
        pieces.append(separator)
        pieces.extend(tokenizer.encode(words, add_special_tokens=False).ids)
    return np.array(pieces, dtype=np.int64)


def _ngrams(rows: np.ndarray[Any, Any], length: int) -> set[bytes]:
    grams: set[bytes] = set()
    for row in rows.astype("<i4"):
        window = np.lib.stride_tricks.sliding_window_view(row, length)
        grams.update(gram.tobytes() for gram in window)
    return grams


def build_rows(
    *,
    texts: Sequence[str | os.PathLike[str]],
    tokenizer_path: str | os.PathLike[str],
    separator: int,
    window: int,
    windows: int,
    part: tuple[int, int] = (0, 1),
    exclude: Mapping[str, str | os.PathLike[str]] | None = None,
    ids_path: str | os.PathLike[str],
    receipt_path: str | os.PathLike[str],
) -> None:
    """Cut texts into windows and write their token ids with a receipt.

    Windows are spread evenly over the whole token stream, so that few windows still see all texts.

    Args:
        texts: UTF-8 files, in this order.
        tokenizer_path: tokenizer.json of the checkpoint.
        separator: Token id before each text.
        window: Tokens a window.
        windows: Windows of all parts together.
        part: (i, n): keep the i-th of n runs of consecutive windows (a split).
        exclude: Rows files, by name, whose n-grams of 32 tokens (or of the shortest window, if
            that is less) no window may share.
        ids_path: Written: `input_ids` int64 [windows, window].
        receipt_path: Written: texts with hashes, a hash a window, what was dropped.

    Raises:
        ConfigError: The texts are too short for the windows asked for.
    """
    paths = [Path(text) for text in texts]
    tokenizer = load_tokenizer(tokenizer_path)
    stream = text_ids(tokenizer, paths, separator)
    cut = stream[: stream.size // window * window].reshape(-1, window)
    shared = dict.fromkeys(exclude or {}, 0)
    clean = np.ones(len(cut), dtype=bool)
    others = {name: read_ids(path).numpy() for name, path in (exclude or {}).items()}
    length = min([SHARED_NGRAM, window, *(rows.shape[1] for rows in others.values())])
    for name, rows in others.items():
        taken = _ngrams(rows, length)
        for index, row in enumerate(cut):
            if not taken.isdisjoint(_ngrams(row[None], length)):
                shared[name] += 1
                clean[index] = False
    offsets = np.flatnonzero(clean)
    if windows > offsets.size:
        raise ConfigError(
            "The texts are too short for the windows asked for.",
            file=paths[0],
            expected=f"{windows} windows of {window} tokens",
            found=f"{offsets.size} windows ({len(cut) - offsets.size} more share text with "
            f"{sorted(shared)})",
            fix="add texts, or lower `windows` or `window` in the configuration",
        )
    offsets = offsets[np.arange(windows) * offsets.size // windows]
    mine = offsets[part[0] * windows // part[1] : (part[0] + 1) * windows // part[1]]
    ids = cut[mine]
    write_tensors(ids_path, {"input_ids": torch.from_numpy(ids)})
    write_json(
        receipt_path,
        {
            "schema": "trellisbank/rows/1",
            "texts": [{"name": path.name, "blake3": blake3_file(path)} for path in paths],
            "tokenizer": blake3_file(tokenizer_path),
            "separator": separator,
            "window_tokens": window,
            "windows": [
                {
                    "first_token": int(index) * window,
                    "blake3": blake3(row.astype("<i4").tobytes()).hexdigest(),
                }
                for index, row in zip(mine, ids, strict=True)
            ],
            "available_windows": len(cut),
            "dropped_for_shared_ngrams": shared,
            "shared_ngram_tokens": length,
            "blake3": blake3_file(ids_path),
        },
    )


def pick_rows(
    *,
    splits: Sequence[str | os.PathLike[str]],
    windows: int,
    ids_path: str | os.PathLike[str],
    receipt_path: str | os.PathLike[str],
) -> None:
    """Write some rows of several files of rows, spread evenly over all of them in their order.

    Args:
        splits: Rows files of one window length.
        windows: Rows to pick; all if there are fewer.
        ids_path: Written: `input_ids` int64 [windows, window].
        receipt_path: Written: which rows of which file, by hash.
    """
    ids = torch.cat([read_ids(path) for path in splits])
    count = min(windows, len(ids))
    places = torch.arange(count) * len(ids) // count
    write_tensors(ids_path, {"input_ids": ids[places]})
    write_json(
        receipt_path,
        {
            "schema": "trellisbank/picked-rows/1",
            "of": [blake3_file(path) for path in splits],
            "rows": places.tolist(),
            "blake3": blake3_file(ids_path),
        },
    )
