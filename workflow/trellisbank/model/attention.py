# SPDX-License-Identifier: Apache-2.0
"""Attention of one layer: sliding window, compressed keys, their index, and a sink.

A layer may publish compressed keys, index keys, a selection and a candidate pool in slots that
later layers read; each slot is overwritten by its next writer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from trellisbank.model.config import ModelConfig
from trellisbank.model.primitives import (
    BF16,
    fake_fp4_index,
    fake_fp4_latent,
    fake_fp8,
    linear,
    rms_norm,
    rotary_table,
    rotate,
)

Weights = Mapping[str, Tensor]

# Gathered keys of this many bytes (widened to fp32) are held at a time; queries are independent.
GATHER_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Slots:
    """What attention hands from layer to layer; None until a layer has written it.

    `n` latents: one for each complete group of `ratio` tokens.
    """

    compressed_kv: Tensor | None = None
    """bf16 `[rows, n, d]`: keys and values at once."""
    index_key: Tensor | None = None
    """bf16 `[rows, n, di]`."""
    selection: Tensor | None = None
    """int32 `[rows, S, min(k, n)]`: latents a query reads, ascending, then -1 for empty."""
    candidates: Tensor | None = None
    """bool `[rows, S, n]`: the pool that later selections draw from."""


AnySlots = TypeVar("AnySlots", bound=Slots)


def attention(
    cfg: ModelConfig, layer: int, x: Tensor, weights: Weights, slots: AnySlots
) -> tuple[Tensor, AnySlots]:
    """Attention of all positions of some rows at once, starting at position 0.

    Args:
        cfg: The model.
        layer: Body layer.
        x: bf16 `[rows, S, D]`, after `attn_norm`.
        weights: The layer's tensors, named as in the checkpoint below `layers.N.`.
        slots: As the layer before left them.

    Returns:
        bf16 `[rows, S, D]` and the slots for the next layer.
    """
    ratio = cfg.compress_ratios[layer]
    length = x.shape[1]
    table = rotary_table(cfg, ratio > 0, length, x.device)
    latent = rms_norm(linear(x, weights["attn.wq_a"]), weights["attn.q_norm"], cfg.rms_norm_eps)
    query = linear(latent, weights["attn.wq_b"]).unflatten(-1, (-1, cfg.head_dim))
    query = rotate(query, table[:, None])
    keys = rms_norm(linear(x, weights["attn.wkv"]), weights["attn.kv_norm"], cfg.rms_norm_eps)
    keys = fake_fp8(rotate(keys, table))
    positions = window_positions(length, cfg.sliding_window, x.device).expand(len(x), -1, -1)
    if ratio:
        slots = _publish(cfg, layer, x, latent, weights, slots)
        assert slots.compressed_kv is not None and slots.selection is not None
        keys = torch.cat([keys, slots.compressed_kv], dim=1)
        selected = slots.selection.long()
        selected = torch.where(selected < 0, selected, selected + length)
        positions = torch.cat([positions, selected], dim=-1)
    seen = attend(query, keys, positions, weights["attn.attn_sink"])
    seen = rotate(seen, table[:, None].conj()).flatten(-2)
    grouped = seen.unflatten(-1, (cfg.o_groups, -1))
    first = weights["attn.wo_a"].unflatten(0, (cfg.o_groups, -1))
    narrow = torch.einsum("bsgd,god->bsgo", grouped.to(first.dtype), first).to(BF16)
    return linear(narrow.flatten(-2), weights["attn.wo_b"]), slots


def _publish(
    cfg: ModelConfig, layer: int, x: Tensor, latent: Tensor, weights: Weights, slots: AnySlots
) -> AnySlots:
    """Write the slots that this layer is the source of."""
    ratio = cfg.compress_ratios[layer]
    table = rotary_table(cfg, True, x.shape[1], x.device)
    if layer in cfg.kv_source_layer_ids:
        pooled = compress(cfg, ratio, x, weights)
        # A latent stands at the position of its group's first token.
        first = table[: pooled.shape[1] * ratio : ratio]
        index_key = rms_norm(
            linear(pooled, weights["attn.indexer.wk"]),
            weights["attn.indexer.k_norm"],
            cfg.rms_norm_eps,
        )
        slots = replace(
            slots,
            compressed_kv=fake_fp4_latent(rotate(pooled, first)),
            index_key=fake_fp4_index(rotate(index_key, first)),
        )
    if layer in cfg.index_source_layer_ids:
        assert slots.index_key is not None
        with torch.no_grad():  # choosing has no gradient
            scores = index_scores(cfg, ratio, x, latent, slots.index_key, weights)
            pool = cfg.candidate_source_layer_id
            if layer == pool:
                slots = replace(slots, candidates=candidate_pool(cfg, ratio, scores))
            elif 0 <= pool < layer:
                assert slots.candidates is not None
                scores = scores.masked_fill(~slots.candidates, -torch.inf)
            slots = replace(slots, selection=select(scores, cfg.index_topk, ratio))
    return slots


def compress(cfg: ModelConfig, ratio: int, x: Tensor, weights: Weights) -> Tensor:
    """One latent for each complete group of `ratio` tokens: bf16 `[rows, S // ratio, d]`.

    Ratio 1 is a bf16 linear; above, tokens of a group are pooled in fp32 with a softmax per
    channel. Neither rotated nor quantized.
    """
    norm = weights["attn.compressor.norm"]
    if ratio == 1:
        return rms_norm(linear(x, weights["attn.compressor.wkv"]), norm, cfg.rms_norm_eps)
    count = x.shape[1] // ratio
    wide = x[:, : count * ratio].float()
    values = F.linear(wide, weights["attn.compressor.wkv"]).unflatten(1, (count, ratio))
    gates = F.linear(wide, weights["attn.compressor.wgate"]).unflatten(1, (count, ratio))
    pooled = (values * gates.softmax(dim=2)).sum(2)
    return rms_norm(pooled.to(BF16), norm, cfg.rms_norm_eps)


def visible(length: int, count: int, ratio: int, device: torch.device) -> Tensor:
    """Query `i` sees latent `t` once its group is complete at `i`: bool `[S, n]`."""
    queries = torch.arange(1, length + 1, device=device).unsqueeze(1)
    return torch.arange(count, device=device) < queries // ratio


def index_scores(
    cfg: ModelConfig, ratio: int, x: Tensor, latent: Tensor, index_key: Tensor, weights: Weights
) -> Tensor:
    """Score of every latent for every query, bf16 `[rows, S, n]`, -inf where not visible.

    Rounded to bf16 at each step: dot product, times head weight, sum over heads.
    """
    table = rotary_table(cfg, True, x.shape[1], x.device)
    query = linear(latent, weights["attn.indexer.wq_b"]).unflatten(-1, (-1, cfg.index_head_dim))
    query = fake_fp4_index(rotate(query, table[:, None]))
    heads = linear(x, weights["attn.indexer.weights_proj"])
    heads = heads * (cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5)
    dots = torch.einsum("bshd,btd->bsht", query, index_key).relu_()
    scores = dots.mul_(heads.unsqueeze(-1)).sum(2)
    seen = visible(x.shape[1], index_key.shape[1], ratio, x.device)
    return scores.masked_fill(~seen, -torch.inf)


def candidate_pool(cfg: ModelConfig, ratio: int, scores: Tensor) -> Tensor:
    """Keep the best blocks of latents for each query, and the newest visible one always.

    Args:
        cfg: The model.
        ratio: Tokens a latent.
        scores: bf16 `[rows, S, n]`, masked.

    Returns:
        bool `[rows, S, n]`.
    """
    size = cfg.candidate_block_size
    length, count = scores.shape[-2:]
    blocks = -(-count // size)
    padded = F.pad(scores, (0, blocks * size - count), value=-torch.inf)
    best = padded.unflatten(-1, (blocks, size)).amax(-1)
    newest = torch.arange(1, length + 1, device=scores.device) // ratio - 1
    own = torch.arange(blocks, device=scores.device) == newest.div(
        size, rounding_mode="floor"
    ).unsqueeze(1)
    best = best.masked_fill(own, torch.inf)
    value, block = best.topk(min(cfg.candidate_topk_blocks, blocks), dim=-1, sorted=False)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, block, value > -torch.inf)
    return kept.repeat_interleave(size, dim=-1)[..., :count]


def select(scores: Tensor, most: int, ratio: int) -> Tensor:
    """The best latents of each query: int32 `[rows, S, min(most, n)]`.

    Ascending; latents that are not visible become -1, which leaves those at the end.
    """
    length, count = scores.shape[-2:]
    chosen = scores.topk(min(most, count), dim=-1, sorted=False).indices.sort(dim=-1).values
    seen = torch.arange(1, length + 1, device=scores.device).unsqueeze(1) // ratio
    return torch.where(chosen < seen, chosen, -1).int()


def window_positions(length: int, window: int, device: torch.device) -> Tensor:
    """int64 `[S, min(window, S)]`: positions a query sees in its window, then -1 for none."""
    query = torch.arange(length, device=device).unsqueeze(1)
    position = (query - window + 1).clamp_min(0) + torch.arange(min(window, length), device=device)
    return torch.where(position <= query, position, -1)


def attend(query: Tensor, keys: Tensor, positions: Tensor, sink: Tensor) -> Tensor:
    """Attention of each query over its own list of keys, which are the values too.

    The sink adds to the denominator only, and not to the maximum. Weights are rounded to bf16
    for the values but not for the denominator; the division comes last.

    Args:
        query: bf16 `[rows, S, H, d]`.
        keys: bf16 `[rows, n, d]`.
        positions: int64 `[rows, S, m]` into `keys`, -1 for none; at least one is there.
        sink: fp32 `[H]`, not scaled.

    Returns:
        bf16 `[rows, S, H, d]`.
    """
    rows, count, width = keys.shape
    flat = keys.reshape(rows * count, width)
    offset = torch.arange(rows, device=keys.device).view(-1, 1, 1) * count
    step = max(1, GATHER_BYTES // (4 * rows * positions.shape[-1] * width))
    # A GPU multiplies bf16 with fp32 sums and results as it is; its gradient would be bf16.
    narrow = query.is_cuda and not torch.is_grad_enabled()
    parts = []
    for part, where in zip(query.split(step, 1), positions.split(step, 1), strict=True):
        # An embedding look-up, since its gradient is summed in fp32 and in a fixed order.
        own = F.embedding(where.clamp_min(0) + offset, flat)
        own = own if narrow else own.float()
        scores = _wide_product(part, own.mT) * width**-0.5
        scores = scores.masked_fill((where < 0).unsqueeze(-2), -torch.inf)
        highest = scores.detach().amax(-1, keepdim=True)  # cancels, so has no gradient
        raised = torch.exp(scores - highest)
        total = raised.sum(-1, keepdim=True) + torch.exp(sink.unsqueeze(-1) - highest)
        parts.append((_wide_product(raised.to(BF16), own) / total).to(BF16))
    return torch.cat(parts, dim=1)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Product of bf16 numbers `[rows, S, ., .]` in fp32; `b` may be widened already."""
    if b.dtype == torch.float32:
        return a.float() @ b
    wide: Tensor = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
    return wide.view(*a.shape[:2], *wide.shape[1:])
