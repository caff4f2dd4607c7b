# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load_file

from trellisbank.errors import FormatError
from trellisbank.formats import trellis

DATA = Path(__file__).parent / "data"
GOLDEN = load_file(DATA / "exl3_format.safetensors")
TABLES = json.loads((DATA / "exl3.json").read_text())["tables"]
RATES = range(1, 9)


def relative(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def packed(rate, tiles, seed):
    rng = np.random.default_rng(seed)
    return rng.integers(-(1 << 15), 1 << 15, (*tiles, 16 * rate), dtype=np.int16)


def hadamard(n):
    index = np.arange(128)
    parity = np.bitwise_count(index[:, None] & index) & 1
    return np.kron(np.eye(n // 128), (1.0 - 2.0 * parity) / np.sqrt(128))


@pytest.mark.parametrize("name", ["mul1", "mcg", "3inst"])
def test_codebooks_are_those_of_exllamav3(name):
    assert hashlib.sha256(trellis.codebook(name).tobytes()).hexdigest() == TABLES[name]


def test_ring_order():
    assert np.array_equal(trellis.RING_TO_ELEMENT, GOLDEN["perm"])
    assert np.array_equal(trellis.RING_TO_ELEMENT[trellis.ELEMENT_TO_RING], np.arange(256))


@pytest.mark.parametrize("rate", RATES)
def test_golden_decodes_exactly(rate):
    case = {name: GOLDEN[f"mul1/K{rate}/{name}"] for name in ("trellis", "states", "inner", "full")}
    suh, svh = GOLDEN[f"mul1/K{rate}/suh"], GOLDEN[f"mul1/K{rate}/svh"]
    states = trellis.unpack(case["trellis"])
    assert np.array_equal(states[:1], case["states"].view(np.uint16))
    assert np.array_equal(trellis.pack(states, rate), case["trellis"])
    assert np.array_equal(trellis.decode_inner(case["trellis"]), case["inner"])
    # exllamav3 rounds to half four times on the way: 4.2e-4 from the formula.
    assert relative(case["full"], trellis.decode(case["trellis"], suh, svh)) < 5e-4


@pytest.mark.parametrize("rate", [3, 4])
@pytest.mark.parametrize("name", ["mcg", "3inst"])
def test_other_codebooks_are_read(name, rate):
    words, suh, svh = (GOLDEN[f"mul1/K{rate}/{part}"] for part in ("trellis", "suh", "svh"))
    assert np.array_equal(trellis.decode_inner(words, name), GOLDEN[f"{name}/K{rate}/inner"])
    full = trellis.decode(words, suh, svh, name)
    assert relative(GOLDEN[f"{name}/K{rate}/full"], full) < 5e-4


def test_decode_is_the_formula():
    words = packed(5, (16, 8), 1)
    rng = np.random.default_rng(2)
    suh, svh = (rng.normal(size=n).astype(np.float16) for n in (256, 128))
    inner = trellis.decode_inner(words).astype(np.float64)
    formula = suh.astype(np.float64)[:, None] * (hadamard(256) @ inner @ hadamard(128)) * svh
    assert relative(trellis.decode(words, suh, svh), formula) < 3e-7


@given(st.integers(1, 8), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_states_are_windows_of_the_stream(rate, seed):
    words = packed(rate, (1,), seed)[0]
    stream = "".join(f"{word:032b}" for word in words.view("<u4"))
    twice = stream + stream
    ends = [len(stream) + (i + 1) * rate for i in range(256)]
    states = [int((twice + stream)[end - 16 : end], 2) for end in ends]
    assert np.array_equal(trellis.unpack(words), states)


@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 2**32 - 1))
@settings(max_examples=30)
def test_pack_inverts_unpack(rate, tiles, seed):
    words = packed(rate, (tiles, 2), seed)
    assert np.array_equal(trellis.pack(trellis.unpack(words), rate), words)


@given(hnp.arrays(np.int16, (32, 48)))
@settings(max_examples=20)
def test_tiles_and_matrix_are_one_order(matrix):
    tiles = trellis.to_tiles(matrix)
    assert np.array_equal(trellis.from_tiles(tiles, 32, 48), matrix)
    assert tiles[4, 9] == matrix[16 + 2 * 1 + 1, 16 + 0]  # tile (1, 1); ring position 8 * 1 + 1


@pytest.mark.parametrize("axis", [0, 1])
def test_hadamard_is_the_matrix_and_its_own_inverse(axis):
    x = np.random.default_rng(3).normal(size=(256, 384)).astype(np.float32)
    y = trellis.hadamard128(x, axis)
    expected = hadamard(256) @ x if axis == 0 else x @ hadamard(384)
    assert relative(y, expected) < 3e-7
    assert relative(trellis.hadamard128(y, axis), x) < 3e-7


def test_markers():
    assert trellis.marker("mul1").shape == ()
    assert trellis.marker("mul1") == -2082680531
    trellis.check_marker("mul1", -2082680531)
    trellis.check_marker("mcg", 3417055213)
    with pytest.raises(FormatError, match="0x83DCD12D"):
        trellis.check_marker("mul1", 3417055213)
    with pytest.raises(FormatError, match="mul1 or mcg"):
        trellis.check_marker("mul2", 1)


@pytest.mark.parametrize(
    ("words", "suh", "svh", "message"),
    [
        (np.zeros((9, 8, 48), np.int16), 144, 128, "144 x 128"),
        (np.zeros((8, 0, 48), np.int16), 128, 0, "128 x 0"),
        (np.zeros((8, 8, 40), np.int16), 128, 128, "half-integer"),
        (np.zeros((8, 8, 144), np.int16), 128, 128, "K = 1..8"),
        (np.zeros((8, 8, 48), np.int32), 128, 128, "int32"),
        (np.zeros((64, 48), np.int16), 128, 128, "three axes"),
        (np.zeros((8, 8, 48), np.int16), 256, 128, "suh"),
        (np.zeros((8, 8, 48), np.int16), 128, 1, "svh"),
    ],
)
def test_malformed_tensors_are_refused(words, suh, svh, message):
    with pytest.raises(FormatError, match=message):
        trellis.decode(words, np.zeros(suh, np.float16), np.zeros(svh, np.float16))


def test_open_rings_and_unknown_codebooks_are_refused():
    states = trellis.unpack(packed(3, (2,), 4))
    states[1, 17] ^= 1 << 9
    with pytest.raises(FormatError, match="closed ring"):
        trellis.pack(states, 3)
    with pytest.raises(FormatError, match="uint16"):
        trellis.pack(states.astype(np.int64), 3)
    with pytest.raises(FormatError, match="codebook"):
        trellis.codebook("4inst")


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("mul1", torch.zeros(2, dtype=torch.int32)),
        ("mul1", torch.zeros((), dtype=torch.bfloat16)),
        ("mcg", torch.ones((), dtype=torch.int32)),
        ("trellis", torch.zeros(8, 8, 32, dtype=torch.bfloat16)),
        ("suh", torch.zeros(128)),
    ],
)
def test_stored_tensors_of_another_kind_are_refused(name, tensor):
    tensors = {
        "trellis": torch.zeros(8, 8, 32, dtype=torch.int16),
        "suh": torch.zeros(128, dtype=torch.float16),
        "svh": torch.zeros(128, dtype=torch.float16),
    }
    assert trellis.stored_matrix(tensors)[3] == "3inst"
    with pytest.raises(FormatError, match=name):
        trellis.stored_matrix(tensors | {name: tensor})
