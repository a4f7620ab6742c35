"""Compile what a text must look like (a JSON schema, a regular expression, a list of choices or a grammar) to a
`Constraint`.

A client's text is read only in a limited process (`program.py`). This process measures it, forwards it, and
compiles the grammar that the other process has written.

A grammar describes the bytes of the text, so it needs the bytes of every token. They are the bytes that the token adds
to a stream of text (`Tokenizer.streamed_bytes`), so that the grammar sees the text that the client gets.
"""

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model.errors import InvalidField
from model.text.constraint import Constraint
from model.text.grammar.limits import CPU_SECONDS, LIMITS, MAX_BYTES, QUICK_CPU_SECONDS
from model.text.grammar.process import GrammarProcess, NeedsMoreTime
from model.text.json_keys import WHOLE_TEXT, JsonPlace, KeyFilter
from model.text.tokenizer import Tokenizer

MAX_TOKEN_BYTES = 1000  # llguidance gives up above
MAX_REMEMBERED = 32  # grammars; compiled ones of the largest schemas have about 10 MB


@dataclass(frozen=True)
class EmbeddedSchema:
    """The JSON schema of one rule in a larger grammar, with its field in the request, and the name of its function.

    With `is_closed`, objects with named properties have no others, unless it says `additionalProperties`. A schema that
    cannot be enforced is an error if it `is_strict`. Otherwise any JSON object is allowed in its place, and the
    `Constraint` says why (`not_enforced`).
    """

    schema: Mapping[str, Any]
    field: str
    name: str = ""
    is_closed: bool = True
    is_strict: bool = True


class NotRemembered(Exception):
    """A grammar is not among the last ones that were compiled."""


class Grammars:
    """Compiles constraints for the tokenizer and the `vocab_size` of one network.

    Every method raises `InvalidField` with the given field if its argument is invalid or too expensive, and `NoAnswer`
    if the process that reads it was killed. A call takes milliseconds, in the worst case seconds, most of them without
    the GIL. The results of the last `MAX_REMEMBERED` grammars are remembered, also an `InvalidField`. Only one thread
    may call the methods.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        vocabulary = Vocabulary(tokenizer, vocab_size)
        self._vocabulary = LLTokenizer(vocabulary)  # type: ignore[arg-type]  # also accepted
        special_ids = set(vocabulary.special_token_ids)
        self._key_filter = KeyFilter([b"" if i in special_ids else data for i, data in enumerate(vocabulary.tokens)])
        self._remembered: dict[bytes, Constraint | InvalidField | NeedsMoreTime] = {}
        self._only_remembers = False
        special = {i: name for i in range(min(vocab_size, tokenizer.vocab_size)) if (name := tokenizer.special_name(i))}
        self._process = GrammarProcess({"vocab_size": vocab_size, "special": special}, CPU_SECONDS)

    def quick(self) -> "Grammars":
        """The same for another thread, but every method raises `NeedsMoreTime` for a grammar that takes long."""
        other = copy.copy(self)  # the vocabulary is shared
        other._remembered = {}
        other._process = GrammarProcess(self._process.vocabulary, QUICK_CPU_SECONDS, is_final=False)
        return other

    def remembered(self) -> "Grammars":
        """The same for any thread, but every method raises `NotRemembered` instead of compiling."""
        other = copy.copy(self)  # the memory is shared
        other._only_remembers = True
        return other

    def kill(self) -> None:
        """End the process that reads grammars, from any thread, so that no call waits for it."""
        self._process.kill()

    def json_schema(self, field: str, schema: Mapping[str, Any] | str, *, is_closed: bool = False) -> Constraint:
        """JSON that is valid under a JSON schema, given as a value or as text. Its keys come in the order there.

        With `is_closed`, objects with named properties have no others, unless it says `additionalProperties`.
        """
        return self._compile(field, {"json": schema, "is_closed": is_closed})

    def regex(self, field: str, pattern: str) -> Constraint:
        """A text that the whole regular expression matches, in the syntax of Rust's `regex` without look-around.

        `\\d`, `\\w` and `\\s` are those of ASCII, because other programs do not agree on the other characters.
        """
        return self._compile(field, {"regex": pattern})

    def choice(self, field: str, choices: Sequence[str]) -> Constraint:
        """One of the given texts."""
        return self._compile(field, {"choice": choices})

    def grammar(self, field: str, text: str) -> Constraint:
        """A text that fits a grammar: in the Lark dialect of llguidance, or in EBNF as llama.cpp takes it (GBNF)."""
        return self._compile(field, {"grammar": text})

    def lark(
        self, field: str, rules: str, schemas: Mapping[str, "EmbeddedSchema"], begin: JsonPlace = WHOLE_TEXT
    ) -> Constraint:
        """A text that fits our own rules, in the Lark dialect of llguidance. The names of `schemas` are rules, too.

        `begin` says where the text has JSON.
        """
        described = {rule: asdict(schema) for rule, schema in schemas.items()}
        sizes = {rule: len(measured(field, {"schema": each["schema"]}, None)) for rule, each in described.items()}
        loose = sorted((rule for rule in sizes if not schemas[rule].is_strict), key=lambda rule: sizes[rule])
        while sum(sizes.values()) > MAX_BYTES and loose:
            described[rule := loose.pop()]["schema"] = None
            sizes[rule] = 0
        if sum(sizes.values()) > MAX_BYTES:
            raise InvalidField(field, "all schemas together are too large; send fewer strict ones")
        return self._compile(field, {"rules": rules, "schemas": described}, begin)

    def _compile(self, field: str, source: Mapping[str, Any], begin: JsonPlace = WHOLE_TEXT) -> Constraint:
        text = measured(field, source, MAX_BYTES if "rules" not in source else None)
        key = hashlib.sha256(json.dumps([field, text, repr(begin)]).encode()).digest()
        if self._only_remembers:
            result = self._remembered.get(key)
            if result is None:
                raise NotRemembered
        else:
            result = self._remembered.pop(key, None) or self._compile_new(field, text, begin)
            self._remembered[key] = result  # the newest one is the last
            if len(self._remembered) > MAX_REMEMBERED:
                del self._remembered[next(iter(self._remembered))]
        if isinstance(result, InvalidField):
            raise InvalidField(result.field, result.reason)
        if isinstance(result, NeedsMoreTime):
            raise NeedsMoreTime
        return result

    def _compile_new(self, field: str, source: str, begin: JsonPlace) -> Constraint | InvalidField | NeedsMoreTime:
        try:
            answer = self._process.read(field, source)
            matcher = LLMatcher(self._vocabulary, answer["grammar"], log_level=0, limits=LIMITS)
            key_filter = self._key_filter if answer["has_other_keys"] else None
            constraint = Constraint(field, matcher, self._vocab_size, key_filter, begin)
            if key_filter is not None and any(keyword in source for keyword in ("patternProperties", "propertyNames")):
                constraint.look_ahead = key_filter.look_ahead
            constraint.not_enforced = answer["not_enforced"]
            return constraint
        except (InvalidField, NeedsMoreTime) as error:
            return error.with_traceback(None)


class Vocabulary:
    """The bytes of all tokens, as `LLTokenizer` takes them, for the network's `vocab_size` ids and one more.

    The additional token stands for the end of the text. Special tokens have no text; a grammar can only name them.
    Ids that the tokenizer does not know, and tokens of more than `MAX_TOKEN_BYTES`, are never allowed.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        known = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_id = vocab_size
        self.special_token_ids = [i for i in range(known) if tokenizer.special_name(i)]
        texts = [tokenizer.streamed_bytes(i) for i in range(known)]
        self.tokens = [text if len(text) <= MAX_TOKEN_BYTES else b"" for text in texts]
        self.tokens += [b""] * (vocab_size + 1 - known)
        for token_id in self.special_token_ids:
            self.tokens[token_id] = tokenizer.special_name(token_id).encode()[:MAX_TOKEN_BYTES]

    def __call__(self, text: str | bytes) -> list[int]:
        raise NotImplementedError("no text is tokenized, because START sets no_forcing")


def measured(field: str, source: Mapping[str, Any], max_bytes: int | None) -> str:
    """A source as JSON. Raises `InvalidField` if a part of it is too long, or nested too deeply to be written."""
    try:
        for value in source.values():
            num_bytes = len(value.encode(errors="surrogatepass") if isinstance(value, str) else json.dumps(value))
            if max_bytes is not None and num_bytes > max_bytes:
                raise InvalidField(field, f"has {num_bytes} bytes; the limit is {max_bytes}")
        return json.dumps(source)
    except RecursionError:
        raise InvalidField(field, "is nested too deeply") from None
