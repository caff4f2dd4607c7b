# SPDX-License-Identifier: Apache-2.0
"""What an encoding costs where it is felt: error energy at the output of an expert."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from torch import Tensor

from trellisbank.model.moe import swiglu
from trellisbank.quantize.hessian import CHUNK, Capture


def gate_up_error(
    captures: Iterable[Capture],
    expert: int,
    weights: Mapping[str, Tensor],
    stored: Mapping[str, Tensor],
    limit: float,
    routed: bool,
) -> float | None:
    """Error energy at an expert's output with its gate and up as stored, its `w2` as in the source.

    The sum over the expert's calibration tokens of `|r (a - a') w2|^2`, with `a` the activation
    before `w2` and `a'` the one that the stored matrices give. Products are fp32 and nothing is
    rounded to bf16 between them, so that the error of high rates is not lost in rounding; sums are
    fp64. A product of `CHUNK` tokens at a time is held.

    Args:
        captures: One for each split; tokens may have any leading shape.
        expert: Its number.
        weights: `w1`, `w3` `[I, D]` and `w2` `[D, I]` of the source, on one device.
        stored: `w1` and `w3` as stored, fp32 `[I, D]`, there too.
        limit: SwiGLU clamp, 0 for none.
        routed: Whether `r` is the routing weight, as in the Hessian of `w2`, or 1.

    Returns:
        None without tokens, or where the sum is not finite. Tokens whose inputs are not finite are
        left out, as in the Hessians.
    """
    w1, w2, w3 = (weights[name].float() for name in ("w1", "w2", "w3"))
    total, count = 0.0, 0
    for inputs, chosen, routing in captures:
        mine = chosen.flatten(0, -2) == expert
        tokens = mine.any(dim=1).nonzero().squeeze(1)
        shares = (routing.flatten(0, -2)[tokens] * mine[tokens]).sum(dim=1)
        for part, share in zip(
            inputs.flatten(0, -2)[tokens].split(CHUNK), shares.split(CHUNK), strict=True
        ):
            x = part.to(w1.device).float()
            finite = x.isfinite().all(dim=1)
            x = x[finite]
            lost = swiglu(x @ w1.T, x @ w3.T, limit)
            lost -= swiglu(x @ stored["w1"].T, x @ stored["w3"].T, limit)
            if routed:
                lost *= share.to(w1.device)[finite, None]
            total += float((lost @ w2.T).double().square().sum())
            count += len(x)
    return total if count and math.isfinite(total) else None
