"""Wrong bodies of the routes of other APIs are answered with an error that names the field, and never with 500."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from forwardscope.results.anthropic import MessagesError
from forwardscope.results.server import ErrorAnswer
from tests.service.checkpoints import write_checkpoint, write_fim_checkpoint
from tests.service.generated_bodies import MODELS, RICH, generated_bodies
from tests.service.running import Running, Start, running, validate, wait_until
from tests.service.test_bad_input import GOOD, OPENAI_GOOD

# FORWARDSCOPE_TEST_BODIES=10000 sends more of them to each route.
NUM_BODIES = int(os.environ.get("FORWARDSCOPE_TEST_BODIES", "150"))


GOOD_BODIES: dict[str, dict[str, Any]] = {**OPENAI_GOOD, **GOOD, "/infill": {"input_prefix": "a", "n_predict": 2}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose context has room for the description of a function, and whose model fills in the middle."""
    directory = write_fim_checkpoint(tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=512)
    with running(model=str(directory)) as service:
        yield service


@pytest.mark.parametrize("path", RICH)
def test_wrong_bodies_are_answered_with_an_error_that_names_the_field(roomy: Running, path: str) -> None:
    good = GOOD_BODIES[path]
    statuses: Counter[int] = Counter()
    for content in generated_bodies(path, good, NUM_BODIES):
        response = roomy.client.post(path, content=content, headers={"Content-Type": "application/json"})
        statuses[response.status_code] += 1
        if response.status_code == 200:
            assert b"event: error" not in response.content, content[:2000]
            assert b"event: response.failed" not in response.content, content[:2000]
        else:
            check_named(path, content, response)
    assert statuses[200] > NUM_BODIES // 20, "most bodies are wrong in the same way"
    assert roomy.post(path, good).status_code == 200
    wait_until(lambda: roomy.state.buffers.num_bytes == 0, "all memory of requests is free again")


def check_named(path: str, content: bytes, response: httpx.Response) -> None:
    """The error has the form of its API, and names a field that the body has or lacks, first of all."""
    sent = content[:2000].decode(errors="replace")
    assert response.status_code in (400, 404, 413, 422), (sent, response.text)
    is_anthropic = path.startswith("/v1/messages")
    error = (validate(MessagesError, response.json()) if is_anthropic else validate(ErrorAnswer, response.json())).error
    assert error.param is not None, (sent, error)
    assert error.message.startswith(f"{error.param}: "), (sent, error)
    first = error.param.partition(".")[0]
    assert first in ("body", *MODELS[path].model_fields) or f'"{first}'.encode() in content, (sent, error)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_error_names_the_field_that_the_client_has_sent(tiny: Running, name: str) -> None:
    """The library knows `max_tokens` only."""
    body = {"messages": [{"role": "user", "content": "a"}], name: 10_000}
    error = tiny.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: this model's maximum context length is 64 tokens.")


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "the cat sat on the mat " * 40


CUSTOM = {"type": "custom", "custom": {"name": "f", "input": ""}}


def with_call(call: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, with_call({"id": 1, "function": {"name": "f"}}), "messages.0.tool_calls.0.id"),
        (CHAT, with_call({"type": "", "function": {"name": "f"}}), "messages.0.tool_calls.0.type"),
        (CHAT, with_call({"function": {"arguments": ""}}), "messages.0.tool_calls.0.function.name"),
        (
            CHAT,
            with_call({"type": "custom", "id": 1, "custom": {"name": "f", "input": ""}}),
            "messages.0.tool_calls.0.id",
        ),
        (CHAT, with_call({"type": "custom"}), "messages.0.tool_calls.0.custom"),
        (CHAT, with_call({"type": "custom", "custom": {"name": "f"}}), "messages.0.tool_calls.0.custom.input"),
        (
            "/v1/responses",
            {"input": [{"type": "function_call_output", "call_id": 1, "output": ""}]},
            "input.0.call_id",
        ),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", "name": 1}]}, "tools.0.name"),
    ],
)
def test_an_error_in_one_of_several_kinds_of_objects_names_its_field(
    tiny: Running, path: str, body: dict[str, Any], param: str
) -> None:
    assert tiny.post(path, body).json()["error"]["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "numbers"),
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}]}, (64, None)),
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "max_tokens": 5}, (64, None)),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "max_tokens": 63}, (64, 65)),
        (COMPLETIONS, {"prompt": [1] * 65}, (64, 65)),
        (COMPLETIONS, {"prompt": [1] * 64}, (64, 64)),
        (COMPLETIONS, {"prompt": [1] * 60, "max_tokens": 5}, (64, 65)),
        (COMPLETIONS, {"prompt": [[1], [1] * 70]}, (64, 70)),
        ("/generate", {"prompt": [1] * 60, "max_tokens": 5}, (64, 65)),
        ("/generate", {"prompt": LONG}, (64, None)),
    ],
)
def test_a_request_that_is_too_long_says_so_in_the_words_that_clients_look_for(
    tiny: Running, path: str, body: dict[str, Any], numbers: tuple[int, int | None], stream: bool
) -> None:
    """Before a stream begins, so that the client can shorten the conversation."""
    response = tiny.post(path, body | {"stream": stream})
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    found = re.search(
        r"maximum context length is (\d+) tokens\. However, (?:you requested|your \w+ resulted in) (?:at least )?"
        r"(\d+) tokens",
        error["message"],
    )
    assert found is not None, error["message"]
    limit, total = map(int, found.groups())
    assert limit == numbers[0]
    assert total == numbers[1] or (numbers[1] is None and total > limit)
    assert "reduce the length of the" in error["message"]


def test_a_cache_that_is_smaller_than_the_context_is_the_limit(tmp_path: Any, start: Start) -> None:
    service = start(model=str(write_checkpoint(tmp_path / "long", max_position_embeddings=4096)), cache_bytes=1 << 16)
    limit = service.get("/v1/models").json()["data"][0]["max_model_len"]
    assert 0 < limit < 4096
    error = service.post(COMPLETIONS, {"prompt": [1, 2], "max_tokens": 4000}).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {limit} tokens. However, you requested 4002 tokens" in error["message"]
