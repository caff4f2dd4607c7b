# SPDX-License-Identifier: Apache-2.0
"""The small model: its configuration, every tensor it has, and the grids its weights live on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trellisbank.formats import fp8_block, mxfp4
from trellisbank.model.config import model_config
from trellisbank.model.engram import _compress
from trellisbank.model.weights import layer_tensors

VOCABULARY, IMAGE_TOKEN = 2048, 2044
LAYERS, EXPERTS, DRAFT_EXPERTS = 6, 16, 4
WIDTH, INNER, COPIES = 256, 128, 4
ENGRAM_LAYERS, ENGRAM_HEADS, ENGRAM_WIDTH, ENGRAM_START, NGRAM = (1, 3), 4, 32, 1450, 4
MARKOV_RANK = 16
VISION_WIDTH, PATCH = 16, 14
SMALLEST_EXPONENT = -60  # of a scale; only blocks of zeros reach it


class Spec(NamedTuple):
    """How a tensor is stored, its shape, and the standard deviation or value it starts with."""

    kind: str  # mxfp4, fp8, rows, bf16 or f32
    shape: tuple[int, ...]
    std: float = 0.0
    start: float = 0.0


def primes_from(start: int, count: int) -> list[int]:
    """The first primes not below ``start``."""
    found: list[int] = []
    while len(found) < count:
        if all(start % divisor for divisor in range(2, math.isqrt(start) + 1)):
            found.append(start)
        start += 1
    return found


def make_config(tokenizer: Path) -> dict[str, Any]:
    """``config.json`` of the small model, with the sizes that follow from its tokenizer."""
    columns = (NGRAM - 1) * ENGRAM_HEADS
    sizes = primes_from(ENGRAM_START, columns * len(ENGRAM_LAYERS))
    text = {
        "model_type": "deepseek_v41_text",
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 128,
        "o_lora_rank": 64,
        "o_groups": 2,
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-20,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "sliding_window": 16,
        # Window only, full, reuse, full, reindex, reuse; the last entry is the draft stage's.
        "compress_ratios": [0, 2, 2, 1, 1, 1, 0],
        "compress_rope_theta": 160000,
        "kv_source_layer_ids": [1, 3],
        "index_source_layer_ids": [1, 3, 4],
        "index_n_heads": 8,
        "index_head_dim": 64,
        "index_topk": 64,
        "candidate_source_layer_id": 3,
        # At least 12 * 8 + 1 latents, so never fewer than are selected; bites from 104 on.
        "candidate_topk_blocks": 13,
        "candidate_block_size": 8,
        "hc_mult": COPIES,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-06,
        "engram_layer_ids": list(ENGRAM_LAYERS),
        "engram_max_ngram_size": NGRAM,
        "engram_vocab_size": ENGRAM_START,
        "engram_n_heads": ENGRAM_HEADS,
        "engram_head_dim": ENGRAM_WIDTH,
        "engram_pad_token_id": 2,
        "num_nextn_predict_layers": 1,
        "dspark_block_size": 3,
        "dspark_noise_token_id": IMAGE_TOKEN,
        "dspark_target_layer_ids": [3, 4, 5],
        "dspark_markov_rank": MARKOV_RANK,
        "dspark_n_routed_experts": DRAFT_EXPERTS,
        "dspark_num_experts_per_tok": 2,
        "engram_num_embeddings": [
            sum(sizes[i * columns : (i + 1) * columns]) for i in range(len(ENGRAM_LAYERS))
        ],
        "engram_compressed_vocab_size": int(_compress(tokenizer.read_text()).max()) + 1,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "image_token_id": IMAGE_TOKEN,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
        "vision_config": {
            "model_type": "deepseek_v41_vision",
            "num_hidden_layers": 1,
            "hidden_size": VISION_WIDTH,
            "num_attention_heads": 2,
            "intermediate_size": 2 * VISION_WIDTH,
            "patch_size": PATCH,
            "rope_theta": 10000,
            "downsample_ratio": 3,
            "max_image_tokens": 64,
            "min_pixels": 7056,
            "max_wh_ratio": None,
        },
    }


def block_specs(config: dict[str, Any], layer: int) -> dict[str, Spec]:
    """Tensors of a body layer, by name below ``layers.N.``; each expert matrix is one stack."""
    cfg = model_config(config)
    # Outputs that are added to the stream start smaller, the more of them there are.
    added = 1 / math.sqrt(2 * LAYERS)
    fp8 = {"wq_a", "wq_b", "wkv", "wo_a", "wo_b", "w1", "w2", "w3"}
    specs = {}
    for name, (shape, role) in layer_tensors(cfg, layer).items():
        last = name.rpartition(".")[2]
        std = 1 / math.sqrt(shape[-1]) * (added if last in ("wo_b", "w2") else 1)
        pooled = "compressor" in name
        if role in ("linear", "wide") or name == "ffn.gate":
            specs[name] = Spec("fp8" if last in fp8 and not pooled else "bf16", shape, std)
        elif name.endswith("_fn"):
            specs[name] = Spec("f32", shape, 0.02)
        elif name.endswith("_base"):
            specs[name] = Spec("f32", shape, 0.3)
        elif name.endswith("_scale"):
            specs[name] = Spec("f32", shape, start=0.5)
        elif role == "bare" and not name.startswith("engram"):
            specs[name] = Spec("f32", shape)
        else:
            specs[name] = Spec("bf16", shape, start=1.0)
    specs |= expert_specs(EXPERTS, added) | {"ffn.gate.bias_vl": Spec("f32", (EXPERTS,), 0.01)}
    if layer in ENGRAM_LAYERS:
        rows = cfg.engram_num_embeddings[ENGRAM_LAYERS.index(layer)]
        specs["engram.embed"] = Spec("rows", (rows, ENGRAM_WIDTH), 0.5)
    return specs


def expert_specs(count: int, added: float) -> dict[str, Spec]:
    """Stacks of routed experts' matrices."""
    wide, narrow = (count, INNER, WIDTH), (count, WIDTH, INNER)
    return {
        "ffn.experts.w1": Spec("mxfp4", wide, WIDTH**-0.5),
        "ffn.experts.w2": Spec("mxfp4", narrow, added * INNER**-0.5),
        "ffn.experts.w3": Spec("mxfp4", wide, WIDTH**-0.5),
    }


def body_specs(config: dict[str, Any]) -> dict[str, Spec]:
    """All trained tensors, by stem."""
    specs = {
        "embed": Spec("bf16", (VOCABULARY, WIDTH), 0.5),
        "head": Spec("bf16", (VOCABULARY, WIDTH), WIDTH**-0.5),
        "norm": Spec("bf16", (WIDTH,), start=1.0),
    }
    for layer in range(LAYERS):
        own = block_specs(config, layer)
        specs |= {f"layers.{layer}.{name}": spec for name, spec in own.items()}
    return specs


def carried_specs(config: dict[str, Any]) -> dict[str, Spec]:
    """What a text forward never reads: the draft stage and the vision tower, by full stem."""
    draft = block_specs(config, 0)  # a window-only block, with fewer experts
    draft |= expert_specs(DRAFT_EXPERTS, 1.0)
    draft |= {
        "ffn.gate": Spec("bf16", (DRAFT_EXPERTS, WIDTH), WIDTH**-0.5),
        "ffn.gate.bias": Spec("f32", (DRAFT_EXPERTS,)),
        "ffn.gate.bias_vl": Spec("f32", (DRAFT_EXPERTS,), 0.01),
        "main_proj": Spec("fp8", (WIDTH, 3 * WIDTH), (3 * WIDTH) ** -0.5),
        "main_norm": Spec("bf16", (WIDTH,), start=1.0),
        "norm": Spec("bf16", (WIDTH,), start=1.0),
        "markov_head.embed": Spec("bf16", (VOCABULARY, MARKOV_RANK), 0.02),
        "markov_head.head": Spec("bf16", (VOCABULARY, MARKOV_RANK), 0.02),
        "confidence_head.proj": Spec("bf16", (1, WIDTH + MARKOV_RANK), 0.02),
    }
    specs = {f"mtp.0.{name}": spec for name, spec in draft.items()}
    seen, joined = VISION_WIDTH, 9 * VISION_WIDTH  # 3 x 3 patches become one token
    vision = {
        "vision.patch_embed.proj": (seen, 3 * PATCH**2),
        "vision.patch_embed.proj.bias": (seen,),
        "vision.blocks.0.norm1": (seen,),
        "vision.blocks.0.attn.wqkv": (3 * seen, seen),
        "vision.blocks.0.attn.wqkv.bias": (3 * seen,),
        "vision.blocks.0.attn.wo": (seen, seen),
        "vision.blocks.0.attn.wo.bias": (seen,),
        "vision.blocks.0.norm2": (seen,),
        "vision.blocks.0.mlp.w1": (4 * seen, seen),
        "vision.blocks.0.mlp.w2": (seen, 2 * seen),
        "vision.norm": (seen,),
        "aligner.w1": (WIDTH, joined),
        "aligner.w1.bias": (WIDTH,),
        "aligner.w2": (WIDTH, WIDTH),
        "aligner.w2.bias": (WIDTH,),
        "image_start": (WIDTH,),
        "image_end": (WIDTH,),
        "image_newline": (WIDTH,),
    }
    return specs | {name: Spec("bf16", shape, 0.02) for name, shape in vision.items()}


def initialize(specs: dict[str, Spec], seed: int) -> dict[str, Tensor]:
    """Start values, fp32 on the CPU, the same on every machine."""
    source = torch.Generator().manual_seed(seed)
    values = {}
    for name, spec in specs.items():
        values[name] = torch.randn(spec.shape, generator=source) * spec.std + spec.start
        if name.endswith(("hc_attn_base", "hc_ffn_base")):
            # Copies start nearly separate, or they would all become their mean at once.
            values[name][2 * COPIES :] += 3 * torch.eye(COPIES).flatten()
    return values


def power_scale(largest: Tensor, top: float) -> Tensor:
    """Smallest power of two that brings ``largest`` within ``top``."""
    mantissa, exponent = torch.frexp(largest / top)
    exponent = exponent - (mantissa == 0.5).int()
    exponent = torch.where(largest > 0, exponent, SMALLEST_EXPONENT)
    return torch.ldexp(torch.ones_like(largest), exponent.clamp_min(SMALLEST_EXPONENT))


def on_mxfp4_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest MXFP4 values of fp32 ``[..., N, K]``, and scales ``[..., N, K/32]``."""
    grouped = weight.unflatten(-1, (-1, mxfp4.GROUP))
    scale = power_scale(grouped.abs().amax(-1, keepdim=True), 6.0)
    units = grouped / scale
    size = units.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (torch.round(units / step) * step * scale).flatten(-2), scale.squeeze(-1)


def on_fp8_grid(weight: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Nearest FP8 values of fp32 ``[N, K]`` (multiples of the block), and a scale a block."""
    tall, wide = block
    grouped = weight.unflatten(1, (-1, wide)).unflatten(0, (-1, tall))
    scale = power_scale(grouped.abs().amax((1, 3), keepdim=True), 448.0)
    codes = (grouped / scale).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).flatten(2, 3).flatten(0, 1)
    return values, scale[:, 0, :, 0]


def on_grid(kind: str, weight: Tensor) -> tuple[Tensor, Tensor | None]:
    """What is stored of a weight: fp32 values, and scales where the format has them."""
    if kind == "mxfp4":
        return on_mxfp4_grid(weight)
    if kind == "fp8":
        return on_fp8_grid(weight, fp8_block.BLOCK)
    if kind == "rows":
        return on_fp8_grid(weight, fp8_block.ROW_BLOCK)
    return (weight.bfloat16().float() if kind == "bf16" else weight), None
