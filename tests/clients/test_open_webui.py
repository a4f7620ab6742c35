"""The requests that Open WebUI sends, as plain HTTP: its connection to a server that speaks OpenAI's API.

The bodies have the fields that Open WebUI's backend sends (`routers/openai.py` and `routers/tasks.py` in its source):
it takes out its own fields, such as `metadata`, and passes on the parameters that a user has set.
"""

import json
from typing import Any

import pytest

from tests.service.running import Running

pytestmark = pytest.mark.slow
MODEL = "SmolLM2-135M-Instruct"
HEADERS = {
    "Authorization": "Bearer none",
    "Content-Type": "application/json",
    "X-OpenWebUI-User-Name": "Ada",
    "X-OpenWebUI-User-Role": "admin",
}
QUESTION = {"role": "user", "content": "What is the capital of France?"}
SEARCH = {
    "type": "function",
    "function": {
        "name": "search_notes",
        "description": "Search the notes of the user",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "Words to search for"}},
            "required": ["query"],
        },
    },
}


def read(service: Running, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream and its chunks, read as Open WebUI reads them: line by line, until `[DONE]`."""
    chunks, text, is_done = [], "", False
    with service.client.stream("POST", "/v1/chat/completions", json=body, headers=HEADERS) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        for line in response.iter_lines():
            if not line.startswith("data:"):
                assert line == ""
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                is_done = True
                continue
            chunks.append(json.loads(data))
            for choice in chunks[-1].get("choices", []):
                text += choice.get("delta", {}).get("content") or ""
    assert is_done
    return text, chunks


def test_the_models_of_a_connection_are_listed(instruct: Running) -> None:
    answer = instruct.get("/v1/models", headers=HEADERS).json()
    assert answer["object"] == "list"
    assert [(model["id"], model["object"]) for model in answer["data"]] == [(MODEL, "model")]


def test_a_chat_is_streamed_with_its_usage(instruct: Running) -> None:
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [QUESTION],
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    text, chunks = read(instruct, body)
    assert text == "The capital of France is Paris."
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert chunks[-1]["usage"]["total_tokens"] > chunks[-1]["usage"]["completion_tokens"] > 0


def test_the_parameters_of_a_user_are_understood(instruct: Running) -> None:
    """All parameters that Open WebUI passes on, but `reasoning_effort`, which this model's template does not use."""
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [{"role": "system", "content": "Be short."}, QUESTION],
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_tokens": 12,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.1,
        "seed": 42,
        "stop": ["\n\n", "User:"],
        "logit_bias": {"42": -100, "7": 5},
        "response_format": {"type": "text"},
    }
    first, _ = read(instruct, body)
    again, _ = read(instruct, body)
    assert first == again
    whole = instruct.answer("/v1/chat/completions", **body | {"stream": False})
    assert whole["choices"][0]["message"]["content"] == first


def test_fields_that_are_null_or_metadata_change_nothing(instruct: Running) -> None:
    body = {"stream": True, "model": MODEL, "messages": [QUESTION], "temperature": 0, "max_tokens": 20}
    names = ("stop", "seed", "top_p", "logit_bias", "frequency_penalty", "tools", "tool_choice", "response_format")
    more = dict.fromkeys(names) | {"metadata": {"chat_id": "7", "task": None}, "user": "ada"}
    assert read(instruct, body | more)[0] == read(instruct, body)[0]


@pytest.mark.parametrize("key", ["title", "tags", "follow_ups", "queries"])
def test_a_task_is_answered_whole(instruct: Running, key: str) -> None:
    """Titles, tags, follow-up questions and search queries are one message without a stream."""
    task = f'### Task:\nWrite {key} for the chat below, as JSON: {{ "{key}": ... }}\n### Chat:\nUSER: Hello\n'
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": task}],
        "stream": False,
        "max_completion_tokens": 50,
    }
    answer = instruct.post("/v1/chat/completions", body, headers=HEADERS).json()
    message = answer["choices"][0]["message"]
    assert message["role"] == "assistant"
    assert message["content"]
    assert answer["usage"]["completion_tokens"] <= 50


def test_a_chat_with_parts_and_earlier_calls_is_understood(instruct: Running) -> None:
    """A message with attachments is a list of parts; native function calls and their results are sent back."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "search_notes", "arguments": "{}"}}
    body = {
        "stream": True,
        "model": MODEL,
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "What do my notes say?"}]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Buy milk."},
        ],
        "tools": [SEARCH],
        "stream_options": {"include_usage": True},
        "max_tokens": 16,
        "temperature": 0,
    }
    text, chunks = read(instruct, body)
    calls = [call for chunk in chunks for choice in chunk["choices"] for call in choice["delta"].get("tool_calls", [])]
    assert text or calls
    assert chunks[-1]["usage"]["completion_tokens"] <= 16


def test_an_image_is_refused_by_name(instruct: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    parts = [{"type": "text", "text": "What is this?"}, image]
    body = {"stream": True, "model": MODEL, "messages": [{"role": "user", "content": parts}]}
    response = instruct.post("/v1/chat/completions", body, headers=HEADERS)
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]
