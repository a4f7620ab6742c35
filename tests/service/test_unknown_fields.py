"""Fields that clients of `/v1/*` send and the server does not know: left out and named, or 422 with `--strict-fields`.

Fields that would change the text, but are not implemented, are a 400 that names them.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.http.bodies import is_strict
from service.http.request_reports import MAX_TEXT, ignored_text
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start, read_events, running, wait_until

CHAT = "/v1/chat/completions"
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
USER: dict[str, Any] = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service whose context has room for the description of a function."""
    directory = write_checkpoint(tmp_path_factory.mktemp("roomy") / "roomy", max_position_embeddings=1024)
    with running(model=str(directory)) as service:
        yield service


def call_with(arguments: Any) -> dict[str, Any]:
    return {"function": {"name": "f", "arguments": arguments}}


def ignored(response: httpx.Response) -> list[str]:
    assert response.status_code == 200, response.text
    return [path for path in response.headers.get("x-ignored-fields", "").split(", ") if path]


def after(user: dict[str, Any], *messages: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user, *messages], "max_tokens": 2}


FIELDS: list[tuple[str, dict[str, Any], list[str]]] = [
    (
        "parse() of the SDK",
        after(
            USER,
            {
                "role": "assistant",
                "content": "b",
                "parsed": {"x": 1},
                "tool_calls": [CALL | {"function": CALL["function"] | {"parsed_arguments": {"y": 2}}}],  # type: ignore[operator]
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "c"},
        ),
        ["messages.1.parsed", "messages.1.tool_calls.0.function.parsed_arguments"],
    ),
    (
        "reasoning of OpenRouter, cache control of Anthropic, and ids",
        after(
            {
                "role": "user",
                "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
                "id": "m1",
            },
            {"role": "assistant", "content": "b", "reasoning_details": [{"type": "x"}], "provider_specific_fields": {}},
            {"role": "user", "content": "c", "cache_control": {"type": "ephemeral"}, "prefix": True},
        ),
        [
            "messages.0.id",
            "messages.0.content.0.cache_control",
            "messages.1.reasoning_details",
            "messages.1.provider_specific_fields",
            "messages.2.cache_control",
            "messages.2.prefix",
        ],
    ),
    (
        "habits of clients of other servers",
        after(USER)
        | {
            "usage": {"include": True},
            "reasoning": {"effort": "low"},
            "timeout": 600,
            "cache_prompt": True,
            "think": False,
            "num_ctx": 4096,
            "keep_alive": "5m",
        },
        ["usage", "reasoning", "timeout", "cache_prompt", "think", "num_ctx", "keep_alive"],
    ),
    (
        "fields of tools, and of the choice",
        after(USER)
        | {
            "tools": [
                TOOL | {"cache_control": {"type": "ephemeral"}, "eager_input_streaming": True},
                {"type": "web_search", "search_context_size": "low"},
                {"type": "custom", "custom": {"name": "g"}},
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "stream_options": None,
        },
        [
            "tools.0.cache_control",
            "tools.0.eager_input_streaming",
            "tools.1.search_context_size",
            "tools.2.custom",
            "tool_choice.disable_parallel_tool_use",
            "tools.1",
            "tools.2",
        ],
    ),
    ("the length of the answer in words", after(USER) | {"verbosity": "low"}, ["verbosity"]),
    ("nulls say nothing", after(USER | {"parsed": None, "audio": None, "x": None}) | {"think": None, "y": None}, []),
    (
        "settings of thinking that the template does not use",
        after(USER) | {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True, "x": False}},
        ["chat_template_kwargs.enable_thinking", "reasoning_effort"],
    ),
    (
        "earlier reasoning as a part of a message",
        after(
            USER,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "?"}, {"type": "text", "text": "b"}]},
        ),
        ["messages.1.content.0.thinking", "messages.1.content.0"],
    ),
]


@pytest.mark.parametrize(("body", "names"), [row[1:] for row in FIELDS], ids=[row[0] for row in FIELDS])
@pytest.mark.parametrize("stream", [False, True])
def test_an_unknown_field_is_left_out_and_named(
    roomy: Running, body: dict[str, Any], names: list[str], stream: bool
) -> None:
    assert ignored(roomy.post(CHAT, body | {"stream": stream})) == names


def test_a_completion_leaves_them_out_as_well_and_answers_the_same(tiny: Running) -> None:
    body = {"prompt": [1, 2], "max_tokens": 3, "seed": 1}
    plain = tiny.post("/v1/completions", body)
    assert ignored(plain) == []
    found = tiny.post("/v1/completions", body | {"cache_prompt": True, "slot_id": 1})
    assert ignored(found) == ["cache_prompt", "slot_id"]
    assert found.json()["choices"] == plain.json()["choices"]


def test_a_field_of_another_kind_of_object_is_named(roomy: Running) -> None:
    """The objects of a list have several kinds, each with its own fields."""
    items = [
        {"type": "message", "role": "user", "content": "a", "output": "lost"},
        {"type": "custom_tool_call", "call_id": "1", "name": "f", "input": "b", "arguments": "lost"},
        {"role": "user", "content": "c", "call_id": "lost"},
        {"type": "web_search_call", "id": "1", "status": "completed", "action": {}},
    ]
    response = roomy.post("/v1/responses", {"input": items, "max_output_tokens": 1})
    named = ["input.0.output", "input.1.arguments", "input.2.call_id", "input.3.action", "input.3"]
    assert ignored(response) == named
    call = {"type": "custom", "custom": {"name": "f", "input": ""}, "function": {"name": "lost"}}
    response = roomy.post(CHAT, after(USER, {"role": "assistant", "tool_calls": [call]}, USER))
    assert ignored(response) == ["messages.1.tool_calls.0.function"]


def test_they_are_in_the_log_and_counted(tiny: Running, caplog: pytest.LogCaptureFixture) -> None:
    counter = f'ignored_fields_total{{route="{CHAT}"}}'
    before = tiny.metric(counter)
    with caplog.at_level(logging.INFO, "access"):
        tiny.post(CHAT, after(USER | {"parsed": 1}) | {"think": True})
        # The line follows the response.
        wait_until(lambda: any("ignored=" in message for message in caplog.messages), "the line is written")
    (line,) = [record for record in caplog.records if "ignored=" in record.getMessage()]
    assert line.getMessage().endswith(" ignored=think,messages.0.parsed")
    assert vars(line)["request_fields"]["ignored_fields"] == "think,messages.0.parsed"
    wait_until(lambda: tiny.metric(counter) == before + 2, "both are counted")


def test_a_refused_request_names_them_as_well(tiny: Running) -> None:
    response = tiny.post(CHAT, after(USER | {"parsed": 1}) | {"suffix": "x", "use_beam_search": True})
    assert response.status_code == 400
    assert response.headers["x-ignored-fields"] == "suffix, messages.0.parsed"


def test_a_template_of_a_client_is_refused(tiny: Running) -> None:
    response = tiny.post(CHAT, after(USER) | {"chat_template": "{{ 7 * 7 }}"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


def test_names_of_clients_cannot_break_the_header_or_the_log() -> None:
    paths = ["messages.0.a\r\nSet-Cookie: b=c", "naïve, x", "a" * 500]
    assert ignored_text(paths) == f"messages.0.a__Set-Cookie__b_c, na_ve__x, {'a' * 100}"
    assert ignored_text(["a", ""]) == "a, _"  # a header value cannot end with a space
    text = ignored_text([*paths, *(f"messages.{index}.id" for index in range(1000))])
    assert len(text) <= MAX_TEXT + 20
    assert text.endswith("more")
    assert int(text.split()[-2]) + len(text.split(", ")) == 1003


@pytest.mark.parametrize(
    ("field", "value", "neutral"),
    [
        ("max_new_tokens", 5, -1),
        ("stop_sequences", ["a"], []),
        ("repeat_penalty", 1.1, 1.0),
        ("do_sample", False, True),
        ("guided_json", {"type": "object"}, None),
        ("typical_p", 0.5, 1),
        ("typ_p", 0.5, 1),
        ("extra_body", {"top_k": 5}, {}),
        ("mirostat", 2, 0),
        ("logits_processors", ["x"], []),
    ],
)
def test_a_field_that_would_change_the_text_is_a_400_unless_it_is_neutral(
    tiny: Running, field: str, value: Any, neutral: Any
) -> None:
    error = tiny.post(CHAT, after(USER) | {field: value}).json()["error"]
    assert (error["param"], error["code"]) == (field, "not_implemented")
    assert field in error["message"]
    assert ignored(tiny.post(CHAT, after(USER) | {field: neutral})) == []


@pytest.mark.parametrize(
    ("path", "field", "value", "instead"),
    [
        ("/v1/messages", "guided_json", {"type": "object"}, "structured_outputs.json"),
        ("/v1/messages", "response_format", {"type": "json_object"}, "output_config.format"),
        ("/v1/messages", "max_completion_tokens", 5, "max_tokens"),
        ("/v1/completions", "response_format", {"type": "json_object"}, "structured_outputs.json"),
        ("/v1/completions", "max_completion_tokens", 5, "max_tokens"),
    ],
)
def test_a_field_of_another_route_names_the_one_to_send(
    tiny: Running, path: str, field: str, value: Any, instead: str
) -> None:
    body = after(USER) if path == "/v1/messages" else {"prompt": [1]}
    error = tiny.post(path, body | {field: value}).json()["error"]
    assert (error["param"], error["code"]) == (field, "not_implemented")
    assert f"send {instead} in its place" in error["message"]


def test_suffix_is_for_completions_and_refused(tiny: Running) -> None:
    response = tiny.post("/v1/completions", {"prompt": [1], "suffix": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "suffix")


@pytest.mark.parametrize("path", ["/v1/completions", CHAT])
def test_our_own_objects_and_our_own_routes_stay_strict(tiny: Running, path: str) -> None:
    body = {"prompt": [1]} if path == "/v1/completions" else after(USER)
    for field, value in (("trace", {"detial": "summary"}), ("edits", [{"stage": "embed", "op": "zero", "x": 1}])):
        response = tiny.post(path, body | {field: value})
        assert response.status_code == 422, response.text
        assert response.json()["error"]["param"].startswith(field)
    for own, good in (("/generate", {"prompt": [1]}), ("/tokenize", {"messages": [USER | {"parsed": 1}]})):
        assert tiny.post(own, good | {"think": True}).status_code == 422


@pytest.mark.parametrize("by_header", [False, True])
def test_strict_fields_restores_the_422(by_header: bool, tiny_directory: Path, start: Start) -> None:
    service = start(model=str(tiny_directory), strict_fields=not by_header)
    headers = {"Prefer": "respond-async, handling=strict"} if by_header else {}
    for body, param in (
        (after(USER | {"parsed": 1}), "messages.0.parsed"),
        (after(USER) | {"think": True}, "think"),
        (after({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}), "messages.0.content.0.x"),
        (after(USER) | {"tools": [{"type": "web_search"}]}, "tools.0.type"),
    ):
        response = service.post(CHAT, body, headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (422, param)
    assert service.post(CHAT, after(USER) | {"reasoning_effort": "low"}, headers=headers).status_code == 400
    assert service.post(CHAT, after(USER), headers=headers).status_code == 200


def test_a_client_may_send_several_preference_headers() -> None:
    """RFC 7240, section 2."""
    headers = [(b"prefer", b"respond-async"), (b"prefer", b"wait=5, handling=strict")]
    assert is_strict({"type": "http", "headers": headers}, strict_fields=False)
    assert not is_strict({"type": "http", "headers": headers[:1]}, strict_fields=False)


LOOSE: list[tuple[str, dict[str, Any]]] = [
    ("an answer without content", after(USER, {"role": "assistant", "content": None}, USER)),
    ("an answer with no calls", after(USER, {"role": "assistant", "content": None, "tool_calls": []}, USER)),
    ("an answer with reasoning only", after(USER, {"role": "assistant", "reasoning_content": "x"}, USER)),
    ("an answer without any part", after(USER, {"role": "assistant", "content": []}, USER)),
    (
        "a tool without a result",
        after(USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1"}),
    ),
    ("a part without text", after({"role": "user", "content": [{"type": "text", "text": None}]})),
    ("an empty stop string", after(USER) | {"stop": ""}),
    ("a list with an empty stop string", after(USER) | {"stop": ["", "zzz"]}),
    ("no seed", after(USER) | {"seed": -1, "temperature": 0}),
    ("whole numbers", after(USER) | {"max_tokens": 2.0, "n": 1.0, "top_k": 40.0, "seed": 3.0, "top_logprobs": None}),
    ("empty lists for objects", after(USER) | {"logit_bias": [], "metadata": [], "chat_template_kwargs": []}),
    ("no tools", after(USER) | {"tools": [], "tool_choice": "auto"}),
    *(
        (f"a call with {arguments!r}", after(USER, {"role": "assistant", "tool_calls": [call_with(arguments)]}))
        for arguments in (dict[str, Any](), None, "")
    ),
]


@pytest.mark.parametrize("body", [row[1] for row in LOOSE], ids=[row[0] for row in LOOSE])
def test_null_and_empty_values_mean_nothing(roomy: Running, body: dict[str, Any]) -> None:
    assert ignored(roomy.post(CHAT, body)) == []


def test_an_answer_without_content_is_an_empty_text(tiny: Running) -> None:
    fields = {"return_token_ids": True, "temperature": 0}
    expected = tiny.answer(CHAT, **after(USER, {"role": "assistant", "content": ""}, USER), **fields)
    found = tiny.answer(CHAT, **after(USER, {"role": "assistant", "content": None}, USER), **fields)
    assert found["prompt_token_ids"] == expected["prompt_token_ids"]


@pytest.mark.parametrize("none", [-1, None, -1.0])
@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_no_limit_is_the_default(tiny: Running, name: str, none: Any) -> None:
    """A chat then goes on to the end of the context, and a completion has 16 tokens."""
    body = {"messages": [USER], "ignore_eos": True, name: none}
    assert tiny.answer(CHAT, **body)["usage"]["total_tokens"] == 64
    if name == "max_tokens":
        found = tiny.answer("/v1/completions", prompt=[1], ignore_eos=True, max_tokens=none)
        assert found["usage"]["completion_tokens"] == 16


def test_a_whole_number_is_that_integer_and_another_number_is_refused(tiny: Running) -> None:
    found = tiny.answer(CHAT, messages=[USER], ignore_eos=True, max_tokens=8.0)
    assert found["usage"]["completion_tokens"] == 8
    for value in ("8.5", "true", '"8"', "1e400", "NaN"):
        content = f'{{"messages": [{{"role": "user", "content": "a"}}], "max_tokens": {value}}}'
        response = tiny.client.post(CHAT, content=content, headers={"Content-Type": "application/json"})
        assert (response.status_code, response.json()["error"]["param"]) == (422, "max_tokens")


def test_the_usage_so_far_is_in_each_chunk_if_asked_for(tiny: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, fields in ((CHAT, {"messages": [USER]}), ("/v1/completions", {"prompt": [1, 2]})):
        body = fields | {"stream": True, "stream_options": options, "max_tokens": 40, "ignore_eos": True}
        counts = [event["usage"]["completion_tokens"] for event in read_events(tiny.post(path, body).content)]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1] == 40


def test_a_top_p_of_zero_keeps_only_the_most_likely_token(tiny: Running) -> None:
    body: dict[str, Any] = {"prompt": [1, 2], "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}

    def generate(**fields: Any) -> Any:
        return tiny.answer("/v1/completions", **body, **fields)["choices"][0]["token_ids"]

    greedy = generate(temperature=0)
    assert generate(top_p=0, seed=3) == generate(top_p=0.0, seed=3) == greedy
    assert generate(seed=3) != greedy
