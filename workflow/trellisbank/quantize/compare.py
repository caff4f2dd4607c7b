# SPDX-License-Identifier: Apache-2.0
"""Fair comparisons: two encodings of one layer on the same rows, and the grid beside a control."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trellisbank.bank import GROUPS
from trellisbank.checkpoint import Checkpoint, expert_stem, open_checkpoint
from trellisbank.files import write_json
from trellisbank.model.config import model_config
from trellisbank.model.moe import expert_hidden
from trellisbank.quantize.block import map_captures
from trellisbank.quantize.expert import quantize_matrix
from trellisbank.quantize.hessian import CHUNK

Pathlike = str | os.PathLike[str]
Progress = Callable[[str], None]

METRICS = ("unweighted", "route_weighted")


def compare_encodings(
    *,
    source: Pathlike,
    first: Pathlike,
    second: Pathlike,
    layer: int,
    captures: Sequence[Pathlike],
    progress: Progress = lambda _: None,
) -> dict[str, Any]:
    """Measure the output error of two releases of one source in a layer, on the same rows.

    Both metrics of the published comparison: every routed row counts once (`unweighted`), or with
    the square of its routing weight (`route_weighted`), as its error enters the layer's output.
    The inputs of `w2` are the source's own activations for both.

    Args:
        source: Folder of the source.
        first: Folder of one release.
        second: Folder of the other.
        layer: Body layer.
        captures: Captures of the rows.
        progress: Told of each expert.

    Returns:
        For each group and metric: relative output error `sqrt(sum |X E|^2 / sum |X W|^2)` over all
        experts for both releases, and in how many experts each has the smaller error. `dropped`
        counts the routed rows that a group left out because a value was not finite.
    """
    opened = [open_checkpoint(path) for path in (source, first, second)]
    cfg = model_config(opened[0].config)
    mapped = map_captures(captures, layer)
    totals = {(group, metric): [0.0, 0.0, 0.0] for group in GROUPS for metric in METRICS}
    wins = {place: [0, 0] for place in totals}
    dropped = dict.fromkeys(GROUPS, 0)
    for expert in range(cfg.n_routed_experts):
        energies, lost = _expert_energies(opened, cfg.swiglu_limit, layer, expert, mapped)
        for group in GROUPS:
            dropped[group] += lost[group]
        for place, measured in energies.items():
            totals[place] = [a + b for a, b in zip(totals[place], measured, strict=True)]
            if measured[1] != measured[2]:
                wins[place][measured[1] > measured[2]] += 1
        progress(f"layer {layer}: expert {expert + 1} of {cfg.n_routed_experts}")
    return {
        "layer": layer,
        "rows": sum(inputs.flatten(0, -2).shape[0] for inputs, _, _ in mapped),
        "dropped": dropped,
        "groups": {
            group: {
                metric: {
                    "relative_output_error": [
                        _root(totals[group, metric][i], totals[group, metric][0]) for i in (1, 2)
                    ],
                    "experts_better": wins[group, metric],
                }
                for metric in METRICS
            }
            for group in GROUPS
        },
    }


def _root(error: float, whole: float) -> float | None:
    """Relative error; None where the rows give no output."""
    return (error / whole) ** 0.5 if whole else None


def _expert_energies(
    checkpoints: Sequence[Checkpoint],
    limit: float,
    layer: int,
    expert: int,
    captures: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> tuple[dict[tuple[str, str], list[float]], dict[str, int]]:
    """`|X W|^2` and `|X E|^2` of both encodings by group and metric; fp64 sums of fp32 products.

    Rows with a value that is not finite are left out, as from Hessians, and counted by group.
    """
    weights = {
        matrix: [c.weight(expert_stem(layer, expert, matrix)) for c in checkpoints]
        for matrices in GROUPS.values()
        for matrix in matrices
    }
    energies = {(group, metric): [0.0, 0.0, 0.0] for group in GROUPS for metric in METRICS}
    dropped = dict.fromkeys(GROUPS, 0)
    for inputs, chosen, routing in captures:
        mine = chosen.flatten(0, -2) == expert
        tokens = mine.any(dim=1).nonzero().squeeze(1)
        route = (routing.flatten(0, -2) * mine)[tokens].sum(dim=1).double().square()
        for part, squares in zip(
            inputs.flatten(0, -2)[tokens].split(CHUNK), route.split(CHUNK), strict=True
        ):
            hidden = expert_hidden(part, weights["w1"][0], weights["w3"][0], limit)
            for group, rows in (("gate_up", part), ("down", hidden.to(torch.bfloat16))):
                finite = rows.isfinite().all(dim=1) & squares.isfinite()
                dropped[group] += len(rows) - int(finite.sum())
                x = rows[finite].float()
                for matrix in GROUPS[group]:
                    true, *coded = (w.float() for w in weights[matrix])
                    for place, error in enumerate([true, *(true - w for w in coded)]):
                        row = (x @ error.T).double().square().sum(dim=1)
                        energies[group, "unweighted"][place] += float(row.sum())
                        energies[group, "route_weighted"][place] += float(
                            (row * squares[finite]).sum()
                        )
    return energies, dropped


def probe_grid(
    *,
    source: Pathlike,
    layers: Sequence[int],
    rates: Sequence[int],
    path: Pathlike,
    threads: int = 1,
    progress: Progress = lambda _: None,
) -> None:
    """Does it matter to the trellis that the weights lie on the FP4 grid?

    One expert a layer is encoded without a Hessian at each rate, and beside it a Gaussian control
    of the same shape whose rows have the same root mean square. If the grid helped or hurt, the
    ratio of their relative errors would leave 1.

    Args:
        source: Folder of the source.
        layers: Body layers; of layer L expert `L mod experts` is taken.
        rates: Bits a weight.
        path: Written: a line a layer, matrix and rate, and the mean ratio of each rate.
        threads: CPU threads.
        progress: Told of each layer.
    """
    checkpoint = open_checkpoint(source)
    experts = model_config(checkpoint.config).n_routed_experts
    lines: list[dict[str, Any]] = []
    for layer in layers:
        for matrix in ("w1", "w2"):
            stem = expert_stem(layer, layer % experts, matrix)
            weight = checkpoint.weight(stem).T.float()
            draw = torch.Generator().manual_seed(layer)
            control = torch.randn(weight.shape, generator=draw)
            control *= weight.square().mean(1, True).sqrt() / control.square().mean(1, True).sqrt()
            for rate in rates:
                errors = [
                    quantize_matrix(w, None, 0, rate, stem, threads=threads).relative_frobenius
                    for w in (weight, control)
                ]
                lines.append(
                    {
                        "layer": layer,
                        "matrix": matrix,
                        "rate": rate,
                        "relative_frobenius": errors[0],
                        "control_relative_frobenius": errors[1],
                    }
                )
        progress(f"layer {layer}: grid and control encoded at {len(rates)} rates")
    ratios: dict[str, list[float]] = {str(rate): [] for rate in rates}
    for line in lines:
        ratio = line["relative_frobenius"] / line["control_relative_frobenius"]
        ratios[str(line["rate"])].append(ratio)
    means = {rate: sum(found) / len(found) for rate, found in ratios.items()}
    write_json(path, {"schema": "trellisbank/probe/1", "mean_ratio": means, "lines": lines})
