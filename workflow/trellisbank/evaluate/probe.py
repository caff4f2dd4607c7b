# SPDX-License-Identifier: Apache-2.0
"""Probes: what one matrix group of one layer loses when it alone is lowered, on held-in rows.

A probe starts at its layer from the state that the source left before it, takes the layer's experts
of one group from the bank and all else from the source, and runs to the end. Its loss is the mean
KL to the source over all scored tokens of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trellisbank.bank import Bank
from trellisbank.checkpoint import open_checkpoint, overlay
from trellisbank.evaluate.scores import checkpoint_head, score_tokens
from trellisbank.evaluate.summary import finite_number
from trellisbank.files import blake3_file, write_json
from trellisbank.model.config import model_config
from trellisbank.model.forward import advance, check_rows, finish
from trellisbank.model.state import join_states
from trellisbank.model.streamed import load_before
from trellisbank.model.weights import load_shared
from trellisbank.plan.ledger import PROBES_SCHEMA, read_ledgers, whole_slots
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import read_header, read_tensor

Pathlike = str | os.PathLike[str]


@torch.inference_mode()
def probe_layer(
    *,
    source: Pathlike,
    bank: Pathlike,
    layer: int,
    rows: Pathlike,
    state_before: Pathlike | None,
    hidden: Pathlike,
    ledgers: Sequence[Pathlike],
    probes_path: Pathlike,
    base: Sequence[Pathlike] = (),
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Probe every (group, rate) of a layer that is encoded for all experts, and write the losses.

    The layers after the probed one are run once, over the rows of all probes together: memory is
    that of a forward over as many times the rows as there are probes.

    Args:
        source: Folder of the source.
        bank: Folder of the bank.
        layer: Body layer.
        rows: Held-in rows, `input_ids`.
        state_before: The source's state before the layer on these rows; None for layer 0.
        hidden: The source's final hidden states on these rows.
        ledgers: Ledgers of the layer.
        probes_path: Written: the mean KL of each probe in nats a token, null if it is not finite.
        base: Ledgers that `ledgers` add to; what is whole in them alone is not probed.
        device: torch device.
        progress: Told of each probe and layer.

    Raises:
        FormatError: A bank file is missing or changed.
        ForwardError: Rows, states and hidden states do not belong together.
        PlanError: The ledgers cannot be used.
    """
    opened = open_checkpoint(source)
    cfg = model_config(opened.config)
    ids = read_ids(rows)
    check_rows(cfg, ids, Path(rows))
    known = whole_slots(read_ledgers(base), layer, cfg.n_routed_experts)
    found = whole_slots(read_ledgers([*base, *ledgers]), layer, cfg.n_routed_experts)
    slots = {slot: keys for slot, keys in found.items() if slot not in known}
    probes = []
    if slots:
        before = load_before(opened, cfg, layer, ids, state_before, device)
        states = []
        for (group, rate), keys in slots.items():
            lowered = overlay(opened, Bank(bank), keys)
            states.append(advance(lowered, cfg, layer, ids, before)[0])
            progress(f"layer {layer}: {group} at K = {rate}")
        after, repeated = join_states(states), ids.repeat(len(slots), 1)
        del states
        for later in range(layer + 1, cfg.num_hidden_layers):
            after, _ = advance(opened, cfg, later, repeated, after)
            progress(f"layer {layer}: {len(slots)} probes after layer {later}")
        norm, head = (load_shared(opened, cfg, name, device) for name in ("norm", "head"))
        ended, _ = finish(cfg, after, repeated, norm, head)
        reference, score_head = (
            read_tensor(read_header(hidden), "final_hidden"),
            checkpoint_head(opened),
        )
        for (group, rate), own in zip(slots, ended.cpu().split(len(ids)), strict=True):
            table = score_tokens(reference, score_head, own, score_head, ids)
            loss = finite_number(table["kl"].to_numpy().mean())
            probes.append({"group": group, "rate": rate, "kl": loss})
    write_json(
        probes_path,
        {
            "schema": PROBES_SCHEMA,
            "layer": layer,
            "rows": blake3_file(rows),
            "windows": len(ids),
            "tokens": ids[:, 1:].numel(),
            "probes": probes,
        },
    )
