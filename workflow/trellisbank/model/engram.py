# SPDX-License-Identifier: Apache-2.0
"""Engram: hashed n-gram memory that is added to the stream before a layer.

Ids depend on the tokens alone: tokens are first mapped to a compressed vocabulary (text that
looks alike shares an id), then the last 2..N of them are hashed into tables of prime size.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import Tensor

from trellisbank.errors import CheckpointError, ForwardError
from trellisbank.model.attention import Weights
from trellisbank.model.config import ModelConfig
from trellisbank.model.primitives import BF16, linear

HASH_SEED = 10007
GATE_FLOOR = 1e-6
PRIVATE_SPACE = "\ue000"


def engram(cfg: ModelConfig, stream: Tensor, memory: Tensor, weights: Weights) -> Tensor:
    """Add the gated memory to each copy of the stream.

    Args:
        cfg: The model.
        stream: bf16 `[..., C, D]`.
        memory: bf16 `[..., columns, width]`: the table's rows of each token's hash ids.
        weights: The layer's tensors.

    Returns:
        bf16 `[..., C, D]`.
    """
    copies, width = stream.shape[-2:]
    mixed = linear(memory.flatten(-2), weights["engram.wkv"]).float()
    keys, value = mixed.split([copies * width, width], dim=-1)
    keys = keys.unflatten(-1, (copies, width))
    wide = stream.float()
    pair = weights["engram.q_weight"].float() * weights["engram.k_weight"].float()
    match = (wide * pair * keys).sum(-1)
    eps = cfg.rms_norm_eps
    norms = torch.rsqrt(wide.square().mean(-1) + eps) * torch.rsqrt(keys.square().mean(-1) + eps)
    match = match * norms * width**-0.5
    gate = torch.sigmoid(torch.copysign(match.abs().clamp_min(GATE_FLOOR).sqrt(), match))
    added: Tensor = gate.unsqueeze(-1) * value.unsqueeze(-2)
    return (wide + added).to(BF16)


def unique_rows(read: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Make a reader of distinct ascending ids take ids of any shape: `[...]` to `[..., w]`."""

    def rows(ids: Tensor) -> Tensor:
        distinct, place = ids.unique(return_inverse=True)
        found: Tensor = read(distinct)[place]
        return found

    return rows


def compressed_tokens(cfg: ModelConfig, tokenizer: Path) -> np.ndarray:
    """Compressed id of each token id, int64 `[len(tokenizer)]`; computed once a tokenizer.

    Args:
        cfg: The model.
        tokenizer: `tokenizer.json` of the checkpoint.

    Raises:
        CheckpointError: No such file, or it gives another number of distinct ids than the model
            was trained with (every hash id would be wrong).
    """
    try:
        ids = _compress(tokenizer.read_text(encoding="utf-8"))
    except Exception as error:  # the tokenizers library raises nothing more specific
        raise CheckpointError(
            "The tokenizer cannot be read, and Engram ids need it.",
            file=tokenizer,
            expected="tokenizer.json of this checkpoint",
            found=str(error),
            fix="copy tokenizer.json from the release",
        ) from error
    if ids.max() + 1 != cfg.engram_compressed_vocab_size:
        raise CheckpointError(
            "The tokenizer gives another compressed vocabulary than the model was trained with.",
            file=tokenizer,
            expected=cfg.engram_compressed_vocab_size,
            found=int(ids.max()) + 1,
            fix="use the tokenizer.json that belongs to this checkpoint",
        )
    return ids


@lru_cache(maxsize=4)
def _compress(text: str) -> np.ndarray:
    tokenizer = Tokenizer.from_str(text)
    alike = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            # A lone space survives the strip in disguise.
            normalizers.Replace(Regex(r"^ $"), PRIVATE_SPACE),
            normalizers.Strip(),
            normalizers.Replace(PRIVATE_SPACE, " "),
        ]
    )
    seen: dict[str, int] = {}
    ids = []
    for token in range(tokenizer.get_vocab_size(with_added_tokens=True)):
        plain = tokenizer.decode([token], skip_special_tokens=False)
        # Part of a character decodes to U+FFFD: its own vocabulary string tells it apart.
        own = tokenizer.id_to_token(token) if "\ufffd" in plain else None
        key = own or alike.normalize_str(plain) or plain
        ids.append(seen.setdefault(key, len(seen)))
    table = np.array(ids, dtype=np.int64)
    table.setflags(write=False)
    return table


@lru_cache(maxsize=8)
def primes(cfg: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """Table sizes of each Engram layer, in column order (n-gram length, then head).

    One ascending sequence of primes over all layers, from `engram_vocab_size` on.

    Raises:
        CheckpointError: A layer's sizes do not add up to its `engram_num_embeddings`.
    """
    found: list[tuple[int, ...]] = []
    candidate = max(cfg.engram_vocab_size, 2)
    for place, layer in enumerate(cfg.engram_layer_ids):
        own: list[int] = []
        while len(own) < cfg.engram_columns:
            divisors = np.arange(2, int(candidate**0.5) + 1)
            if (candidate % divisors != 0).all():
                own.append(candidate)
            candidate += 1
        if sum(own) != cfg.engram_num_embeddings[place]:
            raise CheckpointError(
                "The Engram table has another size than its hash functions.",
                file="config.json",
                tensor="text_config.engram_num_embeddings",
                layer=layer,
                expected=sum(own),
                found=cfg.engram_num_embeddings[place],
                fix="take config.json from the checkpoint as released",
            )
        found.append(tuple(own))
    return tuple(found)


def multipliers(cfg: ModelConfig, layer: int) -> np.ndarray:
    """Odd multipliers for lookback 0..N-1, int64; no product with a compressed id overflows."""
    bound = max(1, (2**63 - 1) // cfg.engram_compressed_vocab_size // 2)
    drawn = np.random.default_rng(HASH_SEED * layer).integers(
        0, bound, size=cfg.engram_max_ngram_size, dtype=np.int64
    )
    return 2 * drawn + 1


def hash_compressed(cfg: ModelConfig, layer: int, compressed: np.ndarray, pad: int) -> np.ndarray:
    """Rows of the layer's table for each token.

    Args:
        cfg: The model.
        layer: An Engram layer.
        compressed: Compressed ids, int64 `[..., S]`.
        pad: Compressed id that stands for tokens before the row.

    Returns:
        int64 `[..., S, columns]`.
    """
    sizes = np.array(primes(cfg)[cfg.engram_layer_ids.index(layer)], dtype=np.int64)
    offsets = np.cumsum(sizes) - sizes
    heads = cfg.engram_n_heads
    length = compressed.shape[-1]
    columns = []
    mixed = np.zeros_like(compressed)
    for back, multiplier in enumerate(multipliers(cfg, layer)):
        shifted = np.full_like(compressed, pad)
        shifted[..., back:] = compressed[..., : max(length - back, 0)]
        mixed = mixed ^ (shifted * multiplier)
        if back:
            part = slice((back - 1) * heads, back * heads)
            columns.append(mixed[..., None] % sizes[part] + offsets[part])
    return np.concatenate(columns, axis=-1)


def hash_ids(cfg: ModelConfig, layer: int, ids: Tensor, compressed: np.ndarray) -> Tensor:
    """Hash ids of token rows: int64 `[rows, S]` to int64 `[rows, S, columns]`.

    N-grams run over document boundaries inside a row.

    Args:
        cfg: The model.
        layer: An Engram layer.
        ids: Token ids.
        compressed: From `compressed_tokens`.

    Raises:
        ForwardError: An id that the tokenizer does not have.
    """
    largest = int(ids.max()) if ids.numel() else 0
    if max(largest, cfg.engram_pad_token_id) >= len(compressed):
        raise ForwardError(
            "A token id has no place in the tokenizer, so it cannot be hashed.",
            layer=layer,
            expected=f"ids below {len(compressed)}",
            found=max(largest, cfg.engram_pad_token_id),
            fix="build the rows with the checkpoint's own tokenizer",
        )
    pad = int(compressed[cfg.engram_pad_token_id])
    return torch.from_numpy(hash_compressed(cfg, layer, compressed[ids.cpu().numpy()], pad))
