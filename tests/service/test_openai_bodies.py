"""Wrong bodies of the routes of other APIs are answered with an error that names the field, and never with 500."""

import json
import os
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from service.http.anthropic_schemas import MessagesRequest
from service.http.generate_schemas import GenerationRequest
from service.http.openai_schemas import ChatRequest, CompletionRequest
from service.http.responses_schemas import ResponsesRequest
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start, running
from tests.service.test_bad_input import OPENAI_GOOD

MODELS: dict[str, type[GenerationRequest]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
# FORWARDSCOPE_TEST_BODIES=10000 sends more of them.
NUM_BODIES = int(os.environ.get("FORWARDSCOPE_TEST_BODIES", "300"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 20, 21, 65, 2**31, 2**63, 2**70, 0.0, 0.5, 1.0, -0.1, 1e308),
    *("", "a", "auto", "none", "required", "\x00", "\ud800", "😀", "a" * 300),
    *([], [""], ["a", "b"], [1, 2], [[1], [2, 3]], [[]], [None], [{}], ["a", 1], [10**9], [-1]),
    *({}, {"a": 1}, {"1": 5}, {"999999": 1}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "cat"}}},
    {"type": "function", "function": {"name": "f"}},
    {"include_usage": True},
    {"regex": "[ab]+"},
    {"regex": "("},
    {"choice": ["a", "b"]},
    {"json": SCHEMA, "regex": "a"},
    {"stages": "embed", "detail": "summary"},
    {"logit_lens": True},
    [TOOL],
    [{"type": "function", "function": {"name": "f", "strict": True}}],
    [{"role": "user", "content": "a"}],
    [
        {"role": "tool", "content": "a", "tool_call_id": "x"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
]


RICH: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": [[1, 2], [3]],
        "max_tokens": 2,
        "logit_bias": {"3": 1.0},
        "stop": ["a", "b"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "structured_outputs": {"json": SCHEMA},
        "trace": {"stages": ["embed"], "positions": [0]},
    },
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "content": "b", "tool_call_id": "x"},
        ],
        "max_tokens": 2,
        "tools": [TOOL],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        "chat_template_kwargs": {"x": False},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "function_call", "call_id": "x", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "x", "output": "b"},
        ],
        "max_output_tokens": 2,
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]},
        "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        "reasoning": {"effort": "low"},
        "include": ["message.output_text.logprobs"],
        "stream": True,
        "metadata": {"a": "b"},
    },
    "/v1/messages": {
        "system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "b", "signature": "c"},
                    {"type": "tool_use", "id": "x", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": "b"}]},
        ],
        "max_tokens": 2,
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        "stop_sequences": ["x"],
    },
}


def bodies(path: str, count: int) -> Iterator[dict[str, Any]]:
    """Bodies in which one to three fields have some value, right or wrong, or do not exist; also nested fields."""
    chance = random.Random(path)
    fields = [*MODELS[path].model_fields, "max_new_tokens", "best", "Model", "messages", "prompt"]
    for index in range(count):
        if index % 2:
            yield mutated(RICH[path], chance)
        else:
            changed = {name: chance.choice(VALUES) for name in chance.sample(fields, chance.choice([1, 1, 2, 3]))}
            yield OPENAI_GOOD[path] | changed


def mutated(body: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A copy of a body in which one value, at any depth, is another one."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    node: Any = copy
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not node[key] or not isinstance(node[key], dict | list) or chance.random() < 0.2:
            break
        node = node[key]
    node[key] = chance.choice([*VALUES, "\\ud800", '{"a": "\\\\ud800"}', '{"a": NaN}', float("nan"), float("inf")])
    return copy


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose context has room for the description of a function."""
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=1024)
    with running(model=str(directory)) as service:
        yield service


@pytest.mark.parametrize("path", MODELS)
def test_wrong_bodies_are_answered_with_an_error_that_names_the_field(roomy: Running, path: str) -> None:
    num_good = 0
    for body in bodies(path, NUM_BODIES):
        body["model"] = body.get("model") if isinstance(body.get("model"), str) else None
        content = json.dumps(body).encode()  # httpx cannot write lone surrogates
        response = roomy.client.post(path, content=content, headers={"Content-Type": "application/json"})
        if response.status_code == 200:
            num_good += 1
            assert b"event: error" not in response.content, body
            assert b"event: response.failed" not in response.content, body
            continue
        assert response.status_code in (400, 404, 413, 422), (body, response.text)
        error = response.json()["error"]
        assert error["param"] is not None or error["code"] == "model_not_found" or response.status_code == 413, (
            body,
            error,
        )
        if error["param"] not in (None, "body"):
            named = error["param"].partition(".")[0]
            assert named in body or named in ("messages", "prompt", "max_tokens"), (body, error)
            assert named in error["message"], (body, error)
    assert num_good > NUM_BODIES // 20, "most bodies are wrong in the same way"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_an_error_names_the_field_that_the_client_has_sent(tiny: Running, name: str) -> None:
    """The library knows `max_tokens` only."""
    body = {"messages": [{"role": "user", "content": "a"}], name: 10_000}
    error = tiny.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: this model's maximum context length is 64 tokens.")


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LONG = "the cat sat on the mat " * 40


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
