"""How byte-level BPE vocabularies split a text before merges: `tokenizer.ggml.pre` -> the steps of that tokenizer.

The patterns are those of the original tokenizers. A GGUF file has only the name of the tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_WORDS[0]}|{_WORDS[1]}|\p{{N}}|{_SLASHES}"
_GPT4O = rf"{_WORDS[0]}{_CONTRACTION}?|{_WORDS[1]}{_CONTRACTION}?|\p{{N}}{{1,3}}|{_SLASHES}"
# llama.cpp's own rule for a file whose converter did not know the tokenizer.
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True)
class PreTokenization:
    """The steps before merges. Each pattern splits each piece of text into its matches and the text between them."""

    patterns: tuple[str, ...]
    single_digits: bool = False
    nfc: bool = False  # normalize the text to Unicode's form NFC
    ignore_merges: bool = False  # a piece that is a token is not built from merges
    adds_bos: bool = False  # without a key that says so

    def normalizer(self) -> Normalizer | None:
        return normalizers.NFC() if self.nfc else None

    def pre_tokenizer(self) -> PreTokenizer:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*digits, *splits, to_bytes])


_STARCODER = PreTokenization((_GPT2,), single_digits=True)
_LLAMA = PreTokenization((_LLAMA3,), ignore_merges=True, adds_bos=True)
_QWEN = PreTokenization((_QWEN2,), nfc=True)

PRE_TOKENIZATIONS: Mapping[str, PreTokenization] = {
    "default": PreTokenization(_DEFAULT),
    "gpt-2": PreTokenization((_GPT2,)),
    "phi-2": PreTokenization((_GPT2,)),
    "olmo": PreTokenization((_GPT2,), nfc=True),  # that of GPT-NeoX
    "mpt": PreTokenization((_GPT2,), nfc=True),  # likewise
    "smollm": _STARCODER,
    "starcoder": _STARCODER,
    "refact": _STARCODER,  # also Granite
    "llama-bpe": _LLAMA,
    "llama3": _LLAMA,
    "llama-v3": _LLAMA,
    "falcon3": _LLAMA,
    "dbrx": PreTokenization((_LLAMA3,)),  # also OLMo 2 and Phi-4
    "smaug-bpe": PreTokenization((_LLAMA3,)),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "megrez": _QWEN,
    "stablelm2": PreTokenization((_QWEN2,)),
    "tekken": PreTokenization((_TEKKEN,), ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenization((_GPT4O,)),  # also Phi-4-mini
}
