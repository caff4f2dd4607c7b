# SPDX-License-Identifier: Apache-2.0
"""What crosses from layer to layer, what a layer leaves for calibration, and their files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from trellisbank.errors import ForwardError
from trellisbank.model.attention import Slots
from trellisbank.model.config import ModelConfig, last_source
from trellisbank.safetensors_io import read_header, read_tensor, write_tensors


@dataclass(frozen=True, kw_only=True)
class State(Slots):
    """The stream after a layer and all else that later layers read, for some rows."""

    stream: Tensor
    """bf16 `[rows, S, C, D]`."""
    pre_mix: Tensor
    """fp32 `[rows, S, C]`: how the next layer's attention collapses the copies."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that have been written, by name."""
        held = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def rows(self, part: slice) -> "State":
        """Some of the rows, as views."""
        return State(**{name: tensor[part] for name, tensor in self.tensors.items()})


def join(parts: Sequence[Tensor]) -> Tensor:
    """Rows of several tensors as one; a single one is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def join_states(parts: Sequence[State]) -> State:
    """Rows of several states after the same layer as one."""
    held = [part.tensors for part in parts]
    return State(**{name: join([tensors[name] for tensors in held]) for name in held[0]})


@dataclass(frozen=True)
class Capture:
    """What calibration and planning need of a layer."""

    ffn_input: Tensor
    """bf16 `[rows, S, D]`, after `ffn_norm`: the input of router and experts."""
    route_indices: Tensor
    """int64 `[rows, S, T]`."""
    route_weights: Tensor
    """fp32 `[rows, S, T]`, the routing scale included."""
    ffn_post: Tensor
    """fp32 `[rows, S, C]`: how the FFN's output is written to the copies."""


STATE_DTYPES = {
    "stream": torch.bfloat16,
    "pre_mix": torch.float32,
    "compressed_kv": torch.bfloat16,
    "index_key": torch.bfloat16,
    "selection": torch.int32,
    "candidates": torch.uint8,
}
CAPTURED = ("ffn_input", "route_indices", "route_weights")


def state_shapes(cfg: ModelConfig, layer: int, rows: int, length: int) -> dict[str, list[int]]:
    """Shapes of the tensors of a state after `layer`; slots nobody has written yet are absent."""
    shapes = {
        "stream": [rows, length, cfg.hc_mult, cfg.hidden_size],
        "pre_mix": [rows, length, cfg.hc_mult],
    }
    source = last_source(cfg.kv_source_layer_ids, layer)
    if source is None:
        return shapes
    count = length // cfg.compress_ratios[source]
    shapes["compressed_kv"] = [rows, count, cfg.head_dim]
    shapes["index_key"] = [rows, count, cfg.index_head_dim]
    shapes["selection"] = [rows, length, min(cfg.index_topk, count)]
    pool = cfg.candidate_source_layer_id
    if 0 <= pool <= layer:
        shapes["candidates"] = [rows, length, length // cfg.compress_ratios[pool]]
    return shapes


def save_state(path: Path | str, state: State, layer: int, capture: Capture | None = None) -> None:
    """Write a state, and the layer's capture if given, as a safetensors file.

    Names, dtypes and shapes: `stream` bf16 `[rows, S, C, D]`, `pre_mix` fp32
    `[rows, S, C]`, `compressed_kv` bf16 `[rows, n, d]`, `index_key` bf16
    `[rows, n, di]`, `selection` int32 `[rows, S, k]`, `candidates` uint8
    `[rows, S, n]`; slots that no layer has written are absent. `ffn_input` bf16,
    `route_indices` int64, `route_weights` fp32. The metadata holds the layer.
    """
    held = state.tensors
    tensors = {name: held[name].to(dtype) for name, dtype in STATE_DTYPES.items() if name in held}
    if capture is not None:
        tensors |= {name: getattr(capture, name) for name in CAPTURED}
    write_tensors(path, tensors, {"layer": str(layer)})


def load_state(
    path: Path | str, cfg: ModelConfig, device: torch.device | str = "cpu"
) -> tuple[State, int]:
    """Read a state and the layer it was written after.

    Raises:
        ForwardError: No layer in metadata or file name (`L07.…`), a tensor missing, of another
            dtype or of another shape than this model has after that layer.
    """
    header = read_header(path)
    named = re.match(r"L(\d+)\.", Path(path).name)
    layer = header.metadata.get("layer", named[1] if named else "")
    if not layer.isdecimal() or int(layer) >= cfg.num_hidden_layers:
        raise ForwardError(
            "A state does not tell after which layer it was written.",
            file=path,
            expected=f"metadata `layer`, or a name like L07.state.safetensors, below "
            f"{cfg.num_hidden_layers}",
            found=layer or "neither",
            fix="use a state file of this program and this model",
        )
    stream = header.tensors.get("stream")
    rows, length = stream.shape[:2] if stream and len(stream.shape) == 4 else (0, 0)
    held = {}
    for name, shape in state_shapes(cfg, int(layer), rows, length).items():
        if name not in header.tensors:
            raise ForwardError(
                "A state lacks a tensor that later layers read.",
                file=path,
                tensor=name,
                layer=int(layer),
                expected=shape,
                found=f"only {', '.join(sorted(header.tensors))}",
                fix="run the forward from an earlier state",
            )
        held[name] = read_tensor(header, name)
        found = [held[name].dtype, list(held[name].shape)]
        if found != [STATE_DTYPES[name], shape]:
            raise ForwardError(
                "A state's tensor does not fit this model.",
                file=path,
                tensor=name,
                layer=int(layer),
                expected=f"{STATE_DTYPES[name]} {shape}",
                found=f"{found[0]} {found[1]}",
                fix="use a state of this checkpoint and these rows",
            )
    if "candidates" in held:
        held["candidates"] = held["candidates"].bool()
    return State(**{name: tensor.to(device) for name, tensor in held.items()}), int(layer)
