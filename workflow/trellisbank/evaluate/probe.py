# SPDX-License-Identifier: Apache-2.0
"""Probes: what lowering one matrix group of one layer alone adds to the loss, on held-in rows.

All else stands at the base rate of the recipe, in the layers before, after and in the layer itself.
Beside an untouched source a single error is overrated: it turns choices of routing and selection
that the errors of the other slots turn anyway, so that losses measured there add up to a multiple
of what all slots lose together (docs/planning.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import Checkpoint, open_checkpoint, overlay
from trellisbank.errors import PlanError
from trellisbank.evaluate.scores import checkpoint_head, score_tokens
from trellisbank.evaluate.summary import finite_number
from trellisbank.files import blake3_file, write_json
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.forward import advance, check_rows, finish
from trellisbank.model.state import State, join_states, save_state
from trellisbank.model.streamed import load_before
from trellisbank.model.weights import load_shared
from trellisbank.plan.ledger import PROBES_SCHEMA, Entries, read_ledgers, whole_slots
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import read_header, read_tensor

Pathlike = str | os.PathLike[str]
Progress = Callable[[str], None]
Keys = dict[tuple[int, int, str], str]


def base_keys(entries: Entries, layer: int, experts: int, rate: int) -> Keys:
    """Return the bank keys of all experts of a layer at the base rate.

    Raises:
        PlanError: The ledgers lack one.
    """
    found = whole_slots(entries, layer, experts)
    missing = [group for group in GROUPS if (group, rate) not in found]
    if missing:
        raise PlanError(
            "The ledgers lack experts of the base.",
            layer=layer,
            expected=f"every expert at K = {rate}",
            found=f"not all of {', '.join(missing)}",
            fix="run the encoding of the base first",
        )
    return {place: key for group in GROUPS for place, key in found[group, rate].items()}


@torch.inference_mode()
def keep_state(
    *,
    source: Pathlike,
    bank: Pathlike,
    layer: int,
    rate: int,
    rows: Pathlike,
    state_before: Pathlike | None,
    ledgers: Sequence[Pathlike],
    state_after: Pathlike,
    device: str = "cpu",
) -> None:
    """Take the probes' rows through a layer of the source with all experts at the base rate.

    Args:
        source: Folder of the source.
        bank: Folder of the bank.
        layer: Body layer.
        rate: The base rate.
        rows: Held-in rows.
        state_before: The state that this wrote for the layer before; None for layer 0.
        ledgers: Ledgers of the base in this layer.
        state_after: Written.
        device: torch device.

    Raises:
        FormatError: A bank file is missing or changed.
        ForwardError: Rows and state do not belong together.
        PlanError: The ledgers lack an expert.
    """
    opened = open_checkpoint(source)
    cfg = model_config(opened.config)
    ids = read_ids(rows)
    check_rows(cfg, ids, Path(rows))
    before = load_before(opened, cfg, layer, ids, state_before, device)
    keys = base_keys(read_ledgers(ledgers), layer, cfg.n_routed_experts, rate)
    after, _ = advance(overlay(opened, Bank(bank), keys), cfg, layer, ids, before)
    save_state(Path(state_after), after, layer)


@torch.inference_mode()
def probe_layer(
    *,
    source: Pathlike,
    bank: Pathlike,
    layer: int,
    rate: int,
    rows: Pathlike,
    state_before: Pathlike | None,
    hidden: Pathlike,
    base: Sequence[Pathlike],
    probes_path: Pathlike,
    draft: Sequence[Pathlike] = (),
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> None:
    """Probe the matrix groups of a layer at every rate that is encoded for all experts.

    A probe starts at the layer from the kept state. Its loss is KL(source || probe), the mean over
    all scored tokens, less that of the same model with the group as the source has it. The layers
    after it run once, over the rows of all probes together: memory is that of a forward over as
    many times the rows as there are probes, and two for the groups as in the source.

    Args:
        source: Folder of the source.
        bank: Folder of the bank.
        layer: Body layer.
        rate: The base rate.
        rows: Held-in rows, `input_ids`.
        state_before: What `keep_state` wrote for the layer before; None for layer 0.
        hidden: The source's final hidden states on these rows.
        base: Ledgers of the base, of this layer and those after it.
        probes_path: Written: the loss of each probe in nats a token, null if it is not finite.
        draft: Ledgers of a draft in this layer. What is whole with them is probed, except what is
            whole in the base alone.
        device: torch device.
        progress: Told of each probe and layer.

    Raises:
        FormatError: A bank file is missing or changed.
        ForwardError: Rows, states and hidden states do not belong together.
        PlanError: The ledgers cannot be used.
    """
    opened, store = open_checkpoint(source), Bank(bank)
    cfg = model_config(opened.config)
    experts = cfg.n_routed_experts
    ids = read_ids(rows)
    check_rows(cfg, ids, Path(rows))
    entries = read_ledgers(base)
    own = base_keys(entries, layer, experts, rate)
    slots = whole_slots(entries, layer, experts)
    if draft:
        found = whole_slots(read_ledgers([*base, *draft]), layer, experts)
        slots = {slot: keys for slot, keys in found.items() if slot not in slots}
    probes: list[dict[str, object]] = []
    if slots:
        groups = [group for group in GROUPS if any(group == at for at, _ in slots)]
        before = load_before(opened, cfg, layer, ids, state_before, device)
        states = []
        # First each group as in the source, then each as it is encoded; the other at the base.
        for group, keys in [(g, {}) for g in groups] + [(g, k) for (g, _), k in slots.items()]:
            others = {place: key for place, key in own.items() if place[2] != group}
            lowered = overlay(opened, store, others | keys)
            states.append(advance(lowered, cfg, layer, ids, before)[0])
            progress(f"layer {layer}: {len(states)} of {len(groups) + len(slots)} probes")
        after, repeated = join_states(states), ids.repeat(len(states), 1)
        del states
        for later in range(layer + 1, cfg.num_hidden_layers):
            lowered = overlay(opened, store, base_keys(entries, later, experts, rate))
            after, _ = advance(lowered, cfg, later, repeated, after)
            progress(f"layer {layer}: probes after layer {later}")
        losses = _losses(opened, cfg, after, ids, repeated, hidden, device)
        kept = dict(zip(groups, losses, strict=False))
        probes = [
            {"group": group, "rate": at, "kl": finite_number(loss - kept[group])}
            for (group, at), loss in zip(slots, losses[len(groups) :], strict=True)
        ]
    write_json(
        probes_path,
        {
            "schema": PROBES_SCHEMA,
            "layer": layer,
            "base_rate": rate,
            "rows": blake3_file(rows),
            "windows": len(ids),
            "tokens": ids[:, 1:].numel(),
            "probes": probes,
        },
    )


def _losses(
    source: Checkpoint,
    cfg: ModelConfig,
    state: State,
    ids: torch.Tensor,
    repeated: torch.Tensor,
    hidden: Pathlike,
    device: str,
) -> list[float]:
    """Return the mean KL to the source of each repetition of the rows."""
    norm, weights = (load_shared(source, cfg, name, device) for name in ("norm", "head"))
    ended, _ = finish(cfg, state, repeated, norm, weights)
    reference, head = read_tensor(read_header(hidden), "final_hidden"), checkpoint_head(source)
    return [
        float(score_tokens(reference, head, own, head, ids)["kl"].to_numpy().mean())
        for own in ended.cpu().split(len(ids))
    ]
