# SPDX-License-Identifier: Apache-2.0
"""One layer's tensors: which there are, their shapes, and how they are held after loading.

A layer's dense tensors are a dict named as in the checkpoint below `layers.N.`, without
`.weight`. Routed experts and Engram rows are read when they are used, never kept.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from trellisbank.checkpoint import Checkpoint, expert_stem
from trellisbank.errors import CheckpointError
from trellisbank.model.attention import Weights
from trellisbank.model.config import ModelConfig
from trellisbank.model.engram import unique_rows
from trellisbank.model.moe import ExpertWeights
from trellisbank.model.primitives import BF16

STORED = {"linear": "F8_E4M3", "wide": "BF16", "plain": "BF16", "bare": "F32"}
"""Safetensors dtype of each role in the released layout of DeepSeek-V4.1-Flash."""


class TensorSpec(NamedTuple):
    """Shape after loading, role and, where it is not that of the role, the stored dtype.

    `linear`: a weight of any stored format, bf16 (exact) unless asked otherwise. `wide`: a
    plain weight used in fp32. `plain`: a weight kept as stored (norms, embedding, router).
    `bare`: fp32, its name has no `.weight`.
    """

    shape: tuple[int, ...]
    role: Literal["linear", "wide", "plain", "bare"] = "linear"
    stored: str | None = None

    @property
    def dtype(self) -> str:
        """Safetensors dtype in which the release stores the tensor."""
        return self.stored or STORED[self.role]


def layer_tensors(cfg: ModelConfig, layer: int) -> dict[str, TensorSpec]:
    """Every tensor of a body layer that the text forward reads, routed experts excepted."""
    width, copies, inner = cfg.hidden_size, cfg.hc_mult, cfg.moe_intermediate_size
    mix = copies * (copies + 2)
    heads = cfg.num_attention_heads * cfg.head_dim
    narrow = cfg.o_groups * cfg.o_lora_rank
    specs = {
        "attn_norm": TensorSpec((width,), "plain"),
        "ffn_norm": TensorSpec((width,), "plain"),
        "attn.wq_a": TensorSpec((cfg.q_lora_rank, width)),
        "attn.q_norm": TensorSpec((cfg.q_lora_rank,), "plain"),
        "attn.wq_b": TensorSpec((heads, cfg.q_lora_rank)),
        "attn.wkv": TensorSpec((cfg.head_dim, width)),
        "attn.kv_norm": TensorSpec((cfg.head_dim,), "plain"),
        "attn.wo_a": TensorSpec((narrow, heads // cfg.o_groups)),
        "attn.wo_b": TensorSpec((width, narrow)),
        "attn.attn_sink": TensorSpec((cfg.num_attention_heads,), "bare"),
        "ffn.gate": TensorSpec((cfg.n_routed_experts, width), "plain"),
        "ffn.gate.bias": TensorSpec((cfg.n_routed_experts,), "bare"),
        "ffn.shared_experts.w1": TensorSpec((inner, width)),
        "ffn.shared_experts.w2": TensorSpec((width, inner)),
        "ffn.shared_experts.w3": TensorSpec((inner, width)),
    }
    for part in ("hc_attn", "hc_ffn"):
        specs[f"{part}_fn"] = TensorSpec((mix, copies * width), "bare")
        specs[f"{part}_base"] = TensorSpec((mix,), "bare")
        specs[f"{part}_scale"] = TensorSpec((3,), "bare")
    if layer in cfg.kv_source_layer_ids:
        pooled = cfg.compress_ratios[layer] > 1
        specs["attn.compressor.wkv"] = TensorSpec(
            (cfg.head_dim, width), "wide" if pooled else "linear", "BF16"
        )
        if pooled:
            specs["attn.compressor.wgate"] = TensorSpec((cfg.head_dim, width), "wide")
        specs["attn.compressor.norm"] = TensorSpec((cfg.head_dim,), "plain")
        specs["attn.indexer.wk"] = TensorSpec((cfg.index_head_dim, cfg.head_dim), stored="BF16")
        specs["attn.indexer.k_norm"] = TensorSpec((cfg.index_head_dim,), "plain")
    if layer in cfg.index_source_layer_ids:
        index_heads = cfg.index_n_heads * cfg.index_head_dim
        specs["attn.indexer.wq_b"] = TensorSpec((index_heads, cfg.q_lora_rank))
        specs["attn.indexer.weights_proj"] = TensorSpec((cfg.index_n_heads, width), stored="BF16")
    if layer in cfg.engram_layer_ids:
        memory = cfg.engram_columns * cfg.engram_head_dim
        specs["engram.wkv"] = TensorSpec(((copies + 1) * width, memory))
        specs["engram.q_weight"] = TensorSpec((copies, width), "bare", "BF16")
        specs["engram.k_weight"] = TensorSpec((copies, width), "bare", "BF16")
    return specs


def load_layer(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    layer: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = BF16,
) -> dict[str, Tensor]:
    """The dense tensors of a layer.

    Args:
        checkpoint: Where they are.
        cfg: Its model.
        layer: Body layer.
        device: Where they go.
        dtype: Of the linear maps: bf16, the calibration forward, or fp32, the same numbers with
            another order of rounding.

    Raises:
        CheckpointError: A tensor is missing or has another shape.
    """
    return {
        name: _load(checkpoint, f"layers.{layer}.{name}", spec, device, dtype)
        for name, spec in layer_tensors(cfg, layer).items()
    }


def _load(
    checkpoint: Checkpoint,
    stem: str,
    spec: TensorSpec,
    device: torch.device | str,
    dtype: torch.dtype,
) -> Tensor:
    weight = checkpoint.tensor(stem) if spec.role == "bare" else checkpoint.weight(stem, device)
    if tuple(weight.shape) != spec.shape:
        raise CheckpointError(
            "A tensor has another shape than config.json gives it.",
            file=checkpoint.path,
            tensor=stem,
            expected=list(spec.shape),
            found=list(weight.shape),
            fix="check that config.json and shards belong to one checkpoint",
        )
    held = {"linear": dtype, "wide": torch.float32}.get(spec.role, weight.dtype)
    return weight.to(device=device, dtype=held)


def load_shared(
    checkpoint: Checkpoint, cfg: ModelConfig, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """`embed`, `head` (`[V, D]`) or `norm` (`[D]`), bf16."""
    shape = (cfg.hidden_size,) if name == "norm" else (cfg.vocab_size, cfg.hidden_size)
    return _load(checkpoint, name, TensorSpec(shape, "plain"), device, BF16)


def expert_reader(
    checkpoint: Checkpoint,
    cfg: ModelConfig,
    layer: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = BF16,
) -> Callable[[int], ExpertWeights]:
    """A function from a routed expert's number to its weights, read at each call."""
    wide = (cfg.moe_intermediate_size, cfg.hidden_size)

    def read(expert: int) -> ExpertWeights:
        w1, w2, w3 = (
            _load(checkpoint, expert_stem(layer, expert, name), TensorSpec(shape), device, dtype)
            for name, shape in (("w1", wide), ("w2", wide[::-1]), ("w3", wide))
        )
        return w1, w2, w3

    return read


def memory_reader(
    checkpoint: Checkpoint, layer: int, device: torch.device | str = "cpu"
) -> Callable[[Tensor], Tensor]:
    """A function from hash ids of any shape to rows of the layer's Engram table, bf16.

    Only the rows asked for are read, each once a call.
    """
    stem = f"layers.{layer}.engram.embed"
    read = unique_rows(lambda ids: checkpoint.rows(stem, ids))
    return lambda ids: read(ids.cpu()).to(device)


def shared_expert(weights: Weights) -> ExpertWeights:
    """The shared expert's matrices of a loaded layer."""
    w1, w2, w3 = (weights[f"ffn.shared_experts.{name}"] for name in ("w1", "w2", "w3"))
    return w1, w2, w3
