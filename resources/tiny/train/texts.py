# SPDX-License-Identifier: Apache-2.0
"""Build the texts of the small checkpoint, and its tokenizer, from the Python standard library.

    python resources/tiny/train/texts.py

Reads the library of the Python that runs it; the files of one version always give the same bytes,
and the committed texts come from the version that ``texts.json`` names. Writes
``resources/tiny/texts`` (calibration and two held-out panels as plain text, training and
validation as one archive, ``texts.json`` with every hash) and the checkpoint's tokenizer. Splits
are made by file before anything else.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import lzma
import platform
import re
import sysconfig
import tarfile
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parents[1]
SEED = "trellisbank tiny 1"
# Tests repeat each other, encodings and pydoc_data are tables: near-duplicates leak across a split.
EXCLUDED = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages"}
EXCLUDED_STARTS = ("config-", "_sysconfigdata", "test_")
SPLITS = {"code": 24, "calibration": 24, "validation": 12}  # files; all others are for training
WINDOWS, WINDOW = 3, 256  # taken from each held-out file; tokens
SLACK = 8  # tokens beyond the last window, so that a reader's own BOS or EOS costs no window
CHARACTERS = (5_000, 25_000)  # of a file that may be held out
PROSE_LETTERS, PROSE_WINDOWS = 0.86, 12  # least share of letters and blanks; most from one topic
GRAM = 24  # words of a shared n-gram
SHARED = 0.01  # largest share of a held-out file's n-grams found in any other file
VOCABULARY = 2048
START = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"]
END = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "<｜deepseek_image｜>"] + [
    f"<｜place▁holder▁no▁{i}｜>" for i in range(3)
]


def rank(name: str) -> str:
    """Order of files that depends on nothing but their names."""
    return hashlib.sha256(f"{SEED}/{name}".encode()).hexdigest()


def sha256(text: str) -> str:
    """Hash of a text as stored (UTF-8)."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_sources(stdlib: Path) -> dict[str, str]:
    """All sources that may be used, by their path below the library."""
    files = {}
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        parts = name.parts
        if EXCLUDED & set(parts) or any(part.startswith(EXCLUDED_STARTS) for part in parts):
            continue
        text = path.read_bytes().decode()
        if text.strip():
            files[name.as_posix()] = text
    return files


def grams(text: str) -> set[int]:
    """Hashes of a text's word n-grams (words and single signs, white space ignored)."""
    words = re.findall(r"\w+|[^\w\s]", text)
    return {hash(tuple(words[i : i + GRAM])) for i in range(len(words) - GRAM + 1)}


def split(files: dict[str, str]) -> dict[str, list[str]]:
    """Assign files to splits: held-out ones by rank, none that shares text with another file."""
    by_file = {name: grams(text) for name, text in files.items()}
    seen: dict[int, int] = {}
    for found in by_file.values():
        for gram in found:
            seen[gram] = seen.get(gram, 0) + 1
    able = [
        name
        for name in sorted(files, key=rank)
        if CHARACTERS[0] <= len(files[name]) <= CHARACTERS[1]
        and sum(seen[gram] > 1 for gram in by_file[name]) <= SHARED * len(by_file[name])
    ]
    result, start = {}, 0
    for name, count in SPLITS.items():
        result[name] = sorted(able[start : start + count])
        start += count
    held = {name for names in result.values() for name in names}
    return result | {"training": [name for name in files if name not in held]}


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE with the special tokens where the released tokenizer has them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(END),
        special_tokens=START,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(END)
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise SystemExit(f"tokenizer: {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}")
    return tokenizer


def excerpt(tokenizer: Tokenizer, text: str, start: int, windows: int = WINDOWS) -> str:
    """Whole lines from character ``start`` on that hold just over ``windows`` windows."""
    text = text[text.index("\n", start) + 1 :] if start else text
    ends = [offset[1] for offset in tokenizer.encode(text).offsets]
    needed = windows * WINDOW + SLACK
    if len(ends) < needed:
        raise SystemExit(f"excerpt: {len(ends)} tokens, needs {needed}")
    end = text.find("\n", ends[needed - 1])
    return text[: end + 1 if end >= 0 else len(text)].rstrip() + "\n"


def prose(stdlib: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Excerpts of the reference manual's topics that are mostly prose, by rank, none twice."""
    tree = ast.parse((stdlib / "pydoc_data" / "topics.py").read_text())
    assert isinstance(tree.body[0], ast.Assign)
    topics = ast.literal_eval(tree.body[0].value)
    chosen: dict[str, str] = {}
    seen: set[int] = set()
    left = SPLITS["code"] * WINDOWS
    for name in sorted(topics, key=rank):
        text = topics[name].strip() + "\n"
        letters = sum(c.isalpha() or c == " " for c in text) / len(text)
        windows = (len(tokenizer.encode(text)) - SLACK) // WINDOW
        if letters < PROSE_LETTERS or ">>>" in text or windows < WINDOWS or left == 0:
            continue
        windows = min(windows, PROSE_WINDOWS, left)
        piece = excerpt(tokenizer, text, 0, windows)
        found = grams(piece)
        if len(found & seen) <= SHARED * len(found):
            chosen[name], seen, left = piece, seen | found, left - windows
    if left:
        raise SystemExit(f"prose: {left} windows short")
    return chosen


def archive(path: Path, texts: dict[str, str]) -> None:
    """One reproducible tar.xz of texts by name."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, text in texts.items():
            data = text.encode()
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    path.write_bytes(lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    """Write texts, hashes, tokenizer."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    files = read_sources(stdlib)
    names = split(files)
    tokenizer = train_tokenizer(files[name] for name in names["training"])

    texts = ROOT / "texts"
    shown: dict[str, dict[str, str]] = {"code": {}, "calibration": {}, "prose": {}}
    for panel in ("code", "calibration"):
        for name in names[panel]:  # from a third on: past licences, doc strings and imports
            piece = excerpt(tokenizer, files[name], len(files[name]) // 3)
            shown[panel][name.replace("/", ".").removesuffix(".py")] = piece
    shown["prose"] = prose(stdlib, tokenizer)
    learnt = set().union(*(grams(files[name]) for name in names["training"]))
    report: dict[str, object] = {
        "source": f"Python {platform.python_version()} standard library, PSF-2.0",
        "shared_ngrams": f"{GRAM}-word n-grams of the committed texts found in training files",
    }
    for panel, pieces in shown.items():
        folder = texts / panel
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.txt"):
            old.unlink()
        listed = {}
        for name, text in sorted(pieces.items()):
            (folder / f"{name}.txt").write_text(text)
            found = grams(text)
            listed[f"{name}.txt"] = {
                "sha256": sha256(text),
                "tokens": len(tokenizer.encode(text)),
                "ngrams": len(found),
                "shared_ngrams": len(found & learnt),
            }
        report[panel] = listed
    for part in ("validation", "training"):
        report[part] = {name: sha256(files[name]) for name in names[part]}
    packed = {f"{p}/{n}": files[n] for p in ("validation", "training") for n in names[p]}
    archive(texts / "training.tar.xz", packed)
    (texts / "texts.json").write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    (texts / "LICENSE-python.txt").write_bytes((stdlib / "LICENSE.txt").read_bytes())

    checkpoint = ROOT / "checkpoint"
    checkpoint.mkdir(exist_ok=True)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": START[0],
        "eos_token": START[1],
        "pad_token": START[2],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "add_bos_token": False,
    }
    (checkpoint / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=1, ensure_ascii=False) + "\n"
    )
    for panel in shown:
        rows = report[panel]
        assert isinstance(rows, dict)
        print(
            panel,
            len(rows),
            "files,",
            sum(r["tokens"] for r in rows.values()),
            "tokens,",
            sum(r["shared_ngrams"] for r in rows.values()),
            "of",
            sum(r["ngrams"] for r in rows.values()),
            "n-grams shared with training",
        )
    print("training", len(names["training"]), "files")


if __name__ == "__main__":
    main()
