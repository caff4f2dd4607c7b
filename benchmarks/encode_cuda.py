# SPDX-License-Identifier: Apache-2.0
"""Seconds an expert of release size on a CUDA device, everything included.

    .venv/bin/python benchmarks/encode_cuda.py --rates 3 4 --experts 48 --out encode.json

A layer of random MXFP4 experts (5120 x 2304) and captures that send each expert 12,288 tokens are
written to a temporary folder. Timed is `encode_block`: hashes, dequantizing, Hessians, encoding,
measuring, and the bank on disk. Beside it the time inside exllamav3 during that run, and alone:
the same groups with Hessians and factors at hand and nothing else going on.
"""

import argparse
import json
import os
import tempfile
import time
from datetime import datetime
from pathlib import Path

import torch

from trellisbank.checkpoint import INDEX, expert_stem, open_checkpoint
from trellisbank.files import blake3_file, write_json
from trellisbank.quantize import block
from trellisbank.quantize import encode_exllamav3 as encoder
from trellisbank.quantize.expert import Options, Work
from trellisbank.safetensors_io import write_tensors

ROOT = Path(__file__).parents[1]
WIDTH, INNER, TOKENS, CHOSEN = 5120, 2304, 12_288, 6
LAYER_EXPERTS = 384
WEIGHTING = "route"


def make_source(folder, experts):
    """A checkpoint of one layer of random experts, and its captures."""
    config = json.loads((ROOT / "resources/tiny/checkpoint/config.json").read_text())
    config["text_config"] |= {
        "hidden_size": WIDTH,
        "moe_intermediate_size": INNER,
        "n_routed_experts": experts,
        "num_experts_per_tok": CHOSEN,
    }
    write_json(folder / "config.json", config)
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(experts):
        for matrix, (n, k) in {
            "w1": (INNER, WIDTH),
            "w2": (WIDTH, INNER),
            "w3": (INNER, WIDTH),
        }.items():
            stem = expert_stem(0, expert, matrix)
            codes = torch.randint(-128, 128, (n, k // 2), dtype=torch.int8, generator=generator)
            scales = torch.randint(118, 122, (n, k // 32), dtype=torch.uint8, generator=generator)
            tensors[f"{stem}.weight"] = codes
            tensors[f"{stem}.scale"] = scales.view(torch.float8_e8m0fnu)
    write_tensors(folder / "model-00001-of-00001.safetensors", tensors)
    shard = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    write_json(folder / INDEX, shard)
    rows = TOKENS * experts // CHOSEN
    on = {"generator": torch.Generator("cuda").manual_seed(0), "device": "cuda"}
    x = torch.randn(rows, WIDTH, dtype=torch.bfloat16, **on)
    x *= torch.linspace(0.2, 2, WIDTH, device="cuda").bfloat16()
    # A token's experts are neighbours on a ring that is shifted at random: equal loads, mixed rows.
    first = torch.arange(rows, device="cuda")[torch.randperm(rows, **on)] * CHOSEN
    chosen = (first[:, None] + torch.arange(CHOSEN, device="cuda")) % experts
    write_tensors(
        folder / "captures.safetensors",
        {
            "ffn_input": x.cpu(),
            "route_indices": chosen.cpu(),
            "route_weights": torch.full((rows, CHOSEN), 0.25),
        },
        {"layer": "0"},
    )
    hashes = [blake3_file(folder / "captures.safetensors")]
    receipt = {"layer": 0, "down_weighting": WEIGHTING, "captures": hashes}
    write_json(folder / "hessians.json", receipt)


class Watch:
    """Time inside a function of exllamav3, the device idle before and after."""

    def __init__(self, function):
        """Wrap it."""
        self.function, self.seconds, self.calls = function, 0.0, 0

    def __call__(self, *arguments):
        """Call it."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = self.function(*arguments)
        torch.cuda.synchronize()
        self.seconds += time.perf_counter() - start
        self.calls += 1
        return result


def whole(folder, experts, rate, attempt):
    """`encode_block` of all experts at one rate."""
    groups = ("gate_up", "down")
    wanted = [
        {"layer": 0, "expert": expert, "group": group, "rate": rate}
        for expert in range(experts)
        for group in groups
    ]
    write_json(folder / "wanted.json", {"entries": wanted})
    ledger = folder / f"ledger-{rate}-{attempt}.json"
    single, batch = load()
    watched = Watch(batch)
    encoder.load = lambda: (single, watched)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    block.encode_block(
        source=folder,
        layer=0,
        block=0,
        experts_per_block=experts,
        wanted_path=folder / "wanted.json",
        hessians_path=folder / "hessians.json",
        captures=[folder / "captures.safetensors"],
        bank=folder / f"bank-{attempt}",
        min_tokens=16,
        options=Options(),
        down_weighting=WEIGHTING,
        backend="exllamav3",
        threads=1,
        ledger_path=ledger,
    )
    seconds = time.perf_counter() - start
    encoder.load = load
    entries = json.loads(ledger.read_text())["entries"]
    errors = [m["proxy_error"] for e in entries for m in e["matrices"].values()]
    return {
        "rate": rate,
        "experts": experts,
        "seconds": seconds,
        "seconds_an_expert": seconds / experts,
        "minutes_a_layer": seconds / experts * LAYER_EXPERTS / 60,
        "inside_exllamav3_an_expert": watched.seconds / experts,
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
        "mean_proxy_error": sum(errors) / len(errors),
    }


def alone(folder, rate):
    """Only exllamav3 at work: groups of works whose inputs are ready; and what makes them ready."""
    checkpoint = open_checkpoint(folder)
    mapped = block.map_captures([folder / "captures.safetensors"], 0)
    cfg = block.model_config(checkpoint.config)
    stages = {}

    def timed(stage, function, experts=encoder.GROUP):
        torch.cuda.synchronize()
        start = time.perf_counter()
        result = function()
        torch.cuda.synchronize()
        stages[stage] = (time.perf_counter() - start) / experts
        return result

    weights = timed(
        "read_and_dequantize",
        lambda: [block._weights(checkpoint, 0, e, "cuda") for e in range(encoder.GROUP)],
    )
    hessians = timed(
        "hessians",
        lambda: [
            block._hessians(cfg, expert, own, mapped, WEIGHTING)
            for expert, own in enumerate(weights)
        ],
    )
    works = [
        [
            Work(
                f"layers.0.ffn.experts.{expert}",
                {name: own[name].T for name in names},
                hessians[expert][group],
                rate,
            )
            for expert, own in enumerate(weights)
        ]
        for group, names in block.GROUPS.items()
    ]
    del hessians
    ready = [[encoder._make_ready(work, Options(), 16) for work in group] for group in works]
    held = encoder.Handover
    encoder.Handover = lambda factor: factor  # as exllamav3's own records hold it
    found = timed(
        "exllamav3", lambda: [encoder._quantize(group, Options(), *load()) for group in ready]
    )
    encoder.Handover = held
    del ready, found
    ready = timed(
        "records",
        lambda: [[encoder._make_ready(work, Options(), 16) for work in group] for group in works],
    )
    found = timed(
        "exllamav3_factors_handed_over",
        lambda: [encoder._quantize(group, Options(), *load()) for group in ready],
    )
    timed(
        "measuring",
        lambda: [
            encoder._finish(one, *result)
            for group, results in zip(ready, found, strict=True)
            for one, result in zip([o for own in group for o in own], results, strict=True)
        ],
    )
    return stages


def one_by_one(folder, rate):
    """The peer: exllamav3's plain function, a matrix a call, its own Hessians and signs."""
    checkpoint = open_checkpoint(folder)
    mapped = block.map_captures([folder / "captures.safetensors"], 0)
    cfg = block.model_config(checkpoint.config)
    single, _ = load()
    seconds = []
    for expert in range(2):
        weights = block._weights(checkpoint, 0, expert, "cuda")
        hessians = block._hessians(cfg, expert, weights, mapped, WEIGHTING)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for group, names in block.GROUPS.items():
            h = hessians[group]
            record = {"H": h.matrix, "count": h.count, "finalized": False, "first_key": ""}
            for name in names:
                arguments = {"K": rate, "mul1": True, "seed": 0, "devices": [h.matrix.device]}
                arguments |= {"sigma_reg": 0.025, "apply_out_scales": True}
                single(weights[name].T.float().contiguous(), record, arguments, False)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[-1]


def tiles(rate):
    """Tiles a second of the raw kernel, by tiles a call."""
    from exllamav3.modules.quant.exl3_lib.quantize import quantize_tiles

    speeds = {}
    for count in (16_384, 5_120, 4_608, 3_840, 3_456, 3_168, 2_304, 320, 144):
        x = torch.randn(count, 256, device="cuda") * 0.94
        quantize_tiles(x, {"K": rate, "mul1": True})
        torch.cuda.synchronize()
        repeats = max(1, 32_768 // count)
        start = time.perf_counter()
        for _ in range(repeats):
            quantize_tiles(x, {"K": rate, "mul1": True})
        torch.cuda.synchronize()
        speeds[count] = repeats * count / (time.perf_counter() - start)
    return speeds


load = encoder.load


def main():
    """Write the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", type=int, nargs="+", default=[3, 4])
    parser.add_argument("--experts", type=int, default=48, help="0: tiles only")
    parser.add_argument("--again", action="store_true", help="a second run at the first rate")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    load()
    result = {
        "date": datetime.now().date().isoformat(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "exllamav3": encoder.package_version(),
        "group": encoder.GROUP,
        "tiles_a_second": {},
        "alone_an_expert": {},
        "one_by_one_an_expert": {},
        "fast_kernel": os.environ.get("EXL3_QT_OPTIMIZED"),
        "encode_block": [],
    }

    def save():
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rate in options.rates:
            result["tiles_a_second"][rate] = tiles(rate)
            save()
        if not options.experts:
            return
        start = time.perf_counter()
        make_source(folder, options.experts)
        print(f"made in {time.perf_counter() - start:.1f} s", flush=True)
        start = time.perf_counter()
        blake3_file(folder / "captures.safetensors")
        size = (folder / "captures.safetensors").stat().st_size
        result["captures_hash_gb_a_second"] = size / 1e9 / (time.perf_counter() - start)
        for rate in options.rates:
            result["encode_block"].append(whole(folder, options.experts, rate, 0))
            save()
            print(result["encode_block"][-1], flush=True)
            if options.experts >= encoder.GROUP:
                result["alone_an_expert"][rate] = alone(folder, rate)
                result["one_by_one_an_expert"][rate] = one_by_one(folder, rate)
                save()
                print(result["alone_an_expert"], flush=True)
        if options.again:
            result["encode_block"].append(whole(folder, options.experts, options.rates[0], 1))
            first, second = (sorted((folder / f"bank-{i}").rglob("*.safetensors")) for i in (0, 1))
            hashes = {path.relative_to(folder / "bank-0"): blake3_file(path) for path in first}
            again = {path.relative_to(folder / "bank-1"): blake3_file(path) for path in second}
            result["same_bytes_again"] = all(hashes[key] == value for key, value in again.items())
            result["files_compared"] = len(again)
            save()
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
