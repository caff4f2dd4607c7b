# SPDX-License-Identifier: Apache-2.0
"""Plans: uniform rates under a budget, what they ask of the bank, and frozen files."""

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synthetic import encoded_group, write_ledger
from trellisbank.errors import PlanError
from trellisbank.files import write_json
from trellisbank.plan.freeze import freeze, load_plan, plan_rates, planned_entries
from trellisbank.plan.layouts import Slot, Wanted, cuda_exl3_slots, wanted_entries
from trellisbank.plan.solve import uniform

EXPERTS = 3


def average(rates):
    total = sum(slot.weights for slot in rates)
    return Fraction(sum(slot.weights * rate for slot, rate in rates.items()), total)


def test_slots_of_the_cuda_exl3_layout():
    assert cuda_exl3_slots([1, 0], 384, 5120, 2304) == [
        Slot(layer, group, matrices * 384 * 5120 * 2304)
        for layer in (0, 1)
        for group, matrices in (("gate_up", 2), ("down", 1))
    ]


@given(st.integers(1, 60), st.integers(200, 800), st.integers(0, 99))
def test_uniform_comes_as_close_to_the_budget_as_slots_allow(layers, hundredths, seed):
    slots = cuda_exl3_slots(range(layers), 4, 256, 128)
    budget = Fraction(hundredths, 100)
    rates = uniform(slots, hundredths / 100, seed)
    assert list(rates) == slots
    low = hundredths // 100
    assert set(rates.values()) <= {low, low + 1}
    # gate_up counts two and down one, so any whole number of thirds of a layer can be met.
    assert average(rates) == low + Fraction(int((budget - low) * 3 * layers), 3 * layers)


@given(st.integers(1, 60), st.integers(200, 800), st.integers(0, 99))
def test_uniform_spreads_each_group_evenly(layers, hundredths, seed):
    rates = uniform(cuda_exl3_slots(range(layers), 4, 256, 128), hundredths / 100, seed)
    counts = []
    for group in ("gate_up", "down"):
        raised = [
            slot.layer
            for slot, rate in rates.items()
            if slot.group == group and rate > hundredths // 100
        ]
        counts.append(len(raised))
        gaps = {
            (b - a) % layers or layers for a, b in zip(raised, raised[1:] + raised[:1], strict=True)
        }
        assert len(raised) < 2 or max(gaps) - min(gaps) <= 1
    assert abs(counts[0] - counts[1]) <= 2


def test_uniform_reads_a_budget_as_the_decimal_it_is_written_as():
    slots = cuda_exl3_slots(range(10), 4, 256, 128)
    # As a binary fraction 3.1 lies above 31/10, and 2.9 below 29/10: both must be met exactly.
    assert average(uniform(slots, 3.1, 0)) == Fraction(31, 10)
    assert average(uniform(slots, 2.9, 0)) == Fraction(29, 10)


def test_the_seed_turns_the_spread_and_nothing_else():
    slots = cuda_exl3_slots(range(40), 4, 256, 128)
    plans = [uniform(slots, 2.77, seed) for seed in range(8)]
    assert plans[0] == uniform(slots, 2.77, 0)
    assert len({tuple(plan.values()) for plan in plans}) > 4
    assert len({average(plan) for plan in plans}) == 1


def test_uniform_works_for_one_group_of_slots():
    slots = [Slot(layer, "all", 10) for layer in range(8)]
    assert sorted(uniform(slots, 2.5, 3).values()) == [2] * 4 + [3] * 4


@pytest.mark.parametrize("budget", [1.99, 8.01, -3, 0])
def test_a_budget_outside_the_rates_is_refused(budget):
    with pytest.raises(PlanError, match="cannot meet its budget"):
        uniform(cuda_exl3_slots([0], 4, 256, 128), budget, 0)


def test_no_slots_are_refused():
    with pytest.raises(PlanError, match="cannot meet its budget"):
        uniform([], 3, 0)


def test_wanted_names_every_expert_once():
    slots = cuda_exl3_slots([0, 3], EXPERTS, 128, 128)
    rates = dict(zip(slots, (2, 3, 4, 5), strict=True))
    wanted = wanted_entries(rates, EXPERTS)
    assert wanted[3][:3] == [
        Wanted(3, 0, "gate_up", 4),
        Wanted(3, 0, "down", 5),
        Wanted(3, 1, "gate_up", 4),
    ]
    assert {layer: len(set(entries)) for layer, entries in wanted.items()} == {0: 6, 3: 6}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Slots of two layers, their ledgers at K = 2 and 3, and the run's folder."""
    root = tmp_path_factory.mktemp("run")
    slots = cuda_exl3_slots([0, 1], EXPERTS, 128, 128)
    ledgers = []
    for rate in (2, 3):
        for layer, items in wanted_entries(dict.fromkeys(slots, rate), EXPERTS).items():
            path = root / f"encoded/base{rate}/L{layer:02d}.B00.json"
            ledgers.append(write_ledger(path, [encoded_group(item)[2] for item in items]))
    return slots, ledgers, root


def plan_of(run, rates=None, **changes):
    slots, ledgers, root = run
    arguments = {
        "recipe": "r",
        "method": "uniform",
        "layout": "cuda-exl3",
        "budget": {"average_rate": 3},
        "rates": rates or dict.fromkeys(slots, 3),
        "experts": EXPERTS,
        "ledgers": ledgers,
        "root": root,
    }
    return freeze(**{**arguments, **changes})


@given(data=st.data())
def test_a_frozen_plan_states_its_rates_and_bits(run, data):
    slots, ledgers, _ = run
    rates = {slot: data.draw(st.integers(2, 3)) for slot in slots}
    plan = plan_of(run, rates)
    assert plan["average_rate"] == pytest.approx(float(average(rates)), abs=1e-12)
    # 16 bits for each of k + n channel scales and 32 for the marker.
    overhead = (16 * 256 + 32) / 128**2
    assert plan["stored_bits_per_weight"] == pytest.approx(plan["average_rate"] + overhead)
    weights = sum(slot.weights for slot in slots)
    assert plan["stored_bytes"] * 8 == pytest.approx(plan["stored_bits_per_weight"] * weights)
    assert plan_rates(plan) == {(s.layer, s.group): rate for s, rate in rates.items()}
    again = plan_of(run, dict(reversed(rates.items())), ledgers=ledgers[::-1])
    assert again == plan


def test_a_plan_names_what_it_read_by_relative_path(run):
    read = plan_of(run)["read"]
    assert [item["path"] for item in read] == [
        f"encoded/base{rate}/L{layer:02d}.B00.json" for rate in (2, 3) for layer in (0, 1)
    ]


@given(data=st.data())
def test_any_edit_of_a_frozen_plan_is_noticed(run, tmp_path_factory, data):
    path = tmp_path_factory.mktemp("plan") / "r.json"
    plan = plan_of(run)
    write_json(path, plan)
    assert load_plan(path) == plan
    name = data.draw(st.sampled_from(sorted(set(plan) - {"schema"})))
    if name == "slots":
        data.draw(st.sampled_from(plan["slots"]))["rate"] += data.draw(st.sampled_from([-1, 1]))
    elif name == "read":
        plan["read"].pop(data.draw(st.integers(0, 3)))
    elif name == "hash":
        digit = data.draw(st.integers(0, 63))
        new = "0" if plan["hash"][digit] != "0" else "1"
        plan["hash"] = plan["hash"][:digit] + new + plan["hash"][digit + 1 :]
    else:
        plan[name] = "edited"
    write_json(path, plan)
    with pytest.raises(PlanError, match="changed after it was frozen"):
        load_plan(path)


def test_a_file_that_is_no_plan_is_refused(tmp_path):
    (tmp_path / "r.json").write_text(json.dumps({"slots": []}))
    with pytest.raises(PlanError, match="no plan"):
        load_plan(tmp_path / "r.json")
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan(tmp_path / "missing.json")


def test_missing_experts_are_refused_and_the_first_six_named(run):
    slots, ledgers, _ = run
    rates = {slot: 4 if slot.layer else 3 for slot in slots}
    with pytest.raises(PlanError) as caught:
        plan_of(run, rates)
    found = caught.value.fields["found"]
    assert found.startswith("6 missing: layer 1 expert 0 gate_up K4, layer 1 expert 1 gate_up K4")
    with pytest.raises(PlanError, match="12 missing.* and more"):
        plan_of(run, dict.fromkeys(slots, 4))


def test_ledgers_of_another_size_or_with_two_keys_are_refused(run, tmp_path):
    slots, ledgers, _ = run
    larger = {slot._replace(weights=2 * slot.weights): 3 for slot in slots}
    with pytest.raises(PlanError, match="another size"):
        plan_of(run, larger)
    other = encoded_group(Wanted(0, 1, "down", 3), seed=1)[2]
    path = write_ledger(tmp_path / "L00.B01.json", [other])
    with pytest.raises(PlanError, match="disagree"):
        plan_of(run, ledgers=[*ledgers, path])
    write_json(path, {"entries": []})
    with pytest.raises(PlanError, match="no ledger"):
        plan_of(run, ledgers=[*ledgers, path])


def test_planned_entries_are_those_of_the_plan_at_its_rates(run):
    slots, ledgers, root = run
    rates = {slot: 2 if slot.group == "down" else 3 for slot in slots}
    plan = plan_of(run, rates)
    entries = planned_entries(plan, EXPERTS, ledgers, root)
    assert len(entries) == 2 * 2 * EXPERTS
    assert {(group, entry["rate"]) for (_, _, group), entry in entries.items()} == {
        ("down", 2),
        ("gate_up", 3),
    }
    of_layer = [path for path in ledgers if path.name.startswith("L01")]
    part = planned_entries(plan, EXPERTS, of_layer, root, layers=[1])
    assert part == {place: entry for place, entry in entries.items() if place[0] == 1}
    with pytest.raises(PlanError, match="lack experts"):
        planned_entries(plan, EXPERTS, of_layer, root)


def test_a_ledger_edited_after_freezing_is_refused(run, tmp_path):
    slots, ledgers, root = run
    plan = plan_of(run)
    moved = tmp_path / ledgers[0].relative_to(root)
    moved.parent.mkdir(parents=True)
    moved.write_text(ledgers[0].read_text().replace('"tokens": 7', '"tokens": 8', 1))
    with pytest.raises(PlanError, match="not the one that the plan was frozen from"):
        planned_entries(plan, EXPERTS, [moved], tmp_path)
