# SPDX-License-Identifier: Apache-2.0
"""What counting alone achieves: unigram entropy and an interpolated Kneser-Ney trigram."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Counts:
    """Sorted n-gram keys (base-vocabulary numbers) and their counts."""

    keys: Ids
    counts: Ids

    def of(self, keys: Ids) -> Ids:
        """Counts of n-grams, 0 for those never seen."""
        place = np.searchsorted(self.keys, keys).clip(max=len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.counts[place], 0)

    def contexts(self, vocabulary: int) -> tuple[Counts, Counts]:
        """By all but the last token: sum of counts, and number of distinct continuations."""
        keys, place, kinds = np.unique(
            self.keys // vocabulary, return_inverse=True, return_counts=True
        )
        return Counts(keys, np.bincount(place, self.counts).astype(np.int64)), Counts(keys, kinds)

    @property
    def discount(self) -> float:
        """Absolute discount, ``n1 / (n1 + 2 n2)`` (Ney, Essen and Kneser 1994)."""
        once, twice = (int((self.counts == n).sum()) for n in (1, 2))
        return once / (once + 2 * twice) if once else 0.0


def count(keys: Ids) -> Counts:
    """Count equal keys."""
    return Counts(*np.unique(keys, return_counts=True))


@dataclass(frozen=True)
class Trigram:
    """Interpolated Kneser-Ney trigram (Kneser and Ney 1995; Chen and Goodman 1999, section 2.7).

    The trigram counts tokens; the orders below count distinct left neighbours.
    """

    vocabulary: int
    trigrams: Counts
    bigrams: Counts
    unigrams: Counts

    def probability(self, first: Ids | None, second: Ids, third: Ids) -> NDArray[np.float64]:
        """Probability of ``third`` after two tokens, or after one where ``first`` is None."""
        size = self.vocabulary
        lowest = self._step(self.unigrams, 0 * third, third, np.full(third.shape, 1 / size))
        middle = self._step(self.bigrams, second, second * size + third, lowest)
        if first is None:
            return middle
        context = first * size + second
        return self._step(self.trigrams, context, context * size + third, middle)

    def _step(
        self, counts: Counts, context: Ids, key: Ids, lower: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        totals, kinds = counts.contexts(self.vocabulary)
        total = totals.of(context)
        kept = np.maximum(counts.of(key) - counts.discount, 0)
        given = counts.discount * kinds.of(context)
        seen = np.maximum(total, 1)
        return np.where(total > 0, kept / seen + given / seen * lower, lower)


def train_trigram(tokens: Ids, vocabulary: int) -> Trigram:
    """Count one stream of token ids."""
    pairs = tokens[:-1] * vocabulary + tokens[1:]
    trigrams = count(pairs[:-1] * vocabulary + tokens[2:])
    bigrams = count(trigrams.keys % vocabulary**2)
    unigrams = count(np.unique(pairs) % vocabulary)
    return Trigram(vocabulary, trigrams, bigrams, unigrams)


def trigram_nll(model: Trigram, rows: Ids) -> float:
    """Mean NLL in nats of every token but the first of each row, from inside the row."""
    second = model.probability(None, rows[:, 0], rows[:, 1])
    others = model.probability(rows[:, :-2], rows[:, 1:-1], rows[:, 2:])
    return float(-np.log(np.concatenate([second.ravel(), others.ravel()])).mean())


def unigram_entropy(rows: Ids) -> float:
    """Entropy in nats of the rows' own distribution of tokens."""
    share = np.unique(rows, return_counts=True)[1] / rows.size
    return float(-(share * np.log(share)).sum())
