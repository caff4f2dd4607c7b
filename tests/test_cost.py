# SPDX-License-Identifier: Apache-2.0
"""Costs from ledgers: what counts, what was not measured, what failed."""

import json

import numpy as np
import pytest

from trellisbank.bank import GROUPS
from trellisbank.errors import PlanError
from trellisbank.files import write_json
from trellisbank.plan.cost import BIT_RATIO, blank_table, frequency_table, ledger_table
from trellisbank.plan.layouts import NATIVE, bank_plan_slots, cuda_exl3_slots
from trellisbank.plan.ledger import Layer, read_layers, read_ledgers
from trellisbank.plan.solve import protect

EXPERTS, WEIGHTS, OVERHEAD = 3, 128 * 128, 16 * 256 + 32
LAYERS = {0: Layer(2.0, [10, 20, 30]), 1: Layer(3.0, [30, 0, 30])}


def entry(layer, expert, group, rate, share=None, tokens=None):
    """A ledger entry with proxy `share` and output energy 100 in each matrix."""
    tokens = LAYERS[layer].tokens[expert] if tokens is None else tokens
    share = 4.0**-rate if share is None else share
    measured = share if tokens else None
    return {
        "layer": layer,
        "expert": expert,
        "group": group,
        "rate": rate,
        "key": f"{layer}{expert}{group}{rate}",
        "tokens": tokens,
        "fallback": None if tokens else "no tokens",
        "expert_error_energy": None if measured is None else 200.0 * measured,
        "matrices": {
            matrix: {
                "proxy_error": measured,
                "output_energy": 100.0 if tokens else None,
                "output_error_energy": None if measured is None else 100.0 * measured,
                "weights": WEIGHTS,
                "stored_bits": rate * WEIGHTS + OVERHEAD,
            }
            for matrix in GROUPS[group]
        },
    }


def entries(*rates, **changes):
    return {
        (layer, expert, group, rate): entry(layer, expert, group, rate, **changes)
        for layer in LAYERS
        for expert in range(EXPERTS)
        for group in GROUPS
        for rate in rates
    }


def table(found, method="gain", layout="cuda-exl3", rates=(2, 3), **options):
    return ledger_table(
        method=method, layout=layout, entries=found, layers=LAYERS, rates=rates, **options
    )


def test_gain_costs_tokens_times_proxy_times_gain_squared():
    made = table(entries(2, 3))
    assert [slot.name for slot in made.slots] == [
        "L00.gate_up",
        "L00.down",
        "L01.gate_up",
        "L01.down",
    ]
    # Layer 1: expert 1 has no tokens and counts as the mean of the others.
    expected = [[4 * 60 * 2, 4 * 60], [9 * 90 * 2, 9 * 90]]
    shares = np.array([4.0**-2, 4.0**-3])
    assert made.cost == pytest.approx(np.array(expected).reshape(4, 1) * shares)
    assert (made.stored - made.payload)[:, 0].tolist() == [6 * OVERHEAD, 3 * OVERHEAD] * 2


def test_exact_costs_the_energy_at_the_output_of_the_expert():
    made = table(entries(2, 3), "exact")
    expected = np.array([[4 * 300 * 2], [4 * 300], [9 * 300 * 2], [9 * 300]])
    assert made.cost == pytest.approx(expected * np.array([4.0**-2, 4.0**-3]))


def test_a_slot_of_one_expert_covers_its_three_matrices():
    made = table(entries(2, 3), layout="bank-plan", rates=(2, 3, NATIVE))
    assert made.rates == (2, 3, NATIVE)
    assert made.cost[1] == pytest.approx([4 * 20 * 3 / 16, 4 * 20 * 3 / 64, 0])
    # No token, no measurement: infinite, which protects the slot.
    assert made.cost[4].tolist() == [np.inf, np.inf, 0]


def test_a_rate_that_is_not_encoded_whole_cannot_be_chosen():
    found = entries(2, 3)
    del found[0, 2, "down", 3]
    made = table(found)
    assert np.isnan(made.cost[1, 1]) and np.isfinite(made.cost).sum() == 7
    with pytest.raises(PlanError, match="no rate that was encoded whole"):
        table({p: e for p, e in found.items() if p[:3] != (0, 2, "down")})


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("method", ["gain", "exact"])
def test_a_failed_measurement_is_infinite_and_never_zero(bad, method):
    found = entries(2, 3)
    matrix = found[1, 0, "down", 3]["matrices"]["w2"]
    matrix["proxy_error"] = matrix["output_error_energy"] = bad
    gate_up = found[0, 1, "gate_up", 2]
    gate_up["expert_error_energy"] = gate_up["matrices"]["w3"]["proxy_error"] = bad
    made = table(found, method)
    assert made.cost[3, 1] == made.cost[0, 0] == np.inf and np.isfinite(made.cost).sum() == 6


def test_a_layer_that_no_token_reached_is_protected():
    found = entries(2, 3) | {
        place: entry(*place, tokens=0) for place in entries(2, 3) if place[0] == 1
    }
    assert np.isinf(table(found).cost[2:]).all()


def test_estimates_take_the_measured_ratio_of_the_group():
    found = entries(3)
    for group, share in (("gate_up", 0.02), ("down", 0.03)):
        found[0, 1, group, 2] = entry(0, 1, group, 2, share=share)
    made = table(found, rates=(2, 3, 4))
    assert np.isnan(made.cost[:, 0]).all() and np.isnan(made.cost[:, 2]).all()
    drafted = table(found, rates=(2, 3, 4), estimate=True)
    assert drafted.cost[:, 1] == pytest.approx(made.cost[:, 1])
    assert drafted.cost[2] == pytest.approx(made.cost[2, 1] * np.array([0.02 * 64, 1, BIT_RATIO]))
    assert drafted.cost[3, 0] == pytest.approx(made.cost[3, 1] * 0.03 * 64)


PROBES = {
    (layer, group, 3): loss
    for layer, group, loss in (
        (0, "gate_up", 0.1),
        (0, "down", 0.2),
        (1, "gate_up", 0.3),
        (1, "down", 0.4),
    )
}


def measured(found, probes, **options):
    return ledger_table(
        method="measured", entries=found, layers={}, probes=probes, **{"rates": (2, 3)} | options
    )


def test_measured_takes_the_probe_of_a_group_as_it_is():
    probes = PROBES | {(1, "down", 2): 1.5}
    made = measured(entries(2, 3), probes, layout="cuda-exl3")
    assert made.cost[:, 1].tolist() == [0.1, 0.2, 0.3, 0.4]
    # What was not probed cannot be chosen; a draft takes it by the ratio of the energies.
    assert np.isnan(made.cost[:3, 0]).all() and made.cost[3, 0] == 1.5
    drafted = measured(entries(2, 3), probes, layout="cuda-exl3", estimate=True)
    assert drafted.cost[:, 1].tolist() == made.cost[:, 1].tolist()
    assert drafted.cost[0, 0] == pytest.approx(4 * 0.1) and drafted.cost[3, 0] == 1.5
    # Layer 1 has an expert without tokens, which a slot of its layer counts as the others' mean.
    assert drafted.cost[2, 0] == pytest.approx(4 * 0.3 * 3 / 2)


def test_measured_spreads_the_probes_of_a_layer_over_experts_by_their_energy():
    found = entries(2, 3)
    for group in GROUPS:
        found[0, 2, group, 3] = entry(0, 2, group, 3, share=2 * 4.0**-3)
    made = measured(found, PROBES, layout="bank-plan", rates=(2, 3, NATIVE))
    assert made.cost[:3, 1] == pytest.approx(np.array([1, 1, 2]) / 4 * 0.3)
    assert made.cost[:3, 0] == pytest.approx(4 * np.array([1, 1, 1]) / 4 * 0.3)
    assert made.cost[3, 1] == pytest.approx(0.7 / 2) and made.cost[4, 1] == np.inf
    assert (made.cost[:, 2] == 0).all()


def test_a_failed_probe_protects_its_slot_and_a_missing_one_is_named():
    failed = PROBES | {(1, "down", 3): np.inf}
    groups = measured(entries(2, 3), failed, layout="cuda-exl3", estimate=True)
    assert np.isinf(groups.cost[3]).all() and np.isfinite(groups.cost[:3]).all()
    assert protect(groups)[1] == (groups.slots[3],)
    experts = measured(entries(2, 3), failed, layout="bank-plan")
    assert np.isinf(experts.cost[3:]).all() and np.isfinite(experts.cost[:3]).all()
    with pytest.raises(PlanError, match="Probes are missing") as caught:
        measured(
            entries(2, 3),
            {place: loss for place, loss in PROBES.items() if place[:2] != (1, "down")},
            layout="bank-plan",
        )
    assert caught.value.fields["tensor"] == "down"


def test_frequency_counts_tokens():
    slots = bank_plan_slots([0, 1], EXPERTS, 128, 128)
    made = frequency_table(blank_table(slots, [2, 3, NATIVE], WEIGHTS, OVERHEAD), LAYERS)
    assert made.cost[:, 2].tolist() == [0] * 6
    assert made.cost[:, 0] / made.cost[0, 0] == pytest.approx([1, 2, 3, 3, 0, 3])
    assert made.cost[:, 0] == pytest.approx(4 * made.cost[:, 1])


def test_native_rates_need_slots_of_one_expert():
    with pytest.raises(PlanError, match="native rates only"):
        blank_table(cuda_exl3_slots([0], 2, 128, 128), [2, NATIVE], WEIGHTS, OVERHEAD)


def test_layers_join_their_splits_by_tokens(tmp_path):
    def split(name, tokens, post, square, counts):
        write_json(
            tmp_path / name,
            {
                "layer": 4,
                "tokens": tokens,
                "post_mean": post,
                "stream_mean_square": square,
                "expert_tokens": counts,
            },
        )
        return tmp_path / name

    paths = [split("a", 10, [3.0, 0.0], 1.0, [5, 5]), split("b", 30, [3.0, 16 / 3], 5.0, [30, 0])]
    layer = read_layers(paths)[4]
    assert layer.gain == pytest.approx(5 / 2) and layer.tokens == [35, 5]
    with pytest.raises(PlanError, match="not finite"):
        read_layers([split("c", 10, [1.0], 0.0, [1])])
    (tmp_path / "d").write_text(json.dumps({"layer": 0}))
    with pytest.raises(PlanError, match="no statistics"):
        read_layers([tmp_path / "d"])


def test_layers_without_gain_and_empty_ledgers_are_refused(tmp_path):
    with pytest.raises(PlanError, match="no gain"):
        ledger_table(
            method="gain",
            layout="cuda-exl3",
            entries=entries(2),
            layers={0: LAYERS[0]},
            rates=[2],
        )
    with pytest.raises(PlanError, match="nothing to plan from"):
        table(read_ledgers([]))
