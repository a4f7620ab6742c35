"""Compile what a text must look like (a JSON schema, a regular expression, a list of choices or a grammar) to a
`Constraint`.

A grammar describes the bytes of the text, so it needs the bytes of every token. They are the bytes that the token adds
to a stream of text (`Tokenizer.streamed_bytes`), so that the grammar sees the text that the client gets.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher, LLTokenizer, regex_to_lark

from model.errors import InvalidField, shortened
from model.text.constraint import Constraint
from model.text.grammar_check import CPU_SECONDS, QUICK_CPU_SECONDS, parser_limits
from model.text.grammar_checker import GrammarChecker, NeedsMoreTime
from model.text.grammar_limits import check_attributes, check_schema
from model.text.tokenizer import Tokenizer

MAX_BYTES = 1 << 16  # of a schema, a grammar, a regular expression or all choices together
MAX_REMEMBERED = 32  # grammars; compiled ones of the largest schemas have about 10 MB
# White space between the parts of JSON is limited, because small models may repeat it without end.
JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,40}"}
# Any tokens may spell a text that the grammar prescribes. Otherwise llguidance would tokenize such texts itself, which
# takes very long for some grammars, and would be wrong for tokenizers that add a space to every text.
START = '%llguidance {"no_forcing": true}\nstart: @main'


class NotRemembered(Exception):
    """A grammar is not among the last ones that were compiled."""


class Grammars:
    """Compiles constraints for the tokenizer and the `vocab_size` of one network.

    Every method raises `InvalidField` with the given field if its argument is invalid or too expensive. A call takes
    milliseconds, in the worst case seconds, most of them without the GIL. The results of the last `MAX_REMEMBERED`
    grammars are remembered, errors too. Only one thread may call the methods.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._vocabulary = LLTokenizer(Vocabulary(tokenizer, vocab_size))  # type: ignore[arg-type]  # also accepted
        self._remembered: dict[bytes, Constraint | InvalidField | NeedsMoreTime] = {}
        self._only_remembers = False
        special = {i: name for i in range(min(vocab_size, tokenizer.vocab_size)) if (name := tokenizer.special_name(i))}
        self._checker = GrammarChecker({"vocab_size": vocab_size, "special": special}, CPU_SECONDS)

    def quick(self) -> "Grammars":
        """The same for another thread, but every method raises `NeedsMoreTime` for a grammar that takes long."""
        other = copy.copy(self)  # the vocabulary is shared
        other._remembered = {}
        other._checker = GrammarChecker(self._checker.vocabulary, QUICK_CPU_SECONDS, is_final=False)
        return other

    def remembered(self) -> "Grammars":
        """The same for any thread, but every method raises `NotRemembered` instead of compiling."""
        other = copy.copy(self)  # the memory is shared
        other._only_remembers = True
        return other

    def json_schema(self, field: str, schema: Mapping[str, Any]) -> Constraint:
        """JSON that is valid under a JSON schema. Its keys come in the order of the schema."""
        return self._compile(field, {"json_schema": json.loads(embedded_schema(field, schema))})

    def json_object(self, field: str) -> Constraint:
        """Any JSON object."""
        return self.json_schema(field, {"type": "object"})

    def regex(self, field: str, pattern: str) -> Constraint:
        """A text that the whole regular expression matches, in the syntax of Rust's `regex` without look-around.

        `\\d`, `\\w` and `\\s` are those of ASCII, because other programs do not agree on the other characters.
        """
        check_length(field, pattern)
        return self._compile(field, {"lark_grammar": f"start: /{regex_to_lark(pattern, use_ascii='dws')}/"})

    def choice(self, field: str, choices: Sequence[str]) -> Constraint:
        """One of the given texts."""
        if not choices or not all(choices):
            raise InvalidField(field, "there must be choices, and none of them may be empty")
        check_length(field, "".join(choices))
        return self._compile(
            field, {"lark_grammar": "start: ANY\nANY: " + " | ".join(quoted(field, c) for c in choices)}
        )

    def grammar(self, field: str, text: str) -> Constraint:
        """A text that fits a grammar: in the Lark dialect of llguidance, or in EBNF as llama.cpp takes it (GBNF)."""
        check_length(field, text)
        if "::=" in text:
            return self._compile(field, {"ebnf": text})
        check_attributes(field, text)
        return self.lark(field, text)

    def lark(self, field: str, text: str) -> Constraint:
        """A text that fits a grammar in the Lark dialect of llguidance. `%json` takes `embedded_schema`."""
        check_length(field, text)
        return self._compile(field, {"lark_grammar": text})

    def _compile(self, field: str, main: dict[str, Any]) -> Constraint:
        key = hashlib.sha256(json.dumps([field, main]).encode()).digest()
        if self._only_remembers:
            result = self._remembered.get(key)
            if result is None:
                raise NotRemembered
        else:
            result = self._remembered.pop(key, None) or self._compile_new(field, main)
            self._remembered[key] = result  # the newest one is the last
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        if isinstance(result, InvalidField):
            raise InvalidField(field, result.reason)
        if isinstance(result, NeedsMoreTime):
            raise NeedsMoreTime
        return result

    def _compile_new(self, field: str, main: dict[str, Any]) -> Constraint | InvalidField | NeedsMoreTime:
        try:
            if "ebnf" in main:
                main = {"lark_grammar": self._checker.convert(field, main["ebnf"])}
                check_length(field, main["lark_grammar"])
            content = json.dumps({"grammars": [{"lark_grammar": START}, {"name": "main", **main}]})
            self._checker.check(field, content)
            matcher = LLMatcher(self._vocabulary, content, log_level=0, limits=parser_limits())
            return Constraint(field, matcher, self._vocab_size)
        except (InvalidField, NeedsMoreTime) as error:
            return error.with_traceback(None)


def embedded_schema(field: str, schema: Mapping[str, Any]) -> str:
    """A JSON schema with our options, as JSON. Raises `InvalidField` for one that is too long or too deep."""
    if "x-guidance" in schema:
        raise InvalidField(field, "x-guidance is not supported")
    try:
        check_length(field, json.dumps(schema))
        check_schema(field, schema)
        return json.dumps({**schema, "x-guidance": JSON_OPTIONS})
    except RecursionError:
        raise InvalidField(field, "is nested too deeply") from None


class Vocabulary:
    """The bytes of all tokens, as `LLTokenizer` takes them, for the network's `vocab_size` ids and one more.

    The additional token stands for the end of the text. Special tokens have no text; a grammar can only name them.
    Ids that the tokenizer does not know are never allowed.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = vocab_size
        self.special_token_ids = [i for i in range(known) if tokenizer.special_name(i)]
        self.tokens = [tokenizer.streamed_bytes(i) for i in range(known)] + [b""] * (vocab_size + 1 - known)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = tokenizer.special_name(token_id).encode()

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("no text is tokenized, because START sets no_forcing")


def check_length(field: str, text: str) -> None:
    num_bytes = len(text.encode(errors="surrogatepass"))
    if num_bytes > MAX_BYTES:
        raise InvalidField(field, f"has {num_bytes} bytes; the limit is {MAX_BYTES}")


def quoted(field: str, text: str) -> str:
    """Write a text as a string literal of Lark."""
    if "\0" in text:
        raise InvalidField(field, f"{shortened(text)} contains a NUL character")
    return json.dumps(text, ensure_ascii=False)
