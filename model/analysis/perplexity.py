"""Measure how well a network predicts text: nats per token, perplexity and bits per byte.

    python -m model.analysis.perplexity TEXT... --model model/bundled --held-out 0.05

Bits per byte are the nats of the text / ln 2 / its UTF-8 bytes. They can be compared between networks whose tokenizers
differ.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import torch
import torch.nn.functional as F

from model.checkpoints.load import load_checkpoint
from model.choices import Dtype
from model.command_line import MODEL_HELP, SHARE, Parser, one_of
from model.network.transformer import Transformer
from model.text.corpus import Corpus
from model.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextScore:
    """The sum of -ln p over the scored tokens, their number, and their UTF-8 bytes (0 if only token ids were given)."""

    nats: float
    num_tokens: int
    num_bytes: int = 0

    @property
    def nats_per_token(self) -> float:
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.num_bytes

    def figures(self) -> dict[str, float]:
        return {
            "tokens": self.num_tokens,
            "bytes": self.num_bytes,
            "nats_per_token": round(self.nats_per_token, 4),
            "perplexity": round(self.perplexity, 3),
            "bits_per_byte": round(self.bits_per_byte, 4),
        }


def windows(num_tokens: int, length: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Divide a text into windows of `length` tokens that together score every token but the first exactly once.

    Yields (start, first scored, end). In every window except the first, at least `length - stride` tokens of context
    precede the first token that is scored.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"a stride of {stride} does not fit windows of {length} tokens; it must be 1 to {length}")
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, length if scored == 1 else scored + stride)
        yield max(0, end - length), scored, end
        scored = end


def score_texts(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> TextScore:
    """Score every token of each text, except the first token of each."""
    sequences = [tokenizer.encode(text) for text in texts]
    score = score_ids(model, sequences)
    first_bytes = sum(len(tokenizer.decode_inside(ids[:1]).encode()) for ids in sequences)
    return replace(score, num_bytes=sum(len(text.encode()) for text in texts) - first_bytes)


@torch.inference_mode()
def score_ids(model: Transformer, sequences: Sequence[Sequence[int]]) -> TextScore:
    """Score every token of each sequence, except the first token of each.

    The windows are as long as the network's context, and each starts at most half a context after the one before it.
    """
    length, device = model.config.max_positions, model.embed.weight.device
    nats, num_tokens = 0.0, 0
    for sequence in sequences:
        ids = torch.tensor(sequence, device=device)
        for start, scored, end in windows(len(ids), length, max(length // 2, 1)):
            logits = model(ids[None, start:end], rows=range(scored - 1 - start, end - 1 - start))[0]  # (R, V)
            nats += float(F.cross_entropy(logits.float(), ids[scored:end], reduction="sum"))
            num_tokens += end - scored
    if num_tokens == 0:
        raise ValueError("the texts are too short: none of them has two tokens")
    return TextScore(nats, num_tokens)


def main() -> None:
    parser = Parser(description="Measure perplexity and bits per byte of a checkpoint on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="bundled", help=MODEL_HELP)
    dtypes = ("auto", *get_args(Dtype))
    parser.add_argument("--dtype", default="auto", type=one_of(*dtypes), help=", ".join(dtypes))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", type=SHARE, default=1.0, help="which share of each text to score, from its end")
    options = parser.parse_args()
    try:
        checkpoint = load_checkpoint(options.model, dtype=options.dtype, device=options.device)
        if checkpoint.tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer.json")
        corpus = Corpus.read(options.texts, options.held_out)
        score = score_texts(checkpoint.model, checkpoint.tokenizer, corpus.held_out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps(score.figures()))  # noqa: T201 (command-line output)


if __name__ == "__main__":
    main()
