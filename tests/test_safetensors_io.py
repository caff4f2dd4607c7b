# SPDX-License-Identifier: Apache-2.0
import json
import struct

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from trellisbank.errors import CheckpointError
from trellisbank.safetensors_io import (
    DTYPES,
    Part,
    read_file,
    read_header,
    read_rows,
    read_tensor,
    tensor_bytes,
    write_parts,
    write_tensors,
)


def file_with(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def tensors_of_all_dtypes():
    torch.manual_seed(0)
    bits = torch.randint(0, 255, (6, 64), dtype=torch.uint8)
    return {
        name: (bits % 2).bool() if name == "BOOL" else bits.view(dtype).clone()
        for name, dtype in DTYPES.items()
    }


def test_written_files_are_read_by_the_library_and_back(tmp_path):
    tensors = tensors_of_all_dtypes()
    write_tensors(tmp_path / "ours", tensors, {"layer": "3"})
    for name, tensor in safetensors.torch.load_file(tmp_path / "ours").items():
        assert tensor.dtype == tensors[name].dtype
        assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(tensors[name]))
    safetensors.torch.save_file(tensors, tmp_path / "theirs")
    for name, tensor in read_file(tmp_path / "theirs").items():
        assert bytes(tensor_bytes(tensor)) == bytes(tensor_bytes(tensors[name]))
    assert read_header(tmp_path / "ours").metadata == {"layer": "3"}


def test_rows_come_by_byte_range(tmp_path):
    table = torch.arange(60).reshape(20, 3)
    write_tensors(tmp_path / "t", {"before": torch.ones(5), "table": table})
    ids = torch.tensor([19, 0, 7, 7])
    assert torch.equal(read_rows(read_header(tmp_path / "t"), "table", ids), table[ids])
    with pytest.raises(CheckpointError, match="ids 0 to 19"):
        read_rows(read_header(tmp_path / "t"), "table", torch.tensor([20]))


def test_scalars_and_empty_tensors(tmp_path):
    tensors = {"scalar": torch.tensor(7, dtype=torch.int32), "empty": torch.zeros(0, 4)}
    write_tensors(tmp_path / "t", tensors)
    back = read_file(tmp_path / "t")
    assert back["scalar"].shape == () and int(back["scalar"]) == 7
    assert back["empty"].shape == (0, 4)


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def changed(**fields):
    return {"a": GOOD["a"] | fields}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (changed(data_offsets=[0, 12]), b"\0" * 12, "byte range does not fit"),
        (changed(data_offsets=[4, 12]), b"\0" * 12, "overlapping tensors or a gap"),
        (GOOD, b"\0" * 4, "size that its header states"),
        (GOOD, b"\0" * 12, "size that its header states"),
        (changed(dtype="C64"), b"\0" * 8, "dtype that does not belong"),
        (changed(shape=[-2]), b"\0" * 8, "impossible shape"),
        (changed(shape=[True, 2]), b"\0" * 8, "impossible shape"),
        (changed(shape=[1 << 62, 1 << 62]), b"\0" * 8, "byte range does not fit"),
        (changed(data_offsets=[0, 8.0]), b"\0" * 8, "impossible offsets"),
        (changed(extra=1), b"\0" * 8, "malformed"),
        (GOOD | {"b": GOOD["a"]}, b"\0" * 8, "overlapping"),
        (b'{"a": 1, "a": 2}', b"", "not JSON"),
        (b"[]", b"", "no object"),
        (b'{"__metadata__": {"a": 1}}', b"", "malformed metadata"),
        (b"\xff\xff", b"", "not JSON"),
    ],
)
def test_headers_that_are_refused(tmp_path, header, data, message):
    path = file_with(tmp_path / "t.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_header(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"\1\2", struct.pack("<Q", 1 << 60) + b"{}"])
def test_lengths_that_are_refused(tmp_path, content):
    path = tmp_path / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="impossible header length"):
        read_header(path)


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_else(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("f") / "t.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError):
        read_header(path)


def test_file_that_shrinks_after_its_header(tmp_path):
    write_tensors(tmp_path / "t", {"a": torch.zeros(100)})
    header = read_header(tmp_path / "t")
    with open(tmp_path / "t", "r+b") as handle:
        handle.truncate(header.size - 4)
    with pytest.raises(CheckpointError, match="shorter than its header"):
        read_tensor(header, "a")


def test_part_with_wrong_bytes_leaves_no_file(tmp_path):
    with pytest.raises(CheckpointError, match="expected: 8 bytes"):
        write_parts(tmp_path / "t", [Part("a", "F32", (2,), lambda: [b"123"])])
    assert list(tmp_path.iterdir()) == []
