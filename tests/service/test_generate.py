"""POST /generate: whole and streamed answers are the same, and both follow from the logits of the network."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forwardscope.results.generations import FinishEvent, Generation, TokenEvent
from service.http.encoding import to_json
from tests.conftest import shared
from tests.service.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.service.running import Running, Start, validate

PROMPT = "the cat sat on"
PROMPT_IDS = [257, 69, 270, 273, 264]
# The service computes one token at a time with the cache, and the tests compute one pass: the same sums in another
# order. The numbers are of the order of 10.
ROUNDING = 1e-4


def whole_and_streamed(service: Running, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer of a request, and the same parts assembled from its stream, without timings and ids."""
    answer = service.answer("/generate", **body)
    validate(Generation, answer)
    *tokens, end = service.stream(**body)
    for event in tokens:
        validate(TokenEvent, event)
    validate(FinishEvent, end)
    assert len({event["id"] for event in (*tokens, end)}) == 1
    parts = ("text", "tokens", "finish_reason", "stop_reason", "usage")
    return {part: answer[part] for part in parts}, {
        "text": "".join(event["text"] for event in tokens),
        "tokens": [event["token"]["id"] for event in tokens],
        **{part: end[part] for part in parts[2:]},
    }


def generate(service: Running, **body: Any) -> dict[str, Any]:
    """The answer of a request, after a check that it is the same whole and streamed."""
    whole, streamed = whole_and_streamed(service, **body)
    assert streamed == whole
    return whole


def logits_of(service: Running, ids: list[int]) -> torch.Tensor:
    """Logits (T, V) of one pass without the service."""
    with torch.inference_mode():
        logits: torch.Tensor = service.checkpoint.model(torch.tensor([ids]))[0]
    return logits


class TestReferences:
    def test_stories260k_generates_the_tokens_of_its_reference_program(self, stories: Running) -> None:
        expected = json.loads(shared("checkpoints/stories260K/greedy_ids.json").read_text())["greedy_ids"][1:201]
        answer = generate(stories, prompt=[1], max_tokens=200, temperature=0)
        assert answer["tokens"] == expected
        assert answer["text"].strip().startswith("Once upon a time, there was a little girl named Lily.")
        assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 200, "cached_tokens": 0}

    def test_tiny_random_gpt2_generates_the_published_tokens_without_a_tokenizer(self, start: Start) -> None:
        directory = shared("checkpoints/tiny-random-gpt2")
        service = start(model=str(directory))
        published = json.loads((directory / "expected.json").read_text())["greedy"]
        assert len(published) == 2
        for case in published:
            num_tokens = len(case["continuation"])
            answer = generate(service, prompt=case["prompt"], max_tokens=num_tokens, temperature=0)
            assert answer["tokens"] == case["continuation"]
            assert answer["text"] == ""
        response = service.post("/generate", {"prompt": "text", "max_tokens": 2})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "no_tokenizer")
        response = service.post("/generate", {"prompt": [1], "stop": "a", "max_tokens": 2})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "stop")


class TestText:
    @pytest.mark.parametrize("prompt", [PROMPT, [1], [167, 96], "naïve 日本"])
    def test_the_text_of_a_stream_is_the_decoded_text_after_the_prompt(self, tiny: Running, prompt: Any) -> None:
        num_incomplete = 0
        for seed in range(8):
            answer = generate(tiny, prompt=prompt, seed=seed, max_tokens=20, ignore_eos=True)
            check_text(tiny, prompt, answer)
            num_incomplete += "\ufffd" in answer["text"]
        assert num_incomplete  # the sampled bytes include incomplete characters, the hard case

    @pytest.mark.parametrize("prompt", ["Once upon a time", [1], "Lily said: \n"])
    def test_the_text_of_a_stream_is_the_decoded_text_with_byte_fallback(self, stories: Running, prompt: Any) -> None:
        for seed in range(8):
            answer = generate(stories, prompt=prompt, seed=seed, max_tokens=20, temperature=3.0, ignore_eos=True)
            check_text(stories, prompt, answer)

    def test_echo_puts_the_prompt_before_the_continuation(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 10}
        plain, echoed = generate(tiny, **body), generate(tiny, **body, echo=True)
        assert echoed["tokens"] == PROMPT_IDS + plain["tokens"]
        assert echoed["text"] == PROMPT + plain["text"]
        assert echoed["usage"] == plain["usage"]


def check_text(service: Running, prompt: Any, answer: dict[str, Any]) -> None:
    """The text is the decoded whole without the decoded prompt."""
    tokenizer = service.checkpoint.tokenizer
    assert tokenizer is not None
    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    whole, before = tokenizer.decode(ids + answer["tokens"]), tokenizer.decode(ids).rstrip("\ufffd")
    # The last character of the prompt may be completed by the first generated tokens.
    assert whole.endswith(answer["text"])
    assert whole.removesuffix(answer["text"]) == before or whole == before + answer["text"]


class TestSampling:
    def test_a_seed_reproduces_its_tokens_and_another_seed_gives_others(self, tiny: Running) -> None:
        texts = [
            tiny.answer("/generate", prompt=PROMPT, seed=seed, max_tokens=12)["tokens"]
            for seed in (7, 7, 8, None, None)
        ]
        assert texts[0] == texts[1]
        assert len({tuple(tokens) for tokens in texts}) == 4

    def test_each_of_several_choices_follows_from_its_own_seed_and_the_first_is_also_at_the_top_level(
        self, tiny: Running
    ) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
        alone = [tiny.answer("/generate", **body, seed=seed) for seed in (7, 8, 9)]
        answer = tiny.answer("/generate", **body, seed=7, n=3)
        choices = answer["choices"]
        assert [choice["choice"] for choice in choices] == [0, 1, 2]
        assert choices[0].items() <= answer.items()
        assert [(choice["tokens"], choice["text"]) for choice in choices] == [(a["tokens"], a["text"]) for a in alone]
        assert all(a["choices"] is None for a in alone)
        *events, _, _, _ = sorted(tiny.stream(**body, seed=7, n=3), key=lambda event: "finish_reason" in event)
        streamed = [[event["token"]["id"] for event in events if event["choice"] == index] for index in range(3)]
        assert streamed == [choice["tokens"] for choice in choices]

    def test_temperature_zero_is_argmax_for_every_seed(self, tiny: Running) -> None:
        answers = [generate(tiny, prompt=PROMPT, temperature=0, seed=seed, max_tokens=15) for seed in (1, 2)]
        assert answers[0] == answers[1]
        tokens = answers[0]["tokens"]
        logits = logits_of(tiny, PROMPT_IDS + tokens)
        assert tokens == logits[len(PROMPT_IDS) - 1 : -1].argmax(-1).tolist()

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
    def test_sampling_from_only_the_most_likely_token_is_greedy(self, tiny: Running, narrow: dict[str, Any]) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=15)
        for seed in range(3):
            assert generate(tiny, prompt=PROMPT, temperature=5.0, seed=seed, max_tokens=15, **narrow) == greedy

    def test_a_bias_can_force_or_forbid_a_token(self, tiny: Running) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10)["tokens"]
        forced = generate(tiny, prompt=PROMPT, max_tokens=10, logit_bias={"41": 100})["tokens"]
        assert forced == [41] * 10
        forbidden = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10, logit_bias={str(greedy[0]): -100})
        assert greedy[0] not in forbidden["tokens"]

    @pytest.mark.parametrize(
        "penalty", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}], ids=str
    )
    def test_a_penalty_lowers_the_logits_of_the_tokens_that_it_counts(
        self, tiny: Running, penalty: dict[str, float]
    ) -> None:
        plain = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True)["tokens"]
        tokens = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True, **penalty)["tokens"]
        assert tokens != plain
        (name,) = penalty
        ids = PROMPT_IDS + tokens
        for position, logits in enumerate(logits_of(tiny, ids)[len(PROMPT_IDS) - 1 : -1]):
            logits = logits.clone()  # tensors made in inference mode cannot be changed
            counted = ids[: len(PROMPT_IDS) + position] if name == "repetition_penalty" else tokens[:position]
            for token_id in set(counted):
                if name == "repetition_penalty":
                    logits[token_id] *= 3.0 if logits[token_id] < 0 else 1 / 3.0
                else:
                    logits[token_id] -= 2.0 if name == "presence_penalty" else 1.5 * counted.count(token_id)
            # Within rounding, because equal logits may be chosen in any order.
            assert logits[tokens[position]] >= logits.max() - ROUNDING

    @pytest.mark.parametrize(
        "extreme",
        [
            {"temperature": 5e-324},
            {"temperature": 1e308},
            {"logit_bias": {"5": 1e308}},
            {"logit_bias": {str(token_id): -1e308 for token_id in range(VOCAB_SIZE)}},
            {"presence_penalty": 1e308},
            {"frequency_penalty": -1e308},
            {"repetition_penalty": 5e-324},
            {"top_k": 10**30},
            {"top_p": 5e-324},
            {"seed": 2**63 - 1},
        ],
        ids=lambda extreme: next(iter(extreme)),
    )
    def test_any_finite_parameter_gives_tokens_or_an_error_that_names_it(
        self, tiny: Running, extreme: dict[str, Any]
    ) -> None:
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": 6, "seed": 1, "ignore_eos": True} | extreme)
        if response.status_code == 200:
            assert len(response.json()["tokens"]) == 6
        else:
            assert response.status_code in (400, 422)
            assert response.json()["error"]["param"].split(".")[0] in extreme

    def test_a_very_low_temperature_is_greedy(self, tiny: Running) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10)
        for temperature in (1e-6, 1e-30, 1e-300):
            assert generate(tiny, prompt=PROMPT, temperature=temperature, seed=1, max_tokens=10) == greedy


class TestStopping:
    @given(data=st.data())
    @settings(max_examples=12, deadline=None, derandomize=True)
    def test_the_text_ends_right_before_the_first_occurrence_of_a_stop_string(
        self, tiny: Running, data: st.DataObject
    ) -> None:
        body = {"prompt": PROMPT, "seed": data.draw(st.integers(0, 3)), "max_tokens": 16, "ignore_eos": True}
        text = tiny.answer("/generate", **body)["text"]
        check_stop(tiny, body, text, data)

    @given(data=st.data())
    @settings(max_examples=12, deadline=None, derandomize=True)
    def test_a_stop_string_that_spans_several_tokens_is_found(self, stories: Running, data: st.DataObject) -> None:
        body = {"prompt": [1], "temperature": 1.5, "seed": data.draw(st.integers(0, 3)), "max_tokens": 24}
        text = stories.answer("/generate", **body)["text"]
        check_stop(stories, body, text, data)

    def test_none_of_several_stop_strings_is_part_of_the_text(self, stories: Running) -> None:
        full = stories.answer("/generate", prompt=[1], temperature=0, max_tokens=60)["text"]
        stops = ["big red", "girl na", "e was"]
        answer = generate(stories, prompt=[1], temperature=0, max_tokens=60, stop=stops)
        assert answer["text"] == full[: full.index("e was")]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "e was")

    def test_an_incomplete_stop_string_at_the_end_is_part_of_the_text(self, stories: Running) -> None:
        full = stories.answer("/generate", prompt=[1], temperature=0, max_tokens=12)["text"]
        answer = generate(stories, prompt=[1], temperature=0, max_tokens=12, stop=[full[-3:] + "ZZ"])
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (full, "length", None)

    def test_a_stop_string_in_the_prompt_has_no_effect(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "echo": True}
        assert generate(tiny, **body, stop=["cat"]) == generate(tiny, **body)

    def test_a_stop_token_is_the_last_token_and_has_no_text(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 15, "ignore_eos": True}
        full = generate(tiny, **body)
        stop_id = full["tokens"][4]
        first = full["tokens"].index(stop_id)
        answer = generate(tiny, **body, stop_token_ids=[stop_id, 1])
        assert answer["tokens"] == full["tokens"][: first + 1]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop_id)
        check_text(tiny, PROMPT, answer | {"tokens": answer["tokens"][:-1]})

    def test_the_end_of_sequence_token_ends_a_choice_unless_ignore_eos_is_set(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logit_bias": {"0": 100}}
        ended = generate(tiny, **body)
        assert (ended["tokens"], ended["text"]) == ([0], "")
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", 0)
        ignored = generate(tiny, **body, ignore_eos=True)
        assert (ignored["tokens"], ignored["finish_reason"]) == ([0] * 6, "length")
        asked_for = generate(tiny, **body, ignore_eos=True, stop_token_ids=[0])
        assert asked_for["tokens"] == [0]

    def test_the_context_limits_max_tokens_and_the_default_fits_into_it(self, tiny: Running) -> None:
        room = CONTEXT - len(PROMPT_IDS)
        assert len(generate(tiny, prompt=PROMPT, max_tokens=room, ignore_eos=True, seed=1)["tokens"]) == room
        assert len(generate(tiny, prompt=PROMPT, ignore_eos=True, seed=1)["tokens"]) == room
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": room + 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
        assert str(room) in response.json()["error"]["message"]

    def test_the_default_of_max_tokens_is_128(self, stories: Running) -> None:
        answer = stories.answer("/generate", prompt=[1], seed=1, ignore_eos=True)
        assert (len(answer["tokens"]), answer["finish_reason"]) == (128, "length")


def check_stop(service: Running, body: dict[str, Any], text: str, data: st.DataObject) -> None:
    """Send a piece of the text as a stop string, and check where the text ends."""
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 8))].replace("\0", "")
    if not stop:
        return
    answer = generate(service, **body, stop=stop)
    if stop not in text:  # the piece had a NUL
        assert answer["text"] == text
        return
    assert answer["text"] == text[: text.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


class TestLogprobs:
    @pytest.mark.parametrize("num_top", [0, 1, 20])
    @pytest.mark.parametrize("echo", [False, True])
    def test_logprobs_are_those_of_the_network_before_penalties_and_biases(
        self, tiny: Running, num_top: int, echo: bool
    ) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 4, "max_tokens": 9, "logprobs": num_top, "echo": echo}
        body |= {"temperature": 0.7, "repetition_penalty": 1.5, "logit_bias": {"9": 5.0}}
        answer = tiny.answer("/generate", **body)
        validate(Generation, answer)
        ids = answer["tokens"] if echo else PROMPT_IDS + answer["tokens"]
        expected = logits_of(tiny, ids).log_softmax(-1)
        entries = answer["logprobs"]
        assert [entry["id"] for entry in entries] == answer["tokens"]
        if echo:
            first, *entries = entries
            assert (first["logprob"], first["top"]) == (None, [])
        for entry, row in zip(entries, expected[-len(entries) - 1 :], strict=False):
            assert entry["logprob"] == pytest.approx(row[entry["id"]].item(), abs=ROUNDING)
            top = row.topk(num_top)
            assert [other["id"] for other in entry["top"]] == top.indices.tolist()
            assert [other["logprob"] for other in entry["top"]] == pytest.approx(top.values.tolist(), abs=ROUNDING)
        *events, _ = tiny.stream(**body)
        for event, entry in zip(events, answer["logprobs"], strict=True):
            validate(TokenEvent, event)
            assert (event["token"]["id"], event["token"]["logprob"]) == (entry["id"], entry["logprob"])
            assert event["token"]["top"] == entry["top"]

    def test_logprobs_are_null_unless_requested(self, tiny: Running) -> None:
        assert tiny.answer("/generate", prompt=PROMPT, max_tokens=2)["logprobs"] is None
        *events, _ = tiny.stream(prompt=PROMPT, max_tokens=2)
        assert all(event["token"]["logprob"] is None and "top" not in event["token"] for event in events)


class TestDefaults:
    def test_a_request_overrides_the_generation_defaults_of_the_checkpoint(self, tmp_path: Path, start: Start) -> None:
        generation = {"do_sample": False, "eos_token_id": [41, 42], "repetition_penalty": 100.0}
        service = start(model=str(write_checkpoint(tmp_path, generation=generation)))
        assert service.get("/model").json()["eos_token_ids"] == [41, 42]
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12}
        default = generate(service, **body)
        assert default == generate(service, **body, seed=9)  # greedy, so the seed has no effect
        assert default == generate(service, **body, temperature=0, repetition_penalty=100.0)
        assert default != generate(service, **body, repetition_penalty=1.0)
        assert len({str(generate(service, **body, temperature=1.0, seed=seed)) for seed in range(3)}) == 3
        forced = generate(service, **body, logit_bias={"42": 100})
        assert (forced["tokens"], forced["stop_reason"]) == ([42], 42)

    def test_a_sampling_default_applies_unless_the_request_sets_the_field(self, tmp_path: Path, start: Start) -> None:
        service = start(model=str(write_checkpoint(tmp_path, generation={"do_sample": True, "top_k": 1})))
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 5.0, "seed": 2}
        greedy = generate(service, **body | {"temperature": 0.0})
        assert generate(service, **body)["tokens"] == greedy["tokens"]
        assert generate(service, **body, top_k=0)["tokens"] != greedy["tokens"]


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_whole_answers_are_encoded_outside_of_the_event_loop(
    tiny: Running, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    threads: list[str] = []

    def noted(content: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return to_json(content)

    monkeypatch.setattr("service.answers.generation.to_json", noted)
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": [1]}
    tiny.answer(path, **prompt, max_tokens=2)
    assert len(threads) == 1
    assert threads[0].startswith("answers")
