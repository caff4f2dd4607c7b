# SPDX-License-Identifier: Apache-2.0
import hashlib
import itertools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba.core import caching
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch

from trellisbank.errors import QuantizeError
from trellisbank.formats import trellis
from trellisbank.quantize import viterbi
from trellisbank.quantize.encode_cpu import sample_tiles, search_scale, tile_encoder
from trellisbank.quantize.expert import ENCODER_VERSION
from trellisbank.quantize.ldlq import refit, regularize, round_with_feedback, transform

DATA = Path(__file__).parent / "data"
GOLDEN = load_file(DATA / "exl3_tiles.safetensors")
MATRICES = load_torch(DATA / "exl3_matrices.safetensors")
FIGURES = json.loads((DATA / "exl3.json").read_text())["proxy"]
TILES = GOLDEN["tiles"]
VALUES = {name: trellis.codebook(name).astype(np.float32) for name in ("mul1", "mcg", "3inst")}
RATES = range(1, 9)

# Worst share by which the mean squared error of a class of tiles may exceed exllamav3's.
CLASSES = {
    "gaussian": (slice(0, 128), 0.002),
    "smaller": (slice(128, 192), 0.002),
    "student-t": (slice(192, 224), 0.005),
    "large": (slice(224, 240), 0.005),
    "tiny": (slice(240, 248), 0.005),
    "zero": (slice(248, 249), 0.005),
}

# SHA-256 of the states of the golden tiles at K = 1..8 and of a matrix encoded with feedback.
# All of it is integers, so this holds on every machine.
BYTES = {2: "1b731ad6df92379b184c5d871f2c70ffe65f24f5aeaa0a201cff3b75d24b9b75"}


def relative(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def errors(tiles, states, codebook="mul1"):
    return np.square(VALUES[codebook][states] - tiles.astype(np.float64)).sum(axis=1)


def two_pass_reference(tile, rate, level=None):
    """The same two passes with every predecessor remembered.

    Costs are the encoder's integers at a level of its grid, without windows; float64 if None.
    """
    states = np.arange(1 << 16)
    values = VALUES["mul1"].astype(np.float64)
    nodes = 1 << (16 - rate)
    shift = 0
    if level is not None:
        scale = 2.0 ** (15 + level) / np.abs(values).max()
        values, tile, shift = np.rint(values * scale), np.rint(tile * scale), 16

    def run(order, costs):
        history = []
        for i in order:
            step = np.square(values - tile[i])
            candidates = (np.floor(step / 2**shift) if shift else step) + costs[states >> rate]
            candidates = candidates.reshape(-1, nodes)
            history.append(candidates.argmin(axis=0))
            costs = candidates.min(axis=0)
        return costs, history

    def back(history, node):
        path = []
        for winners in reversed(history):
            state = int(winners[node]) * nodes + node
            path.append(state)
            node = state >> rate
        return node, path[::-1]

    costs, history = run([*range(128, 256), *range(128)], np.zeros(nodes))
    z, _ = back(history[128:], int(costs.argmin()))
    costs = np.full(nodes, np.inf)
    costs[z] = 0
    _, history = run(range(256), costs)
    return np.array(back(history, z)[1], dtype=np.uint16)


@pytest.mark.parametrize("rate", RATES)
def test_paths_are_those_of_a_plain_viterbi(rate):
    tile = TILES[rate] * np.float32(0.7)
    states = tile_encoder(rate)(tile[None])[0]
    assert np.array_equal(states, two_pass_reference(tile, rate, viterbi.FINEST[rate]))


def test_integer_costs_are_fine_enough():
    tile = TILES[0] * np.float32(0.7)
    for rate in (1, 4, 8):
        states = np.stack([tile_encoder(rate)(tile[None])[0], two_pass_reference(tile, rate)])
        found, exact = errors(tile[None], states)
        assert found <= 1.01 * exact


@pytest.mark.parametrize("rate", RATES)
def test_plain_loops_give_the_same_states(rate, monkeypatch):
    # With targets this large many nodes tie at the end of a path.
    huge = np.random.default_rng(0).normal(0, 1e4, (23, 256)).astype(np.float32)
    tiles = np.concatenate([TILES[:2], TILES[200:201], huge[[4, 22]]])
    states, free = tile_encoder(rate)(tiles), tile_encoder(rate)(tiles, ring=False)

    class Broken:
        def compile(self, signature):
            raise RuntimeError("no such vectors")

    kernels = viterbi._KERNELS | {(rate, False): Broken()}
    monkeypatch.setattr(viterbi, "_KERNELS", kernels)
    monkeypatch.setattr(viterbi, "kernel", viterbi.kernel.__wrapped__)
    with pytest.warns(UserWarning, match="no such vectors"):
        encode = tile_encoder(rate)
    assert np.array_equal(encode(tiles), states)
    assert np.array_equal(encode(tiles, ring=False), free)


def test_encoder_works_where_nothing_compiled_can_be_kept(monkeypatch):
    def refuse(_):
        raise OSError("read-only file system")

    monkeypatch.setattr(caching._CacheLocator, "ensure_cache_path", refuse)
    kernels = viterbi._KERNELS | {(8, False): viterbi._kernel(8, False)}
    tiles = TILES[:1]
    states = tile_encoder(8)(tiles)
    monkeypatch.setattr(viterbi, "_KERNELS", kernels)
    monkeypatch.setattr(viterbi, "kernel", viterbi.kernel.__wrapped__)
    assert np.array_equal(tile_encoder(8)(tiles), states)


ARM = """
import re
import llvmlite.binding as llvm
from trellisbank.quantize import viterbi

llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
for rate in (3, 5):
    encode = viterbi.kernel(rate).encode
    code = encode.inspect_llvm(encode.signatures[0])
    code = re.sub(r"target (triple|datalayout) = .*", "", code)
    code = re.sub(r'"target-(cpu|features)"="[^"]*"', "", code)
    module = llvm.parse_assembly(code)
    module.triple = "aarch64-linux-gnu"
    machine = llvm.Target.from_triple(module.triple).create_target_machine(opt=3)
    text = machine.emit_assembly(module)
    print(*(len(re.findall(rf"\\t{op}\\tv", text)) for op in ("sub", "smull", "uqadd", "umin")))
"""


def test_vector_code_becomes_vector_code_on_arm(tmp_path):
    """Cross-compiled, not run. Optimizing for the host first would leave its own instructions."""
    environment = os.environ | {"NUMBA_OPT": "0", "NUMBA_CACHE_DIR": str(tmp_path)}
    program = [sys.executable, "-W", "ignore", "-c", ARM]
    done = subprocess.run(program, env=environment, check=True, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        assert min(int(n) for n in line.split()) >= 4 * 16  # 4 registers a vector, 16 candidates
    assert len(done.stdout.splitlines()) == 2


def test_what_a_window_hides_is_looked_for_again():
    """Two targets at the codebook's ends, one state apart, want values from all of it."""
    tile = TILES[0] * np.float32(0.7)
    tile[[30, 31]] = 4.2, -3.6
    for rate in (4, 6):
        states = tile_encoder(rate)(tile[None])
        exact = errors(tile[None], two_pass_reference(tile, rate)[None])
        assert errors(tile[None], states) == pytest.approx(exact, rel=0.002)


@pytest.mark.parametrize("rate", RATES)
def test_golden_tiles_by_class(rate):
    found = errors(TILES, tile_encoder(rate)(TILES))
    golden = GOLDEN[f"mul1/K{rate}/error"]
    for name, (tiles, share) in CLASSES.items():
        assert found[tiles].sum() <= golden[tiles].sum() * (1 + share), name


@pytest.mark.parametrize("codebook", ["mcg", "3inst"])
def test_golden_tiles_of_other_codebooks(codebook):
    for rate in (2, 3, 4):
        golden = GOLDEN[f"{codebook}/K{rate}/error"]
        tiles = TILES[: len(golden)]
        found = errors(tiles, tile_encoder(rate, codebook)(tiles), codebook)
        assert found.sum() <= golden.sum() * 1.002


@given(
    rate=st.integers(2, 5),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 1e-30, 0.01, 1.0, 30.0, 1e4, 1e15]),
    count=st.integers(1, 5),
)
@settings(max_examples=25)
def test_any_finite_tiles_give_closed_rings(rate, seed, scale, count):
    rng = np.random.default_rng(seed)
    tiles = (rng.standard_t(3, size=(count, 256)) * scale).astype(np.float32)
    states = tile_encoder(rate)(tiles)
    packed = trellis.pack(states, rate)  # refuses what does not close
    assert np.array_equal(trellis.unpack(packed), states)


def test_tiles_do_not_feel_each_other_or_the_threads():
    tiles = TILES[:7]
    states = tile_encoder(3)(tiles)
    for threads in (2, 3, 8):
        assert np.array_equal(tile_encoder(3, threads=threads)(tiles), states)
    order = [4, 0, 6]
    assert np.array_equal(tile_encoder(3)(tiles[order]), states[order])
    encode = tile_encoder(3, threads=2)
    for _ in range(2):  # the buffers carry nothing over
        assert np.array_equal(encode(tiles), states)


def test_work_that_outlasts_an_interruption_keeps_its_buffers(monkeypatch):
    compiled = viterbi.kernel(8)
    calls, held, given = itertools.count(), [], []
    running, end = threading.Event(), threading.Event()

    def encode(*arguments):
        if next(calls) >= 2:
            given.append(arguments[-1])
            compiled.encode(*arguments)
        elif len(arguments[0]) == 2:  # the second thread's share of six tiles
            held.append(arguments[-1])
            running.set()
            end.wait(30)
        else:
            running.wait(30)
            raise KeyboardInterrupt

    monkeypatch.setattr(viterbi, "kernel", lambda _: viterbi.Kernel(encode, False))
    encoder = tile_encoder(8, threads=2)
    with pytest.raises(KeyboardInterrupt):
        encoder(TILES[:6])
    encoder(TILES[:6])
    end.set()
    assert given
    assert not any(np.shares_memory(held[0], rows) for rows in given)


def test_unknown_rates_are_refused():
    for rate in (0, 9):
        with pytest.raises(QuantizeError, match="rate"):
            tile_encoder(rate)


def test_bytes_change_only_with_the_encoder_version():
    digest = hashlib.sha256()
    for rate in RATES:
        digest.update(tile_encoder(rate)(TILES[:32]).astype("<u2").tobytes())
    # One entry a row, a power of two: the feedback is exact, whatever sums the products.
    factor = torch.diag(torch.full((112,), 0.5), -16)
    weight = torch.from_numpy(trellis.from_tiles(TILES[:64], 128, 128).copy())
    _, states = round_with_feedback(weight, factor, tile_encoder(3), VALUES["mul1"])
    digest.update(states.astype("<u2").tobytes())
    assert digest.hexdigest() == BYTES[ENCODER_VERSION]


# Steps of one matrix, s128x256/fp4 at K = 3, each from exllamav3's own input to it.


def step(name):
    return MATRICES[f"steps/{name}"]


WEIGHT = MATRICES["s128x256/fp4/W"].float()


def test_regularize_reproduces_exllamav3():
    sv = torch.where(MATRICES["s128x256/svh"] < 0, -1.0, 1.0)
    regular, su, sv = regularize(WEIGHT, step("su_sign").flatten(), sv, True)
    assert float(regular.square().mean().sqrt()) == pytest.approx(1.24371088, rel=1e-6)
    g = FIGURES["s128x256/fp4/K3"]["g_scale"]
    assert relative(regular * g, step("weight_r")) < 1e-6
    assert relative(su / g, step("su_reg").flatten()) < 1e-6
    assert relative(sv, step("sv_reg").flatten()) < 1e-6
    back = su[:, None] * transform(regular) * sv
    assert relative(back, WEIGHT) < 1e-6


def test_scale_search():
    g = FIGURES["s128x256/fp4/K3"]["g_scale"]
    regular = step("weight_r").numpy() / np.float32(g)
    assert sample_tiles(regular).shape == (64, 256)
    encode, rings = tile_encoder(3), []

    def counted(tiles, ring=True):
        rings.append(ring)
        return encode(tiles, ring)

    found = search_scale(regular, 3, counted, VALUES["mul1"])
    assert found == pytest.approx(g, abs=0.02)
    assert rings == [False] * 3


def test_scale_search_far_from_the_usual():
    regular = step("weight_r").numpy()
    found = [search_scale(regular * s, 3, tile_encoder(3), VALUES["mul1"]) for s in (1.0, 1.5, 0.6)]
    assert found[1] == pytest.approx(found[0] / 1.5, abs=0.02)
    assert found[2] == pytest.approx(found[0] / 0.6, abs=0.02)
    # Nothing to tell scales apart by, and a minimum beyond the end.
    assert search_scale(regular * 0, 3, tile_encoder(3), VALUES["mul1"]) == pytest.approx(1.9)
    assert search_scale(regular * 0.1, 3, tile_encoder(3), VALUES["mul1"]) == pytest.approx(1.9)


def test_open_paths_cost_no_more_than_rings():
    encode, tiles = tile_encoder(4), TILES[:16]
    closed, free = errors(tiles, encode(tiles)), errors(tiles, encode(tiles, ring=False))
    assert 0.9 * closed.sum() < free.sum() < closed.sum()


def test_tiles_that_are_not_finite_are_refused():
    tiles = TILES[:3].copy()
    tiles[1, 7] = np.nan
    with pytest.raises(QuantizeError, match="1 of 3"):
        tile_encoder(3)(tiles)


def test_feedback_is_as_good_as_exllamav3():
    weight, factor = step("weight_r"), step("L")
    quantized, states = round_with_feedback(weight, factor, tile_encoder(3), VALUES["mul1"])
    assert np.array_equal(
        trellis.from_tiles(VALUES["mul1"][states.reshape(-1, 256)], 128, 256), quantized
    )
    h = step("H_rot_damped")

    def energy(q):
        error = weight - q
        return float((error * (h @ error)).sum())

    golden = energy(step("weight_q_rot").float())
    assert energy(quantized) < 1.02 * golden
    # The last block has no feedback before it, so it is encoded alike but for rounding of costs.
    same = (states[-1] == step("states").numpy().view(np.uint16)[-1]).all(axis=1)
    assert same.mean() > 0.5
    without, _ = round_with_feedback(weight, None, tile_encoder(3), VALUES["mul1"])
    assert energy(quantized) < 0.5 * energy(without)


def test_feedback_does_not_depend_on_the_span():
    weight, factor = step("weight_r")[:, :128], step("L")
    encode = tile_encoder(2)
    quantized, _ = round_with_feedback(weight, factor, encode, VALUES["mul1"])
    plain = torch.zeros_like(weight)
    for row in range(112, -1, -16):
        rows = slice(row, row + 16)
        target = weight[rows] + factor[row + 16 :, rows].T @ (weight - plain)[row + 16 :]
        found = VALUES["mul1"][encode(trellis.to_tiles(target.numpy()))]
        plain[rows] = torch.from_numpy(trellis.from_tiles(found, 16, 128))
    assert (plain == quantized).float().mean() > 0.9


def test_refit_reproduces_exllamav3():
    su, sv = step("su_reg").flatten(), step("sv_reg").flatten()
    quantized = su[:, None] * transform(step("weight_q_rot").float()) * sv
    h = MATRICES["s128x256/H"] / 1024
    damped = h + 0.025 * h.diagonal().mean() * torch.eye(128)
    su, sv = refit(WEIGHT, quantized, damped, su, sv)
    assert torch.equal(su.half(), MATRICES["s128x256/suh"])
    assert torch.equal(sv.half(), MATRICES["s128x256/svh"])
