# SPDX-License-Identifier: Apache-2.0
"""Speed and precision of the CPU encoder, beside the bound of its arithmetic and a plain encoder.

    .venv/bin/python benchmarks/encode_cpu.py [--peer DIRECTORY]

Seconds are CPU seconds, the best of several, so that other work on the machine counts little. The
results go to benchmarks/results/encode_cpu.json. ``--peer`` names the ``workflow`` directory of
another version of this repository, whose tiles are encoded in the same run.

- bound: the four vector operations that each of 2 x 256 x 65,536 states of a tile needs, on
  registers, without memory or dependencies;
- plain: numba loops over fp32 costs, to which mean squared errors are compared.
"""

import argparse
import datetime
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from trellisbank.files import write_json
from trellisbank.formats import trellis
from trellisbank.quantize import expert
from trellisbank.quantize.encode_cpu import tile_encoder

RESULTS = Path(__file__).parent / "results" / "encode_cpu.json"
TILE_RMS = 0.94
STATES = 1 << 16
VALUES = trellis.codebook("mul1").astype(np.float32)
PARTS = ("finalize", "regularize", "search_scale", "round_with_feedback", "refit")
INDEPENDENT = 8


def best(function, repeats=5):
    """Least CPU seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        seconds.append(time.process_time() - start)
    return min(seconds)


def gaussian_tiles(count):
    """Tiles of the size at which those of K = 3 are encoded."""
    return np.random.default_rng(7).normal(0, TILE_RMS, (count, 256)).astype(np.float32)


@intrinsic
def _operations(_context, count, target, memory):
    def code(context, builder, signature, args):
        from trellisbank.quantize import relax  # not in versions before, which --peer may name

        count, target, memory = args
        base = context.make_array(signature.args[2])(context, builder, memory).data

        def vector(i):
            return relax.load(builder, base, relax.constant(relax.LANES * i))

        first = relax.splat(builder, target)
        one = relax.splat(builder, ir.Constant(ir.IntType(16), 1))
        least = [cgutils.alloca_once_value(builder, vector(i)) for i in range(INDEPENDENT)]
        value = [vector(INDEPENDENT + i) for i in range(INDEPENDENT)]
        moving = cgutils.alloca_once_value(builder, first)
        with cgutils.for_range(builder, count):
            w = builder.load(moving)
            for i, slot in enumerate(least):
                c = relax.cost(builder, value[i], w, value[i - 3])
                builder.store(relax.least(builder, builder.load(slot), c), slot)
            builder.store(builder.add(w, one), moving)
        for i, slot in enumerate(least):
            relax.store(builder, builder.load(slot), base, relax.constant(relax.LANES * i))
        return context.get_dummy_value()

    return types.void(count, target, memory), code


@njit
def _run_operations(count, target, memory):
    _operations(count, target, memory)


def bound():
    """Tiles a second if a state cost nothing but its operations."""
    memory = np.random.default_rng(0).integers(-3000, 3000, 32 * 2 * INDEPENDENT, dtype=np.int16)
    _run_operations(1, np.int16(3), memory)
    count = 3_000_000
    seconds = best(lambda: _run_operations(count, np.int16(3), memory), 8)
    return count * INDEPENDENT * 32 / seconds / (2 * 256 * STATES)


@njit(error_model="numpy", fastmath={"nnan", "nsz"})
def _plain_pass(values, tile, first, costs, spread, rate, path):
    """Relax 256 positions from ``first`` on, then trace back from the best or the given node."""
    nodes, highs, lows = STATES >> rate, STATES >> (2 * rate), 1 << rate
    for i in range(256):
        w, before, after = tile[(first + i) % 256], costs[i], costs[i + 1]
        after[:] = np.float32(3e38)
        for q in range(lows):
            for high in range(highs):
                spread[high * lows : (high + 1) * lows] = before[q * highs + high]
            candidates = values[q]
            for node in range(nodes):
                d = candidates[node] - w
                after[node] = min(after[node], spread[node] + d * d)
    node = np.int64(np.argmin(costs[256])) if path[0] < 0 else path[0]
    for i in range(255, -1, -1):
        w, least, winner = tile[(first + i) % 256], np.float32(3e38), 0
        for q in range(lows):
            d = values[q, node] - w
            cost = costs[i, q * highs + (node >> rate)] + d * d
            if cost < least:
                least, winner = cost, q
        path[(first + i) % 256] = winner * nodes + node
        node = path[(first + i) % 256] >> rate


@njit(error_model="numpy")
def _plain_encode(values, tiles, rate, states):
    nodes = STATES >> rate
    costs = np.empty((257, nodes), dtype=np.float32)
    spread = np.empty(nodes, dtype=np.float32)
    path = np.empty(256, dtype=np.int64)
    for t in range(len(tiles)):
        costs[0, :] = 0
        path[0] = -1
        _plain_pass(values, tiles[t], 128, costs, spread, rate, path)
        z = path[0] >> rate
        costs[0, :] = 1e38
        costs[0, z] = 0
        path[0] = z
        _plain_pass(values, tiles[t], 0, costs, spread, rate, path)
        states[t] = path


def plain_encoder(rate):
    """Encoder with fp32 costs in loops that the compiler vectorizes where it can."""

    def encode(tiles):
        states = np.empty(tiles.shape, dtype=np.int64)
        _plain_encode(VALUES.reshape(1 << rate, -1), tiles, rate, states)
        return states

    return encode


def error(tiles, states):
    """Squared error of all tiles."""
    return float(np.square(VALUES[states] - tiles.astype(np.float64)).sum())


def peer_seconds(directory, rate, count):
    """`tiles_seconds` with another version of the package."""
    command = [sys.executable, __file__, "--tiles-only", str(rate), "--tiles", str(count)]
    environment = os.environ | {"PYTHONPATH": str(directory)}
    return float(subprocess.run(command, env=environment, check=True, stdout=-1).stdout)


def tiles_seconds(rate, count, threads=1):
    """CPU seconds for some tiles."""
    encode, tiles = tile_encoder(rate, threads=threads), gaussian_tiles(count)
    encode(tiles[:4])
    return best(lambda: encode(tiles))


def tile_figures(rate, count, peer, limit):
    """One row of the table of tiles."""
    tiles = gaussian_tiles(count)
    plain, encode = plain_encoder(rate), tile_encoder(rate)
    plain(tiles[:1])
    start = time.process_time()
    exact = error(tiles, plain(tiles))
    plain_seconds = time.process_time() - start
    speed = count / tiles_seconds(rate, count)
    row = {
        "tiles_per_second": round(speed),
        "share_of_bound": round(speed / limit, 3),
        "plain_fp32_tiles_per_second": round(count / plain_seconds),
        "error_over_fp32": round(error(tiles, encode(tiles)) / exact, 5),
    }
    if peer:
        row["peer_tiles_per_second"] = round(count / peer_seconds(peer, rate, count))
    return row


def compile_seconds(rate):
    """CPU seconds of the first compilation, and of loading it from the cache."""
    program = (
        "import time; from trellisbank.quantize import viterbi; from numba import njit\n"
        "njit(lambda x: x)(1); start = time.process_time()\n"
        f"viterbi.kernel({rate}); print(time.process_time() - start)"
    )
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {"NUMBA_CACHE_DIR": cache}
        command = [sys.executable, "-c", program]
        first, cached = (
            float(subprocess.run(command, env=environment, check=True, stdout=-1).stdout)
            for _ in range(2)
        )
    return {"first": round(first, 2), "cached": round(cached, 3)}


_encoder = cache(tile_encoder)


def _encode_some(rate, count):
    """Encode tiles in another process."""
    _encoder(rate)(gaussian_tiles(count))


def thread_figures(rates, count, rounds=7):
    """Wall time of one thread over that of two, and over that of two processes.

    Processes share nothing: what two of them gain is what this machine has to give. The three stand
    beside one another in each round.
    """
    tiles = gaussian_tiles(count)
    figures = {}
    with ExitStack() as stack:
        workers = [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
            for _ in range(2)
        ]

        def processes(rate, each):
            jobs = [worker.submit(_encode_some, rate, each) for worker in workers]
            return [job.result() for job in jobs]

        def wall(function, *arguments):
            start = time.perf_counter()
            function(*arguments)
            return time.perf_counter() - start

        for rate in rates:
            one, two = (tile_encoder(rate, threads=n) for n in (1, 2))
            one(tiles[:4]), two(tiles[:4]), processes(rate, 4)
            ratios = {"threads": [], "processes": []}
            for _ in range(rounds):
                alone = wall(one, tiles)
                ratios["threads"].append(alone / wall(two, tiles))
                ratios["processes"].append(alone / wall(processes, rate, count // 2))
            figures[str(rate)] = {name: round(float(np.median(r)), 2) for name, r in ratios.items()}
    return figures | {"load": round(os.getloadavg()[0], 1)}


@contextmanager
def timed_parts(seconds):
    """Add up the CPU seconds of the parts of `expert.quantize_matrix`."""

    def timed(name, function):
        def call(*args, **kwargs):
            start = time.process_time()
            result = function(*args, **kwargs)
            seconds[name] = seconds.get(name, 0.0) + time.process_time() - start
            return result

        return call

    patches = [mock.patch.object(expert, n, timed(n, getattr(expert, n))) for n in PARTS]
    for patch in patches:
        patch.start()
    yield
    for patch in patches:
        patch.stop()


def matrix_figures(rate, k, n, repeats=4):
    """Milliseconds for a matrix with a Hessian, from weights to stored tensors, by part."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(k, n, generator=generator) / k**0.5
    rows = torch.randn(4 * k, k, generator=generator) * torch.linspace(0.2, 2, k)
    hessian = rows.T @ rows
    fastest = {"whole": float("inf")}
    for _ in range(repeats):
        parts = {}
        with timed_parts(parts):
            whole = best(
                lambda: expert.quantize_matrix(weight, hessian, 4 * k, rate, "benchmark"), 1
            )
        if whole < fastest["whole"]:
            fastest = {"whole": whole, **parts, "rest": whole - sum(parts.values())}
    count = k * n // 256
    tiles = tiles_seconds(rate, count) if repeats > 1 else None
    row = {name: round(1000 * seconds, 1) for name, seconds in fastest.items()}
    if tiles:
        row |= {"own_tiles": round(1000 * tiles, 1), "ratio": round(fastest["whole"] / tiles, 2)}
    return row


def processor():
    """Name of the CPU, as far as the system tells."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.name == "posix" else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="+", default=list(trellis.RATES))
    parser.add_argument("--tiles", type=int, default=256)
    parser.add_argument("--peer", type=Path, help="workflow directory of another version")
    parser.add_argument("--matrix", type=int, nargs=2, metavar=("K", "N"), action="append")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tiles-only", type=int, metavar="RATE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.tiles_only:
        print(tiles_seconds(options.tiles_only, options.tiles))
        return
    limit = bound()
    results = {
        "date": datetime.date.today().isoformat(),
        "cpu": processor(),
        "numba_cpu": numba.config.CPU_NAME or "host",
        "versions": {m.__name__: m.__version__ for m in (np, numba, torch)},
        "bound_tiles_per_second": round(limit),
        "tiles": {},
        "compile": {},
        "matrices": {},
    }
    for rate in options.rates:
        row = tile_figures(rate, options.tiles, options.peer, limit)
        results["tiles"][str(rate)] = row
        results["compile"][str(rate)] = compile_seconds(rate)
        print(rate, row, results["compile"][str(rate)], flush=True)
    rates = [rate for rate in options.rates if 2 <= rate <= 5]
    results["threads"] = thread_figures(rates, options.tiles)
    print(results["threads"])
    for k, n in options.matrix or [(256, 128)]:
        for rate in rates:
            row = matrix_figures(rate, k, n, 4 if k * n <= 1 << 20 else 1)
            results["matrices"][f"{k}x{n}/K{rate}"] = row
            print(k, n, rate, row, flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
