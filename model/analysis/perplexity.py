"""Measure how well a network predicts text: nats per token, perplexity and bits per byte.

    python -m model.analysis.perplexity TEXT... --model model/bundled --held-out 0.05

Bits per byte are the nats of the text / ln 2 / its UTF-8 bytes. They can be compared between networks whose tokenizers
differ.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import get_args

from model.analysis.surprisal import score_text
from model.analysis.token_losses import token_nats
from model.checkpoints.load import load_checkpoint
from model.choices import Dtype
from model.command_line import MODEL_HELP, SHARE, Parser, one_of
from model.network.transformer import Transformer
from model.text.corpus import Corpus, read_utf8
from model.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextScore:
    """The sum of -ln p over the scored tokens, their number, and their UTF-8 bytes (0 if only token ids were given)."""

    nats: float
    num_tokens: int
    num_bytes: int = 0

    def __post_init__(self) -> None:
        if self.num_tokens == 0:
            raise ValueError("the texts are too short: none of them has two tokens")

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


def score_texts(model: Transformer, tokenizer: Tokenizer, texts: Sequence[str]) -> TextScore:
    """Score every token of each text, except the first token of each."""
    sequences = [tokenizer.encode(text) for text in texts]
    score = score_ids(model, sequences)
    first_bytes = sum(len(tokenizer.decode_inside(ids[:1]).encode()) for ids in sequences)
    return replace(score, num_bytes=sum(len(text.encode()) for text in texts) - first_bytes)


def score_ids(model: Transformer, sequences: Sequence[Sequence[int]]) -> TextScore:
    """Score every token of each sequence, except the first token of each."""
    scores = [token_nats(model, sequence) for sequence in sequences]
    return TextScore(sum(float(each.sum()) for each in scores), sum(map(len, scores)))


def print_words(model: Transformer, tokenizer: Tokenizer, paths: Sequence[Path]) -> TextScore:
    """Print the surprisal of every word of some files, and score the files."""
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for path in paths:
        found = score_text(tokenizer, lambda ids: token_nats(model, ids).tolist(), read_utf8(path))
        for word in found.words:
            print(json.dumps({"file": str(path), **asdict(word)}, ensure_ascii=False))  # noqa: T201 (likewise)
        nats += math.log(2) * sum(token.bits or 0.0 for token in found.tokens)
        num_tokens += sum(token.bits is not None for token in found.tokens)
        num_bytes += len(found.text.encode()) - len(found.text[: found.tokens[0].end].encode())
    return TextScore(nats, num_tokens, num_bytes)


def make_parser() -> Parser:
    parser = Parser(description="Measure perplexity and bits per byte of a checkpoint on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--model", default="bundled", help=MODEL_HELP)
    dtypes = ("auto", *get_args(Dtype))
    parser.add_argument("--dtype", default="auto", type=one_of(*dtypes), help=", ".join(dtypes))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--held-out", type=SHARE, default=1.0, help="which share of each text to score, from its end")
    parser.add_argument(
        "--words", action="store_true", help="first print a line of JSON for each word, with its surprisal in bits"
    )
    return parser


def main() -> None:
    parser = make_parser()
    options = parser.parse_args()
    if options.words and options.held_out < 1:
        parser.error("--words scores whole texts, so that it can count their characters; leave --held-out out")
    try:
        checkpoint = load_checkpoint(options.model, dtype=options.dtype, device=options.device)
        if checkpoint.tokenizer is None:
            raise ValueError(f"{options.model} has no tokenizer.json")
        if options.words:
            score = print_words(checkpoint.model, checkpoint.tokenizer, options.texts)
        else:
            corpus = Corpus.read(options.texts, options.held_out)
            score = score_texts(checkpoint.model, checkpoint.tokenizer, corpus.held_out)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    print(json.dumps(score.figures()))  # noqa: T201 (command-line output)


if __name__ == "__main__":
    main()
