# SPDX-License-Identifier: Apache-2.0
"""The workflow's configuration: checked against its schema, completed with the defaults in it."""

from __future__ import annotations

import copy
import math
import os
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match

from trellisbank.errors import ConfigError


def load_settings(
    config: dict[str, Any], schema_path: str | os.PathLike[str], name: str = ""
) -> dict[str, Any]:
    """Return a checked copy of a configuration with every default filled in.

    Args:
        config: What the YAML file and the command line gave.
        schema_path: JSON schema (2020-12) in YAML; defaults are taken from it.
        name: The configuration file, for messages.

    Raises:
        ConfigError: An unknown key, a value out of its bounds, or keys that contradict one
            another; the message names the key and shows what it may hold.
    """
    with open(schema_path, encoding="utf-8") as handle:
        schema = yaml.safe_load(handle)
    settings = copy.deepcopy(config)
    _check_scalars(settings, name)
    _fill_defaults(settings, schema, schema)
    error = best_match(Draft202012Validator(schema).iter_errors(settings))
    if error is not None:
        raise _config_error(error, name)
    _cross_check(settings, name)
    return settings


def _check_scalars(value: Any, file: str, at: str = "") -> None:
    """Refuse what YAML can say and JSON cannot: keys that are no strings, NaN and infinities."""
    if isinstance(value, dict):
        for key, part in value.items():
            if not isinstance(key, str):
                raise ConfigError(
                    "A key of the configuration is not a string.",
                    file=file or None,
                    key=f"{at}{key}",
                    expected=f'"{key}"',
                    found=type(key).__name__,
                    fix=f'put the key in quotes: "{key}"',
                )
            _check_scalars(part, file, f"{at}{key}.")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            _check_scalars(part, file, f"{at}{number}.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(
            "A number of the configuration is not finite.",
            file=file or None,
            key=at.rstrip("."),
            expected="a finite number",
            found=value,
            fix="see config/README.md",
        )


def _fill_defaults(value: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    if "$ref" in schema:
        schema = root["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    if not isinstance(value, dict):
        return
    for name, part in schema.get("properties", {}).items():
        if name not in value and "default" in part:
            value[name] = copy.deepcopy(part["default"])
        if name in value:
            _fill_defaults(value[name], part, root)
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        for name in value.keys() - schema.get("properties", {}).keys():
            _fill_defaults(value[name], extra, root)


def _config_error(error: ValidationError, file: str) -> ConfigError:
    where = ".".join(str(part) for part in error.absolute_path) or "(top level)"
    schema = error.schema if isinstance(error.schema, dict) else {}
    fix = "see config/README.md"
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        known = sorted(schema.get("properties", {}))
        fix = f"remove or rename the key; known keys here: {', '.join(known)}"
    elif description := schema.get("description"):
        fix = str(description)
    return ConfigError(
        f"The configuration cannot be used: {error.message}.",
        file=file or None,
        key=where,
        expected=schema.get("enum") or schema.get("type"),
        found=error.instance if not isinstance(error.instance, dict) else None,
        fix=fix,
    )


def _cross_check(settings: dict[str, Any], file: str) -> None:
    names = list(settings["panels"]) + list(settings["recipes"])
    for name in names:
        taken = (
            name in ("source", "probe", "floor")
            or name.startswith(("split", "base"))
            or name.endswith(".draft")
        )
        if taken or names.count(name) > 1:
            raise ConfigError(
                "A panel or recipe has a name that is taken.",
                file=file or None,
                key=name,
                expected="names used once, other than source, probe, floor, split..., base..., "
                "....draft",
                fix=f"rename {name!r} in the configuration",
            )
    run = os.path.join(settings["results"], settings["run"])
    folders = [os.path.abspath(folder) for folder in (run, settings["bank_store"])]
    source = os.path.abspath(settings["source"])
    for key, folder in zip(("run", "bank_store"), folders, strict=True):
        if os.path.commonpath([folder, source]) in (folder, source) or folders[0] == folders[1]:
            raise ConfigError(
                "Two folders of the configuration lie in one another.",
                file=file or None,
                key=key,
                expected="run, bank_store and source apart",
                found=f"{folder}, source {source}",
                fix="name other folders; the source is never written to",
            )
    calibration = settings["calibration"]
    if calibration["splits"] > calibration["windows"]:
        raise ConfigError(
            "There are more splits than calibration windows.",
            file=file or None,
            key="calibration.splits",
            expected=f"at most {calibration['windows']}",
            found=calibration["splits"],
            fix=f"splits: {calibration['windows']}",
        )
    for name, recipe in settings["recipes"].items():
        _check_recipe(f"recipes.{name}", recipe, file)


def _check_recipe(key: str, recipe: dict[str, Any], file: str) -> None:
    budgets = [kind for kind in ("average_rate", "stored_bits", "bytes") if kind in recipe]
    method, rates = recipe["method"], recipe["rates"]
    if len(budgets) != 1 or (method == "uniform" and budgets != ["average_rate"]):
        raise ConfigError(
            "A recipe needs one budget.",
            file=file or None,
            key=key,
            expected="average_rate"
            if method == "uniform"
            else "one of average_rate, stored_bits, bytes",
            found=", ".join(budgets) or "none",
            fix="average_rate: 3.5",
        )
    if method in ("gain", "exact", "measured") and recipe["base_rate"] not in rates:
        raise ConfigError(
            "A recipe's base rate is not among its rates.",
            file=file or None,
            key=f"{key}.base_rate",
            expected=f"one of {rates}",
            found=recipe["base_rate"],
            fix=f"rates: {sorted({recipe['base_rate'], *(r for r in rates if r != 'native')})}",
        )
    if "native" in rates and recipe["layout"] != "bank-plan":
        raise ConfigError(
            "Only a layout with one rate an expert can keep experts in the source's format.",
            file=file or None,
            key=f"{key}.rates",
            expected="layout bank-plan for native",
            found=f"layout {recipe['layout']}",
            fix="layout: bank-plan",
        )


def check_windows(settings: dict[str, Any], positions: int) -> None:
    """Refuse windows longer than the model has positions.

    Raises:
        ConfigError: Naming the split or panel.
    """
    rows = {"calibration": settings["calibration"]}
    rows |= {f"panels.{name}": panel for name, panel in settings["panels"].items()}
    for key, described in rows.items():
        if described["window"] > positions:
            raise ConfigError(
                "Windows are longer than the model has positions.",
                key=f"{key}.window",
                expected=f"at most {positions} tokens",
                found=described["window"],
                fix=f"window: {positions}",
            )
