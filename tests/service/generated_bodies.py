"""Bodies for the routes of other APIs, made from a seed: most of them are wrong in one or several places."""

import json
import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from pydantic import BaseModel

from service.http.anthropic_schemas import CountTokensRequest, MessagesRequest
from service.http.embedding_schemas import EmbeddingRequest
from service.http.infill_schemas import InfillRequest
from service.http.openai_schemas import ChatRequest, CompletionRequest
from service.http.responses_schemas import ResponsesRequest
from service.http.score_schemas import ScoreRequest
from service.http.tokenize_schemas import TokenizeRequest

MODELS: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/responses/input_tokens": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/v1/embeddings": EmbeddingRequest,
    "/score": ScoreRequest,
    "/infill": InfillRequest,
    "/tokenize": TokenizeRequest,
}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
EDIT = {"stage": "blocks.0.resid_post", "op": "scale", "factor": 2.0}
BROKEN = ("\ud800", '{"a": "\\ud800"}', '{"a": NaN}', float("nan"), float("inf"))
VALUES: list[Any] = [
    *(None, True, False, 0, 1, 2, -1, 20, 21, 65, 2**31, 2**63, 2**70, 0.0, 0.5, 1.0, -0.1, 1e308),
    *("", "a", "auto", "none", "required", "\x00", "\ud800", "😀", "a" * 300, "a b " * 20_000),
    *([], [""], ["a", "b"], [1, 2], [[1], [2, 3]], [[]], [None], [{}], ["a", 1], [10**9], [-1], [1] * 5000),
    *({}, {"a": 1}, {"1": 5}, {"999999": 1}, {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}),
    {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "cat"}}},
    {"type": "function", "function": {"name": "f"}},
    {"type": "tool", "name": "f"},
    {"type": "any"},
    {"include_usage": True},
    {"regex": "[ab]+"},
    {"regex": "("},
    {"choice": ["a", "b"]},
    {"json": SCHEMA, "regex": "a"},
    {"stages": "embed", "detail": "summary"},
    {"logit_lens": True},
    json.loads('{"a":' * 60 + "1" + "}" * 60),
    json.loads("[" * 120 + "]" * 120),
    [TOOL],
    [EDIT],
    [EDIT | {"stage": "blocks.9.resid_post"}],
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

CHAT_MESSAGES: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "content": "b", "tool_call_id": "x"},
]
CONVERSATION: dict[str, Any] = {
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
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
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
        "messages": CHAT_MESSAGES,
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
    "/v1/responses/input_tokens": {"input": [{"role": "user", "content": "a"}], "instructions": "b"},
    "/v1/messages": CONVERSATION | {"max_tokens": 2, "stop_sequences": ["x"], "stream": True},
    "/v1/messages/count_tokens": CONVERSATION,
    "/v1/embeddings": {
        "input": ["a", "b c"],
        "stage": "blocks.1.resid_post",
        "dimensions": 4,
        "encoding_format": "base64",
        "edits": [EDIT],
    },
    "/score": {"prompt": "a", "continuations": [" b", " c d"], "edits": [EDIT]},
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "prompt": "c",
        "input_extra": [{"filename": "f", "text": "d"}, {"text": "e", "time": 1}],
        "n_predict": 2,
        "n_probs": 1,
        "samplers": ["top_k", "infill"],
        "stop": ["x"],
        "stream": True,
    },
    "/tokenize": {"messages": CHAT_MESSAGES, "tools": [TOOL], "chat_template_kwargs": {"x": False}},
}


def generated_bodies(path: str, good: dict[str, Any], count: int) -> Iterator[bytes]:
    """Yield `count` bodies as JSON, a few of which is broken. They are the same in each call.

    A half changes one to three fields of `good`; the others change one to three values of a rich body at any depth.
    """
    chance = random.Random(path)
    fields = [*MODELS[path].model_fields, "max_new_tokens", "best"]
    for index in range(count):
        number = chance.choice([1, 1, 2, 3])
        if index % 2:
            body = deepcopy(RICH[path])
            for _ in range(number):
                change(body, chance)
        else:
            body = good | {name: value_for(path, name, chance) for name in chance.sample(fields, number)}
        content = json.dumps(body).encode()
        yield content if chance.random() < 0.97 else broken(content, chance)


def value_for(path: str, name: str, chance: random.Random) -> Any:
    """A value for a field, which has a fair chance to be right."""
    return RICH[path].get(name) if chance.random() < 0.3 else chance.choice(VALUES)


def change(body: dict[str, Any], chance: random.Random) -> None:
    """Replace, remove, repeat or add one value, at any depth."""
    node: Any = body
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if not node[key] or not isinstance(node[key], dict | list) or chance.random() < 0.2:
            break
        node = node[key]
    kind = chance.random()
    if kind < 0.7:
        node[key] = deepcopy(chance.choice([*VALUES, *BROKEN]))
    elif kind < 0.8 and len(body) > 1:
        del node[key]
    elif isinstance(node, list):
        node += [deepcopy(node[key]) for _ in range(chance.choice([1, 3, 300]))]
    else:
        node[chance.choice(["type", "name", "id", "n", "\ud800", "b" * 200])] = deepcopy(chance.choice(VALUES))
    body.setdefault("model", None)  # so that it cannot become empty


def broken(content: bytes, chance: random.Random) -> bytes:
    """Cut a JSON text, or change one of its bytes."""
    place = chance.randrange(len(content))
    rest = b"" if chance.random() < 0.5 else bytes([chance.randrange(256)]) + content[place + 1 :]
    return content[:place] + rest
