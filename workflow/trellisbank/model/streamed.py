# SPDX-License-Identifier: Apache-2.0
"""The forward as the workflow runs it: one layer of one set of rows a job, state by state."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.errors import ForwardError
from trellisbank.files import write_json
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.forward import (
    advance,
    check_rows,
    finish,
    first_state,
    layer_statistics,
)
from trellisbank.model.state import CAPTURED, State, load_state, save_state
from trellisbank.model.weights import load_shared
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import write_tensors

Pathlike = str | os.PathLike[str]


@torch.inference_mode()
def stream_layer(
    *,
    checkpoint: Pathlike,
    layer: int,
    rows: Pathlike,
    state_before: Pathlike | None,
    state_after: Pathlike,
    stats: Pathlike,
    capture: Pathlike | None = None,
    wide: bool = False,
    device: str = "cpu",
) -> None:
    """Take a state file through one layer.

    Memory is the state, the layer's dense weights and one expert at a time.

    Args:
        checkpoint: Folder of source or release.
        layer: Body layer.
        rows: Rows file with `input_ids`.
        state_before: State after the layer before; None for layer 0.
        state_after: Written: the state after this layer.
        stats: Written: routing counts, gain and non-finite counts as JSON.
        capture: Written unless None: `ffn_input`, `route_indices`, `route_weights`.
        wide: Linear maps are fp32 products of the same numbers instead of bf16 ones: another
            order of the same operations, from which the noise floor of a comparison is taken.
        device: torch device.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ForwardError: Rows and state do not fit.
    """
    opened = open_checkpoint(checkpoint)
    cfg = model_config(opened.config)
    ids = read_ids(rows)
    check_rows(cfg, ids, Path(rows))
    before = load_before(opened, cfg, layer, ids, state_before, device)
    dtype = torch.float32 if wide else torch.bfloat16
    after, captured = advance(opened, cfg, layer, ids, before, dtype)
    save_state(Path(state_after), after, layer)
    if capture is not None:
        tensors = {name: getattr(captured, name) for name in CAPTURED}
        write_tensors(capture, tensors, {"layer": str(layer)})
    write_json(
        stats,
        {
            "schema": "trellisbank/layer-statistics/1",
            "layer": layer,
            **layer_statistics(cfg, after, captured),
        },
    )


def load_before(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    layer: int,
    ids: torch.Tensor,
    path: Pathlike | None,
    device: str,
) -> State:
    """Return the state that a layer starts from.

    Args:
        checkpoint: Gives the embedding, before layer 0.
        cfg: Its model.
        layer: Body layer.
        ids: int64 `[rows, S]`.
        path: State after the layer before; None for layer 0.
        device: torch device.

    Raises:
        ForwardError: The state is of another layer or does not fit the model.
    """
    if path is None:
        return first_state(cfg, ids, load_shared(checkpoint, cfg, "embed", device))
    return _state_after(layer - 1, path, cfg, device)


def _state_after(layer: int, path: Pathlike, cfg: ModelConfig, device: str) -> State:
    state, found = load_state(Path(path), cfg, device)
    if found != layer:
        raise ForwardError(
            "A state was written after another layer.",
            file=path,
            expected=f"layer {layer}",
            found=f"layer {found}",
            fix="give the state of the layer before",
        )
    return state


@torch.inference_mode()
def finish_rows(
    *, checkpoint: Pathlike, rows: Pathlike, state: Pathlike, hidden: Pathlike, device: str = "cpu"
) -> None:
    """Write `final_hidden` (bf16 [rows, S, D]) and `nll` (fp32 [rows, S-1], nats) of a last state.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ForwardError: Rows and state do not fit.
    """
    opened = open_checkpoint(checkpoint)
    cfg = model_config(opened.config)
    last = _state_after(cfg.num_hidden_layers - 1, state, cfg, device)
    _write_hidden(opened, cfg, last, read_ids(rows), hidden, device)


@torch.inference_mode()
def forward_rows(
    *,
    checkpoint: Pathlike,
    rows: Pathlike,
    hidden: Pathlike,
    device: str = "cpu",
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Run rows through all layers in memory and write what `finish_rows` writes; no state is kept.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ForwardError: Rows that the model has no answer for.
    """
    opened = open_checkpoint(checkpoint)
    cfg = model_config(opened.config)
    ids = read_ids(rows)
    check_rows(cfg, ids, Path(rows))
    state = first_state(cfg, ids, load_shared(opened, cfg, "embed", device))
    for layer in range(cfg.num_hidden_layers):
        state, _ = advance(opened, cfg, layer, ids, state)
        progress(f"{opened.path.name}: layer {layer + 1} of {cfg.num_hidden_layers}")
    _write_hidden(opened, cfg, state, ids, hidden, device)


def _write_hidden(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    state: State,
    ids: torch.Tensor,
    path: Pathlike,
    device: str,
) -> None:
    norm, head = (load_shared(checkpoint, cfg, name, device) for name in ("norm", "head"))
    final_hidden, nll = finish(cfg, state, ids, norm, head)
    write_tensors(path, {"final_hidden": final_hidden, "nll": nll})
