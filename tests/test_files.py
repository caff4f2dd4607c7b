# SPDX-License-Identifier: Apache-2.0
import os
import signal
import subprocess
import sys

import pytest

from trellisbank.errors import CheckpointError
from trellisbank.files import atomic_write, digest_json, link_or_copy, read_json, write_json


def test_failed_writer_leaves_no_file(tmp_path):
    with pytest.raises(RuntimeError), atomic_write(tmp_path / "out.bin") as handle:
        handle.write(b"half")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_killed_writer_keeps_the_old_file(tmp_path):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")
    program = (
        "import sys, time\n"
        "from trellisbank.files import atomic_write\n"
        "with atomic_write(sys.argv[1]) as handle:\n"
        "    handle.write(b'new'); handle.flush(); print('writing', flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(target)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout.readline() == "writing\n"
        writer.send_signal(signal.SIGKILL)
    assert target.read_bytes() == b"old"


def test_json_comes_back_and_its_digest_ignores_order(tmp_path):
    value = {"b": [1, 2.5, None], "a": "é"}
    write_json(tmp_path / "x.json", value)
    assert read_json(tmp_path / "x.json") == value
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    assert digest_json({"a": 1}) != digest_json({"a": 1.5})


@pytest.mark.parametrize(
    "text",
    [
        b'{"a": NaN}',
        b'{"a": 1, "a": 2}',
        b"[1]",
        b"{",
        b"\xff{}",
        b"[" * 100_000,
        b'{"a": 1} x',
        b'{"a": 1e999}',
    ],
    ids=["nan", "twice", "no object", "cut", "not utf-8", "deep", "more", "too large"],
)
def test_json_that_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(CheckpointError, match=str(path)):
        read_json(path)


def test_missing_json_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere.json"):
        read_json(tmp_path / "nowhere.json")


def test_link_keeps_bytes_and_time_stamps_of_the_source(tmp_path):
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(b"weights")
    os.utime(source, (1, 1))
    target.write_bytes(b"older release")
    assert link_or_copy(source, target)
    assert link_or_copy(source, target)
    assert os.path.samefile(source, target)
    assert source.stat().st_mtime == 1 and target.read_bytes() == b"weights"


def test_copy_where_no_link_can_be(tmp_path, monkeypatch):
    def no_link(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", no_link)
    (tmp_path / "a").write_bytes(b"weights")
    assert not link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"weights"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]
