# SPDX-License-Identifier: Apache-2.0
"""What a CUDA device gives against what it should give: exllamav3's encoder and the forward.

    python benchmarks/check_cuda.py encoder --golden golden_c1.safetensors --out check.json
    python benchmarks/check_cuda.py policies --out policies.json
    python benchmarks/check_cuda.py tiny --out tiny.json --ledger LEDGER --captures FILE FILE
    python benchmarks/check_cuda.py forward --out forward.json

encoder: bytes recorded from exllamav3 with seed 0 (16 matrices), records of Hessians, our decoders
against exllamav3's, one expert alone, in a full group and again, and policies: unusable Hessians.
tiny: a layer of the shipped checkpoint, from a run on a CPU: `results/tiny/encoded/{recipe}` and
`results/tiny/captures/split{0,1}` hold its ledger and captures. forward: each layer of the recorded
model from the recorded state before it.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from trellisbank.checkpoint import expert_stem, open_checkpoint
from trellisbank.formats import trellis
from trellisbank.model.config import model_config
from trellisbank.quantize import encode_exllamav3 as encoder
from trellisbank.quantize.block import map_captures
from trellisbank.quantize.decode_torch import decode_inner
from trellisbank.quantize.expert import Options, Work, encode_group
from trellisbank.quantize.hessian import Hessian, expert_hessians
from trellisbank.safetensors_io import read_file

ROOT = Path(__file__).parents[1]
PARTS = ("trellis", "suh", "svh")


PLAIN = Options(scaled_hessian=False)
"""What was recorded, and what exllamav3 does unless it is told."""


def encode(works, places, min_tokens=1, options=None):
    """Encode with groups of so many places; tensors by stem and matrix."""
    encoder.GROUP = places
    found = encoder.encode_many(iter(works), options or Options(), min_tokens)
    return {(work.stem, name): one for work, many in found for name, one in many.items()}


def equal(a, b):
    """Which parts are the same bytes."""
    return {part: bool(torch.equal(a[part].cpu(), b[part].cpu())) for part in PARTS}


def golden(path):
    """Our path, with the recorded signs, against the recorded bytes; alone and in a full group."""
    recorded = read_file(path)
    _, batch = encoder.load()
    from exllamav3.modules.quant.exl3_lib.quantize import quantize_exl3

    named = encoder.random_signs
    rows = {}
    for shape in ("s256x128", "s128x256"):
        for kind in ("fp4", "gauss"):
            for rate in (2, 3, 4, 5):
                case = f"{shape}/{kind}/K{rate}"
                stored = {part: recorded[f"{case}/{part}"] for part in PARTS}
                weight = recorded[f"{shape}/{kind}/W"].float().cuda()
                h = recorded[f"{shape}/H"].cuda()
                signs = {
                    "in": torch.where(stored["suh"] < 0, 1.0, -1.0),
                    "out": torch.where(stored["svh"] < 0, -1.0, 1.0),
                }
                encoder.random_signs = lambda name, size, signs=signs: signs[name.split("/")[-1]]
                work = Work(case, {"w2": weight}, Hessian(h, 1024), rate)
                rows[case] = {
                    f"group of {places}": equal(
                        encode([work], places, options=PLAIN)[case, "w2"].tensors, stored
                    )
                    for places in (1, 16)
                }
                rows[case]["scaled Hessian"] = scaled(work)
                encoder.random_signs = named
                record = {"H": h.clone(), "count": 1024, "finalized": False, "device": h.device}
                record |= {"packed": False, "n": len(h), "num_total": 1024, "inf_nan": None}
                record |= {"first_key": case}
                arguments = encoder._arguments(work, PLAIN)
                _, _, tensors = quantize_exl3(weight.clone(), record, arguments, False)
                rows[case]["exllamav3 itself"] = equal(tensors, stored)
    return rows


def scaled(work):
    """Our scaled Hessian against exllamav3's own: share of equal words, error over its error."""
    from exllamav3.modules.quant.exl3_lib.quantize import quantize_exl3

    encoder.GROUP = 1
    (ready,) = encoder._make_ready(work, Options(), 1)
    ((ours, _),) = encoder._quantize([[ready]], Options(), *encoder.load())
    (ready,) = encoder._make_ready(work, Options(), 1)
    arguments = encoder._arguments(work, Options()) | {"scaled_hessian": True}
    weight = work.weights["w2"].float() * ready.flips
    _, _, theirs = quantize_exl3(weight, ready.record | {"L": None}, arguments, False)
    plain = encode([work], 1, options=PLAIN)[work.stem, "w2"]
    ours, theirs = (encoder._finish(ready, found, 0.0) for found in (ours, theirs))
    words = ours.tensors["trellis"] == theirs.tensors["trellis"]
    return {
        "equal_words": float(words.float().mean()),
        "proxy_error_over_exllamav3": ours.proxy_error / theirs.proxy_error,
        "proxy_error_over_plain": ours.proxy_error / plain.proxy_error,
    }


def records(path):
    """Our record of a Hessian against exllamav3's, bit for bit."""
    from exllamav3.modules.quant.exl3_lib.quantize import finalize_capture_H

    recorded = read_file(path)
    rows = {}
    hessians = {shape: recorded[f"{shape}/H"].cuda() for shape in ("s256x128", "s128x256")}
    x = torch.randn(8192, 5120, device="cuda") * torch.linspace(0.2, 2, 5120, device="cuda")
    hessians["5120"] = x.T @ x
    for name, h in hessians.items():
        theirs = {"H": h.clone(), "count": 1024, "finalized": False, "device": h.device}
        torch.manual_seed(0)
        finalize_capture_H(theirs, {"sigma_reg": 0.025}, False)
        damped = encoder._damped(h, 1024, 0.025)
        rotated = encoder._rotated(damped, theirs["su"].flatten())
        factor, _ = encoder._block_ldl(rotated, 0.025)
        ours = {"H": rotated, "L": factor, "diag": damped.diagonal()}
        rows[name] = {
            part: {
                "equal": bool(torch.equal(ours[part].cpu(), theirs[part].cpu())),
                "relative": float(
                    (ours[part].cpu() - theirs[part].cpu()).norm() / theirs[part].cpu().norm()
                ),
            }
            for part in ("H", "L", "diag")
        }
    return rows


def decoder(sizes=((5120, 2304), (2304, 5120)), rates=(2, 3, 4, 5)):
    """Inner matrices: CPU decoder, torch decoder and exllamav3's reconstruct."""
    from exllamav3.ext import exllamav3_ext as ext

    rows = {}
    for k, n in sizes:
        for rate in rates:
            stored = random_matrix(k, n, rate)
            theirs = torch.empty(k, n, dtype=torch.half, device="cuda")
            ext.reconstruct(theirs, stored["trellis"].cuda(), rate, False, True)
            ours = torch.from_numpy(trellis.decode_inner(stored["trellis"].numpy()))
            rows[f"{k}x{n}/K{rate}"] = {
                "CPU decoder": bool(torch.equal(ours, theirs.cpu())),
                "torch decoder": bool(
                    torch.equal(decode_inner(stored["trellis"].cuda(), "mul1"), theirs.float())
                ),
            }
    return rows


def random_matrix(k, n, rate):
    """What CUDA writes for a Gaussian matrix with a Hessian."""
    encoder.GROUP = 1
    generator = torch.Generator("cuda").manual_seed(k + rate)
    x = torch.randn(2 * k, k, generator=generator, device="cuda")
    weight = torch.randn(k, n, generator=generator, device="cuda")
    name = f"random/{k}/{rate}"
    return encode([Work(name, {"w2": weight}, Hessian(x.T @ x, 2 * k), rate)], 1)[
        name, "w2"
    ].tensors


def neighbours(size=(1280, 768), rate=3):
    """One expert's bytes: alone, among others in another place, again, and by size of the group."""
    k, n = size
    generator = torch.Generator("cuda").manual_seed(1)

    def work(name):
        x = torch.randn(4096, k, generator=generator, device="cuda")
        weights = {
            m: torch.randn(k, n, generator=generator, device="cuda").bfloat16()
            for m in ("w1", "w3")
        }
        return Work(name, weights, Hessian(x.T @ x, 4096), rate)

    works = [work(str(number)) for number in range(16)]
    alone = encode(works[5:6], 16)
    variants = {
        "again": encode(works[5:6], 16),
        "among 15 others": encode(works, 16),
        "last of 3": encode([works[0], works[9], works[5]], 16),
        "group of 1": encode(works[5:6], 1),
        "group of 4": encode(works[4:8], 4),
    }
    return {
        name: all(
            all(equal(found["5", m].tensors, alone["5", m].tensors).values()) for m in ("w1", "w3")
        )
        for name, found in variants.items()
    }


def policies(k=256, n=128, rate=3):
    """What cannot be encoded with feedback: reasons, and errors over those of the CPU encoder."""
    generator = torch.Generator("cuda").manual_seed(2)
    x = torch.randn(600, k, generator=generator, device="cuda")
    good, few = x.T @ x, x[:3].T @ x[:3]
    broken = good.clone()
    broken[3, 3] = float("nan")
    indefinite = torch.eye(k, device="cuda") - 0.5 * torch.ones(k, k, device="cuda")
    weight = torch.randn(k, n, generator=generator, device="cuda").bfloat16()
    cases = {
        "usable": (weight, good, 600),
        "few": (weight, few, 3),
        "none": (weight, torch.zeros_like(good), 0),
        "not finite": (weight, broken, 600),
        "indefinite": (weight, indefinite, 600),
        "zeros": (torch.zeros_like(weight), good, 600),
    }
    works = [Work(name, {"w2": w}, Hessian(h, c), rate) for name, (w, h, c) in cases.items()]
    found = encode(works, 16, 16)
    rows = {}
    for work in works:
        ours = found[work.stem, "w2"]
        h = work.hessian
        theirs = encode_group(
            {"w2": work.weights["w2"].cpu()},
            h.matrix.cpu(),
            h.count,
            rate,
            work.stem,
            min_tokens=16,
        )["w2"]
        rows[work.stem] = {
            "fallback": ours.fallback,
            "same_reason": (ours.fallback, ours.notes) == (theirs.fallback, theirs.notes),
            "relative_frobenius": [ours.relative_frobenius, theirs.relative_frobenius],
            "proxy_error": [ours.proxy_error, theirs.proxy_error],
        }
    return rows


def tiny(checkpoint, captures, ledger, weighting):
    """Proxy errors of a layer: CUDA over CPU."""
    source = open_checkpoint(checkpoint)
    cfg = model_config(source.config)
    entries = json.loads(Path(ledger).read_text())["entries"]
    layer, rate = entries[0]["layer"], entries[0]["rate"]
    mapped = map_captures(captures, layer)
    works = []
    for expert in sorted({entry["expert"] for entry in entries}):
        w = {m: source.weight(expert_stem(layer, expert, m), "cuda") for m in ("w1", "w2", "w3")}
        gate_up, down = expert_hessians(
            mapped, expert, w["w1"], w["w3"], cfg.swiglu_limit, weighting
        )
        stem = f"layers.{layer}.ffn.experts.{expert}"
        works.append(Work(stem, {"w1": w["w1"].T, "w3": w["w3"].T}, gate_up, rate))
        works.append(Work(stem, {"w2": w["w2"].T}, down, rate))
    found = encode(works, 16, 16)
    ratios = {}
    for entry in entries:
        if entry["rate"] != rate:
            continue
        for matrix, measured in entry["matrices"].items():
            ours = found[f"layers.{layer}.ffn.experts.{entry['expert']}", matrix].proxy_error
            ratios[f"{entry['expert']}.{matrix}"] = ours / measured["proxy_error"]
    values = np.array(list(ratios.values()))
    return {
        "layer": layer,
        "rate": rate,
        "matrices": len(values),
        "mean_ratio": float(values.mean()),
        "standard_error": float(values.std(ddof=1) / len(values) ** 0.5),
        "least": float(values.min()),
        "largest": float(values.max()),
    }


def forward(recorded):
    """Per layer, from the recorded state before it: the bars of the tests and where we are."""
    sys.path.insert(0, str(ROOT / "tests"))
    import model_a
    from trellisbank.model.forward import advance, finish, first_state
    from trellisbank.model.weights import load_shared

    if recorded:
        everything = read_file(recorded)
        model_a.golden = lambda: everything
    cfg, checkpoint, golden = model_a.config(), model_a.checkpoint(), model_a.golden()
    rows = golden["layers.0.stream"].shape[0]
    ids = golden["input_ids"][:rows]

    def on_gpu(state):
        return replace(state, **{name: t.cuda() for name, t in state.tensors.items()})

    start = first_state(cfg, ids, load_shared(checkpoint, cfg, "embed", "cuda"))
    layers = {}
    free = start
    for layer in model_a.LAYERS:
        before = on_gpu(model_a.recorded(layer - 1)) if layer else start
        free, _ = advance(checkpoint, cfg, layer, ids, free)
        state, capture = advance(checkpoint, cfg, layer, ids, before)
        expected = model_a.recorded(layer)
        ours = state.stream.cpu().float().flatten(2)
        theirs = expected.stream.float().flatten(2)
        error = ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).flatten()
        routes = capture.route_indices.cpu().sort(-1).values
        flipped = (routes != golden[f"layers.{layer}.route_indices"].sort(-1).values).any(-1)
        flipped = flipped.flatten()
        figures = {"route_flips": int(flipped.sum()), "tokens": len(flipped)}
        if f"layers.{layer}.topk_idxs" in golden:
            scores = golden[f"layers.{layer}.index_score"].float()
            chosen, wanted = state.selection.cpu(), expected.selection
            other = (chosen != wanted).any(-1)
            gaps = []
            for row, query in other.nonzero().tolist():
                mine, own = (set(s[row, query].tolist()) - {-1} for s in (chosen, wanted))
                swapped = scores[row, query][sorted(mine ^ own)]
                step = 2.0 ** (torch.frexp(swapped.abs().max()).exponent - 8)
                gaps.append(float((swapped.max() - swapped.min()) / step))
            figures["selection_flips"] = int(other.sum())
            figures["largest_gap_bf16_steps"] = max(gaps, default=0.0)
            flipped |= other.flatten()
        elif state.selection is not None:
            assert torch.equal(state.selection.cpu(), expected.selection)
        same = error[~flipped]
        mix = (state.pre_mix.cpu() - expected.pre_mix).abs().amax(-1).flatten()[~flipped]
        figures |= {
            "median": float(error.median()),
            "p99": float(same.quantile(0.99)),
            "max_without_flips": float(same.max()),
            "max": float(error.max()),
            "pre_mix": float(mix.max()),
        }
        layers[layer] = figures
    norm, head = (load_shared(checkpoint, cfg, name, "cuda") for name in ("norm", "head"))
    _, nll = finish(cfg, free, ids, norm, head)
    last = golden["layers.5.stream"].float().flatten(2)
    drift = (
        (free.stream.cpu().float().flatten(2) - last).norm(dim=-1) / last.norm(dim=-1)
    ).flatten()
    return {
        "rows": rows,
        "layers": layers,
        "free_running": {
            "mean_nll_difference": float(nll.cpu().mean() - golden["nll"].mean()),
            "median": float(drift.median()),
            "p99": float(drift.quantile(0.99)),
        },
    }


def main():
    """Write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["encoder", "policies", "tiny", "forward"])
    parser.add_argument("--golden", help="safetensors with recorded encodings (exllamav3, seed 0)")
    parser.add_argument("--recorded", help="safetensors with all rows of the recorded forward")
    parser.add_argument("--captures", nargs="+")
    parser.add_argument("--ledger")
    parser.add_argument("--weighting", choices=["none", "route"], default="route")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_grad_enabled(False)
    if options.what == "encoder":
        encoder.load()
        result = {"records": records(options.golden), "golden": golden(options.golden)}
        result |= {"decoder": decoder(), "neighbours": neighbours(), "policies": policies()}
    elif options.what == "policies":
        result = policies()
    elif options.what == "tiny":
        result = tiny(
            ROOT / "resources/tiny/checkpoint", options.captures, options.ledger, options.weighting
        )
    else:
        result = forward(options.recorded)
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
