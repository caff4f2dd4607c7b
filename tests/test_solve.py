# SPDX-License-Identifier: Apache-2.0
"""Solvers against brute force and against the published plan."""

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trellisbank.errors import PlanError
from trellisbank.plan.cost import Table, blank_table, published_table
from trellisbank.plan.layouts import (
    NATIVE,
    bank_plan_slots,
    cuda_exl3_slots,
    exl3_overhead,
)
from trellisbank.plan.solve import curve, next_best, protect, rank_bytes, smallest, solve

PUBLISHED = Path(__file__).parent / "data/published/ledger_per_layer.csv"
DOWN_K4 = [*range(15), 16, 17, 18, 20, 21, 22, 24]
GATE_UP_K4 = [*range(15), 16, 17, 18, 21]


def layers_at(solution, group, rate):
    return [s.layer for s, r in solution.rates.items() if s.group == group and r == rate]


def test_gain_reproduces_the_published_plan():
    found = solve("gain", published_table(PUBLISHED), {"average_rate": 3.5})
    assert layers_at(found, "down", 4) == DOWN_K4
    assert layers_at(found, "gate_up", 4) == GATE_UP_K4
    assert round(found.sizes()["stored_bits_per_weight"], 3) == 3.510
    both = set(DOWN_K4) & set(GATE_UP_K4)
    assert (len(both), len(set(DOWN_K4) - both), 40 - len(DOWN_K4)) == (19, 3, 18)


def test_exact_proves_the_published_plan_optimal_and_is_better_elsewhere():
    table = published_table(PUBLISHED)
    exact = solve("exact", table, {"average_rate": 3.5})
    # The greedy steps fill 3.5 bits to the last one, so nothing was left to gain.
    assert exact.cost == exact.greedy == pytest.approx(exact.bound, rel=1e-12)
    better = {}
    for budget in (3.1, 3.3, 3.77):
        exact = solve("exact", table, {"average_rate": budget})
        assert exact.cost == pytest.approx(exact.bound, rel=1e-9)
        better[budget] = exact.greedy / exact.cost - 1
    assert better == pytest.approx({3.1: 0, 3.3: 0.00728, 3.77: 0.000375}, abs=1e-5)


def test_a_rank_budget_is_met():
    room = rank_bytes(62.8, 4, 7 * 2**30)
    assert room == pytest.approx(4 * 55.8 * 2**30)
    found = solve("exact", published_table(PUBLISHED), {"bytes": room})
    assert room * 0.99 < found.sizes()["stored_bytes"] <= room


@st.composite
def tables(draw, most=5):
    """A few slots of either layout with costs that need neither fall nor be convex."""
    width, inner = draw(st.sampled_from([(128, 128), (256, 128)]))
    count = draw(st.integers(1, most))
    if draw(st.booleans()):
        rates = draw(st.sets(st.integers(2, 8), min_size=1, max_size=4))
        slots = cuda_exl3_slots(range(count), 3, width, inner)[: most + 1]
    else:
        rates = [2, 3, NATIVE, 5][: draw(st.integers(1, 4))]
        slots = bank_plan_slots([0, 1], (count + 1) // 2, width, inner)
    blank = blank_table(slots, rates, width * inner, exl3_overhead(width, inner))
    value = st.sampled_from([0.0, 1.0, 1.5, 3.0]) | st.floats(1e-3, 10)
    cost = np.array([[draw(value) for _ in blank.rates] for _ in blank.slots])
    for row in range(len(cost)):
        if draw(st.integers(0, 3)) == 0:
            cost[row, draw(st.integers(0, cost.shape[1] - 1))] = draw(
                st.sampled_from([np.nan, np.inf])
            )
        if np.isnan(cost[row]).all():
            cost[row, 0] = 1.0
    return replace(blank, cost=cost)


def brute(table: Table, size):
    """Cost and size of every plan."""
    for columns in itertools.product(range(len(table.rates)), repeat=len(table.slots)):
        at = np.arange(len(columns)), np.array(columns)
        if not np.isnan(table.cost[at]).any():
            yield math.fsum(table.cost[at]), int(size[at].sum())


budgets = st.fixed_dictionaries({"average_rate": st.floats(2, 8)}) | st.fixed_dictionaries(
    {"stored_bits": st.floats(2, 9)}
)


@settings(max_examples=150)
@given(tables(), budgets)
def test_exact_is_as_good_as_brute_force(table, budget):
    held, protected = protect(table)
    kind = next(iter(budget))
    size = held.payload if kind == "average_rate" else held.stored
    room = math.floor(budget[kind] * held.weights)
    plans = [cost for cost, bits in brute(held, size) if bits <= room]
    if not plans:
        with pytest.raises(PlanError, match="smallest plan is larger"):
            solve("exact", table, budget)
        return
    for method in ("exact", "gain", "random", "frequency"):
        found = solve(method, table, budget)
        used = size[np.arange(len(found.choice)), found.choice].sum()
        assert used <= room
        assert found.protected == protected
        assert found.greedy >= min(plans) * (1 - 1e-12)
        if method == "exact":
            assert found.cost == pytest.approx(min(plans), rel=1e-9, abs=1e-12)
        if found.bound is not None:
            assert found.bound <= min(plans) + 1e-9


@given(tables(), st.floats(0, 30))
def test_the_smallest_plan_below_a_loss_is_that_of_brute_force(table, limit):
    held, _ = protect(table)
    fits = [bits for cost, bits in brute(held, held.stored) if cost <= limit]
    if not fits:
        with pytest.raises(PlanError, match="stays below"):
            smallest(table, limit)
        return
    found = smallest(table, limit)
    assert found.cost <= limit * (1 + 1e-11)
    assert found.sizes()["stored_bytes"] == min(fits) // 8
    assert found.bound <= min(fits) * (1 + 1e-12)


@given(tables())
def test_the_curve_is_convex_and_no_plan_lies_below_it(table):
    points = curve(table)
    held, _ = protect(table)
    x = np.array([point["stored_bits_per_weight"] * held.weights for point in points])
    y = np.array([point["cost"] for point in points])
    slopes = np.diff(y) / np.diff(x)
    assert (slopes < 0).all() and (np.diff(slopes) >= -1e-9).all()
    for cost, bits in brute(held, held.stored):
        assert bits >= x[0] - 1e-6
        assert cost >= np.interp(bits, x, y) - 1e-9


def test_a_curve_of_few_points_keeps_both_ends():
    slots = bank_plan_slots([0, 1, 2], 4, 128, 128)
    blank = blank_table(slots, [2, 3, 4], 128 * 128, 0)
    cost = np.array([[16.0, 4.0, 1.0]]) * np.arange(1, 13)[:, None]
    whole = curve(replace(blank, cost=cost))
    assert len(whole) == 1 + 2 * 12
    few = curve(replace(blank, cost=cost), 5)
    assert len(few) == 5 and few[0] == whole[0] and few[-1] == whole[-1]
    assert all(point in whole for point in few)
    assert curve(replace(blank, cost=cost), 99) == whole


def test_slots_stand_in_their_order_by_name_whatever_order_they_come_in():
    slots = cuda_exl3_slots([0, 1], 2, 128, 128) + bank_plan_slots([2], 2, 128, 128)
    for order in itertools.permutations(slots):
        assert blank_table(order, [3, 2], 128 * 128, 0).slots == tuple(slots)


def test_ties_go_to_the_first_name():
    slots = bank_plan_slots([1, 0], 2, 128, 128)
    blank = blank_table(slots, [2, 3], 128 * 128, 0)
    table = replace(blank, cost=np.array([[2.0, 1.0]] * 4))
    for method in ("gain", "exact"):
        found = solve(method, table, {"average_rate": 2.5})
        assert [s.name for s, rate in found.rates.items() if rate == 3] == ["L00.E000", "L00.E001"]


def test_a_failed_measurement_protects_its_slot():
    slots = bank_plan_slots([0], 4, 128, 128)
    table = replace(
        blank_table(slots, [2, 3, 5], 128 * 128, 0),
        cost=np.array([[9, 3, 1], [np.inf, 3, 1], [9, 3, np.nan], [np.inf, np.inf, np.nan]]),
    )
    for method in ("gain", "exact", "frequency"):
        found = solve(method, table, {"average_rate": 3.3})
        assert [slot.expert for slot in found.protected] == [1, 3]
        # Best of what was encoded for each; the known costs alone are summed.
        assert [found.rates[slot] for slot in found.protected] == [5, 3]
    with pytest.raises(PlanError, match="2 of 4 slots protected"):
        solve("exact", table, {"average_rate": 2.5})


def test_the_source_format_is_taken_where_it_is_cheaper():
    slots = bank_plan_slots([0], 2, 128, 128)
    blank = blank_table(slots, [5, 2, NATIVE, 3], 128 * 128, exl3_overhead(128, 128))
    assert blank.rates == (2, 3, NATIVE, 5)
    assert blank.payload[0].tolist() == [3 * 128 * 128 * b // 4 for b in (8, 12, 17, 20)]
    assert (blank.stored - blank.payload)[0].tolist() == [3 * (16 * 256 + 32)] * 2 + [
        0,
        3 * (16 * 256 + 32),
    ]
    table = replace(blank, cost=np.array([[8.0, 2.0, 0.0, 0.2], [4.0, 1.0, 0.0, 0.1]]))
    found = solve("exact", table, {"average_rate": 4})
    assert list(found.rates.values()) == [NATIVE, 3]
    assert found.sizes()["average_rate"] == (4.25 + 3) / 2


def test_random_follows_its_seed_and_fills_the_budget():
    table = published_table(PUBLISHED)
    plans = [solve("random", table, {"average_rate": 3.5}, seed) for seed in range(4)]
    assert plans[0].rates == solve("random", table, {"average_rate": 3.5}, 0).rates
    assert len({tuple(plan.choice) for plan in plans}) == 4
    assert {plan.sizes()["average_rate"] for plan in plans} == {3.5}


def test_next_best_are_the_steps_that_would_follow():
    table = published_table(PUBLISHED)
    found = solve("gain", table, {"average_rate": 3.5})
    beyond = next_best(found, 2)
    # Published lists of what was encoded: four more layers of each group, 25 among them.
    up = {slot.name for slot, rates in beyond.items() if 4 in rates}
    down = {slot.name for slot, rates in beyond.items() if 3 in rates}
    wider = solve("gain", table, {"average_rate": 3.5 + 4 / 120}).rates
    assert {name for name in up if "down" in name} >= {
        s.name for s, r in wider.items() if r == 4 and found.rates[s] == 3 and s.group == "down"
    }
    assert len(up) == len(down) == 4 and not up & down
    assert next_best(found, 0) == {}


@pytest.mark.parametrize(
    "budget", [{}, {"average_rate": 3, "bytes": 10}, {"bytes": 0}, {"average_rate": -1}]
)
def test_budgets_that_are_refused(budget):
    with pytest.raises(PlanError, match="one budget"):
        solve("exact", published_table(PUBLISHED), budget)


def test_an_unknown_method_is_refused():
    with pytest.raises(PlanError, match="method is unknown"):
        solve("best", published_table(PUBLISHED), {"average_rate": 3.5})


def test_a_file_that_is_no_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("layer,gain\n0,1\n")
    with pytest.raises(PlanError, match="no table"):
        published_table(tmp_path / "a.csv")
