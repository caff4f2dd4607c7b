# SPDX-License-Identifier: Apache-2.0
import copy
from pathlib import Path

import pytest
import yaml

from trellisbank.errors import ConfigError
from trellisbank.plan.recipe import base_name, baselines
from trellisbank.settings import check_windows, load_settings

CONFIG = Path(__file__).parents[1] / "config"
GOOD = yaml.safe_load((CONFIG / "config.yaml").read_text())


def load(config):
    return load_settings(config, CONFIG / "schema.yaml", "config.yaml")


def test_shipped_configuration_is_good_and_stays_as_it_is():
    before = copy.deepcopy(GOOD)
    settings = load(GOOD)
    assert before == GOOD
    assert settings["encode"]["sigma_reg"] == 0.025
    assert settings["recipes"]["K3"]["layout"] == "cuda-exl3"


def test_the_configuration_of_the_comparison_is_good_and_every_arm_has_a_baseline():
    settings = load(yaml.safe_load((CONFIG / "compare.yaml").read_text()))
    recipes = settings["recipes"]
    compared = baselines(recipes)
    assert set(recipes) - set(compared) == set(compared.values())
    # One base, and the bank and the captures of the shipped configuration.
    assert len({base_name(recipes[name]) for name in compared.values()}) == 1
    for key in ("bank_store", "calibration", "encode"):
        assert settings[key] == load(GOOD)[key]


def keys(schema, root, at=""):
    for name, part in schema.get("properties", {}).items():
        part = root["$defs"][part["$ref"].rsplit("/", 1)[1]] if "$ref" in part else part
        nested = part.get("additionalProperties")
        if isinstance(nested, dict):
            item = root["$defs"][nested["$ref"].rsplit("/", 1)[1]]
            yield from keys(item, root, f"{at}{name}.<name>.")
        elif "properties" in part:
            yield from keys(part, root, f"{at}{name}.")
        else:
            yield f"{at}{name}", part


def test_reference_lists_every_key_with_its_default():
    schema = yaml.safe_load((CONFIG / "schema.yaml").read_text())
    rows = {}
    for line in (CONFIG / "README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 4 and cells[1].startswith("`"):
            rows[cells[1].strip("`")] = cells
    known = dict(keys(schema, schema))
    assert known.keys() == rows.keys() & known.keys()
    for name, part in known.items():
        if "default" in part:
            default = str(part["default"])
            default = default.lower() if part.get("type") == "boolean" else default
            assert rows[name][3].strip("`") == default, name


def changed(path, value):
    config = copy.deepcopy(GOOD)
    at = config
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "key"),
    [
        (["sorce"], "x", "top level"),
        (["encode", "threds"], 2, "encode"),
        (["recipes", "K3", "average_rate"], 1.5, "recipes.K3.average_rate"),
        (["recipes", "K3", "average_rate"], "3", "recipes.K3.average_rate"),
        (["recipes", "K3", "method"], "best", "recipes.K3.method"),
        (["recipes"], {}, "recipes"),
        (["recipes", "../up"], {"method": "uniform", "average_rate": 3}, "recipes"),
        (["panels", "source"], GOOD["panels"]["code"], "source"),
        (["panels", "K3"], GOOD["panels"]["code"], "K3"),
        (["calibration", "splits"], 65, "calibration.splits"),
        (["run"], "a/b", "run"),
        (["evaluate"], {"confidence": 1.0}, "evaluate.confidence"),
        (["recipes", "K3"], {"method": "exact"}, "recipes.K3"),
        (["recipes", "K3"], {"method": "gain", "average_rate": 3, "bytes": 9}, "recipes.K3"),
        (["recipes", "K3"], {"method": "uniform", "bytes": 9}, "recipes.K3"),
        (["recipes", "K3", "base_rate"], 9, "recipes.K3.base_rate"),
        (
            ["recipes", "K3"],
            {"method": "exact", "average_rate": 3, "rates": [2, 4]},
            "recipes.K3.base_rate",
        ),
        (["recipes", "K3", "rates"], [2, 3, "native"], "recipes.K3.rates"),
        (["recipes", "base3"], GOOD["recipes"]["K3"], "base3"),
        (["recipes", "K3.draft"], GOOD["recipes"]["K3"], "K3.draft"),
        (["recipes"], {3: {"method": "uniform", "average_rate": 3}}, "recipes.3"),
        (["recipes", "K3", "average_rate"], float("nan"), "recipes.K3.average_rate"),
        (["panels", "code", "windows"], 1, "panels.code.windows"),
        (["run"], "bank", "run"),
        (["results"], "res{ults}", "results"),
        (["bank_store"], "resources/tiny/checkpoint/bank", "bank_store"),
    ],
)
def test_mistakes_name_the_key_and_the_way_out(path, value, key):
    with pytest.raises(ConfigError) as raised:
        load(changed(path, value))
    assert key in raised.value.fields["key"] or key in str(raised.value)
    assert raised.value.fields["fix"]


def test_missing_key():
    config = copy.deepcopy(GOOD)
    del config["source"]
    with pytest.raises(ConfigError, match="source"):
        load(config)


def test_windows_longer_than_the_model():
    with pytest.raises(ConfigError, match=r"panels\.prose\.window"):
        settings = load(changed(["panels", "prose", "window"], 4097))
        check_windows(settings, 4096)
