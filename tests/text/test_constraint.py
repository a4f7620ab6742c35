"""Tests of constraints: what compiles and what is refused, and which tokens the masks allow."""

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from model.errors import InvalidField
from model.text.constraint import GrammarState, token_masks
from model.text.grammar.grammars import Grammars, Vocabulary
from model.text.grammar.limits import MAX_BYTES
from model.text.tokenizer import Detokenizer, Tokenizer
from tests.service.checkpoints import EOS, VOCAB_SIZE, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("constraint") / "tokenizer.json"
    write_tokenizer(path)
    return Tokenizer.from_file(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


def test_a_token_with_a_very_long_text_is_never_allowed(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    write_tokenizer(path, extra_token="-" * 4000)
    own = Tokenizer.from_file(path)
    long_id = own.id_of("-" * 4000)
    assert long_id is not None
    vocabulary = Vocabulary(own, VOCAB_SIZE)
    assert vocabulary.tokens[long_id] == b""
    state = GrammarState(Grammars(own, VOCAB_SIZE).regex("regex", "-*"), frozenset())
    (ids,) = allowed(state)
    assert long_id not in ids
    assert "-" in texts(own, ids)


def allowed(state: GrammarState, draft: tuple[int, ...] = ()) -> list[set[int]]:
    """The allowed token ids after the newest token, and after each drafted token."""
    masks = token_masks([(state, draft)], VOCAB_SIZE)
    assert masks is not None
    assert not masks.failures
    bits = masks.words[:, :, None] >> torch.arange(32, dtype=torch.int32) & 1
    return [set(row.nonzero()[:, 0].tolist()) - {VOCAB_SIZE} for row in bits.flatten(1)]


def texts(tokenizer: Tokenizer, ids: set[int]) -> set[str]:
    return {tokenizer.decode_inside([token_id]) for token_id in ids}


def rules(num_rules: int) -> str:
    return "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(num_rules)) + f'\na{num_rules}: "x"'


def doubled(num_rules: int) -> str:
    return "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(num_rules)) + f"\nA{num_rules}: /x/"


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


HOSTILE = {
    "a schema nested too deeply": ("json_schema", nested(500)),
    "alternatives of alternatives": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"{i}": {"const": k}}} for k in range(4)]} for i in range(40)]},
    ),
    "remainders": ("json_schema", {"type": "integer", "multipleOf": 1234567}),
    "patterns of properties": (
        "json_schema",
        {"type": "object", "patternProperties": {f"^[a-z]*{i}[a-z]*$": {} for i in range(1000)}},
    ),
    "a huge enum": ("json_schema", {"enum": [f"value {i}" for i in range(100_000)]}),
    "a remote reference": ("json_schema", {"$ref": "http://example.com/schema.json"}),
    "nested groups": ("regex", "(" * 5000 + "a" + ")" * 5000),
    "a long choice": ("choice", ["x" * (MAX_BYTES + 1)]),
    "a chain of rules": ("grammar", rules(4000)),
    "a chain of terminals": ("grammar", doubled(2000)),
    "nested parentheses": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "nested parentheses in EBNF": ("grammar", "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_constraint_is_refused_soon_and_the_next_one_compiles(grammars: Grammars, name: str) -> None:
    kind, spec = HOSTILE[name]
    begun = time.process_time(), time.perf_counter()
    with pytest.raises(InvalidField) as caught:
        getattr(grammars, kind)("field", spec)
    assert caught.value.field == "field"
    assert 5 < len(caught.value.reason) < 400
    assert time.process_time() - begun[0] < 2
    assert time.perf_counter() - begun[1] < 10  # a second, if nothing else takes the CPU
    grammars.choice("field", ["a"])


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("json_schema", {"type": "text"}, "'text' is not a type"),
        ("json_schema", {"not": {"format": "date"}}, "cannot be enforced"),
        ("json_schema", {"oneOf": [{"type": "string", "format": "date"}, {"type": "string"}]}, "use anyOf"),
        ("json_schema", {"x-guidance": {"lenient": True}}, "keyword x-guidance cannot be enforced"),
        ("json_schema", {"type": "integer", "minimum": 3, "maximum": 2}, "minimum"),
        ("regex", "(a|b", "unclosed group"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "", "empty text"),
        ("choice", [], "there must be choices"),
        ("choice", ["a", ""], "may be empty"),
        ("grammar", 'start: "a" b', "unknown name"),
        ("grammar", "start: ", "empty text"),
        ("grammar", 'root ::= "a', "EBNF"),
    ],
)
def test_an_invalid_constraint_is_refused_with_its_reason(
    grammars: Grammars, kind: str, spec: Any, reason: str
) -> None:
    with pytest.raises(InvalidField, match=reason) as caught:
        getattr(grammars, kind)("field", spec)
    assert not re.search(r"\.rs|\.py|/home|/usr|backtrace", caught.value.reason), "details of this machine"


class TestMasks:
    def test_only_tokens_that_continue_the_text_are_allowed(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        choices = ["the cat", "that", "dog"]
        state = GrammarState(grammars.choice("choice", choices))
        vocabulary = texts(tokenizer, set(range(tokenizer.vocab_size))) - {""}
        assert texts(tokenizer, allowed(state)[0]) == {
            text for text in vocabulary if any(choice.startswith(text) for choice in choices)
        }
        state.append(*tokenizer.encode("th"))
        assert texts(tokenizer, allowed(state)[0]) == {
            text for text in vocabulary if any(choice.startswith("th" + text) for choice in choices)
        }

    def test_special_tokens_and_ids_without_a_token_are_never_allowed(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        ids = allowed(GrammarState(grammars.regex("regex", "(?s:.*)x")))[0]
        assert ids < set(range(tokenizer.vocab_size))
        assert all(tokenizer.has_text(token_id) for token_id in ids)

    def test_a_grammar_can_name_a_special_token(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        state = GrammarState(grammars.grammar("grammar", f'start: "a" {EOS} "b"'))
        state.append(*tokenizer.encode("a"))
        assert allowed(state) == [set(tokenizer.encode(EOS))]

    def test_stop_tokens_are_allowed_exactly_where_the_text_is_complete(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        letter = tokenizer.encode("b")[0]
        state = GrammarState(grammars.regex("regex", "a(ba)*"), [0, letter, 10**6])
        assert not allowed(state)[0] & {0, letter}
        state.append(*tokenizer.encode("a"))
        assert allowed(state)[0] >= {0, letter}
        assert not state.is_complete

    def test_a_row_in_which_only_a_stop_token_could_continue_the_text_is_an_error(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        state = GrammarState(grammars.regex("regex", "b"), tokenizer.encode("b"))
        masks = token_masks([(None, ()), (state, ())], VOCAB_SIZE)
        assert masks is not None
        assert list(masks.failures) == [1]
        assert "every token that can follow is in stop_token_ids" in str(masks.failures[1])

    def test_a_state_is_complete_where_nothing_can_follow(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        state = GrammarState(grammars.json_schema("json", {"type": "object", "properties": {}}))
        found = []
        for token_id in tokenizer.encode('{"a": 1}'):
            state.append(token_id)
            found.append(state.is_complete)
        assert found == [False] * (len(found) - 1) + [True]

    def test_each_drafted_token_has_the_mask_of_the_state_after_the_tokens_before_it(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        constraint = grammars.regex("regex", "[a-c]{2}[0-9]+")
        drafting, plain = GrammarState(constraint, [0]), GrammarState(constraint, [0])
        draft = [*tokenizer.encode("b"), *tokenizer.encode("7"), *tokenizer.encode("7"), *tokenizer.encode("a")]
        for token_id in [*tokenizer.encode("a"), *draft[:3]]:
            expected = []
            ahead = GrammarState(constraint, [0])
            for earlier in plain._tokens:
                ahead.append(earlier)
            for drafted in [*draft, None]:
                expected += allowed(ahead)
                if drafted not in expected[-1]:
                    break
                ahead.append(drafted)
            found = allowed(drafting, tuple(draft))
            assert found[: len(expected)] == expected
            assert allowed(drafting) == allowed(plain)
            drafting.append(token_id)
            plain.append(token_id)
            draft = draft[1:] if token_id == draft[0] else draft

    def test_tokens_that_are_added_to_a_fork_do_not_change_the_original(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        a, b, semicolon = (tokenizer.encode(letter)[0] for letter in "ab;")
        state = GrammarState(grammars.regex("regex", "(ab)+;"), [0])
        state.append(a)
        fork = state.fork()
        assert fork.try_append(b)
        assert allowed(fork) == [{a, semicolon}]
        assert allowed(state) == [{b}]
        assert not fork.fork().try_append(b), "not allowed"
        assert fork.try_append(a)
        assert fork.try_append(b)
        assert not fork.try_append(semicolon), "nothing can follow"
        assert allowed(state) == [{b}]

    def test_keys_of_a_fork_are_not_keys_of_the_original(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        """No object has a key twice."""
        constraint = grammars.json_schema("json", {"type": "object", "additionalProperties": {"type": "null"}})
        state = GrammarState(constraint, [0])
        for token_id in tokenizer.encode("{"):
            state.append(token_id)
        fork, ids = state.fork(), tokenizer.encode('"a": null, "a')
        for token_id in ids:
            fork.try_append(token_id)
        quote = tokenizer.encode('"')[0]
        assert quote not in allowed(fork)[0]
        assert allowed(state, tuple(ids[:2]))[2] >= {quote}

    def test_a_stop_token_ends_a_draft(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        assert not GrammarState(grammars.regex("regex", "a*"), [0]).try_append(0)

    def test_a_draft_is_cut_before_the_first_token_that_is_not_allowed(
        self, grammars: Grammars, tokenizer: Tokenizer
    ) -> None:
        a, b, semicolon = (tokenizer.encode(letter)[0] for letter in "ab;")
        state = GrammarState(grammars.regex("regex", "(ab)+;"), [0])
        state.append(a)
        assert state.allowed_part([b, a, b, semicolon]) == [b, a, b, semicolon]
        assert state.allowed_part([b, a, a, b]) == [b, a]
        assert state.allowed_part([a, b]) == state.allowed_part([]) == []
        assert state.allowed_part([VOCAB_SIZE + 5]) == []  # an error of the matcher
        assert allowed(state) == [{b}]

    def test_rows_without_a_constraint_have_all_bits_set(self, grammars: Grammars) -> None:
        state = GrammarState(grammars.regex("regex", "a"))
        masks = token_masks([(None, (1, 2)), (state, ()), (None, ())], VOCAB_SIZE)
        assert masks is not None
        assert [bool((row == -1).all()) for row in masks.words] == [True, True, True, False, True]
        assert token_masks([(None, (1,)), (None, ())], VOCAB_SIZE) is None

    def test_continuations_do_not_share_their_state(self, grammars: Grammars, tokenizer: Tokenizer) -> None:
        constraint = grammars.regex("regex", "ab")
        first, second = GrammarState(constraint), GrammarState(constraint)
        first.append(*tokenizer.encode("a"))
        assert allowed(first) == [set(tokenizer.encode("b"))]
        assert allowed(second) != allowed(first)

    def test_an_error_behind_a_drafted_token_does_not_end_the_sequence(
        self, grammars: Grammars, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The draft may be wrong, and then the sequence never reaches the state that is too complex."""
        state = GrammarState(grammars.regex("regex", "[ab]*c"))
        letters = [tokenizer.encode(letter)[0] for letter in "ab"]
        state.append(letters[0])
        before = allowed(state)
        broken = BrokenMatcher(state._matcher)
        monkeypatch.setattr(state, "_matcher", broken)
        found = allowed(state, tuple(letters))
        assert found[0] == before[0]
        assert found[1] == set()
        assert allowed(state) == before


class BrokenMatcher:
    """A matcher that fails as soon as it computes a second mask."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._num_masks = 0

    def unsafe_compute_mask_ptr(self, *arguments: int) -> None:
        self._num_masks += 1
        self._matcher.unsafe_compute_mask_ptr(*arguments)

    def is_error(self) -> bool:
        return self._num_masks > 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matcher, name)


class TestVocabulary:
    def test_the_bytes_of_each_token_are_those_that_a_stream_gets(self, tokenizer: Tokenizer) -> None:
        vocabulary = Vocabulary(tokenizer, VOCAB_SIZE)
        assert len(vocabulary.tokens) == VOCAB_SIZE + 1
        for token_id in range(tokenizer.vocab_size):
            detokenizer = Detokenizer(tokenizer, is_inside=True)
            text = detokenizer.push(token_id) + detokenizer.flush()
            if token_id in vocabulary.special_token_ids:
                assert text == ""
            else:
                assert vocabulary.tokens[token_id].decode(errors="replace") == text

    def test_a_vocabulary_with_byte_fallback_writes_spaces_and_characters_of_several_tokens(self) -> None:
        names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", '"', "é"]
        backend = Backend(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        tokenizer = Tokenizer(backend)
        grammars = Grammars(tokenizer, len(names))
        for text in (" a", " é€a", "€"):
            constraint = grammars.choice("choice", [text])
            state, detokenizer, streamed = GrammarState(constraint), Detokenizer(tokenizer, is_inside=True), ""
            while not state.is_complete:
                masks = token_masks([(state, ())], len(names))
                assert masks is not None
                bits = (masks.words[0, :, None] >> torch.arange(32, dtype=torch.int32) & 1).flatten()
                token_id = int(bits.nonzero()[0])
                streamed += detokenizer.push(token_id)
                state.append(token_id)
            assert streamed + detokenizer.flush() == text

    def test_a_vocabulary_that_cannot_write_the_text_is_an_error(self) -> None:
        tokenizer = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]")))
        with pytest.raises(InvalidField, match="no token of the vocabulary continues the text"):
            Grammars(tokenizer, 3).choice("choice", ["c"])
        state = GrammarState(Grammars(tokenizer, 3).choice("choice", [" a c"]))  # its decoder puts a space before words
        state.append(0)
        masks = token_masks([(state, ())], 3)
        assert masks is not None
        assert "no token of the vocabulary continues the text" in str(masks.failures[0])


def test_ebnf_and_lark_allow_the_same_texts(grammars: Grammars, tokenizer: Tokenizer) -> None:
    states = [
        GrammarState(grammars.grammar("grammar", text))
        for text in ('root ::= "a" [b-d]+ "\\n"', 'start: "a" /[b-d]+/ "\\n"')
    ]
    for letter in "abd\n":
        found = [allowed(state) for state in states]
        assert found[0] == found[1]
        for state in states:
            state.append(*tokenizer.encode(letter))
    assert all(state.is_complete for state in states)


def test_choices_may_contain_any_characters(grammars: Grammars, tokenizer: Tokenizer, tmp_path: Path) -> None:
    for text in ('a"b', "a\\b", "a\nb\t\x1f", "é€😀", "/x/", "#c", json.dumps({"a": [1]})):
        state = GrammarState(grammars.choice("choice", [text, "zzz"]))
        for token_id in tokenizer.encode(text):
            assert not state.is_complete
            assert token_id in allowed(state)[0]
            state.append(token_id)
        assert state.is_complete
