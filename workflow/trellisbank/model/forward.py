# SPDX-License-Identifier: Apache-2.0
"""The forward, one layer at a time: prefill of whole rows from position 0.

A row's result depends on its own ids alone. On a CPU with `rows_at_once=1` (the default) that
holds to the last bit, whatever other rows are run beside it. On a GPU an expert multiplies its
tokens of all rows at once, since a row's few would leave it idle: the last bit of a product may
then depend on their number, and through routing and selection what follows (docs/performance.md).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.errors import ForwardError
from trellisbank.model.attention import Weights, attention
from trellisbank.model.config import ModelConfig, model_config
from trellisbank.model.engram import compressed_tokens, engram, hash_ids
from trellisbank.model.hyper_connections import expand, mixes
from trellisbank.model.moe import ExpertWeights, moe, route
from trellisbank.model.primitives import BF16, collapse, rms_norm
from trellisbank.model.state import Capture, State, join, join_states, load_state, save_state
from trellisbank.model.weights import (
    expert_reader,
    load_layer,
    load_shared,
    memory_reader,
    shared_expert,
)
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import write_tensors

__all__ = [
    "Capture",
    "State",
    "advance",
    "check_rows",
    "finish",
    "first_state",
    "forward_files",
    "layer_statistics",
    "load_layer",
    "load_state",
    "run_layer",
    "save_state",
]

# Logits of one row over this many tokens of the vocabulary are held at a time.
VOCABULARY_BLOCK = 8192


def check_rows(cfg: ModelConfig, ids: Tensor, file: Path | str | None = None) -> None:
    """Refuse rows that the model has no answer for.

    Raises:
        ForwardError: Not int64 `[rows, S]`, empty, longer than the model's positions, or an id
            outside the vocabulary.
    """

    def refuse(what: str, expected: object, found: object) -> ForwardError:
        return ForwardError(
            what,
            file=file,
            tensor="input_ids",
            expected=expected,
            found=found,
            fix="build the rows for this checkpoint",
        )

    if ids.dtype != torch.int64 or ids.dim() != 2 or not ids.numel():
        raise refuse("Rows have a wrong form.", "int64 [rows, S]", f"{ids.dtype} {[*ids.shape]}")
    if ids.shape[1] > cfg.max_position_embeddings:
        raise refuse(
            "Rows are longer than the model's positions.",
            f"at most {cfg.max_position_embeddings} tokens",
            ids.shape[1],
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= cfg.vocab_size:
        raise refuse(
            "A token id is outside the vocabulary.",
            f"0 to {cfg.vocab_size - 1}",
            low if low < 0 else high,
        )


def first_state(cfg: ModelConfig, ids: Tensor, embed: Tensor) -> State:
    """The state before layer 0: each copy is the embedding, copy 0 is read first.

    Args:
        cfg: The model.
        ids: int64 `[rows, S]`.
        embed: bf16 `[V, D]`.

    Raises:
        ForwardError: See `check_rows`.
    """
    check_rows(cfg, ids)
    embedded = F.embedding(ids.to(embed.device), embed)
    stream = embedded.unsqueeze(2).expand(-1, -1, cfg.hc_mult, -1).contiguous()
    pre_mix = torch.zeros(*ids.shape, cfg.hc_mult, device=embed.device)
    pre_mix[..., 0] = 1
    return State(stream=stream, pre_mix=pre_mix)


def run_layer(
    cfg: ModelConfig,
    layer: int,
    state: State,
    weights: Weights,
    experts: Callable[[int], ExpertWeights],
    memory: Callable[[Tensor], Tensor] | None = None,
    hashes: Tensor | None = None,
    rows_at_once: int = 1,
) -> tuple[State, Capture]:
    """One layer on some rows; differentiable.

    Beside the weights and one row's intermediate results it holds about
    `rows * S * D * (6 * C + 8)` bytes: three streams, the FFN's inputs and its fp32 sum.

    Args:
        cfg: The model.
        layer: Body layer.
        state: After the layer before.
        weights: From `load_layer`, or one's own tensors under the same names.
        experts: Gives `(w1, w2, w3)` of a routed expert; called once for each that has a token.
        memory: Gives Engram rows for hash ids, bf16 `[..., columns, width]`; Engram layers only.
        hashes: int64 `[rows, S, columns]`; Engram layers only.
        rows_at_once: Rows in one product. Above 1 (training) results may differ in last bits.
    """
    after: list[State] = []
    combs: list[Tensor] = []
    captured: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for start in range(0, len(state.stream), rows_at_once):
        part = slice(start, start + rows_at_once)
        own = state.rows(part)
        stream = own.stream
        if layer in cfg.engram_layer_ids:
            assert memory is not None and hashes is not None
            stream = engram(cfg, stream, memory(hashes[part]), weights)
        pre, post, comb = mixes(cfg, stream, *_mix_weights(weights, "hc_attn"))
        x = rms_norm(collapse(own.pre_mix, stream), weights["attn_norm"], cfg.rms_norm_eps)
        output, own = attention(cfg, layer, x, weights, own)
        stream = expand(output, stream, post, comb)
        # What a sublayer reads was decided by the one before: `pre` here, and `pre_mix` is for
        # the next layer.
        pre_mix, post, comb = mixes(cfg, stream, *_mix_weights(weights, "hc_ffn"))
        x = rms_norm(collapse(pre, stream), weights["ffn_norm"], cfg.rms_norm_eps)
        chosen, routing = route(cfg, x, weights["ffn.gate"], weights["ffn.gate.bias"])
        after.append(replace(own, stream=stream, pre_mix=pre_mix))
        combs.append(comb)
        captured.append((x, chosen, routing, post))
    capture = Capture(*(join(parts) for parts in zip(*captured, strict=True)))
    del captured
    output = moe(
        cfg,
        capture.ffn_input,
        capture.route_indices,
        capture.route_weights,
        experts,
        shared_expert(weights),
        by_row=rows_at_once == 1 and state.stream.device.type == "cpu",
    )
    for place, comb in enumerate(combs):
        part = slice(place * rows_at_once, (place + 1) * rows_at_once)
        stream = expand(output[part], after[place].stream, capture.ffn_post[part], comb)
        after[place] = replace(after[place], stream=stream)
    return join_states(after), capture


def _mix_weights(weights: Weights, part: str) -> tuple[Tensor, Tensor, Tensor]:
    return weights[f"{part}_fn"], weights[f"{part}_base"], weights[f"{part}_scale"]


def finish(
    cfg: ModelConfig, state: State, ids: Tensor, norm: Tensor, head: Tensor
) -> tuple[Tensor, Tensor]:
    """Final hidden states and the NLL of each next token.

    Logits are fp32 products, made a row and a block of the vocabulary at a time.

    Args:
        cfg: The model.
        state: After the last layer.
        ids: int64 `[rows, S]`.
        norm: bf16 `[D]`.
        head: bf16 `[V, D]`.

    Returns:
        bf16 `[rows, S, D]` and fp32 `[rows, S - 1]`, in nats: entry `s` scores token `s+1`.
    """
    hiddens, losses = [], []
    for row, row_ids in enumerate(ids.to(head.device)):
        mixed = collapse(state.pre_mix[row], state.stream[row])
        hidden = rms_norm(mixed, norm, cfg.rms_norm_eps)
        wide, target = hidden[:-1].float(), row_ids[1:]
        total = torch.full_like(target, -torch.inf, dtype=torch.float32)
        for block in head.split(VOCABULARY_BLOCK):
            logits = F.linear(wide, block.float())
            total = torch.logaddexp(total, logits.logsumexp(-1))
        aimed = (wide * head[target].float()).sum(-1)
        hiddens.append(hidden)
        losses.append(total - aimed)
    return torch.stack(hiddens), torch.stack(losses)


def layer_statistics(cfg: ModelConfig, state: State, capture: Capture) -> dict[str, Any]:
    """What planning and the report need of a layer; means are over rows and tokens, fp64.

    `gain` is the length of the mean writing vector over the rms of the stream (all copies): how
    strongly an error of the FFN's output shows in the stream.
    """
    counts = torch.bincount(capture.route_indices.flatten(), minlength=cfg.n_routed_experts)
    post = capture.ffn_post.double().mean((0, 1))
    square = torch.stack([row.double().square().mean() for row in state.stream]).mean()
    return {
        "tokens": capture.ffn_input.shape[0] * capture.ffn_input.shape[1],
        "expert_tokens": counts.tolist(),
        "post_mean": post.tolist(),
        "stream_mean_square": float(square),
        "gain": float(post.norm() / square.sqrt()),
        "non_finite_stream": sum(int((~row.isfinite()).sum()) for row in state.stream),
        "non_finite_ffn_input": sum(int((~row.isfinite()).sum()) for row in capture.ffn_input),
    }


@torch.inference_mode()
def advance(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    layer: int,
    ids: Tensor,
    state: State,
    dtype: torch.dtype = BF16,
) -> tuple[State, Capture]:
    """Run one layer of a checkpoint on the state's device, reading what it needs.

    Args:
        checkpoint: Source or release.
        cfg: Its model.
        layer: Body layer.
        ids: int64 `[rows, S]`, hashed on Engram layers.
        state: After the layer before.
        dtype: Of the linear maps, see `load_layer`.

    Raises:
        ForwardError: The state is not one of these rows.
        CheckpointError: A tensor is missing or wrong, or the tokenizer is not the model's own.
    """
    if state.stream.shape[:2] != ids.shape:
        raise ForwardError(
            "The state was made from other rows.",
            layer=layer,
            expected=f"{[*ids.shape]} rows and tokens",
            found=[*state.stream.shape[:2]],
            fix="give the rows that the state was made from",
        )
    device = state.stream.device
    hashes = None
    if layer in cfg.engram_layer_ids:
        compressed = compressed_tokens(cfg, checkpoint.path / "tokenizer.json")
        hashes = hash_ids(cfg, layer, ids, compressed)
    return run_layer(
        cfg,
        layer,
        state,
        load_layer(checkpoint, cfg, layer, device, dtype),
        expert_reader(checkpoint, cfg, layer, device, dtype),
        memory_reader(checkpoint, layer, device),
        hashes,
    )


@torch.inference_mode()
def forward_files(
    checkpoint_path: Path | str,
    rows_path: Path | str,
    out_dir: Path | str,
    layers: tuple[int, int] | None = None,
    from_state: Path | str | None = None,
    device: str = "cpu",
    progress: Callable[[str], None] | None = None,
) -> list[Path]:
    """Run layers on a file of rows and write the state after each.

    Args:
        checkpoint_path: Source or release.
        rows_path: Safetensors file with `input_ids` int64 `[rows, S]`.
        out_dir: Gets `L00.state.safetensors` and so on (see `save_state`), and after the
            last layer `final.safetensors`: `final_hidden` bf16, `nll` fp32 `[rows, S-1]`.
        layers: First and last, inclusive; by default from where the state ends to the last.
        from_state: Any state file; the layer after it is the first.
        device: Torch device.
        progress: Told what was just done, a line at a time.

    Returns:
        The files written.

    Raises:
        ForwardError: Rows, state or range of layers do not fit the model.
        CheckpointError: The checkpoint cannot be read.
    """
    checkpoint = open_checkpoint(checkpoint_path)
    cfg = model_config(checkpoint.config)
    ids = read_ids(rows_path)
    check_rows(cfg, ids, rows_path)
    if from_state is None:
        state = first_state(cfg, ids, load_shared(checkpoint, cfg, "embed", device))
        before = -1
    else:
        state, before = load_state(from_state, cfg, device)
    end = cfg.num_hidden_layers - 1
    first, last = layers or (before + 1, end)
    if first != before + 1 or not first <= last <= end and not (layers is None and before == end):
        raise ForwardError(
            "The range of layers cannot be run from here.",
            expected=f"from {before + 1} to at most {end}",
            found=f"{first}-{last}",
            fix="start at 0, or give the state of the layer before the first",
        )
    written = []
    for layer in range(first, last + 1):
        state, capture = advance(checkpoint, cfg, layer, ids, state)
        written.append(Path(out_dir) / f"L{layer:02d}.state.safetensors")
        save_state(written[-1], state, layer, capture)
        if progress:
            progress(f"layer {layer} of {first}-{last}")
    if last == end:
        norm, head = (load_shared(checkpoint, cfg, name, device) for name in ("norm", "head"))
        hidden, nll = finish(cfg, state, ids, norm, head)
        written.append(Path(out_dir) / "final.safetensors")
        write_tensors(written[-1], {"final_hidden": hidden, "nll": nll})
        if progress:
            progress("final hidden states and NLL")
    return written
