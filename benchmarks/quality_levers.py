# SPDX-License-Identifier: Apache-2.0
"""What each option of the encoder does to the held-out loss of the small checkpoint.

    .venv/bin/python benchmarks/quality_levers.py [--rate 3] [--run results/tiny]

Needs a finished `make run`: its captures and the hidden states of the source. Every variant is
encoded, spliced into a release, run over the panels and compared with the plain one by window.
"""

import argparse
import json
import platform
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trellisbank.bank import Bank
from trellisbank.checkpoint import open_checkpoint
from trellisbank.evaluate.bootstrap import compare_files
from trellisbank.evaluate.scores import score_files
from trellisbank.files import read_json, write_json
from trellisbank.model.streamed import forward_rows
from trellisbank.plan.freeze import load_plan, planned_entries
from trellisbank.plan.recipe import freeze_recipe, write_base
from trellisbank.quantize.block import describe_hessians, encode_block
from trellisbank.quantize.expert import Options
from trellisbank.release.finish import finish_release
from trellisbank.release.splice import splice_shard

PANELS = ("code", "prose")
SCALED = Options(scaled_hessian=True)
PLAIN = Options(scaled_hessian=False)
VARIANTS = {
    "plain": (PLAIN, "none"),
    "scaled Hessian": (SCALED, "none"),
    "no refit": (replace(PLAIN, refit=False), "none"),
    "no output scales": (replace(PLAIN, out_scales=False), "none"),
    "sigma_reg 0.01": (replace(PLAIN, sigma_reg=0.01), "none"),
    "sigma_reg 0.05": (replace(PLAIN, sigma_reg=0.05), "none"),
    "down by route": (PLAIN, "route"),
    "scaled Hessian, down by route": (SCALED, "route"),
}


def encode_layer(source: Path, run: Path, folder: Path, layer: int, name: str) -> None:
    """Encode all experts of a layer as a variant asks."""
    options, weighting = VARIANTS[name]
    captures = sorted(run.glob(f"captures/*/L{layer:02d}.safetensors"))
    hessians = folder / f"hessians-{layer}.json"
    describe_hessians(
        source=source,
        layer=layer,
        captures=captures,
        down_weighting=weighting,
        receipt_path=hessians,
    )
    encode_block(
        source=source,
        layer=layer,
        block=0,
        experts_per_block=1 << 16,
        wanted_path=folder / f"wanted-{layer}.json",
        hessians_path=hessians,
        captures=captures,
        bank=folder.parent / "bank",
        min_tokens=16,
        options=options,
        down_weighting=weighting,
        backend="cpu",
        threads=1,
        ledger_path=folder / f"ledger-{layer}.json",
    )


def measure(source: Path, run: Path, folder: Path, name: str, rate: float) -> dict[str, Path]:
    """Make the release of a variant; return its score table for each panel."""
    folder.mkdir()
    checkpoint = open_checkpoint(source)
    manifest = run / "source/manifest.json"
    layers = range(len(read_json(manifest)["layers"]))
    recipe = {"method": "uniform", "layout": "cuda-exl3", "average_rate": rate, "seed": 0}
    wanted = [folder / f"wanted-{layer}.json" for layer in layers]
    write_base(recipe=recipe, manifest_path=manifest, statistics=[], wanted_paths=wanted)
    with ProcessPoolExecutor(2) as pool:
        done = [pool.submit(encode_layer, source, run, folder, layer, name) for layer in layers]
        for job in done:
            job.result()
    ledgers = [folder / f"ledger-{layer}.json" for layer in layers]
    freeze_recipe(
        name="variant",
        recipe=recipe,
        manifest_path=manifest,
        ledgers=ledgers,
        statistics=[],
        root=folder,
        plan_path=folder / "plan.json",
    )
    plan = load_plan(folder / "plan.json")
    experts = read_json(manifest)["routed_experts"]
    entries = planned_entries(plan, experts, ledgers, folder)
    keys = {place: entry["key"] for place, entry in entries.items()}
    bank, release = Bank(folder.parent / "bank"), folder / "release"
    receipts = [
        splice_shard(
            checkpoint,
            shard,
            plan,
            bank,
            keys,
            release,
            read_json(run / f"source/shards/{Path(shard).stem}.json")["sha256"],
        )
        for shard in checkpoint.shards
    ]
    finish_release(checkpoint, plan, receipts, release, calibration={"rows": 64, "cols": 256})
    tables = {}
    for panel in PANELS:
        hidden = folder / f"{panel}.safetensors"
        rows = run / f"rows/{panel}.safetensors"
        forward_rows(checkpoint=release, rows=rows, hidden=hidden)
        tables[panel] = folder / f"{panel}.parquet"
        score_files(
            run / f"forward/source/{panel}/hidden.safetensors",
            source,
            hidden,
            release,
            rows,
            tables[panel],
            folder / f"{panel}.json",
            release_name=name,
            panel=panel,
        )
    return tables


def main() -> None:
    """Measure every variant and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=3)
    parser.add_argument("--run", type=Path, default=Path("results/tiny"))
    parser.add_argument("--source", type=Path, default=Path("resources/tiny/checkpoint"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/quality_levers.json"))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    options = parser.parse_args()
    if options.variants[0] != "plain":
        parser.error("the first variant is the one that the others are compared with: plain")
    torch.set_num_threads(1)
    results = {}
    with TemporaryDirectory() as scratch:
        tables: dict[str, dict[str, Path]] = {}
        for number, name in enumerate(options.variants):
            folder = Path(scratch) / f"v{number}"
            tables[name] = measure(options.source, options.run, folder, name, options.rate)
            for panel in PANELS:
                own = compare_files(tables[name][panel], folder / f"own-{panel}.json", seed=0)
                paired = None
                if number:
                    paired = compare_files(
                        tables[name][panel],
                        folder / f"paired-{panel}.json",
                        seed=0,
                        baseline_path=tables["plain"][panel],
                    )["quantities"]["kl_difference"]
                results.setdefault(name, {})[panel] = {
                    "kl": own["quantities"]["kl"],
                    "kl_difference_to_plain": paired,
                }
                line = f"{name:32} {panel:6} KL {own['quantities']['kl']['mean']:.5f}"
                if paired:
                    line += f"  {paired['mean']:+.5f} [{paired['low']:+.5f}, {paired['high']:+.5f}]"
                print(line, flush=True)
    write_json(
        options.out,
        {
            "date": date.today().isoformat(),
            "processor": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "rate": options.rate,
            "unit": "nats/token",
            "variants": json.loads(json.dumps(results)),
        },
    )


if __name__ == "__main__":
    main()
