# SPDX-License-Identifier: Apache-2.0
"""From a recipe to its plan: base, draft, what is encoded for it, and the frozen plan."""

import json

import pytest

from synthetic import write_ledger
from test_cost import EXPERTS, LAYERS, entry
from trellisbank.errors import PlanError
from trellisbank.files import read_json, write_json
from trellisbank.plan.freeze import load_plan
from trellisbank.plan.recipe import (
    base_name,
    base_slice,
    baselines,
    freeze_recipe,
    probed_lists,
    write_base,
    write_draft,
)

RECIPE = {
    "method": "exact",
    "average_rate": 3,
    "layout": "cuda-exl3",
    "rates": [4, 2, 3],
    "base_rate": 2,
    "margin": 1,
    "seed": 0,
}


class Run:
    """A run whose encoder makes up its measurements; counts what it had to encode."""

    def __init__(self, root):
        self.root = root
        self.bank = set()
        self.manifest = root / "manifest.json"
        write_json(
            self.manifest,
            {
                "layers": ["full", "full"],
                "routed_experts": EXPERTS,
                "hidden_size": 128,
                "moe_intermediate_size": 128,
            },
        )
        self.statistics = []
        for layer, (gain, tokens) in LAYERS.items():
            self.statistics.append(root / f"L{layer:02d}.stats.json")
            write_json(
                self.statistics[-1],
                {
                    "layer": layer,
                    "tokens": 60,
                    "post_mean": [gain],
                    "stream_mean_square": 1.0,
                    "expert_tokens": tokens,
                },
            )

    def paths(self, name):
        return [self.root / f"wanted/{name}/L{layer:02d}.json" for layer in LAYERS]

    def encode(self, name):
        """Make the ledgers of a wanted list; return how many matrix groups the bank lacked."""
        ledgers, new = [], 0
        for layer, path in enumerate(self.paths(name)):
            wanted = [tuple(item.values()) for item in read_json(path)["entries"]]
            assert wanted == sorted(
                set(wanted), key=lambda w: (w[0], w[2], ("gate_up", "down").index(w[1]), w[3])
            )
            places = [(layer, expert, group, rate) for expert, group, _, rate in wanted]
            new += len(set(places) - self.bank)
            self.bank |= set(places)
            ledger = self.root / f"encoded/{name}/L{layer:02d}.B00.json"
            if places:
                ledgers.append(write_ledger(ledger, [entry(*place) for place in places]))
        return ledgers, new

    def plan(self, name, **changes):
        """Take a recipe the whole way; return its plan, what the base and the draft encoded."""
        recipe = RECIPE | changes
        base = base_name(recipe)
        write_base(
            recipe=base_slice(recipe),
            manifest_path=self.manifest,
            statistics=[],
            wanted_paths=self.paths(base),
        )
        ledgers, of_base = self.encode(base)
        write_draft(
            recipe=recipe,
            ledgers=ledgers,
            statistics=self.statistics,
            wanted_paths=self.paths(f"{name}.draft"),
        )
        more, of_draft = self.encode(f"{name}.draft")
        return self.freeze(name, recipe, ledgers + more), of_base, of_draft

    def freeze(self, name, recipe, ledgers, statistics=None, probes=()):
        path = self.root / f"plan/{name}.json"
        freeze_recipe(
            name=name,
            recipe=recipe,
            manifest_path=self.manifest,
            ledgers=ledgers,
            statistics=self.statistics if statistics is None else statistics,
            root=self.root,
            plan_path=path,
            probes=probes,
        )
        return load_plan(path)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_recipes_compete_with_the_exact_one_of_their_layout_and_budget():
    recipes = {
        "arm": RECIPE | {"method": "uniform"},
        "best": RECIPE,
        "again": RECIPE | {"margin": 2},
        "other": RECIPE | {"method": "random", "average_rate": 3.5},
        "experts": RECIPE | {"method": "gain", "layout": "bank-plan"},
    }
    assert baselines(recipes) == {"arm": "best", "again": "best"}


def test_budgets_after_one_another_encode_what_is_missing_and_then_nothing(run):
    first, of_base, of_draft = run.plan("r")
    # 2 layers x 3 experts x 2 groups at the base rate, one expert a layer at two rates more.
    assert of_base == 12 + 8 and 0 < of_draft < 24 - 8
    assert first["average_rate"] <= 3 < first["stored_bits_per_weight"]
    second, of_base, _ = run.plan("r", average_rate=3.5)
    assert of_base == 0 and second["average_rate"] > first["average_rate"]
    again, *encoded = run.plan("r")
    assert again == first and encoded == [0, 0]
    # Another recipe with the same rates shares the base; it encodes nothing that is there.
    other, *encoded = run.plan("other", method="gain", average_rate=3.5)
    assert encoded[0] == 0
    assert {item["path"].split("/")[1] for item in other["read"] if "encoded" in item["path"]} == {
        "base2-234",
        "other.draft",
    }


def test_a_plan_takes_measurements_alone(run):
    plan, *_ = run.plan("r", margin=0)
    predicted = plan["predicted"]
    assert predicted["bound"] <= predicted["loss"] <= predicted["greedy_loss"]
    assert predicted["protected"] == []
    losses = [point["cost"] for point in predicted["curve"]]
    assert losses == sorted(losses, reverse=True) and losses[-1] <= predicted["loss"] < losses[0]
    read = {item["path"] for item in plan["read"]}
    assert {path.name for path in run.statistics} <= read
    measured = set()
    for name in read - {path.name for path in run.statistics}:
        for item in read_json(run.root / name)["entries"]:
            measured.add((item["layer"], item["group"], item["rate"], item["expert"]))
    for slot in plan["slots"]:
        for expert in range(EXPERTS):
            assert (slot["layer"], slot["group"], slot["rate"], expert) in measured


def test_single_experts_are_encoded_where_the_layout_has_slots_for_them(run):
    plan, _, of_draft = run.plan("r", layout="bank-plan", rates=[2, 3, 4, "native"])
    rates = {(slot["layer"], slot["expert"]): slot["rate"] for slot in plan["slots"]}
    # Expert 1 of layer 1 saw no token: protected, in the source's own format.
    assert rates[1, 1] == "native" and plan["predicted"]["protected"] == ["L01.E001"]
    assert of_draft % 2 == 0 and 0 < of_draft < 2 * 2 * 2 * EXPERTS
    assert plan["average_rate"] <= 3
    total = sum(4.25 if rate == "native" else rate for rate in rates.values())
    assert plan["average_rate"] == pytest.approx(total / 6)


@pytest.mark.parametrize("method", ["uniform", "random", "frequency"])
@pytest.mark.parametrize("layout", ["cuda-exl3", "bank-plan"])
def test_arms_without_measurement_know_their_rates_at_once(run, method, layout):
    recipe = RECIPE | {"method": method, "average_rate": 2.5, "layout": layout}
    write_base(
        recipe=recipe,
        manifest_path=run.manifest,
        statistics=run.statistics,
        wanted_paths=run.paths("arm"),
    )
    ledgers, new = run.encode("arm")
    assert new == 2 * EXPERTS * 2
    plan = run.freeze("arm", recipe, ledgers)
    assert plan["average_rate"] == 2.5 and plan["predicted"] is None


@pytest.mark.parametrize(
    ("budget", "text"), [({"stored_bits": 3.3}, "stored_bits"), ({"bytes": 130_000}, "bytes")]
)
def test_other_budgets(run, budget, text):
    recipe = {name: value for name, value in RECIPE.items() if name != "average_rate"}
    base = base_name(recipe)
    write_base(
        recipe=base_slice(recipe),
        manifest_path=run.manifest,
        statistics=[],
        wanted_paths=run.paths(base),
    )
    plan = run.freeze("r", recipe | budget, run.encode(base)[0])
    assert plan["budget"] == budget | {"seed": 0}
    assert json.dumps(plan["slots"])
    with pytest.raises(PlanError, match="smallest plan is larger"):
        run.freeze("r", recipe | {text: 1}, run.encode(base)[0])


@pytest.mark.parametrize("layout", ["cuda-exl3", "bank-plan"])
def test_a_measured_plan_rests_on_probes_and_lists_them(run, layout):
    def probes(name, rates, factor):
        paths = []
        for layer in LAYERS:
            paths.append(run.root / f"probes/{name}/L{layer:02d}.json")
            items = [
                {"group": group, "rate": rate, "kl": factor[layer] * 4.0**-rate}
                for group in ("gate_up", "down")
                for rate in rates
            ]
            write_json(
                paths[-1], {"schema": "trellisbank/probes/1", "layer": layer, "probes": items}
            )
        return paths

    recipe = RECIPE | {"method": "measured", "layout": layout, "average_rate": 2.5, "margin": 3}
    lists = probed_lists("r", recipe)
    assert lists == ["base2-234"] + ["r.draft"] * (layout == "cuda-exl3")
    write_base(
        recipe=base_slice(recipe),
        manifest_path=run.manifest,
        statistics=[],
        wanted_paths=run.paths("base2-234"),
    )
    ledgers, _ = run.encode("base2-234")
    plans = []
    for factor in ({0: 1.0, 1: 100.0}, {0: 100.0, 1: 1.0}):
        base = probes("base2-234", [2], factor)
        write_draft(
            recipe=recipe,
            ledgers=ledgers,
            statistics=[],
            wanted_paths=run.paths("r.draft"),
            probes=base,
        )
        more, _ = run.encode("r.draft")
        all_probes = base + probes("r.draft", [3, 4], factor) * (layout == "cuda-exl3")
        plans.append(run.freeze("r", recipe, ledgers + more, [], all_probes))
    for plan, dear in zip(plans, (1, 0), strict=True):
        assert {item["path"].split("/")[0] for item in plan["read"]} == {"encoded", "probes"}
        # Expert 1 of layer 1 saw no token and is protected.
        free = [slot for slot in plan["slots"] if slot.get("expert") != 1]
        rates = [slot["rate"] for slot in free if slot["layer"] == dear]
        assert sum(rates) > sum(slot["rate"] for slot in free if slot["layer"] != dear)


def test_other_methods_probe_nothing():
    assert probed_lists("r", RECIPE) == probed_lists("r", RECIPE | {"method": "uniform"}) == []
