# SPDX-License-Identifier: Apache-2.0
"""Scores of a release against its source, one line a token, over the full vocabulary.

The final hidden states of both are kept (width numbers a token instead of vocabulary numbers) and
the logits are made again, a block of the vocabulary at a time: fp32 products, fp64 sums.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from trellisbank.checkpoint import Checkpoint, open_checkpoint
from trellisbank.errors import ForwardError
from trellisbank.evaluate.summary import summarize
from trellisbank.files import atomic_write, canonical_json, write_json
from trellisbank.rows import read_ids
from trellisbank.safetensors_io import map_tensor, read_header, read_rows, read_tensor

SCHEMA = "trellisbank/score/2"
UNITS = {
    "row": "window of the panel, from 0",
    "position": "position of the scored token in its window, from 1",
    "token": "token id",
    "nll_source": "nats",
    "nll_release": "nats",
    "kl": "nats, KL(source || release)",
    "kl_reverse": "nats, KL(release || source)",
    "agree": "same most probable token",
    "best_rank": "rank in the release of the source's most probable token, from 1; "
    "6: sixth or lower; 0 where the logits are not finite",
    "best_probability": "probability, of the source's most probable token",
    "rank_source": "rank of the scored token, from 1; 0 where the logits are not finite",
    "rank_release": "rank of the scored token, from 1; 0 where the logits are not finite",
    "p_true_difference": "probability, release - source",
}
LISTED = 5
"""Ranks up to this are told apart."""
# The forward takes its NLL from fp32 logits in one piece; 1e-3 nats is far above what another
# order of the sums changes and far below what hidden states of other rows give.
FORWARD_NLL_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Head:
    """An output head [vocabulary, width] whose rows are fetched when they are needed.

    `rows` takes int64 ids [n] and returns the head's rows [n, width], in any float dtype.
    """

    vocabulary: int
    rows: Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _Arm:
    """One model's hidden states [rows * S, width] and its running sums, one a scored token."""

    hidden: torch.Tensor
    head: Head
    true_logit: torch.Tensor  # fp32
    maximum: torch.Tensor  # fp64: the largest logit so far
    mass: torch.Tensor  # fp64: sum of exp(logit - maximum)
    cross: torch.Tensor  # fp64: sum of exp(logit - maximum) * (logit - the other model's logit)
    best: torch.Tensor  # int64: the first token that has the largest logit
    larger: torch.Tensor  # int64: tokens whose logit is above the true token's
    other: torch.Tensor  # fp32: the other model's logit of this one's first largest
    top: torch.Tensor  # fp32 [tokens, LISTED]: the largest logits


def score_tokens(
    hidden_source: torch.Tensor,
    head_source: torch.Tensor | Head,
    hidden_release: torch.Tensor,
    head_release: torch.Tensor | Head,
    ids: torch.Tensor,
    *,
    token_block: int = 512,
    vocabulary_block: int = 4096,
) -> pd.DataFrame:
    """Score every token but the first of each window under both models.

    One pass over the vocabulary: with a, b the logits of the two models and L their log-sum-exp,
    KL = sum_v softmax(a)_v (a_v - b_v) - (L_a - L_b). Equal logits give differences of exactly 0,
    hence a KL of exactly 0. Nothing is clamped: rounding may leave a KL a few 1e-16 below 0.

    Memory beside the arguments, in bytes: at most width (20 token_block + 10 vocabulary_block)
    + 60 token_block vocabulary_block + 200 tokens (0.4 GB at width 5120 and 131,072 tokens).

    Args:
        hidden_source: Final hidden states, after the final norm: bf16 [rows, S, width].
        head_source: Output head [vocabulary, width], held or fetched.
        hidden_release: The same of the release.
        head_release: The same of the release.
        ids: The windows' tokens, int64 [rows, S].
        token_block: Tokens worked on at a time.
        vocabulary_block: Head rows worked on at a time. Another block changes results only by the
            rounding of fp32 products (about 1e-6 of a logit) and of fp64 sums.

    Returns:
        One line a scored token, windows in order, with the columns and units of `UNITS`.

    Raises:
        ForwardError: Shapes that do not belong together, or a token outside the vocabulary.
    """
    heads = [_as_head(head_source), _as_head(head_release)]
    _check(hidden_source, hidden_release, heads, ids)
    rows, length = ids.shape
    targets = ids[:, 1:].reshape(-1)
    # The state at position s scores the token at s + 1.
    states = (torch.arange(rows)[:, None] * length + torch.arange(length - 1)).reshape(-1)
    tokens = targets.numel()
    blocks = [slice(at, min(at + token_block, tokens)) for at in range(0, tokens, token_block)]
    source, release = (
        _start(hidden.reshape(rows * length, -1), head, states, targets, blocks)
        for hidden, head in zip((hidden_source, hidden_release), heads, strict=True)
    )
    for first in range(0, heads[0].vocabulary, vocabulary_block):
        part = torch.arange(first, min(first + vocabulary_block, heads[0].vocabulary))
        weights = [head.rows(part).float() for head in heads]
        for block in blocks:
            logits_source, logits_release = (
                _logits(arm, block, weight, states, targets, first)
                for arm, weight in zip((source, release), weights, strict=True)
            )
            _absorb(source, block, logits_source, logits_release, first)
            _absorb(release, block, logits_release, logits_source, first)
    return _table(source, release, ids)


def _as_head(head: torch.Tensor | Head) -> Head:
    if isinstance(head, Head):
        return head
    return Head(head.shape[0], lambda ids: head[ids])


def _check(
    hidden_source: torch.Tensor, hidden_release: torch.Tensor, heads: list[Head], ids: torch.Tensor
) -> None:
    if ids.dim() != 2 or ids.shape[1] < 2:
        raise ForwardError(
            "Windows to score need at least two tokens.",
            expected="ids [rows, S] with S of 2 or more",
            found=list(ids.shape),
        )
    for name, hidden in (("source", hidden_source), ("release", hidden_release)):
        if hidden.dim() != 3 or hidden.shape[:2] != ids.shape:
            raise ForwardError(
                f"The {name}'s hidden states do not belong to these windows.",
                expected=f"[{ids.shape[0]}, {ids.shape[1]}, width]",
                found=list(hidden.shape),
                fix="run the forward of both checkpoints on the rows that are scored",
            )
    if heads[0].vocabulary != heads[1].vocabulary:
        raise ForwardError(
            "Source and release have different vocabularies.",
            expected=heads[0].vocabulary,
            found=heads[1].vocabulary,
        )
    if ids.min() < 0 or ids.max() >= heads[0].vocabulary:
        raise ForwardError(
            "A window holds a token outside the vocabulary.",
            expected=f"ids 0 to {heads[0].vocabulary - 1}",
            found=f"ids {int(ids.min())} to {int(ids.max())}",
            fix="build the rows with this checkpoint's tokenizer",
        )


def _start(
    hidden: torch.Tensor,
    head: Head,
    states: torch.Tensor,
    targets: torch.Tensor,
    blocks: list[slice],
) -> _Arm:
    """Begin the sums. The true token's logit is taken first: its rank is counted against it."""
    true_logit = torch.cat(
        [
            torch.linalg.vecdot(
                hidden[states[block]].double(), head.rows(targets[block]).double()
            ).float()
            for block in blocks
        ]
    )
    tokens = targets.numel()
    return _Arm(
        hidden,
        head,
        true_logit,
        maximum=torch.full((tokens,), -math.inf, dtype=torch.float64),
        mass=torch.zeros(tokens, dtype=torch.float64),
        cross=torch.zeros(tokens, dtype=torch.float64),
        best=torch.zeros(tokens, dtype=torch.int64),
        larger=torch.zeros(tokens, dtype=torch.int64),
        other=torch.zeros(tokens),
        top=torch.full((tokens, LISTED), -math.inf),
    )


def _logits(
    arm: _Arm,
    block: slice,
    weight: torch.Tensor,
    states: torch.Tensor,
    targets: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Return fp32 logits [block, weight rows], the true token's replaced by the one taken first.

    So one value of it stands in the rank, the NLL and the sums.
    """
    logits = arm.hidden[states[block]].float() @ weight.T
    column = targets[block] - first
    inside = torch.nonzero((column >= 0) & (column < weight.shape[0]))[:, 0]
    logits[inside, column[inside]] = arm.true_logit[block][inside]
    return logits


def _absorb(arm: _Arm, block: slice, own: torch.Tensor, other: torch.Tensor, first: int) -> None:
    """Add a block of the vocabulary to the running sums of a block of tokens."""
    highest, column = own.max(dim=1)
    before = arm.maximum[block]
    maximum = torch.maximum(before, highest.double())
    rises = highest > before
    arm.best[block] = torch.where(rises, column + first, arm.best[block])
    counterpart = other.gather(1, column[:, None])[:, 0]
    arm.other[block] = torch.where(rises, counterpart, arm.other[block])
    listed = own.topk(min(LISTED, own.shape[1]), dim=1).values
    arm.top[block] = torch.cat([arm.top[block], listed], dim=1).topk(LISTED, dim=1).values
    shrink = torch.exp(before - maximum)
    mass = torch.exp(own.double() - maximum[:, None])
    arm.maximum[block] = maximum
    arm.mass[block] = arm.mass[block] * shrink + mass.sum(dim=1)
    difference = own.double() - other.double()
    arm.cross[block] = arm.cross[block] * shrink + (mass * difference).sum(dim=1)
    arm.larger[block] += (own > arm.true_logit[block][:, None]).sum(dim=1)


def _table(source: _Arm, release: _Arm, ids: torch.Tensor) -> pd.DataFrame:
    rows, length = ids.shape
    log_sum = [arm.maximum + torch.log(arm.mass) for arm in (source, release)]
    nll = [
        total - arm.true_logit.double()
        for total, arm in zip(log_sum, (source, release), strict=True)
    ]
    finite = [torch.isfinite(value) for value in nll]
    rank = [
        torch.where(good, arm.larger + 1, 0)
        for good, arm in zip(finite, (source, release), strict=True)
    ]
    best_rank = 1 + (release.top > source.other[:, None]).sum(dim=1)
    shift = log_sum[0] - log_sum[1]
    columns = {
        "row": torch.arange(rows).repeat_interleave(length - 1).int(),
        "position": torch.arange(1, length).repeat(rows).int(),
        "token": ids[:, 1:].reshape(-1).int(),
        "nll_source": nll[0],
        "nll_release": nll[1],
        "kl": source.cross / source.mass - shift,
        "kl_reverse": release.cross / release.mass + shift,
        "agree": (source.best == release.best) & finite[0] & finite[1],
        "best_rank": torch.where(finite[0] & finite[1], best_rank, 0).int(),
        "best_probability": torch.exp(source.maximum - log_sum[0]),
        "rank_source": rank[0].int(),
        "rank_release": rank[1].int(),
        "p_true_difference": torch.exp(-nll[1]) - torch.exp(-nll[0]),
    }
    return pd.DataFrame({name: column.numpy() for name, column in columns.items()})


def checkpoint_head(checkpoint: Checkpoint) -> Head:
    """Return the head of a checkpoint (`head.weight`), its rows read by byte range."""
    vocabulary = checkpoint.info("head.weight").shape[0]
    header = checkpoint.header(checkpoint.shard_of("head.weight"))
    return Head(vocabulary, lambda ids: read_rows(header, "head.weight", ids))


def score_files(
    hidden_source: str | os.PathLike[str],
    source: str | os.PathLike[str],
    hidden_release: str | os.PathLike[str],
    release: str | os.PathLike[str],
    rows: str | os.PathLike[str],
    table_path: str | os.PathLike[str],
    summary_path: str | os.PathLike[str],
    *,
    release_name: str,
    panel: str,
) -> dict[str, Any]:
    """Score the kept hidden states of two checkpoints and write table and summary.

    Args:
        hidden_source: Safetensors with `final_hidden` bf16 [rows, S, width] and the forward's own
            `nll` fp32 [rows, S-1]; memory-mapped.
        source: Folder of the source checkpoint; of it only `head.weight` is read.
        hidden_release: The same of the release.
        release: Folder of the release.
        rows: Safetensors with `input_ids` int64 [rows, S].
        table_path: Parquet written: the table of `score_tokens`, names and units in its metadata.
            The same inputs give the same bytes.
        summary_path: JSON written: the summary of `summarize` with names and units.
        release_name: Name of the release in table, summary and report.
        panel: Name of the rows.

    Returns:
        The summary as written.

    Raises:
        ForwardError: Hidden states that do not belong to the rows or to the head: by their shape,
            or because the NLL made here is not the forward's.
        CheckpointError: A file that cannot be read.
    """
    ids = read_ids(rows)
    table = score_tokens(
        map_tensor(read_header(hidden_source), "final_hidden"),
        checkpoint_head(open_checkpoint(source)),
        map_tensor(read_header(hidden_release), "final_hidden"),
        checkpoint_head(open_checkpoint(release)),
        ids,
    )
    summary = {
        "schema": SCHEMA,
        "release": release_name,
        "panel": panel,
        "units": {"nll": "nats/token", "kl": "nats/token", "kl_reverse": "nats/token"}
        | {"perplexity": "1", "top1_agreement": "share of tokens", "rms_p_true_difference": "1"},
        "forward_nll_difference": {
            "source": _check_nll(hidden_source, table["nll_source"]),
            "release": _check_nll(hidden_release, table["nll_release"]),
        },
    } | summarize(table)
    write_table(table_path, table, release=release_name, panel=panel)
    write_json(summary_path, summary)
    return summary


def _check_nll(hidden: str | os.PathLike[str], nll: pd.Series[float]) -> float:
    """Return the largest distance (nats) to the NLL that the forward wrote beside its states."""
    forward = read_tensor(read_header(hidden), "nll").double().reshape(-1).numpy()
    ours = nll.to_numpy()
    finite = np.isfinite(forward) & np.isfinite(ours) if forward.shape == ours.shape else None
    distance = (
        math.inf if finite is None else float(np.abs(forward - ours)[finite].max(initial=0.0))
    )
    if distance > FORWARD_NLL_TOLERANCE:
        raise ForwardError(
            "The NLL of these hidden states, rows and head is not the one that the forward wrote.",
            file=hidden,
            tensor="nll",
            expected=f"at most {FORWARD_NLL_TOLERANCE} nats apart",
            found=f"{distance:.4g} nats",
            fix="score the rows that the forward ran on, with the head of the same checkpoint",
        )
    return distance


def write_table(
    path: str | os.PathLike[str], table: pd.DataFrame, *, release: str, panel: str
) -> None:
    """Write a score table as parquet; its metadata holds release, panel and units."""
    metadata = {
        "schema": SCHEMA,
        "release": release,
        "panel": panel,
        "units": canonical_json(UNITS),
    }
    arrow = pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(metadata)
    with atomic_write(path) as handle:
        pq.write_table(arrow, handle, compression="zstd")


def read_table(path: str | os.PathLike[str]) -> tuple[pd.DataFrame, dict[str, str]]:
    """Read a score table and its metadata (`release`, `panel`, `schema`, `units`)."""
    arrow = pq.read_table(path)
    metadata = {
        key.decode(): value.decode() for key, value in (arrow.schema.metadata or {}).items()
    }
    if metadata.get("schema") != SCHEMA:
        raise ForwardError(
            "A file is no score table of this version.",
            file=path,
            expected=SCHEMA,
            found=metadata.get("schema"),
            fix="score the panel again",
        )
    return arrow.to_pandas(), metadata
