"""Compare a checkpoint with a 5-gram model on held-out text, in bits per byte: the baseline that a network must beat.

    python -m tests.benchmarks.ngram TEXT... --prose BOOK... --model model/bundled

The 5-gram model is trained on the other part of the same texts, over the same tokens. It uses interpolated modified
Kneser-Ney smoothing (Chen & Goodman 1998), with discounts estimated for each order.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from model.analysis.perplexity import score_texts
from model.checkpoints.load import load_checkpoint
from model.text.corpus import END_OF_TEXT_ID, Corpus
from model.text.tokenizer import Tokenizer
from model.training.train import Recipe

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Order:
    """The n-grams of one order: their counts, and for each context the weight of the order below."""

    def __init__(self, grams: Ints, counts: Ints, bits: int) -> None:
        self._grams, self._counts, self._bits = grams, counts, bits
        self._discounts = self._estimate_discounts()
        discounted = self._discounts[np.minimum(counts, 3)]
        self._contexts, group = np.unique(grams >> bits, return_inverse=True)
        self._totals = np.bincount(group, counts)
        self._backoff_weights = np.bincount(group, discounted) / self._totals

    def _estimate_discounts(self) -> Floats:
        """Estimate the discounts for counts of 0, 1, 2, and 3 or more."""
        once, twice, thrice, four_times = (max(int((self._counts == times).sum()), 1) for times in (1, 2, 3, 4))
        share = once / (once + 2 * twice)
        estimates = (1 - 2 * share * twice / once, 2 - 3 * share * thrice / twice, 3 - 4 * share * four_times / thrice)
        return np.array([0.0, *(min(max(d, 0.0), times) for times, d in enumerate(estimates, 1))])

    def interpolate(self, grams: Ints, below: Floats) -> Floats:
        """p(last token | earlier tokens) of grams (N,), from the probabilities of the order below (N,)."""
        counts = np.where(_contains(self._grams, grams), self._counts[_indices(self._grams, grams)], 0)
        contexts = grams >> self._bits
        indices = _indices(self._contexts, contexts)
        own = (counts - self._discounts[np.minimum(counts, 3)]) / self._totals[indices]
        return np.where(_contains(self._contexts, contexts), own + self._backoff_weights[indices] * below, below)


def _indices(sorted_values: Ints, wanted: Ints) -> Ints:
    return np.minimum(np.searchsorted(sorted_values, wanted), len(sorted_values) - 1)


def _contains(sorted_values: Ints, wanted: Ints) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = sorted_values[_indices(sorted_values, wanted)] == wanted
    return found


class KneserNey:
    """An n-gram model, trained on ids (N,). A gram is one integer, which has its last token in the lowest bits."""

    def __init__(self, ids: Ints, vocab_size: int, order: int = 5) -> None:
        self._bits = (vocab_size - 1).bit_length()
        if order * self._bits > 63:
            raise ValueError(f"{order} tokens of a vocabulary of {vocab_size} do not fit in 63 bits")
        self._vocab_size = vocab_size
        grams, counts = np.unique(self._pack(ids, order), return_counts=True)
        orders = [Order(grams, counts, self._bits)]
        for size in range(order - 1, 0, -1):  # lower orders count the distinct contexts of a gram, not its occurrences
            grams, counts = np.unique(grams & ((1 << size * self._bits) - 1), return_counts=True)
            orders.append(Order(grams, counts, self._bits))
        self._orders = orders[::-1]

    def _pack(self, ids: Ints, size: int) -> Ints:
        """ids (N,) -> grams (N - size + 1,) of `size` tokens, the first of which ends at position `size - 1`."""
        grams = np.zeros(len(ids) - size + 1, dtype=np.int64)
        for offset in range(size):
            grams = grams << self._bits | ids[offset : offset + len(grams)]
        return grams

    def probabilities(self, ids: Ints) -> Floats:
        """p of each of ids (N,), given the ids before it."""
        result = np.full(len(ids), 1 / self._vocab_size)
        for size, order in enumerate(self._orders, 1):
            result[size - 1 :] = order.interpolate(self._pack(ids, size), result[size - 1 :])
        return result


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Ints]:
    """For each text, an end-of-text token followed by the tokens of the text."""
    return [np.array([END_OF_TEXT_ID, *tokenizer.encode(text)], dtype=np.int64) for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a checkpoint with a 5-gram model on held-out text.")
    parser.add_argument("texts", nargs="+", type=Path, help="files of plain text")
    parser.add_argument(
        "--prose", nargs="+", type=Path, default=[], help="books of prose, in which the lines of a paragraph are joined"
    )
    parser.add_argument("--model", default="model/bundled", help="directory of the checkpoint")
    parser.add_argument("--held-out", type=float, default=Recipe.held_out, help="share of each text that is held out")
    options = parser.parse_args()
    checkpoint = load_checkpoint(options.model)
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        parser.error(f"{options.model} has no tokenizer.json")
    corpus = Corpus.read(options.texts, options.held_out, options.prose)
    network = score_texts(checkpoint.model, tokenizer, corpus.held_out)
    ngram = KneserNey(np.concatenate(encode(tokenizer, corpus.training)), tokenizer.vocab_size)
    bits = -sum(float(np.log2(ngram.probabilities(ids)[2:]).sum()) for ids in encode(tokenizer, corpus.held_out))
    figures = {
        "tokens": network.num_tokens,
        "bytes": network.num_bytes,
        "network_bits_per_byte": round(network.bits_per_byte, 4),
        "network_perplexity": round(network.perplexity, 2),
        "ngram_bits_per_byte": round(bits / network.num_bytes, 4),
        "ngram_perplexity": round(math.exp2(bits / network.num_tokens), 2),
    }
    print(json.dumps(figures))  # noqa: T201 (command-line output)


if __name__ == "__main__":
    main()
