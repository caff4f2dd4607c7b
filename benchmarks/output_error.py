# SPDX-License-Identifier: Apache-2.0
"""The error at an expert's output: of each matrix group, of both, and as a first order has it.

    python benchmarks/output_error.py [--run results/compare] [--bank results/bank]

Needs a run with captures and ledgers, encoded with `down_weighting: route`. Beside what the ledger
measured of each group stands the energy that both lose together, and what the proxy errors of w1
and w3 would give for gate_up: (proxy_w1 + proxy_w3) |A W2|^2, the error of a hidden activation
carried through SwiGLU and w2 in proportion.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from trellisbank.bank import GROUPS, Bank
from trellisbank.checkpoint import expert_stem, open_checkpoint
from trellisbank.files import read_json
from trellisbank.formats import trellis
from trellisbank.model.config import model_config
from trellisbank.model.moe import swiglu
from trellisbank.plan.ledger import read_ledgers
from trellisbank.quantize.block import map_captures


def stored(bank: Bank, key: str, matrix: str) -> torch.Tensor:
    """The matrix that a release would hold, fp32 [out, in]."""
    tensors, _ = bank.get(key)
    parts = {name.split(".")[1]: t for name, t in tensors.items() if name.startswith(f"{matrix}.")}
    return torch.from_numpy(trellis.decode(*trellis.stored_matrix(parts))).T


def expert_tokens(captures, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Routed inputs fp32 [n, D] and their weights [n] over all splits."""
    inputs, weights = [], []
    for ffn_input, chosen, routing in captures:
        mine = chosen.flatten(0, -2) == expert
        tokens = mine.any(dim=1).nonzero().squeeze(1)
        inputs.append(ffn_input.flatten(0, -2)[tokens].float())
        weights.append((routing.flatten(0, -2)[tokens] * mine[tokens]).sum(dim=1))
    return torch.cat(inputs), torch.cat(weights)


def measure(run: Path, bank: Bank) -> list[dict]:
    """Return the energies of every (layer, expert, rate) with both groups encoded, with tokens."""
    record = next((run / "provenance/encode").glob("*.json"))
    source = open_checkpoint(read_json(record)["parameters"]["source"])
    limit = model_config(source.config).swiglu_limit
    entries = read_ledgers(sorted(run.glob("encoded/*/*.json")))
    places = sorted({place[:2] for place in entries})
    lines = []
    for layer in sorted({layer for layer, _ in places}):
        captures = map_captures(sorted(run.glob(f"captures/*/L{layer:02d}.safetensors")), layer)
        for expert in (e for at, e in places if at == layer):
            rates = [
                k for k in range(2, 9) if all((layer, expert, g, k) in entries for g in GROUPS)
            ]
            x, routing = expert_tokens(captures, expert)
            if not rates or not len(x):
                continue
            w1, w2, w3 = (
                source.weight(expert_stem(layer, expert, m)).float() for m in ("w1", "w2", "w3")
            )
            hidden = swiglu(x @ w1.T, x @ w3.T, limit) * routing[:, None]
            for rate in rates:
                gate_up, down = (entries[layer, expert, g, rate] for g in GROUPS)
                s1, s3 = (stored(bank, gate_up["key"], m) for m in ("w1", "w3"))
                s2 = stored(bank, down["key"], "w2")
                lowered = swiglu(x @ s1.T, x @ s3.T, limit) * routing[:, None]
                matrices = gate_up["matrices"]
                first_order = (
                    matrices["w1"]["proxy_error"] + matrices["w3"]["proxy_error"]
                ) * down["matrices"]["w2"]["output_energy"]
                lines.append(
                    {
                        "layer": layer,
                        "expert": expert,
                        "rate": rate,
                        "tokens": len(x),
                        "gate_up": gate_up["expert_error_energy"],
                        "gate_up_first_order": first_order,
                        "down": down["matrices"]["w2"]["output_error_energy"],
                        "both": energy(hidden @ w2.T - lowered @ s2.T),
                    }
                )
    return lines


def energy(error: torch.Tensor) -> float:
    """Sum of squares."""
    return float(error.square().sum(dtype=torch.float64))


def compared(lines: list[dict], true: str, predicted: str) -> dict:
    """Ratio true / predicted (quantiles), and the correlation of their logarithms."""
    a, b = (np.array([line[name] for line in lines]) for name in (true, predicted))
    low, half, high = np.quantile(a / b, [0.1, 0.5, 0.9])
    return {
        "n": len(a),
        "ratio_p10": low,
        "ratio_median": half,
        "ratio_p90": high,
        "log_correlation": float(np.corrcoef(np.log(a), np.log(b))[0, 1]),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, default=Path("results/compare"))
    parser.add_argument("--bank", type=Path, default=Path("results/bank"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = measure(options.run, Bank(options.bank))
    for line in lines:
        line["sum"] = line["gate_up"] + line["down"]
    for rate in sorted({line["rate"] for line in lines}):
        part = [line for line in lines if line["rate"] == rate]
        for true, predicted in (("gate_up", "gate_up_first_order"), ("both", "sum")):
            found = compared(part, true, predicted)
            print(
                f"K={rate} {true} / {predicted}: n {found['n']}, ratio {found['ratio_median']:.3f} "
                f"({found['ratio_p10']:.3f} to {found['ratio_p90']:.3f}), "
                f"correlation of logarithms {found['log_correlation']:.4f}"
            )
    for layer in sorted({line["layer"] for line in lines}):
        part = [line for line in lines if line["layer"] == layer]
        found = compared(part, "gate_up", "gate_up_first_order")
        spread = f"{found['ratio_p10']:.3f} to {found['ratio_p90']:.3f}"
        print(f"L{layer:02d}: ratio {found['ratio_median']:.3f} ({spread})")


if __name__ == "__main__":
    main()
