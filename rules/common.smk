# SPDX-License-Identifier: Apache-2.0
# What the stages share: the checked configuration, the names that wildcards take, small helpers.
import re
from pathlib import Path

from snakemake.exceptions import WorkflowError

from trellisbank.checkpoint import check_shards, open_checkpoint
from trellisbank.errors import TrellisbankError
from trellisbank.model.config import model_config
from trellisbank.plan.recipe import (
    MEASURED,
    base_name,
    base_slice,
    baselines,
    needs_statistics,
    probed_lists,
)
from trellisbank.provenance.digest import code_digest
from trellisbank.rows import find_texts, start_token
from trellisbank.settings import check_windows, load_settings

try:
    settings = load_settings(config, Path(workflow.basedir) / "config/schema.yaml", "configuration")
    SOURCE = open_checkpoint(settings["source"])
    check_shards(SOURCE)
    MODEL = model_config(SOURCE.config)
    SEPARATOR = start_token(SOURCE)
    check_windows(settings, MODEL.max_position_embeddings)
    CALIBRATION_TEXTS = find_texts(settings["calibration"]["texts"])
    PANEL_TEXTS = {name: find_texts(panel["texts"]) for name, panel in settings["panels"].items()}
except TrellisbankError as trouble:
    raise WorkflowError(str(trouble)) from None

RUN = f"{settings['results']}/{settings['run']}"
CALIBRATION, PANELS, RECIPES = settings["calibration"], settings["panels"], settings["recipes"]
# Panels on which the source's NLL is known beforehand.
BELIEVED = [name for name, panel in settings["panels"].items() if "source_nll" in panel]
SPLITS = [f"split{number}" for number in range(CALIBRATION["splits"])]
SHARDS = [shard.removesuffix(".safetensors") for shard in SOURCE.shards]
LAYERS = [f"L{layer:02d}" for layer in range(MODEL.num_hidden_layers)]
BLOCKS = [
    f"B{block:02d}"
    for block in range(-(-MODEL.n_routed_experts // settings["encode"]["experts_per_block"]))
]

# What is wanted before anything is measured, and on what it depends: the rates of a recipe that
# needs no errors, or the base that measured recipes share. Then the lists that each recipe's plan
# is frozen from.
BASES = {
    base_name(recipe) if recipe["method"] in MEASURED else name: (
        base_slice(recipe) if recipe["method"] in MEASURED else recipe
    )
    for name, recipe in RECIPES.items()
}
WANTED = {
    name: [base_name(recipe), f"{name}.draft"] if recipe["method"] in MEASURED else [name]
    for name, recipe in RECIPES.items()
}
# Wanted lists whose matrix groups are probed for a recipe; the base first.
PROBED = {name: probed_lists(name, recipe) for name, recipe in RECIPES.items()}
# Recipes that compete with one another: each with the `exact` one of its layout and budget.
BASELINES = baselines(RECIPES)


# Forwards of the source: as the model is meant, and with its sums in another order. What the two
# differ by is the noise floor of every comparison.
FLOOR = "floor"
OF_SOURCE = ("source", FLOOR)


pathvars:
    run=RUN,


wildcard_constraints:
    shard="|".join(map(re.escape, SHARDS)),
    layer="|".join(LAYERS),
    block="|".join(BLOCKS),
    split="|".join(SPLITS),
    panel="|".join(map(re.escape, PANELS)),
    rows="|".join(map(re.escape, [*SPLITS, *PANELS])),
    recipe="|".join(map(re.escape, RECIPES)),
    baseline="|".join(map(re.escape, RECIPES)),
    base="|".join(map(re.escape, BASES)),
    wanted="|".join(re.escape(name) for names in WANTED.values() for name in names),
    checkpoint="|".join(map(re.escape, [*OF_SOURCE, *RECIPES])),


def code(script):
    """Digest of a script and its imports; a comment does not change it."""
    return code_digest(Path(workflow.basedir) / f"workflow/scripts/{script}.py")


def number(name):
    """Number in a wildcard such as L07, B03 or split2."""
    return int(re.sub(r"\D", "", name))


def layer_shards():
    """Shards that hold tensors of each body layer, from one pass over the index."""
    found = {layer: set() for layer in LAYERS}
    for name, shard in SOURCE.weight_map.items():
        if name.startswith("layers."):
            found[f"L{int(name.split('.')[1]):02d}"].add(shard.removesuffix(".safetensors"))
    return {layer: sorted(shards) for layer, shards in found.items()}


LAYER_SHARDS = layer_shards()
EMBED_SHARD, HEAD_SHARD, NORM_SHARD = (
    SOURCE.shard_of(f"{name}.weight").removesuffix(".safetensors")
    for name in ("embed", "head", "norm")
)


def before(layer):
    """The layer whose state a layer starts from; None for the first."""
    return LAYERS[number(layer) - 1] if number(layer) else None


def state_before(folder):
    """Input function: the state after the layer before, none for the first layer."""

    def states(wildcards):
        last = before(wildcards.layer)
        return [f"{folder}/{last}.state.safetensors".format(**wildcards)] if last else []

    return states


def weights_of(wildcards):
    """What must be checked before a layer's weights are read: shards, or the whole release."""
    if wildcards.get("checkpoint", "source") in OF_SOURCE:
        first = [] if before(wildcards.layer) else [EMBED_SHARD]
        shards = LAYER_SHARDS[wildcards.layer] + first
        return expand(rules.verify_shard.output.receipt, shard=shards)
    return f"<run>/receipts/{wildcards.checkpoint}/verify.json"


def checkpoint_folder(wildcards):
    """Folder of the checkpoint that a forward reads."""
    name = wildcards.get("checkpoint", "source")
    return settings["source"] if name in OF_SOURCE else f"{RUN}/release/{name}"


def head_of(wildcards):
    """What must be checked before norm and head are read."""
    if wildcards.get("checkpoint", "source") in OF_SOURCE:
        return expand(rules.verify_shard.output.receipt, shard={HEAD_SHARD, NORM_SHARD})
    return f"<run>/receipts/{wildcards.checkpoint}/verify.json"


def layers_of_shard(wildcards):
    """Body layers that a shard holds tensors of."""
    return [layer for layer in LAYERS if wildcards.shard in LAYER_SHARDS[layer]]


def ledgers_of(recipes, layers=LAYERS):
    """Ledgers that the plans of recipes are frozen from; what two of them share stands once."""
    wanted = dict.fromkeys(name for recipe in recipes for name in WANTED[recipe])
    return expand(rules.encode.output.ledger, wanted=wanted, layer=layers, block=BLOCKS)


def statistics_of(recipe):
    """Statistics of the captures, for methods that read gains or routed tokens."""
    if not needs_statistics(recipe):
        return []
    return expand(rules.capture.output.stats, split=SPLITS, layer=LAYERS)


def probes_of(names):
    """Probes of the whole matrix groups of wanted lists, in all layers."""
    return expand(rules.probe_slots.output.probes, wanted=names, layer=LAYERS)


def ledgers_of_list(wanted, layers):
    """Ledgers of one wanted list."""
    return expand(rules.encode.output.ledger, wanted=wanted, layer=layers, block=BLOCKS)


def base_of(wanted):
    """The base that a draft adds to; a base itself."""
    recipe = wanted.removesuffix(".draft")
    return recipe if recipe == wanted else base_name(RECIPES[recipe])
