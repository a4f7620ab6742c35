"""POST /generate over HTTP: what comes whole is what comes streamed, and both are what the network says."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.generation import Transcript
from model.sampling import Sampler
from service.schemas import FinishEvent, GenerateAnswer, TokenEvent
from tests.conftest import shared
from tests.service.checkpoints import CONTEXT, VOCAB_SIZE, write_checkpoint
from tests.service.running import Running, Start, running, wait_until

PROMPT = "the cat sat on"
PROMPT_IDS = [257, 69, 270, 273, 264]
# The service computes a token at a time with the cache, the tests in one pass: the same sums in another order, on
# numbers of the order of 10.
ROUNDING = 1e-4


def whole_and_streamed(service: Running, **body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer of a request, and the same parts put together from its stream; timings and ids left out."""
    answer = service.answer("/generate", **body)
    GenerateAnswer.model_validate(answer)
    *tokens, end = service.stream(**body)
    for event in tokens:
        TokenEvent.model_validate(event)
    FinishEvent.model_validate(end)
    assert len({event["id"] for event in (*tokens, end)}) == 1
    parts = ("text", "tokens", "finish_reason", "stop_reason", "usage")
    return {part: answer[part] for part in parts}, {
        "text": "".join(event["text"] for event in tokens),
        "tokens": [event["token"]["id"] for event in tokens],
        **{part: end[part] for part in parts[2:]},
    }


def generate(service: Running, **body: Any) -> dict[str, Any]:
    """The answer, which must be the same whole and streamed."""
    whole, streamed = whole_and_streamed(service, **body)
    assert streamed == whole
    return whole


def logits_of(service: Running, ids: list[int]) -> torch.Tensor:
    """(T, V), in one pass without the service."""
    with torch.inference_mode():
        return service.checkpoint.model(torch.tensor([ids]))[0]


class TestReferences:
    def test_stories260k_tells_the_story_of_its_reference_program(self, stories: Running) -> None:
        expected = json.loads(shared("checkpoints/stories260K/greedy_ids.json").read_text())["greedy_ids"][1:201]
        answer = generate(stories, prompt=[1], max_tokens=200, temperature=0)
        assert answer["tokens"] == expected
        assert answer["text"].strip().startswith("Once upon a time, there was a little girl named Lily.")
        assert answer["usage"] == {"prompt_tokens": 1, "completion_tokens": 200, "cached_tokens": 0}

    def test_tiny_random_gpt2_continues_as_published_without_a_tokenizer(self, start: Start) -> None:
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
    def test_stream_pieces_join_to_the_decoded_text_behind_the_prompt(self, tiny: Running, prompt: Any) -> None:
        unfinished = 0
        for seed in range(8):
            answer = generate(tiny, prompt=prompt, seed=seed, max_tokens=20, ignore_eos=True)
            check_text(tiny, prompt, answer)
            unfinished += "\ufffd" in answer["text"]
        assert unfinished  # the sampled bytes are what this test is for

    @pytest.mark.parametrize("prompt", ["Once upon a time", [1], "Lily said: \n"])
    def test_stream_pieces_join_to_the_decoded_text_with_byte_fallback(self, stories: Running, prompt: Any) -> None:
        for seed in range(8):
            answer = generate(stories, prompt=prompt, seed=seed, max_tokens=20, temperature=3.0, ignore_eos=True)
            check_text(stories, prompt, answer)

    def test_echo_puts_the_prompt_first(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 3, "max_tokens": 10}
        plain, echoed = generate(tiny, **body), generate(tiny, **body, echo=True)
        assert echoed["tokens"] == PROMPT_IDS + plain["tokens"]
        assert echoed["text"] == PROMPT + plain["text"]
        assert echoed["usage"] == plain["usage"]


def check_text(service: Running, prompt: Any, answer: dict[str, Any]) -> None:
    """The text is what the whole decodes to, behind what the prompt's finished characters decode to."""
    tokenizer = service.checkpoint.tokenizer
    assert tokenizer is not None
    ids = prompt if isinstance(prompt, list) else tokenizer.encode(prompt)
    whole, before = tokenizer.decode(ids + answer["tokens"]), tokenizer.decode(ids).rstrip("\ufffd")
    # The prompt's last character may be finished only by what was generated.
    assert whole.endswith(answer["text"])
    assert whole.removesuffix(answer["text"]) == before or whole == before + answer["text"]


class TestSampling:
    def test_a_seed_repeats_and_another_differs(self, tiny: Running) -> None:
        texts = [
            tiny.answer("/generate", prompt=PROMPT, seed=seed, max_tokens=12)["tokens"]
            for seed in (7, 7, 8, None, None)
        ]
        assert texts[0] == texts[1]
        assert len({tuple(tokens) for tokens in texts}) == 4

    def test_each_of_several_continuations_is_that_of_its_own_seed_and_the_first_stands_on_top(
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

    def test_temperature_zero_is_argmax_whatever_the_seed(self, tiny: Running) -> None:
        answers = [generate(tiny, prompt=PROMPT, temperature=0, seed=seed, max_tokens=15) for seed in (1, 2)]
        assert answers[0] == answers[1]
        tokens = answers[0]["tokens"]
        logits = logits_of(tiny, PROMPT_IDS + tokens)
        assert tokens == logits[len(PROMPT_IDS) - 1 : -1].argmax(-1).tolist()

    @pytest.mark.parametrize("narrow", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
    def test_only_the_likeliest_kept_is_greedy(self, tiny: Running, narrow: dict[str, Any]) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=15)
        for seed in range(3):
            assert generate(tiny, prompt=PROMPT, temperature=5.0, seed=seed, max_tokens=15, **narrow) == greedy

    def test_a_bias_forces_a_token_and_forbids_one(self, tiny: Running) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10)["tokens"]
        forced = generate(tiny, prompt=PROMPT, max_tokens=10, logit_bias={"41": 100})["tokens"]
        assert forced == [41] * 10
        forbidden = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10, logit_bias={str(greedy[0]): -100})
        assert greedy[0] not in forbidden["tokens"]

    @pytest.mark.parametrize(
        "penalty", [{"repetition_penalty": 3.0}, {"presence_penalty": 2.0}, {"frequency_penalty": 1.5}], ids=str
    )
    def test_a_penalty_weakens_the_tokens_that_it_counts(self, tiny: Running, penalty: dict[str, float]) -> None:
        plain = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True)["tokens"]
        tokens = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=40, ignore_eos=True, **penalty)["tokens"]
        assert tokens != plain
        (name,) = penalty
        ids = PROMPT_IDS + tokens
        for position, logits in enumerate(logits_of(tiny, ids)[len(PROMPT_IDS) - 1 : -1]):
            logits = logits.clone()  # made in inference mode, which allows no change
            counted = ids[: len(PROMPT_IDS) + position] if name == "repetition_penalty" else tokens[:position]
            for token_id in set(counted):
                if name == "repetition_penalty":
                    logits[token_id] *= 3.0 if logits[token_id] < 0 else 1 / 3.0
                else:
                    logits[token_id] -= 2.0 if name == "presence_penalty" else 1.5 * counted.count(token_id)
            # Within rounding, since equals may come either way.
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
    def test_any_finite_parameter_is_answered_with_tokens_or_refused_by_name(
        self, tiny: Running, extreme: dict[str, Any]
    ) -> None:
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": 6, "seed": 1, "ignore_eos": True} | extreme)
        if response.status_code == 200:
            assert len(response.json()["tokens"]) == 6
        else:
            assert response.status_code in (400, 422)
            assert response.json()["error"]["param"].split(".")[0] in extreme

    def test_a_tiny_temperature_is_greedy(self, tiny: Running) -> None:
        greedy = generate(tiny, prompt=PROMPT, temperature=0, max_tokens=10)
        for temperature in (1e-6, 1e-30, 1e-300):
            assert generate(tiny, prompt=PROMPT, temperature=temperature, seed=1, max_tokens=10) == greedy


class TestStopping:
    @given(data=st.data())
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_a_stop_string_ends_the_text_right_before_its_first_occurrence(
        self, tiny: Running, data: st.DataObject
    ) -> None:
        body = {"prompt": PROMPT, "seed": data.draw(st.integers(0, 3)), "max_tokens": 16, "ignore_eos": True}
        text = tiny.answer("/generate", **body)["text"]
        check_stop(tiny, body, text, data)

    @given(data=st.data())
    @settings(max_examples=60, deadline=None, derandomize=True)
    def test_a_stop_string_is_found_across_the_tokens_of_a_story(self, stories: Running, data: st.DataObject) -> None:
        body = {"prompt": [1], "temperature": 1.5, "seed": data.draw(st.integers(0, 3)), "max_tokens": 24}
        text = stories.answer("/generate", **body)["text"]
        check_stop(stories, body, text, data)

    def test_several_stop_strings_none_of_which_shows(self, stories: Running) -> None:
        full = stories.answer("/generate", prompt=[1], temperature=0, max_tokens=60)["text"]
        stops = ["big red", "girl na", "e was"]
        answer = generate(stories, prompt=[1], temperature=0, max_tokens=60, stop=stops)
        assert answer["text"] == full[: full.index("e was")]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "e was")

    def test_a_stop_string_that_begins_and_does_not_end_is_text(self, stories: Running) -> None:
        full = stories.answer("/generate", prompt=[1], temperature=0, max_tokens=12)["text"]
        answer = generate(stories, prompt=[1], temperature=0, max_tokens=12, stop=[full[-3:] + "ZZ"])
        assert (answer["text"], answer["finish_reason"], answer["stop_reason"]) == (full, "length", None)

    def test_a_stop_string_in_the_prompt_stops_nothing(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "echo": True}
        assert generate(tiny, **body, stop=["cat"]) == generate(tiny, **body)

    def test_a_stop_id_is_the_last_token_and_has_no_text(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 15, "ignore_eos": True}
        full = generate(tiny, **body)
        stop_id = full["tokens"][4]
        first = full["tokens"].index(stop_id)
        answer = generate(tiny, **body, stop_token_ids=[stop_id, 1])
        assert answer["tokens"] == full["tokens"][: first + 1]
        assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop_id)
        check_text(tiny, PROMPT, answer | {"tokens": answer["tokens"][:-1]})

    def test_the_end_of_sequence_ends_unless_it_is_ignored(self, tiny: Running) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logit_bias": {"0": 100}}
        ended = generate(tiny, **body)
        assert (ended["tokens"], ended["text"]) == ([0], "")
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", 0)
        ignored = generate(tiny, **body, ignore_eos=True)
        assert (ignored["tokens"], ignored["finish_reason"]) == ([0] * 6, "length")
        asked_for = generate(tiny, **body, ignore_eos=True, stop_token_ids=[0])
        assert asked_for["tokens"] == [0]

    def test_the_context_bounds_what_is_generated_and_the_default_fits_into_it(self, tiny: Running) -> None:
        room = CONTEXT - len(PROMPT_IDS)
        assert len(generate(tiny, prompt=PROMPT, max_tokens=room, ignore_eos=True, seed=1)["tokens"]) == room
        assert len(generate(tiny, prompt=PROMPT, ignore_eos=True, seed=1)["tokens"]) == room
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": room + 1})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
        assert str(room) in response.json()["error"]["message"]

    def test_128_tokens_come_where_nothing_is_said(self, stories: Running) -> None:
        answer = stories.answer("/generate", prompt=[1], seed=1, ignore_eos=True)
        assert (len(answer["tokens"]), answer["finish_reason"]) == (128, "length")


def check_stop(service: Running, body: dict[str, Any], text: str, data: st.DataObject) -> None:
    """A piece of the unstopped text, sent as a stop string."""
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 8))].replace("\0", "")
    if not stop:
        return
    answer = generate(service, **body, stop=stop)
    if stop not in text:  # it held a NUL
        assert answer["text"] == text
        return
    assert answer["text"] == text[: text.index(stop)]
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", stop)


class TestLogprobs:
    @pytest.mark.parametrize("num_top", [0, 1, 20])
    @pytest.mark.parametrize("echo", [False, True])
    def test_logprobs_are_those_of_the_network_before_any_penalty(
        self, tiny: Running, num_top: int, echo: bool
    ) -> None:
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 4, "max_tokens": 9, "logprobs": num_top, "echo": echo}
        body |= {"temperature": 0.7, "repetition_penalty": 1.5, "logit_bias": {"9": 5.0}}
        answer = tiny.answer("/generate", **body)
        GenerateAnswer.model_validate(answer)
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
            TokenEvent.model_validate(event)
            assert (event["token"]["id"], event["token"]["logprob"]) == (entry["id"], entry["logprob"])
            assert (event["token"].get("top") or []) == entry["top"]

    def test_no_logprobs_come_where_none_are_asked_for(self, tiny: Running) -> None:
        assert tiny.answer("/generate", prompt=PROMPT, max_tokens=2)["logprobs"] is None
        *events, _ = tiny.stream(prompt=PROMPT, max_tokens=2)
        assert all(event["token"]["logprob"] is None and "top" not in event["token"] for event in events)


class TestDefaults:
    def test_the_checkpoints_own_settings_apply_and_a_request_overrides_them(
        self, tmp_path: Path, start: Start
    ) -> None:
        generation = {"do_sample": False, "eos_token_id": [41, 42], "repetition_penalty": 100.0}
        service = start(model=str(write_checkpoint(tmp_path, generation=generation)))
        assert service.get("/model").json()["eos_token_ids"] == [41, 42]
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12}
        default = generate(service, **body)
        assert default == generate(service, **body, seed=9)  # greedy: no seed matters
        assert default == generate(service, **body, temperature=0, repetition_penalty=100.0)
        assert default != generate(service, **body, repetition_penalty=1.0)
        assert len({str(generate(service, **body, temperature=1.0, seed=seed)) for seed in range(3)}) == 3
        forced = generate(service, **body, logit_bias={"42": 100})
        assert (forced["tokens"], forced["stop_reason"]) == ([42], 42)

    def test_a_sampling_default_is_used_where_the_request_says_nothing(self, tmp_path: Path, start: Start) -> None:
        service = start(model=str(write_checkpoint(tmp_path, generation={"do_sample": True, "top_k": 1})))
        body: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 12, "temperature": 5.0, "seed": 2}
        greedy = generate(service, **body | {"temperature": 0.0})
        assert generate(service, **body)["tokens"] == greedy["tokens"]
        assert generate(service, **body, top_k=0)["tokens"] != greedy["tokens"]


class TestStreams:
    def test_the_last_frame_says_how_it_ended_and_done_follows(self, tiny: Running) -> None:
        response = tiny.post("/generate", {"prompt": PROMPT, "max_tokens": 3, "stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.content.endswith(b"\n\ndata: [DONE]\n\n")
        *tokens, end = tiny.stream(prompt=PROMPT, max_tokens=3, ignore_eos=True)
        assert len(tokens) == 3
        assert all(event["choice"] == 0 and "finish_reason" not in event for event in tokens)
        assert end["finish_reason"] == "length"
        assert end["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "cached_tokens": 0}
        timings = end["timings"]
        assert 0 <= timings["queue_seconds"] < timings["time_to_first_token_seconds"] <= timings["total_seconds"]

    def test_tokens_come_one_by_one_and_not_all_at_the_end(self, roomy: Running) -> None:
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        before = roomy.metric("generation_tokens_total")
        with roomy.client.stream("POST", "/generate", json=body) as response:
            chunks = response.iter_bytes()
            next(chunks)
            assert roomy.metric("num_requests_running") == 1
            assert roomy.metric("generation_tokens_total") - before < 2000
        is_idle(roomy)

    @pytest.mark.parametrize("where", ["Transcript.__init__", "Transcript.push", "Sampler.accept"])
    @pytest.mark.parametrize("n", [1, 2])
    def test_a_bug_ends_its_own_request_with_an_error_and_the_next_one_is_served(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, errors_logged: list[str], where: str, n: int
    ) -> None:
        owner: Any = {"Transcript": Transcript, "Sampler": Sampler}[where.partition(".")[0]]
        name = where.partition(".")[2]
        whole_one, num_calls = getattr(owner, name), 0

        def fail(*arguments: Any) -> Any:
            """Where a request is admitted, its last choice alone fails."""
            nonlocal num_calls
            num_calls += 1
            if name == "__init__" and num_calls % n != 0:
                return whole_one(*arguments)
            raise RuntimeError("secret detail")

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            streamed = tiny.post("/generate", {"prompt": PROMPT, "stream": True, "n": n})
            whole = tiny.post("/generate", {"prompt": PROMPT, "n": n})
        assert streamed.status_code == 200
        *errors, done, rest = streamed.content.split(b"\n\n")
        assert (done, rest) == (b"data: [DONE]", b"")
        events = [json.loads(error.removeprefix(b"event: error\ndata: ")) for error in errors]
        assert [event["choice"] for event in events] == list(range(n))
        for content in (*events, whole.json()):
            assert content["error"]["type"] == "internal_error"
            assert "secret" not in str(content)
        assert whole.status_code == 500
        assert whole.headers["connection"] == "close"  # the server closes it: no client may send its next request there
        is_idle(tiny)
        wait_until(lambda: "secret detail" in "".join(errors_logged), "the failure is logged")
        errors_logged.clear()


def is_idle(service: Running) -> None:
    """No request holds a place or waits for one, no block is in use, and a good request is served."""
    wait_until(lambda: service.metric("num_requests_running") == 0, "no request runs")
    wait_until(lambda: service.metric("num_requests_waiting") == 0, "no request waits")
    assert service.metric("kv_cache_usage_perc") == 0
    assert len(service.answer("/generate", prompt=PROMPT, max_tokens=2, ignore_eos=True)["tokens"]) == 2


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One place, and a context that takes seconds to fill: what is cancelled in it has not ended by itself."""
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy"), max_position_embeddings=1 << 16)
    with running(model=str(directory), max_num_seqs=1) as service:
        yield service


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
class TestDisconnects:
    LONG: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 60_000, "ignore_eos": True}  # noqa: RUF012 (never changed)

    def test_a_client_that_leaves_between_tokens_frees_its_place(self, roomy: Running, stream: bool) -> None:
        before = roomy.metric("generation_tokens_total")
        connection = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("generation_tokens_total") > before + 2, "tokens are generated")
        connection.close()
        is_idle(roomy)
        assert roomy.metric("generation_tokens_total") - before < 60_000

    def test_a_client_that_leaves_before_the_first_token_frees_its_place(self, roomy: Running, stream: bool) -> None:
        with roomy.blocked():
            connection = roomy.send("/generate", self.LONG | {"stream": stream})
            wait_until(lambda: roomy.metric("num_requests_waiting") == 1, "the request waits for its first step")
            connection.close()
            wait_until(lambda: roomy.state.worker._inbox.qsize() == 2, "its end is known behind it")
        is_idle(roomy)

    def test_a_client_that_leaves_while_it_waits_leaves_the_queue(self, roomy: Running, stream: bool) -> None:
        first = roomy.send("/generate", self.LONG)
        wait_until(lambda: roomy.metric("num_requests_running") == 1, "the first runs")
        second = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("num_requests_waiting") == 1, "the second waits")
        second.close()
        wait_until(lambda: roomy.metric("num_requests_waiting") == 0, "none waits")
        assert roomy.metric("num_requests_running") == 1
        first.close()
        is_idle(roomy)

    def test_cancelled_generations_are_counted_as_such(self, roomy: Running, stream: bool) -> None:
        name = 'request_success_total{finished_reason="cancelled"}'
        before = roomy.metric(name)
        running_before = roomy.metric("generation_tokens_total")
        connection = roomy.send("/generate", self.LONG | {"stream": stream})
        wait_until(lambda: roomy.metric("generation_tokens_total") > running_before, "tokens are generated")
        connection.close()
        wait_until(lambda: roomy.metric(name) == before + 1, "it counts as cancelled")
