# SPDX-License-Identifier: Apache-2.0
"""Time, memory and proven gap of the exact solver at release size.

Ledgers are synthetic: error curves of the published table of 40 layers, spread over experts and
rates at random. Run: `python benchmarks/plan.py`.
"""

import argparse
import resource
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from trellisbank.plan.cost import BIT_RATIO, PUBLISHED, Table, blank_table, published_table
from trellisbank.plan.layouts import NATIVE, bank_plan_slots, cuda_exl3_slots, exl3_overhead
from trellisbank.plan.solve import solve

TABLE = Path(__file__).parents[1] / "tests/data/published/ledger_per_layer.csv"


def layer_costs() -> np.ndarray:
    """Cost of K = 3 [layers, groups] from the published table."""
    return published_table(TABLE).cost[:, 0].reshape(-1, 2)


def curve(draw: np.random.Generator, base: np.ndarray, rates: list) -> np.ndarray:
    """Costs at all rates [slots, rates]; each bit leaves a quarter, give or take a few percent."""
    columns = []
    for rate in rates:
        if rate == NATIVE:
            columns.append(np.zeros_like(base))
            continue
        columns.append(base * BIT_RATIO ** (rate - 3) * draw.lognormal(0, 0.03, len(base)))
    return np.stack(columns, axis=1)


def groups_table(draw: np.random.Generator) -> Table:
    """Return 40 layers x 2 groups with K 2..8."""
    base, rates = layer_costs(), list(range(2, 9))
    width, inner, experts = PUBLISHED["width"], PUBLISHED["inner"], PUBLISHED["experts"]
    slots = cuda_exl3_slots(range(len(base)), experts, width, inner)
    blank = blank_table(slots, rates, width * inner, exl3_overhead(width, inner))
    return replace(blank, cost=curve(draw, base.ravel(), rates))


def experts_table(draw: np.random.Generator) -> Table:
    """Return 15,360 experts with K 2, 3, 5 and native; their tokens differ as published."""
    base, rates = layer_costs().sum(axis=1), [2, 3, NATIVE, 5]
    width, inner, experts = PUBLISHED["width"], PUBLISHED["inner"], PUBLISHED["experts"]
    slots = bank_plan_slots(range(len(base)), experts, width, inner)
    blank = blank_table(slots, rates, width * inner, exl3_overhead(width, inner))
    tokens = draw.lognormal(0, 1.2, (len(base), experts))
    shares = tokens / tokens.sum(axis=1, keepdims=True)
    spread = draw.lognormal(0, 0.3, (len(base), experts))
    return replace(blank, cost=curve(draw, (base[:, None] * shares * spread).ravel(), rates))


def main() -> None:
    """Solve both sizes under each kind of budget and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    print("slots  budget             seconds  peak MB  proven gap  greedy above exact  bits")
    for seed in range(options.seeds):
        for make in (groups_table, experts_table):
            table = make(np.random.default_rng(seed))
            for budget in (
                {"average_rate": 2.5},
                {"average_rate": 2.77},
                {"average_rate": 3.5},
                {"stored_bits": 2.77},
                {"bytes": 200 * 2**30},
            ):
                start = time.perf_counter()
                found = solve("exact", table, budget)
                seconds = time.perf_counter() - start
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
                (kind, amount), sizes = *budget.items(), found.sizes()
                print(
                    f"{len(table.slots):5}  {kind} {amount:<{17 - len(kind)}} {seconds:7.2f}"
                    f"  {peak:7.0f}  {found.cost / found.bound - 1:10.2e}"
                    f"  {found.greedy / found.cost - 1:18.2e}  {sizes['average_rate']:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
