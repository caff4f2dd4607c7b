# SPDX-License-Identifier: Apache-2.0
"""One layer of release size on a CUDA device: seconds, memory, share of the matmul peak, parts.

    python benchmarks/forward_cuda.py --layer 2 --rows 192 --out forward.json

Weights and stream are random; experts are dequantized from MXFP4 codes on the device each time, as
in a run, but only eight different ones are held. Reading files is not counted. Floating-point
operations are counted from the shapes: linear maps, attention over the gathered keys, index scores.
"""

import argparse
import json
import time
from collections import defaultdict
from datetime import datetime
from pathlib import Path

import torch

from trellisbank.formats import mxfp4
from trellisbank.model import attention, forward
from trellisbank.model.config import model_config
from trellisbank.model.state import State
from trellisbank.model.weights import layer_tensors

ROOT = Path(__file__).parents[1]
RELEASE = {
    "vocab_size": 129280,
    "hidden_size": 5120,
    "moe_intermediate_size": 2304,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "compress_ratios": [0, 0] + [2] * 18 + [1] * 20,
    "kv_source_layer_ids": [2, 8, 14, 20],
    "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer_id": 20,
    "candidate_block_size": 8,
    "candidate_topk_blocks": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 6,
    "max_position_embeddings": 1048576,
    "engram_layer_ids": [1, 14],
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "original_max_position_embeddings": 65536,
    },
}
PARTS = {
    "attention": "attention",
    "moe": "experts",
    "mixes": "mixing",
    "expand": "mixing",
    "collapse": "mixing",
    "rms_norm": "mixing",
    "route": "routing",
}


def random_layer(cfg, layer):
    """Weights with outputs of the size of their inputs, experts as MXFP4 codes."""
    generator = torch.Generator("cuda").manual_seed(layer)
    weights = {}
    for name, spec in layer_tensors(cfg, layer).items():
        held = torch.float32 if spec.role in ("bare", "wide") else torch.bfloat16
        value = torch.randn(spec.shape, generator=generator, device="cuda")
        if "norm" in name:
            value = torch.ones(spec.shape, device="cuda")
        elif len(spec.shape) > 1:
            value *= spec.shape[-1] ** -0.5
        weights[name] = (0.1 * value if spec.role == "bare" else value).to(held)

    def codes(n, k):
        words = torch.randint(-128, 128, (n, k // 2), generator=generator, device="cuda")
        scales = torch.randint(118, 121, (n, k // 32), generator=generator, device="cuda")
        return words.to(torch.int8), scales.to(torch.uint8)

    wide = (cfg.moe_intermediate_size, cfg.hidden_size)
    pool = [[codes(*shape) for shape in (wide, wide[::-1], wide)] for _ in range(8)]

    def experts(number):
        return tuple(mxfp4.dequantize(*part) for part in pool[number % len(pool)])

    return weights, experts


def operations(cfg, layer, rows, length, weights):
    """Multiplications and additions of a layer, attention and experts apart."""
    tokens = rows * length
    dense = sum(
        w.numel()
        for name, w in weights.items()
        if w.dim() == 2 and name.startswith(("attn.w", "attn.indexer.w"))
    )
    count = length // (cfg.compress_ratios[layer] or 1)
    keys = min(cfg.sliding_window, length)
    keys += min(cfg.index_topk, count) if cfg.compress_ratios[layer] else 0
    attention = 2 * tokens * dense + 4 * tokens * cfg.num_attention_heads * cfg.head_dim * keys
    if layer in cfg.index_source_layer_ids:
        attention += 2 * tokens * cfg.index_n_heads * cfg.index_head_dim * count
    expert = 6 * cfg.hidden_size * cfg.moe_intermediate_size
    return {"attention": attention, "experts": tokens * (cfg.num_experts_per_tok + 1) * expert}


def matmul_peak(size=8192, repeats=20):
    """Measured bf16 operations a second."""
    a, b = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return repeats * 2 * size**3 / (time.perf_counter() - start)


def main():
    """Write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", type=int, nargs="+", default=[2])
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    raw = json.loads((ROOT / "resources/tiny/checkpoint/config.json").read_text())
    raw["text_config"] |= RELEASE
    cfg = model_config(raw)
    peak = matmul_peak()
    result = {
        "date": datetime.now().date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "matmul_peak_tflops": peak / 1e12,
        "rows": options.rows,
        "length": options.length,
        "runs": [],
    }
    spans = defaultdict(list)

    def timed(function, part):
        def run(*arguments, **named):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            found = function(*arguments, **named)
            end.record()
            spans[part].append((start, end))
            return found

        return run

    for name, part in PARTS.items():
        setattr(forward, name, timed(getattr(forward, name), part))
    attention.attend = timed(attention.attend, "of attention: gathered keys")
    attention._publish = timed(attention._publish, "of attention: compression and index")
    for layer in options.layer:
        weights, experts = random_layer(cfg, layer)
        experts = timed(experts, "of experts: dequantizing")
        shape = (options.rows, options.length, cfg.hc_mult)
        stream = torch.empty(*shape, cfg.hidden_size, dtype=torch.bfloat16, device="cuda")
        for row in stream:
            row.normal_()
        state = State(stream=stream, pre_mix=torch.full(shape, 0.25, device="cuda"))
        # A first, small run loads kernels.
        forward.run_layer(cfg, layer, state.rows(slice(0, 2)), weights, experts)
        work = operations(cfg, layer, options.rows, options.length, weights)
        for _ in range(options.repeats):
            spans.clear()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            after, capture = forward.run_layer(cfg, layer, state, weights, experts)
            torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            parts = {p: sum(a.elapsed_time(b) for a, b in s) / 1e3 for p, s in spans.items()}
            loads = torch.bincount(capture.route_indices.flatten(), minlength=384)
            result["runs"].append(
                {
                    "layer": layer,
                    "seconds": seconds,
                    "parts_seconds": parts,
                    "operations": work,
                    "share_of_peak": sum(work.values()) / seconds / peak,
                    "experts_share_of_peak": work["experts"] / parts["experts"] / peak,
                    "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
                    "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
                    "tokens_an_expert": [int(loads.min()), int(loads.max())],
                    "finite": bool(after.stream[-1].isfinite().all()),
                }
            )
            del after, capture
            print(result["runs"][-1], flush=True)
            Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
        del weights, experts, stream, state
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
