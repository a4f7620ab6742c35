"""How well a network predicts text: nats a token, perplexity, bits a byte.

    python -m model.perplexity TEXT... --model model/bundled --held-out 0.05

Bits a byte compare networks whose tokenizers differ: all nats of the text, over ln 2, over its UTF-8 bytes.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from model.checkpoint import load_checkpoint
from model.corpus import Corpus
from model.tokenizer import Tokenizer
from model.transformer import Transformer


@dataclass(frozen=True)
class Predicted:
    """What a network made of a text: the sum of -ln p over its tokens; of ids alone, the bytes are not known."""

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
    """(start, first scored, end) of windows of `length` tokens that score each token after the first exactly once.

    Each window but the first has `length - stride` tokens of context before the first that it scores.
    """
    if not 1 <= stride <= length:
        raise ValueError(f"windows of {length} tokens cannot move on by {stride}")
    scored = 1
    while scored < num_tokens:
        end = min(num_tokens, length if scored == 1 else scored + stride)
        yield max(0, end - length), scored, end
        scored = end


def predict_texts(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> Predicted:
    """Score every token of every text but its first."""
    sequences = [tokenizer.encode(text) for text in texts]
    predicted = predict_ids(model, sequences)
    first_bytes = sum(len(tokenizer.decode_inside(ids[:1]).encode()) for ids in sequences)
    return replace(predicted, num_bytes=sum(len(text.encode()) for text in texts) - first_bytes)


@torch.inference_mode()
def predict_ids(model: Transformer, sequences: Sequence[Sequence[int]]) -> Predicted:
    """Score every token of every sequence but its first, in windows of the context that move on by half of it."""
    length, device = model.config.max_positions, model.embed.weight.device
    nats, num_tokens = 0.0, 0
    for sequence in sequences:
        ids = torch.tensor(sequence, device=device)
        for start, scored, end in windows(len(ids), length, max(length // 2, 1)):
            logits = model(ids[None, start:end], rows=range(scored - 1 - start, end - 1 - start))[0]  # (R, V)
            nats += float(F.cross_entropy(logits.float(), ids[scored:end], reduction="sum"))
            num_tokens += end - scored
    if num_tokens == 0:
        raise ValueError("there is no text to predict")
    return Predicted(nats, num_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bits a byte and perplexity of a checkpoint on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="model/bundled")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", type=float, default=1.0, help="the share at the end of each text that is scored")
    options = parser.parse_args()
    try:
        checkpoint = load_checkpoint(options.model, dtype=options.dtype, device=options.device)
        if checkpoint.tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer.json")
        corpus = Corpus.read(options.texts, options.held_out)
        predicted = predict_texts(checkpoint.model, checkpoint.tokenizer, corpus.held_out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps(predicted.figures()))  # noqa: T201 (command-line output)


if __name__ == "__main__":
    main()
