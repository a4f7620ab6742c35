"""`Client`: results and errors, against a running service, or against prepared answers where that is not enough."""

import socket
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from forwardscope import ApiError, Client, ConnectionFailed, ForwardscopeError, RequestTimeout, UnknownStage
from forwardscope.call import MAX_WAIT_SECONDS, retry_delay
from model import __version__
from tests.forwardscope.canned_server import Canned, answer, canned, error
from tests.forwardscope.conftest import url_of
from tests.service.running import ROOT, Running, running

PROMPT = "the cat sat on"


class TestResults:
    def test_arrays_are_float32_and_writable(self, client: Client) -> None:
        trace = client.run(PROMPT, "blocks.0.*", heads=[2])
        assert {trace[name].dtype for name in trace} == {np.dtype("float32")}
        assert trace["blocks.0.attn.hook_pattern"].shape == (1, 1, 4, 4)
        assert {stage.name: stage.dtype for stage in trace.stages}["blocks.0.resid_post"] == "bfloat16"
        trace["blocks.0.resid_post"][...] = 0

    def test_the_pattern_times_the_values_is_z(self, client: Client) -> None:
        """The identity fails if the numbers of any of these stages are read wrongly."""
        trace = client.run(PROMPT, ["blocks.2.attn.pattern", "blocks.2.attn.v", "blocks.2.attn.z"])
        pattern, values, z = (trace[f"blocks.2.attn.{name}"][0] for name in ("pattern", "v", "z"))
        repeated = values.repeat(pattern.shape[0] // values.shape[1], axis=1)
        assert np.allclose(np.einsum("hqk,khd->qhd", pattern, repeated), z, atol=0.02)

    def test_the_logits_of_a_trace_must_be_asked_for(self, client: Client) -> None:
        assert client.run(PROMPT, ["embed", "logits"], positions=[3]).logits.shape == (1, 4096)
        with pytest.raises(UnknownStage, match="'logits'"):
            _ = client.run(PROMPT, "embed").logits

    def test_logits_are_those_of_the_pass(self, client: Client) -> None:
        whole = client.run(PROMPT, "logits").logits
        assert np.array_equal(client.logits(PROMPT).logits, whole[3:])
        found = client.logits(PROMPT, [1, 2], top_k=3, logprobs=True)
        assert found.positions == (1, 2)
        assert found.ids is not None
        assert found.logprobs is not None
        assert np.array_equal(np.take_along_axis(whole[1:3], found.ids, axis=1), found.logits)
        assert np.array_equal(found.ids[:, 0], whole[1:3].argmax(1))
        assert (found.logprobs < 0).all()

    def test_attention_maps_are_those_of_the_pass(self, client: Client) -> None:
        found = client.patterns(PROMPT, layers=[2, 0], heads=[1, 3])
        assert (found.values.shape, found.layers, found.heads, found.block) == ((2, 2, 4, 4), (2, 0), (1, 3), 1)
        trace = client.run(PROMPT, "blocks.*.attn.pattern", heads=[1, 3])
        for layer, maps in zip(found.layers, found.values, strict=True):
            assert np.array_equal(maps, trace[f"blocks.{layer}.attn.pattern"][0])
        assert np.allclose(client.patterns(PROMPT, [2, 0], [1, 3], dtype="uint8").values, found.values, atol=0.002)

    def test_large_attention_maps_are_reduced(self, client: Client) -> None:
        ids = client.to_tokens("the cat sat on the mat and the dog sat on the log")
        found = client.patterns(ids, [0], max_size=4)
        whole = client.patterns(ids, [0])
        assert found.block == -(-len(ids) // 4)
        assert found.values[0, 0, 0, 0] == whole.values[0, 0, : found.block, : found.block].max()

    def test_the_status_of_the_server_is_described(self, client: Client) -> None:
        status = client.status()
        assert (status.version, status.model, status.ready) == (__version__, "bundled", True)
        assert status.cache is not None
        assert status.cache["total_tokens"] == client.model().limits["cache_tokens"]
        assert client.model().capabilities["edits"]
        assert {each.prompt.text for each in client.models() if each.prompt is not None} >= {PROMPT}

    def test_a_worked_example_is_run_by_its_name(self, client: Client) -> None:
        trace = client.run(PROMPT, model="a-tokens-journey")
        assert trace.model == "a-tokens-journey"
        assert trace["blocks.0.attn.pattern"].dtype == np.float64

    def test_stages_of_another_program_are_compared(self, client: Client) -> None:
        trace = client.run(PROMPT)
        stages = {name: trace[name] for name in trace}
        found = client.compare(PROMPT, stages)
        assert (found.differs, found.first_stage, found.hints, found.dtype) == (False, None, (), "bfloat16")
        assert list(found.stages) == list(trace)
        name = "blocks.1.attn.q"
        found = client.compare(PROMPT, stages | {name: stages[name][:, :, ::-1]}, per_head=True)
        assert found.first_stage == name
        assert found.hints[0].code == "permuted_heads"
        assert found.stages[name].per_head is not None
        assert found.last_equal_stage == "blocks.1.ln1.out"
        tensor = torch.tensor(stages[name]).requires_grad_()
        assert not client.compare(PROMPT, {name: tensor}).differs
        assert not client.compare(PROMPT, {name: tensor.bfloat16()}).differs
        with pytest.raises(ValueError, match="complex64 cannot be sent"):
            client.compare(PROMPT, {name: tensor.to(torch.complex64)})
        assert not client.compare(PROMPT, setting={"dtype": "bfloat16"}).differs
        with pytest.raises(ApiError, match="--compare-directory"):
            client.compare(PROMPT, path="other")

    def test_a_prompt_may_be_an_array_of_ids(self, client: Client) -> None:
        ids = np.array(client.to_tokens(PROMPT))
        assert client.run(ids, "embed").tokens == client.run(PROMPT, "embed").tokens  # type: ignore[call-overload]
        with pytest.raises(TypeError):
            client.run([1.5])  # type: ignore[list-item]  # not cut to 1

    def test_a_generation_has_its_traces_as_arrays(self, client: Client) -> None:
        found = client.generate(
            PROMPT, max_tokens=3, temperature=0, trace={"stages": "*.resid_post", "logit_lens": True}
        )
        assert found.trace is not None
        step = found.trace[-1]
        ids = [*client.to_tokens(PROMPT), *found.tokens[:-1]]
        whole = client.run(ids, "*.resid_post", positions=step.positions)
        for name in whole:
            assert np.array_equal(step[name], whole[name]), name
        assert step.logit_lens is not None
        assert [layer.layer for layer in step.logit_lens] == list(range(6))
        assert step.logit_lens[-1].top[0].id == found.tokens[-1]

    def test_all_continuations_are_returned(self, client: Client) -> None:
        found = client.generate("Emma", n=3, max_tokens=4, seed=1, ignore_eos=True, logprobs=0)
        assert [choice.choice for choice in found.choices] == [0, 1, 2]
        assert found.text == found.choices[0].text
        assert all(len(choice.tokens) == 4 for choice in found.choices)
        assert found.usage.completion_tokens == 4
        assert found.timings["total_seconds"] is not None

    def test_the_model_and_its_stages_are_described(self, client: Client) -> None:
        model = client.model()
        assert (model.name, model.dtype) == ("bundled", "bfloat16")
        assert {each.name: each.dims for each in model.stages}["blocks.0.attn.pattern"] == (
            "batch",
            "head",
            "query",
            "key",
        )
        assert model.limits["max_positions"] == 512
        assert next(iter(client.models())).name == "bundled"
        assert client.health() == "ok"


class TestErrors:
    def test_an_error_has_the_message_status_field_and_code_of_the_server(self, client: Client) -> None:
        with pytest.raises(ApiError) as raised:
            client.generate(PROMPT, max_tokns=3)
        assert (raised.value.status, raised.value.param, raised.value.code) == (422, "max_tokns", "extra_forbidden")
        assert "did you mean 'max_tokens'" in str(raised.value)

    def test_an_unknown_stage_is_an_error_with_the_nearest_names(self, client: Client) -> None:
        with pytest.raises(ApiError, match=r"blocks\.0\.attn\.pattern") as raised:
            client.run(PROMPT, "blocks.0.attn.patern")
        assert (raised.value.status, raised.value.code) == (400, "unknown_stage")

    def test_the_api_key_is_sent_and_its_absence_is_401(self) -> None:
        with running(model="none", api_key="secret") as service:
            with Client(url_of(service), api_key="secret") as client:
                assert len(client.models()) == 3
            with Client(url_of(service)) as client, pytest.raises(ApiError) as raised:
                client.models()
        assert raised.value.status == 401

    def test_a_server_that_does_not_run_is_named(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with Client(url) as client, pytest.raises(ConnectionFailed, match=f"cannot connect to {url}"):
            client.health()

    def test_a_silent_server_is_a_timeout_that_names_the_argument(self) -> None:
        with (
            canned(answer({}, pause=0.0), Canned(pause=2.0, headers={"Content-Length": "99"})) as server,
            Client(server.url, timeout=0.6) as client,
        ):
            with pytest.raises(ForwardscopeError, match="documented form"):
                client.health()
            with pytest.raises(RequestTimeout, match="`timeout`"):
                client.health()

    def test_an_answer_that_ends_early_is_a_failed_connection(self) -> None:
        with canned(Canned(headers={"Content-Length": "99"})) as server, Client(server.url) as client:
            with pytest.raises(ConnectionFailed, match="before the answer was complete"):
                client.health()
            with pytest.raises(ConnectionError):  # as any other failed connection in Python
                client.health()

    @pytest.mark.parametrize("content", [b"<html>", b"[]", b"null", b"{}", b'{"status": []}'[:-1]])
    def test_an_answer_of_another_program_is_a_clear_error(self, content: bytes) -> None:
        with canned(Canned((content,))) as server, Client(server.url) as client:
            for call in (client.health, client.model, client.models, lambda: client.run("a")):
                with pytest.raises(ForwardscopeError, match=r"GET|POST|safetensors"):
                    call()
        with (
            canned(Canned((content,), status=502)) as server,
            Client(server.url) as client,
            pytest.raises(ApiError) as raised,
        ):
            client.health()
        assert (raised.value.status, raised.value.code) == (502, None)

    @pytest.mark.parametrize("url", ["localhost:8000", "", "ftp://localhost"])
    def test_a_url_without_http_is_refused(self, url: str) -> None:
        with pytest.raises(ValueError, match="does not begin with http"):
            Client(url)

    @pytest.mark.parametrize("timeout", ["x", None, 0, -1.0, float("nan")])
    def test_a_timeout_that_is_no_time_is_refused(self, timeout: Any) -> None:
        with pytest.raises(ValueError, match="is not a number of seconds above 0"):
            Client(timeout=timeout)

    @pytest.mark.parametrize("key", ["secret\n", "sécret", b"secret"])
    def test_a_key_that_no_header_can_have_is_refused(self, key: Any) -> None:
        with pytest.raises(ValueError, match="api_key: is not a text that a header can have"):
            Client(api_key=key)

    def test_a_number_that_json_does_not_have_is_refused(self, client: Client) -> None:
        with pytest.raises(ValueError, match="JSON"):
            client.generate(PROMPT, temperature=float("nan"))


class TestRetries:
    def test_a_busy_server_is_asked_again(self) -> None:
        with canned(error(429, "full", "0"), error(503, "loading", "0"), answer({"status": "ok"})) as server:
            with Client(server.url) as client:
                assert client.health() == "ok"
            assert len(server.requests) == 3

    def test_the_number_of_retries_is_bounded(self) -> None:
        with canned(error(429, "the queue is full", "0")) as server:
            with Client(server.url, max_retries=2) as client, pytest.raises(ApiError, match="the queue is full"):
                client.health()
            assert len(server.requests) == 3

    def test_a_stream_is_asked_for_again(self) -> None:
        with canned(error(429, "full", "0"), Canned((b"data: [DONE]\n\n",))) as server:
            with Client(server.url) as client:
                assert list(client.stream("a")) == []
            assert len(server.requests) == 2

    @pytest.mark.parametrize(
        ("status", "retry_after", "expected"),
        [
            (429, "1", 1.0),
            (503, "0", 0.0),
            (503, None, None),
            (429, "soon", None),
            (429, str(int(MAX_WAIT_SECONDS) + 1), None),
            (400, "1", None),
            (500, "1", None),
        ],
    )
    def test_only_refusals_with_a_short_retry_after_are_repeated(
        self, status: int, retry_after: str | None, expected: float | None
    ) -> None:
        assert retry_delay(status, retry_after, num_attempts=1, max_retries=1) == expected
        assert retry_delay(status, retry_after, num_attempts=2, max_retries=1) is None


class TestChat:
    ANSWER: dict[str, Any] = {  # noqa: RUF012
        "id": "chatcmpl-1",
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Paris."}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
    }

    def test_a_question_is_one_message_of_the_user(self) -> None:
        with canned(answer(self.ANSWER)) as server:
            with Client(server.url) as client:
                found = client.chat("Where is the Louvre?", max_tokens=5, top_p=0.5)
            question = {"role": "user", "content": "Where is the Louvre?"}
            assert server.requests == [
                ("/v1/chat/completions", {"messages": [question], "max_tokens": 5, "top_p": 0.5})
            ]
        assert (found.text, found.finish_reason, found.usage.completion_tokens) == ("Paris.", "stop", 3)
        assert found.message == {"role": "assistant", "content": "Paris."}

    def test_an_answer_of_tool_calls_has_no_text(self) -> None:
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function"}]}
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
        with canned(answer(self.ANSWER | {"choices": [choice]})) as server, Client(server.url) as client:
            found = client.chat([{"role": "user", "content": "a"}])
        assert (found.text, found.message) == (None, message)


def test_the_clients_do_not_import_torch() -> None:
    code = (
        "import sys; from forwardscope import Client, AsyncClient, __version__; Client('http://localhost');"
        "print([name for name in ('torch', 'service', 'model.config') if name in sys.modules], __version__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == f"[] {__version__}"


def test_help_shows_the_arguments_and_what_a_method_does(client: Client) -> None:
    import inspect

    assert list(inspect.signature(client.run).parameters)[:2] == ["prompt", "stages"]
    assert (Client.run.__doc__ or "").startswith("Run one forward pass")
    assert next(iter(inspect.signature(Client.run).parameters)) == "self"


def test_the_server_says_the_version_of_the_package(service: Running) -> None:
    assert service.get("/openapi.json").json()["info"]["version"] == __version__
