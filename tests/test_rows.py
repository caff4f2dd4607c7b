# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from cut import TINY
from trellisbank.errors import CheckpointError, ConfigError
from trellisbank.files import read_json
from trellisbank.rows import build_rows, find_texts, load_tokenizer, pick_rows, read_ids
from trellisbank.safetensors_io import write_tensors

WORDS = "def f{0}(x):\n    return x + {0}\n\n"


@pytest.fixture
def texts(tmp_path):
    for name, numbers in (("a", range(400)), ("b", range(1000, 1400)), ("c", range(90))):
        (tmp_path / f"{name}.txt").write_text("".join(WORDS.format(n * n) for n in numbers))
    return {name: tmp_path / f"{name}.txt" for name in "abc"}


def build(tmp_path, name, texts, **changes):
    arguments = {"window": 64, "windows": 10, "separator": 0} | changes
    build_rows(
        texts=texts,
        tokenizer_path=TINY / "tokenizer.json",
        ids_path=tmp_path / f"{name}.safetensors",
        receipt_path=tmp_path / f"{name}.json",
        **arguments,
    )
    return read_ids(tmp_path / f"{name}.safetensors"), read_json(tmp_path / f"{name}.json")


def test_windows_are_pieces_of_the_token_stream(tmp_path, texts):
    ids, receipt = build(tmp_path, "rows", [texts["a"], texts["b"]])
    tokenizer = load_tokenizer(TINY / "tokenizer.json")
    stream = []
    for name in "ab":
        stream += [0, *tokenizer.encode(texts[name].read_text(), add_special_tokens=False).ids]
    for row, window in zip(ids, receipt["windows"], strict=True):
        assert row.tolist() == stream[window["first_token"] :][:64]
    firsts = [window["first_token"] for window in receipt["windows"]]
    assert firsts == sorted(set(firsts)) and firsts[-1] > len(stream) * 0.8


@pytest.mark.parametrize(("windows", "places"), [(4, [0, 2, 5, 7]), (99, range(10))])
def test_picked_rows_are_spread_over_all_splits(tmp_path, windows, places):
    ids = torch.arange(40).reshape(10, 4)
    for name, rows in (("a", ids[:3]), ("b", ids[3:])):
        write_tensors(tmp_path / name, {"input_ids": rows.contiguous()})
    pick_rows(
        splits=[tmp_path / "a", tmp_path / "b"],
        windows=windows,
        ids_path=tmp_path / "picked",
        receipt_path=tmp_path / "picked.json",
    )
    assert torch.equal(read_ids(tmp_path / "picked"), ids[list(places)])
    assert read_json(tmp_path / "picked.json")["rows"] == list(places)


def test_splits_are_the_whole_in_parts(tmp_path, texts):
    whole, _ = build(tmp_path, "whole", [texts["a"]])
    parts = [build(tmp_path, f"part{i}", [texts["a"]], part=(i, 3))[0] for i in range(3)]
    assert [len(part) for part in parts] == [3, 3, 4]
    assert torch.equal(torch.cat(parts), whole)


def test_same_inputs_same_bytes(tmp_path, texts):
    build(tmp_path, "one", [texts["a"]])
    build(tmp_path, "two", [texts["a"]])
    for kind in ("safetensors", "json"):
        one, two = ((tmp_path / f"{name}.{kind}").read_bytes() for name in ("one", "two"))
        assert one == two
    assert str(tmp_path) not in (tmp_path / "one.json").read_text()


def test_windows_that_share_text_are_dropped_and_counted(tmp_path, texts):
    build(tmp_path, "calibration", [texts["c"]], windows=5)
    exclude = {"calibration": tmp_path / "calibration.safetensors"}
    everything, before = build(tmp_path, "panel", [texts["a"]], windows=40)
    _, receipt = build(tmp_path, "panel", [texts["a"]], windows=40, exclude=exclude)
    shared = receipt["dropped_for_shared_ngrams"]["calibration"]
    assert 0 < shared < receipt["available_windows"] == before["available_windows"]
    assert receipt["windows"][0]["first_token"] > 0  # text a begins as text c does


def test_short_windows_are_compared_at_their_own_length(tmp_path, texts):
    build(tmp_path, "calibration", [texts["c"]], window=16, windows=5)
    exclude = {"calibration": tmp_path / "calibration.safetensors"}
    _, receipt = build(tmp_path, "panel", [texts["a"]], windows=40, exclude=exclude)
    assert receipt["shared_ngram_tokens"] == 16
    assert receipt["dropped_for_shared_ngrams"]["calibration"] > 0


def test_too_few_windows_says_what_to_do(tmp_path, texts):
    with pytest.raises(ConfigError, match="lower `windows`"):
        build(tmp_path, "rows", [texts["c"]], windows=10_000)
    assert not (tmp_path / "rows.json").exists()


def test_texts_and_tokenizers_that_cannot_be_read(tmp_path, texts):
    (tmp_path / "bad.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match=r"bad\.txt"):
        build(tmp_path, "rows", [tmp_path / "bad.txt"])
    with pytest.raises(ConfigError, match="nothing"):
        find_texts([str(tmp_path / "*.md")])
    assert find_texts([str(tmp_path / "[ab].txt")]) == [str(texts["a"]), str(texts["b"])]
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "none"}}')
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")


def test_rows_files_that_are_refused(tmp_path):
    write_tensors(tmp_path / "float", {"input_ids": torch.zeros(2, 3)})
    write_tensors(tmp_path / "other", {"ids": torch.zeros(2, 3, dtype=torch.int64)})
    for name in ("float", "other"):
        with pytest.raises(CheckpointError, match="input_ids"):
            read_ids(tmp_path / name)
