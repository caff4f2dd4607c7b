# SPDX-License-Identifier: Apache-2.0
"""Speed of the CPU encoder: tiles a second at each rate, and whole matrices.

    .venv/bin/python benchmarks/encode_cpu.py --rates 2 3 4 5 --matrix 256 128 --threads 1

Tiles are Gaussian at the size at which they are encoded; their number does not change the speed.
Matrices are Gaussian with a Hessian of 4 k rows. Compilation is not counted.
"""

import argparse
import time

import numpy as np
import torch

from trellisbank.quantize.encode_cpu import tile_encoder
from trellisbank.quantize.expert import quantize_matrix

TILE_RMS = 0.94


def tiles_per_second(rate: int, threads: int, count: int) -> float:
    """Tiles encoded in a second of wall time."""
    encode = tile_encoder(rate, threads=threads)
    tiles = np.random.default_rng(0).normal(0, TILE_RMS, (count, 256)).astype(np.float32)
    encode(tiles[: 2 * threads])
    start = time.perf_counter()
    encode(tiles)
    return count / (time.perf_counter() - start)


def matrix_seconds(rate: int, threads: int, k: int, n: int) -> float:
    """Seconds for one matrix with a Hessian, from weights to stored tensors."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(k, n, generator=generator) / k**0.5
    rows = torch.randn(4 * k, k, generator=generator) * torch.linspace(0.2, 2, k)
    hessian = rows.T @ rows
    start = time.perf_counter()
    quantize_matrix(weight, hessian, 4 * k, rate, "benchmark", threads=threads)
    return time.perf_counter() - start


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiles", type=int, default=1024)
    parser.add_argument("--matrix", type=int, nargs=2, metavar=("K", "N"), default=[256, 128])
    options = parser.parse_args()
    k, n = options.matrix
    print(f"{'K':>2} {'tiles/s':>8} {f's for {k} x {n}':>18}   ({options.threads} threads)")
    for rate in options.rates:
        speed = tiles_per_second(rate, options.threads, options.tiles)
        seconds = matrix_seconds(rate, options.threads, k, n)
        print(f"{rate:>2} {speed:>8.0f} {seconds:>18.2f}")


if __name__ == "__main__":
    main()
