# SPDX-License-Identifier: Apache-2.0
"""The bank: what is read back, what counts as a hit, and writers that race or die."""

import multiprocessing
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from synthetic import encoded_group, sha256
from trellisbank import safetensors_io
from trellisbank.bank import Bank, expert_key
from trellisbank.errors import FormatError
from trellisbank.files import canonical_json
from trellisbank.plan.layouts import Wanted

WANTED = Wanted(1, 2, "gate_up", 3)


@pytest.fixture
def bank(tmp_path):
    return Bank(tmp_path / "bank")


@given(st.integers(2, 8), st.sampled_from(["gate_up", "down"]), st.sampled_from([128, 256]))
def test_what_is_put_comes_back_with_its_ledger_entry(tmp_path_factory, rate, group, k):
    bank = Bank(tmp_path_factory.mktemp("bank"))
    key, tensors, entry = encoded_group(Wanted(0, 5, group, rate), k=k)
    assert not bank.has(key)
    bank.put(key, tensors, entry)
    assert bank.has(key)
    found, read = bank.get(key)
    assert canonical_json(read) == canonical_json(entry)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_bytes_do_not_depend_on_the_order_of_tensors_or_on_the_folder(tmp_path):
    key, tensors, entry = encoded_group(WANTED)
    one, two = Bank(tmp_path / "one"), Bank(tmp_path / "two")
    one.put(key, tensors, entry)
    two.put(key, dict(reversed(tensors.items())), dict(reversed(entry.items())))
    assert one.path(key).read_bytes() == two.path(key).read_bytes()
    assert str(tmp_path).encode() not in one.path(key).read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        {"weights": {"layers.0.ffn.experts.0.w2.weight": "b"}},
        {"weights": {"layers.0.ffn.experts.1.w2.weight": "a"}},
        {"captures": "other"},
        {"rate": 4},
        {"parameters": {"sigma_reg": 0.03}},
        {"encoder": "other"},
        {"encoder_version": 2},
        {"device_class": "other"},
    ],
)
def test_a_key_speaks_of_everything_that_decides_the_bytes(change):
    told = {
        "weights": {"layers.0.ffn.experts.0.w2.weight": "a"},
        "captures": "c",
        "rate": 3,
        "parameters": {"sigma_reg": 0.025},
        "encoder": "cpu",
        "encoder_version": 1,
        "device_class": "cpu-avx2",
    }
    assert expert_key(**told) == expert_key(**dict(reversed(told.items())))
    assert expert_key(**told) != expert_key(**{**told, **change})


def _write_many_times(root, start):
    bank = Bank(root)
    key, tensors, entry = encoded_group(WANTED)
    start.wait()
    for _ in range(10):
        bank.put(key, tensors, entry)
        bank.get(key)


def test_writers_of_one_key_race_without_harm(bank):
    context = multiprocessing.get_context("fork")
    start = context.Event()
    writers = [context.Process(target=_write_many_times, args=(bank.root, start)) for _ in range(4)]
    for writer in writers:
        writer.start()
    start.set()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    key, tensors, entry = encoded_group(WANTED)
    alone = Bank(bank.root.parent / "alone")
    alone.put(key, tensors, entry)
    assert bank.path(key).read_bytes() == alone.path(key).read_bytes()
    assert os.listdir(bank.path(key).parent) == [bank.path(key).name]


def _write_and_hang(root):
    def hang(tensor):
        time.sleep(60)

    safetensors_io.tensor_bytes = hang
    key, tensors, entry = encoded_group(WANTED)
    Bank(root).put(key, tensors, entry)


def test_a_killed_writer_leaves_no_final_name(bank):
    key, tensors, entry = encoded_group(WANTED)
    writer = multiprocessing.get_context("fork").Process(target=_write_and_hang, args=(bank.root,))
    writer.start()
    folder = bank.path(key).parent
    deadline = time.monotonic() + 30
    while not (folder.exists() and os.listdir(folder)) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(writer.pid, signal.SIGKILL)
    writer.join(30)
    assert os.listdir(folder), "the writer was killed before it began"
    assert not bank.has(key)
    bank.put(key, tensors, entry)
    assert bank.has(key)


@pytest.mark.parametrize("left", [0, 7, 300, -1])
def test_a_truncated_file_is_never_a_hit(bank, left):
    key, tensors, entry = encoded_group(WANTED)
    bank.put(key, tensors, entry)
    whole = bank.path(key).read_bytes()
    bank.path(key).write_bytes(whole[:left])
    assert not bank.has(key)
    with pytest.raises(FormatError, match="damaged"):
        bank.get(key)
    bank.put(key, tensors, entry)
    assert bank.path(key).read_bytes() == whole


def test_a_changed_byte_is_noticed_when_read(bank):
    key, tensors, entry = encoded_group(WANTED)
    bank.put(key, tensors, entry)
    data = bytearray(bank.path(key).read_bytes())
    data[-1] ^= 1
    bank.path(key).write_bytes(data)
    with pytest.raises(FormatError, match="changed since it was written"):
        bank.get(key)


def test_a_file_under_another_key_is_no_hit(bank):
    key, tensors, entry = encoded_group(WANTED)
    bank.put(key, tensors, entry)
    other = sha256(bank.path(key))
    bank.path(other).parent.mkdir(exist_ok=True)
    shutil.copy(bank.path(key), bank.path(other))
    assert not bank.has(other)
    with pytest.raises(FormatError, match="not hold what its name says"):
        bank.get(other)


def test_missing_and_malformed_keys(bank):
    with pytest.raises(FormatError, match="lacks an encoded expert"):
        bank.get("0" * 64)
    for key in ("../../etc/passwd", "", "0" * 63, "A" * 64):
        with pytest.raises(FormatError, match="malformed"):
            bank.path(key)


@pytest.mark.parametrize("fault", ["rate", "group", "key", "shape", "dtype", "extra"])
def test_tensors_that_do_not_fit_their_entry_are_refused(bank, fault):
    key, tensors, entry = encoded_group(WANTED)
    if fault == "shape":
        tensors["w1.suh"] = tensors["w1.suh"][:-1]
    elif fault == "dtype":
        tensors["w3.svh"] = tensors["w3.svh"].float()
    elif fault == "extra":
        tensors["w2.suh"] = tensors["w1.suh"]
    else:
        entry[fault] = {"rate": 4, "group": "down", "key": "0" * 64}[fault]
    with pytest.raises(FormatError, match="does not fit its ledger entry"):
        bank.put(key, tensors, entry)
    assert not Path(bank.path(key)).exists()
