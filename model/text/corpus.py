"""Read text files, split them into training and held-out text, and train a tokenizer. Knows nothing of networks."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
END_OF_TEXT_ID = 0

_HEADER = re.compile(r"\A.*^\*\*\* ?START OF TH[^\n]*PROJECT GUTENBERG[^\n]*$", re.M | re.S)
_LICENCE = re.compile(
    r"^(End of (the |this )?Project Gutenberg|\*\*\* ?END OF TH[^\n]*PROJECT GUTENBERG).*\Z", re.M | re.S
)
_LINE_END_IN_PARAGRAPH = re.compile(r"(?<!\n)\n(?!\n|\Z) *")
_TITLE = re.compile(r"\A\s*\[[^\]\n]*\]")  # as in "[Moby Dick by Herman Melville 1851]"


def read_utf8(path: Path) -> str:
    """Read a text in UTF-8 as it is, so that offsets count its characters. Raises `ValueError` if it is not UTF-8."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: the byte at {error.start} is wrong") from None


def read_text(path: Path) -> str:
    """Read a text in UTF-8, or in Latin-1 if it is not UTF-8.

    All line ends become newlines. The title in brackets and Project Gutenberg's header and licence are removed.
    """
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    for pattern in (_HEADER, _LICENCE, _TITLE):
        text = pattern.sub("", text, count=1)
    return text.strip() + "\n"


@dataclass(frozen=True)
class Corpus:
    """Texts to train on, and the held-out end of each text."""

    training: Sequence[str]
    held_out: Sequence[str]

    @classmethod
    def read(cls, paths: Sequence[Path], held_out_share: float, prose: Sequence[Path] = ()) -> "Corpus":
        """Read files, and hold out the last part of each: this share of its characters, from 0 to 1.

        In the files of `prose`, the lines of each paragraph are joined.
        """
        texts = [read_text(path) for path in paths]
        texts += [_LINE_END_IN_PARAGRAPH.sub(" ", read_text(path)) for path in prose]
        borders = [int(len(text) * (1 - held_out_share)) for text in texts]
        pairs = list(zip(texts, borders, strict=True))
        return cls([text[:border] for text, border in pairs], [text[border:] for text, border in pairs])


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level BPE tokenizer. It encodes every text, and decoding the ids gives the same text."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return tokenizer
