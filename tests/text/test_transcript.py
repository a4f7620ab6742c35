"""The pieces of a transcript join to the decoded text, and each way to end a sequence has its reason."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.text.sampling import TokenLogprobs
from model.text.tokenizer import Tokenizer
from model.text.transcript import End, GenerationParams, TokenOutput, Transcript
from tests.service.checkpoints import NUM_TOKENS, write_tokenizer

TOKENS = st.lists(st.integers(1, NUM_TOKENS - 1), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory / "tokenizer.json")
    return Tokenizer.from_directory(directory)


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(tokenizer.token_bytes(token_id) for token_id in ids).decode(errors="replace")


def write(
    tokenizer: Tokenizer | None, ids: list[int], *, prompt_ids: list[int] | None = None, **params: Any
) -> tuple[list[TokenOutput], End]:
    """Push these tokens until the sequence ends."""
    transcript = Transcript(tokenizer, prompt_ids or [], GenerationParams(**{"max_tokens": len(ids)} | params))
    outputs = transcript.prompt_outputs([]) if params.get("echo") else []
    for token_id in ids:
        outputs.append(transcript.push(token_id, None))
        if transcript.end is not None:
            return outputs, transcript.end
    raise AssertionError("the sequence has not ended")


def text(outputs: list[TokenOutput]) -> str:
    return "".join(output.text for output in outputs)


@given(ids=TOKENS)
@settings(max_examples=60, deadline=None)
def test_the_pieces_join_to_the_decoded_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    outputs, end = write(tokenizer, ids)
    assert [output.token_id for output in outputs] == ids
    assert text(outputs) == decoded(tokenizer, ids)
    assert end == End("length")


@given(prompt_ids=TOKENS, ids=TOKENS)
@settings(max_examples=60, deadline=None)
def test_an_echoed_prompt_and_its_continuation_join_to_the_whole_text(
    tokenizer: Tokenizer, prompt_ids: list[int], ids: list[int]
) -> None:
    outputs, _ = write(tokenizer, ids, prompt_ids=prompt_ids, echo=True)
    assert [output.token_id for output in outputs] == prompt_ids + ids
    assert text(outputs) == decoded(tokenizer, prompt_ids + ids)


def test_without_echo_a_character_that_begins_in_the_prompt_is_completed(tokenizer: Tokenizer) -> None:
    first, second = (tokenizer.encode("é", add_special_tokens=False)[i] for i in range(2))
    assert text(write(tokenizer, [second], prompt_ids=[first])[0]) == "é"
    assert text(write(tokenizer, [second], prompt_ids=[first], echo=True)[0]) == "é"
    assert text(write(tokenizer, [first])[0]) == "\ufffd"


@given(ids=TOKENS, data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_stop_string_ends_the_text_before_itself_with_the_token_that_completes_it(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    whole = decoded(tokenizer, ids)
    begin = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[begin : begin + data.draw(st.integers(1, 4))]
    outputs, end = write(tokenizer, ids, stop=[stop])
    assert end == End("stop", stop)
    assert text(outputs) == whole.partition(stop)[0]
    if "\ufffd" not in stop:
        shortest = next(n for n in range(len(ids)) if stop in decoded(tokenizer, ids[: n + 1]))
        assert len(outputs) == shortest + 1


@given(ids=TOKENS, at=st.integers(0, 11))
@settings(max_examples=60, deadline=None)
def test_a_stop_token_ends_the_sequence_and_has_no_text(tokenizer: Tokenizer, ids: list[int], at: int) -> None:
    stop = ids[at % len(ids)]
    outputs, end = write(tokenizer, ids, stop_token_ids=frozenset({stop}))
    before = ids[: ids.index(stop)]
    assert end == End("stop", stop)
    assert [output.token_id for output in outputs] == [*before, stop]
    assert text(outputs) == decoded(tokenizer, before)


def test_text_that_might_have_begun_a_stop_string_is_returned_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the cat sa", add_special_tokens=False)
    outputs, end = write(tokenizer, ids, stop=["sat"])
    assert (text(outputs), end) == ("the cat sa", End("length"))
    outputs, end = write(tokenizer, [*ids, 5], stop=["sat"], stop_token_ids=frozenset({5}))
    assert (text(outputs), end) == ("the cat sa", End("stop", 5))


def test_without_a_tokenizer_there_is_no_text_and_sequences_end_in_the_same_way() -> None:
    assert write(None, [4, 5, 6]) == ([TokenOutput(4, ""), TokenOutput(5, ""), TokenOutput(6, "")], End("length"))
    assert write(None, [4, 5, 6], stop_token_ids=frozenset({5}))[1] == End("stop", 5)
    assert write(None, [4, 5], stop_token_ids=frozenset({5}))[1] == End("stop", 5)
    assert write(None, [4], prompt_ids=[1, 2], echo=True)[0] == [TokenOutput(token_id, "") for token_id in (1, 2, 4)]


def test_an_echo_has_the_logprobs_of_all_tokens_but_the_first() -> None:
    entries = [TokenLogprobs(-float(i), [], 1) for i in range(2)]
    echo = Transcript(None, [7, 8, 9], GenerationParams(max_tokens=1, echo=True)).prompt_outputs(entries)
    assert [output.logprobs for output in echo] == [None, *entries]


def test_no_token_can_follow_the_end() -> None:
    transcript = Transcript(None, [], GenerationParams(max_tokens=1))
    transcript.push(3, None)
    with pytest.raises(AssertionError):
        transcript.push(3, None)


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    """A vocabulary with the tokens `a`, `bc` and a space, in which other characters are runs of bytes."""
    names = ["<unk>", "<s>", "a", "bc", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({name: i for i, name in enumerate(names)}, [], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
        ]
    )
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend)


def bytes_of(text: str) -> list[int]:
    return [5 + byte for byte in text.encode()]


A, BC, SPACE, SPECIAL = 2, 3, 4, 1
OFFSETS: dict[str, tuple[list[int], list[int], list[int]]] = {
    # The prompt, the tokens, and the offset of each.
    "two bytes": ([A], [A, *bytes_of("é"), BC, A], [0, 1, 1, 2, 4]),
    "several characters": ([A], [*bytes_of("é🙂x"), A], [0, 0, 1, 1, 1, 1, 2, 3]),
    "bytes that are no text": ([A], [5 + 0xFF, 5 + 0xFE, A, BC], [0, 0, 2, 3]),
    "bytes at the end": ([A], [BC, *bytes_of("é")], [0, 2, 2]),
    "a special token between": ([A], [*bytes_of("é"), SPECIAL, A], [0, 0, 1, 1]),
    "a character that begins in the prompt": ([A, *bytes_of("é")[:1]], [*bytes_of("é")[1:], A, BC], [0, 1, 2]),
    "a run that begins in the prompt": ([A, *bytes_of("é")], [*bytes_of("à"), A, BC], [0, 0, 1, 2]),
}


@pytest.mark.parametrize("name", OFFSETS)
def test_an_offset_is_where_the_text_of_a_token_begins(fallback: Tokenizer, name: str) -> None:
    prompt_ids, ids, offsets = OFFSETS[name]
    outputs, _ = write(fallback, ids, prompt_ids=prompt_ids)
    assert [output.offset for output in outputs] == offsets
    assert text(outputs)[offsets[-1] :] in ("a", "bc", "é")


def test_offsets_count_the_echoed_prompt_and_text_that_is_kept_back(fallback: Tokenizer) -> None:
    prompt_ids, ids = [A, *bytes_of("é")], [A, BC, *bytes_of("é"), A]
    outputs, _ = write(fallback, ids, prompt_ids=prompt_ids, echo=True, stop=["abcx"])
    assert [output.offset for output in outputs] == [0, 1, 1, 2, 3, 5, 5, 6]
    assert [output.text for output in outputs] == ["a", "", "", "é", "", "", "", "abcéa"]
    stopped, end = write(fallback, [BC, A, A, BC], stop=["aab"])
    assert end == End("stop", "aab")
    assert [output.offset for output in stopped] == [0, 2, 3, 2]  # the text ends at 2
