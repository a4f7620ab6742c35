"""A table of bad requests: each is answered with its documented status and an error that names the field, never 500."""

import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from forwardscope.results.server import ErrorAnswer
from tests.service.checkpoints import CONTEXT, NUM_TOKENS, VOCAB_SIZE
from tests.service.running import PATIENCE_SECONDS, Running, Start, running, validate

LIMIT = 10_000
JSON = {"Content-Type": "application/json"}
TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "too_large_error",
    422: "invalid_request_error",
}
GOOD: dict[str, dict[str, Any]] = {
    "/forward": {"prompt": [1, 2], "stages": ["embed"]},
    "/logits": {"prompt": [1, 2], "top_k": 1},
    "/patterns": {"prompt": [1, 2]},
    "/generate": {"prompt": [1, 2], "max_tokens": 2, "ignore_eos": True},
    "/score": {"prompt": [1, 2], "continuations": [[3], [4, 5]]},
    "/attribute": {"method": "direct", "prompt": [1, 2], "token": 3},
    "/compare": {"prompt": [1, 2], "b": {"setting": {}}},
    "/tokenize": {"text": "a"},
    "/detokenize": {"tokens": [40, 41]},
}
OPENAI_GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [1, 2], "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/responses/input_tokens": {"input": "a"},
    "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/embeddings": {"input": [1, 2]},
}
WITH_PROMPT = ("/forward", "/logits", "/patterns", "/generate", "/score", "/attribute", "/compare")


@dataclass(frozen=True)
class Bad:
    """A body, as JSON values or raw bytes, and the error that it must be answered with."""

    path: str
    body: Any
    status: int
    param: str | None
    code: str | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.content()[:60]!r}"

    def content(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


def with_field(path: str, field: str, value: Any) -> Any:
    """A good body with another value for one field. Bytes are put into the JSON unchanged."""
    if not isinstance(value, bytes):
        return GOOD[path] | {field: value}
    return json.dumps(GOOD[path] | {field: "HERE"}).encode().replace(b'"HERE"', value)


def rows(
    path: str, field: str, *values: Any, status: int, param: str | None = None, code: str | None = None
) -> list[Bad]:
    return [Bad(path, with_field(path, field, value), status, param or field, code) for value in values]


def bad_ids(path: str, field: str, vocab_size: int) -> Iterator[Bad]:
    first, huge = f"{field}.0", b"[1" + b"0" * 399 + b"]"
    yield from rows(path, field, [vocab_size], [2**31], [2**63], [2**64], [2**200], huge, status=400, param=first)
    yield from rows(path, field, [1, vocab_size], status=400, param=f"{field}.1", code="token_id")
    yield from rows(path, field, [-1], [-(2**63)], [-(2**200)], status=422, param=first)
    yield from rows(path, field, [True], [1.5], [1.0], [None], [{}], status=422, param=first)
    yield from rows(path, field, [1, "1"], [1, [1]], status=422, param=f"{field}.1")
    yield from rows(path, field, b"[NaN]", b"[Infinity]", b"[-Infinity]", b"[1e999]", b"[1e3]", status=422, param=first)
    yield from rows(path, field, None, 3, True, 1.5, {"a": 1}, b"NaN", status=422)


def bad_texts(path: str, field: str) -> Iterator[Bad]:
    yield from rows(path, field, b'"\\ud800"', b'"a\\udfffb"', b'"\\udc00\\ud800"', status=422)
    yield from rows(path, field, "\0", "a\0b", status=422)


def bad_bodies(path: str) -> Iterator[Bad]:
    deep = b'{"a":' * 9000 + b"1" + b"}" * 9000
    for raw in (b"{", b"{]", b"not json", b'{"prompt": [1]', b"{'prompt': [1]}", b"\0", b'{"prompt": [1]}{}'):
        yield Bad(path, raw, 422, "body", "json_invalid")
    for raw in (b'{"prompt": "\xff"}', b"\xff\xfe\xfa", b'{"prompt": [1' + b"0" * 5000 + b"]}"):
        yield Bad(path, raw, 422, "body", "json_invalid")
    for raw in (b"[" * 90_000, deep):
        yield Bad(path, raw, 400, "body", "nested_too_deeply")
    for raw in (b"", b"[]", b'"text"', b"null", b"1", b"true", b"[{}]"):
        yield Bad(path, raw, 422, "body")
    yield Bad(path, {}, 422, next(iter(GOOD[path])), "missing")
    for name in ("unknown", "max-tokens", "str", "int", "Prompt", " prompt", "prompt.0", "", "naïve", "0"):
        yield Bad(path, GOOD[path] | {name: 1}, 422, name or "body", "extra_forbidden")
    yield Bad(path, b'{"\\ud800": 1}', 422, "body")


def bad_prompts(path: str) -> Iterator[Bad]:
    yield from bad_ids(path, "prompt", VOCAB_SIZE)
    yield from bad_texts(path, "prompt")
    yield from rows(path, "prompt", "", [], status=400, code="empty")
    yield from rows(path, "prompt", [1] * (CONTEXT + 1), "\u20ac" * CONTEXT, status=400, code="context_length_exceeded")


def bad_prompt_lists(path: str) -> Iterator[Bad]:
    """Lists of prompts: the place of the wrong prompt is named."""
    yield from rows(path, "prompt", [[1], []], ["a", ""], status=400, param="prompt.1", code="empty")
    yield from rows(path, "prompt", [[1], [1, VOCAB_SIZE]], status=400, param="prompt.1.1", code="token_id")
    long = [[1], [1] * (CONTEXT + 1)]
    yield from rows(
        path, "prompt", long, ["a", "\u20ac" * CONTEXT], status=400, param="prompt.1", code="context_length_exceeded"
    )
    yield from rows(path, "prompt", ["a", 1], ["a", [1]], [[1], "a"], ["a", None], status=422, param="prompt.1")
    yield from rows(path, "prompt", [[1, -1]], [[1, True]], [[1, "a"]], [[1, [1]]], status=422, param="prompt.0.1")
    yield from rows(path, "prompt", ["a"] * 257, [[1]] * 257, status=422)
    yield Bad(path, {"prompt": [[1, 2], [1]], "positions": [1]}, 400, "positions.0", "out_of_range")


def bad_numbers(path: str, field: str) -> Iterator[Bad]:
    """Values that no numeric field accepts."""
    not_numbers: tuple[Any, ...] = (True, "1", [1], {}, b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999")
    yield from rows(path, field, *not_numbers, status=422)


def bad_models(path: str) -> Iterator[Bad]:
    others = () if path in ("/forward", "/patterns") else ("ai-rocks",)  # a worked example, which only these run
    yield from rows(path, "model", "gpt-5", "", "Tiny", "../tiny", *others, status=404, code="model_not_found")
    yield from rows(path, "model", "m" * 201, 1, True, b'"\\ud800"', "ai-rocks\0", status=422)


def forward_rows() -> Iterator[Bad]:
    def bad(field: str, *values: Any, **expected: Any) -> list[Bad]:
        return rows("/forward", field, *values, **expected)

    yield from bad("stages", ["nope"], [""], ["["], ["blocks.2.*"], ["EMBED"], status=400, param="stages.0")
    yield from bad("stages", ["embed", "nope*"], status=400, param="stages.1", code="unknown_stage")
    yield from bad("stages", "nope", "", "embed*.", status=400, param="stages.0", code="unknown_stage")
    yield from bad("stages", [], {}, None, status=422)
    yield from bad("stages", ["embed"] * 201, status=422)
    yield from bad("stages", ["q" * 201], status=422, param="stages.0")
    yield from bad("stages", [1], [None], b'["\\ud800"]', ["\0"], status=422, param="stages.0")
    for field, size in (("heads", 6), ("positions", 2)):
        yield from bad(field, [size], [2**63], [2**200], status=400, param=f"{field}.0", code="out_of_range")
        yield from bad(field, [0, 0], status=400, code="duplicate")
        yield from bad(field, [True], [0.0], ["0"], b"[NaN]", status=422, param=f"{field}.0")
        yield from bad(field, [], "last", 0, True, status=422)
    yield from bad("heads", [-1], status=422, param="heads.0")
    yield from bad("positions", [-3], [-(2**200)], status=400, param="positions.0", code="out_of_range")
    yield from bad("positions", [1, -1], status=400, code="duplicate")
    yield from bad("top_k", VOCAB_SIZE + 1, 2**63, status=400)
    yield from bad("top_k", -1, 1.0, status=422)
    yield from bad_numbers("/forward", "top_k")
    yield from bad("targets", [1], [1, 2, 3], [], status=400)
    yield from bad("targets", [VOCAB_SIZE, 1], [2**63, None], status=400, param="targets.0", code="token_id")
    yield from bad("targets", [-1, None], [True, None], [1.5, 1], status=422, param="targets.0")
    yield from bad("targets", [[1, None]], status=400)
    for targets in ([1, 2], [[1, 2]], [[1, 2], [1, 2], [1, 2]], [None, None]):
        yield Bad("/forward", {"prompt": [[1, 2], [3, 4]], "targets": targets}, 400, "targets")
    yield Bad("/forward", {"prompt": [[1, 2], [3]], "targets": [[1, 2], [3, 4]]}, 400, "targets.1")
    yield Bad("/forward", {"prompt": [[1], [3]], "targets": [[1], [VOCAB_SIZE]]}, 400, "targets.1.0", "token_id")
    yield from bad("detail", "all", 1, None, status=422)
    yield from bad("dtype", "int8", "float", 32, status=422)
    yield from bad("encoding", "hex", None, status=422)


def logits_rows() -> Iterator[Bad]:
    def bad(field: str, *values: Any, **expected: Any) -> list[Bad]:
        return rows("/logits", field, *values, **expected)

    yield from bad("positions", [], status=400)
    yield from bad("positions", [0, 0], status=400, code="duplicate")
    yield from bad("positions", [2], [2**63], status=400, param="positions.0", code="out_of_range")
    yield from bad("positions", [-3], [-(2**63)], status=400, param="positions.0", code="out_of_range")
    yield from bad("positions", [0, -2], status=400, code="duplicate")
    yield from bad("positions", [True], [0.5], status=422, param="positions.0")
    yield from bad("positions", "first", 0, None, status=422)
    yield from bad("top_k", VOCAB_SIZE + 1, 2**200, status=400)
    yield from bad("top_k", 0, -1, status=422)
    yield from bad_numbers("/logits", "top_k")
    yield from bad("logprobs", 1, "true", None, status=422)


def compare_rows() -> Iterator[Bad]:
    def bad(field: str, *values: Any, **expected: Any) -> list[Bad]:
        return rows("/compare", field, *values, **expected)

    yield from bad("b", {}, {"setting": {}, "path": "x"}, {"tensors": None}, 1, "bundled", [], status=422)
    yield from bad("b", {"setting": {"dtype": "int8"}}, status=422, param="b.setting.dtype")
    yield from bad("b", {"setting": {"kernels": "cuda"}}, status=422, param="b.setting.kernels")
    yield from bad("b", {"setting": {"device": "cpu"}}, status=422, param="b.setting.device", code="extra_forbidden")
    yield from bad("b", {"url": "http://localhost"}, status=422, param="b.url", code="extra_forbidden")
    yield from bad("b", {"path": "/etc/passwd"}, {"path": "http://localhost"}, status=400, param="b.path")
    yield from bad("b", {"tensors": "%"}, {"tensors": ""}, {"tensors": "AAAA"}, status=400, param="b.tensors")
    yield from bad("names", {"a": "embed"}, status=400)
    yield from bad("names", {"a": 1}, ["embed"], status=422)
    yield from bad("dtype", "int8", "float64", 32, status=422)
    for flag in ("per_position", "per_head"):
        yield from bad(flag, 1, "true", None, status=422)


def generate_rows() -> Iterator[Bad]:
    def bad(field: str, *values: Any, **expected: Any) -> list[Bad]:
        return rows("/generate", field, *values, **expected)

    for field in ("max_tokens", "top_k", "seed", "logprobs"):
        yield from bad_numbers("/generate", field)
        yield from bad(field, -1, 1.5, 1.0, status=422)
    for field in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        yield from bad_numbers("/generate", field)
    yield from bad("top_k", 2**31, 2**63, 10**309, status=422)
    yield from bad("stop_token_ids", [1] * 1025, status=422)
    yield from bad("logit_bias", {str(i): 1 for i in range(1025)}, status=422)
    yield from bad("structured_outputs", 1, "a", [], {}, {"regex": "a", "choice": ["a"]}, status=422)
    yield from bad("cache_salt", 1, "a" * 201, "\0", status=422)
    yield from bad("max_tokens", CONTEXT - 1, 2**63, 2**200, status=400)
    yield from bad("max_tokens", 0, status=400)
    yield from bad("temperature", -1e-9, status=422)
    yield from bad("top_p", 0, 1.01, -1, status=422)
    yield from bad("min_p", -0.1, 1.01, status=422)
    yield from bad("repetition_penalty", 0, -1, 5e-324, 1e308, status=422)
    yield from bad("presence_penalty", 2.01, -1e308, status=422)
    yield from bad("frequency_penalty", -2.01, 1e308, status=422)
    yield from bad("seed", 2**63, 2**200, status=422)
    yield from bad("logprobs", 21, status=422)
    for flag in ("stream", "echo", "ignore_eos"):
        yield from bad(flag, 1, "true", None, status=422)
    for key in ("a", "-1", "1.0", " 1", str(VOCAB_SIZE), "01", "\u0661", "\u00b2", "9" * 15):
        yield from bad("logit_bias", {key: 1}, status=400, param=f"logit_bias.{key}", code="token_id")
    yield from bad("logit_bias", {"9" * 5000: 1}, status=400, param="logit_bias." + "9" * 20, code="token_id")
    yield from bad("logit_bias", {"": 1}, status=400, param="logit_bias.")
    yield from bad(
        "logit_bias", {"1": True}, {"1": "1"}, {"1": None}, {"1": 1e308}, b'{"1": NaN}', b'{"1": 1e999}', status=422
    )
    yield from bad("logit_bias", b'{"\\ud800": 1}', {"1\0": 1}, [1], 1, "1", status=422)
    yield from bad("stop", "", [""], ["a", ""], status=400)
    yield from bad("stop", "a" * 201, ["a"] * 201, status=422)
    yield from bad("stop", 1, {}, None, b'"\\ud800"', "\0", status=422)
    yield from bad("stop", [1], [None], ["\0"], b'["\\udfff"]', status=422, param="stop.0")
    yield from bad("stop_token_ids", [VOCAB_SIZE], [2**63], [2**200], status=400, param="stop_token_ids.0")
    yield from bad("stop_token_ids", [-1], [True], [1.0], status=422, param="stop_token_ids.0")
    yield from bad("stop_token_ids", 1, "1", None, status=422)
    yield from bad("n", 65, 2**63, status=400)
    yield from bad("n", 0, -1, 1.0, True, None, status=422)
    yield Bad("/generate", {"prompt": [1] * CONTEXT}, 400, "prompt")
    yield from trace_rows()


def trace_rows() -> Iterator[Bad]:
    """Wrong values in `trace`. With two tokens after a prompt of two, three positions are computed."""

    def bad(field: str, *values: Any, status: int, param: str, code: str | None = None) -> list[Bad]:
        return rows("/generate", "trace", *({field: value} for value in values), status=status, param=param, code=code)

    yield from rows("/generate", "trace", 1, True, "all", ["embed"], status=422)
    yield from bad("stages", ["nope"], ["["], ["blocks.2.*"], status=400, param="trace.stages.0", code="unknown_stage")
    yield from bad("stages", ["embed", "nope*"], status=400, param="trace.stages.1", code="unknown_stage")
    for field, size in (("heads", 6), ("positions", 3)):
        yield from bad(field, [size], [2**63], [2**200], status=400, param=f"trace.{field}.0", code="out_of_range")
        yield from bad(field, [0, size], status=400, param=f"trace.{field}.1", code="out_of_range")
        yield from bad(field, [0, 0], status=400, param=f"trace.{field}", code="duplicate")
    yield from bad("positions", [-3], [-(2**200)], status=400, param="trace.positions.0", code="out_of_range")
    yield from bad("positions", [-1, 1], status=400, param="trace.positions", code="duplicate")
    yield from bad("stages", "nope", status=400, param="trace.stages.0", code="unknown_stage")
    yield from bad("top_k", VOCAB_SIZE + 1, 2**63, status=400, param="trace.top_k")


def misshapen_traces() -> Iterator[Bad]:
    """Values in `trace` that do not have the documented shape."""

    def bad(field: str, *values: Any, param: str | None = None) -> list[Bad]:
        field_of_body = f"trace.{field}" if param is None else param
        return rows("/generate", "trace", *({field: value} for value in values), status=422, param=field_of_body)

    yield from bad("stages", [], {}, ["embed"] * 201)
    yield from bad("stages", [1], [None], ["\0"], ["q" * 201], param="trace.stages.0")
    for field in ("heads", "positions"):
        yield from bad(field, [], "last", 0, True)
        yield from bad(field, [True], [0.0], ["0"], param=f"trace.{field}.0")
    yield from bad("heads", [-1], param="trace.heads.0")
    yield from bad("top_k", -1, 1.0, "1", True)
    yield from bad("detail", "all", 1, None)
    yield from bad("encoding", "hex", "safetensors", None)
    yield from bad("logit_lens", 1, "true", None)
    yield from bad("unknown", 1)


def table() -> list[Bad]:
    bad = [row for path in GOOD for row in bad_bodies(path)]
    bad += [row for path in GOOD for row in bad_models(path)]
    bad += [row for path in WITH_PROMPT for row in bad_prompts(path)]
    bad += [*bad_prompt_lists("/forward"), *bad_prompt_lists("/logits")]
    bad += rows("/generate", "prompt", ["a"], [[1]], status=422, param="prompt.0")
    bad += rows("/compare", "prompt", ["a"], [[1]], status=422, param="prompt.0")
    bad += [*forward_rows(), *logits_rows(), *compare_rows(), *generate_rows()]
    bad += [*bad_texts("/tokenize", "text"), *rows("/tokenize", "text", 1, None, True, [1], status=422)]
    bad += rows("/tokenize", "add_special_tokens", 1, "true", None, status=422)
    bad += [*bad_ids("/detokenize", "tokens", NUM_TOKENS), *rows("/detokenize", "tokens", "text", status=422)]
    bad += rows("/detokenize", "skip_special_tokens", 1, "true", None, status=422)
    return bad


TABLE = table()


def problem_of(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> str | None:
    """How an error answer differs from the expected one. None if it does not."""
    found = f"{response.status_code} {response.text[:300]}"
    if response.status_code != status:
        return f"{status} expected, not {found}"
    error = validate(ErrorAnswer, response.json()).error
    if (error.type, error.param) != (TYPES[status], param) or code not in (None, error.code):
        return f"{TYPES[status]}, {param!r}, {code} expected, not {found}"
    if param is not None and param not in error.message:
        return f"the message does not name {param!r}: {found}"
    if len(error.message) > 6000:
        return f"the message repeats the request: {found}"
    return None


def check_error(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> None:
    assert problem_of(response, status, param, code) is None


@pytest.mark.parametrize("path", GOOD)
def test_bad_input_is_answered_with_its_documented_error(tiny: Running, path: str) -> None:
    bad_requests = [bad for bad in TABLE if bad.path == path]
    assert len(bad_requests) > 20
    problems = []
    for bad in bad_requests:
        try:
            response = tiny.client.post(path, content=bad.content(), headers=JSON)
        except httpx.TransportError as error:
            problems.append(f"{bad}: {error}")
            continue
        problem = problem_of(response, bad.status, bad.param, bad.code)
        if problem is not None:
            problems.append(f"{bad}: {problem}")
    assert not problems, "\n".join(problems)


def test_a_wrong_field_inside_a_trace_is_named(tiny: Running) -> None:
    bad_requests = list(misshapen_traces())
    found = [problem_of(tiny.post(bad.path, bad.body), bad.status, bad.param, bad.code) for bad in bad_requests]
    problems = [f"{bad}: {problem}" for bad, problem in zip(bad_requests, found, strict=True) if problem is not None]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("path", GOOD)
def test_every_endpoint_takes_the_name_of_the_served_model_and_the_error_for_another_name_states_it(
    tiny: Running, path: str
) -> None:
    name = tiny.get("/model").json()["name"]
    assert tiny.post(path, GOOD[path] | {"model": name}).status_code == 200
    assert tiny.post(path, GOOD[path] | {"model": None}).status_code == 200
    error = tiny.post(path, GOOD[path] | {"model": "gpt-5"}).json()["error"]
    assert "'gpt-5' is not served" in error["message"]
    assert f"send {name}" in error["message"]


@pytest.fixture(autouse=True)
def no_request_is_left(tiny: Running) -> Iterator[None]:
    """After every test, nothing runs or waits and a good request is answered; at the end, one on each route."""
    yield
    assert tiny.state.worker.num_running == tiny.state.worker.num_waiting == 0
    assert tiny.post("/generate", GOOD["/generate"]).status_code == 200


@pytest.fixture(scope="module", autouse=True)
def good_requests_are_served_afterwards(tiny: Running) -> Iterator[None]:
    yield
    for path, body in GOOD.items():
        assert tiny.post(path, body).status_code == 200
    assert tiny.metric("num_requests_running") == tiny.metric("num_requests_waiting") == 0


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "", None, "json", "multipart/form-data"])
def test_a_body_without_a_json_content_type_is_an_error_that_names_the_header(
    tiny: Running, path: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = tiny.client.post(path, content=json.dumps(GOOD[path]).encode(), headers=headers)
    check_error(response, 422, "body", "content_type")
    assert "Content-Type" in response.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
@pytest.mark.parametrize("path", GOOD)
def test_another_method_is_405_and_the_answer_names_the_allowed_one(tiny: Running, path: str, method: str) -> None:
    response = tiny.client.request(method, path)
    check_error(response, 405, None, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("path", ["/nope", "/forwards/", "/forward/x", "/v1/rerank", "/%00", "/%ff"])
def test_an_unknown_path_is_404_in_the_common_form(tiny: Running, path: str) -> None:
    for method in ("GET", "POST"):
        check_error(tiny.client.request(method, path), 404, None, "not_found")


@pytest.fixture(scope="module")
def small(tiny_directory: Path) -> Iterator[Running]:
    with running(model=str(tiny_directory), max_body_bytes=LIMIT) as service:
        yield service


@pytest.fixture(scope="module")
def locked(tiny_directory: Path) -> Iterator[Running]:
    with running(model=str(tiny_directory), api_key="s3cret-\u00e9") as service:
        yield service


def body_of(num_bytes: int) -> bytes:
    return b'{"text": "' + b"a" * (num_bytes - 12) + b'"}'


class TestBodyLimit:
    @pytest.mark.parametrize("chunked", [False, True], ids=["with Content-Length", "chunked"])
    @pytest.mark.parametrize("path", GOOD)
    def test_a_body_over_the_limit_is_413_with_the_limit_in_the_message(
        self, small: Running, path: str, chunked: bool
    ) -> None:
        body = body_of(LIMIT + 1)
        response = small.client.post(path, content=iter([body]) if chunked else body, headers=JSON)
        check_error(response, 413, "body", "body_too_large")
        assert str(LIMIT) in response.json()["error"]["message"]

    @pytest.mark.parametrize("chunked", [False, True], ids=["with Content-Length", "chunked"])
    def test_a_client_can_read_the_answer_to_a_body_that_is_much_too_large(self, small: Running, chunked: bool) -> None:
        """If the server closed the connection with unread bytes, the client would get a reset instead of the 413."""
        piece = b"a" * 100_000
        content = iter([piece] * 40) if chunked else piece * 40
        check_error(small.client.post("/tokenize", content=content, headers=JSON), 413, "body", "body_too_large")

    @pytest.mark.parametrize("chunked", [False, True], ids=["with Content-Length", "chunked"])
    def test_a_body_at_the_limit_is_accepted(self, small: Running, chunked: bool) -> None:
        body = body_of(LIMIT)
        assert len(body) == LIMIT
        content = iter([body[:100], body[100:]]) if chunked else body
        assert small.client.post("/tokenize", content=content, headers=JSON).status_code == 200

    def test_a_content_length_over_the_limit_is_refused_before_the_body_is_sent(self, small: Running) -> None:
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: {10**12}\r\nExpect: 100-continue\r\n\r\n"
        with socket.create_connection(small.address, timeout=PATIENCE_SECONDS) as connection:
            connection.sendall(head.encode())
            assert connection.recv(12) == b"HTTP/1.1 413"


class TestApiKey:
    @pytest.mark.parametrize("path", GOOD)
    @pytest.mark.parametrize(
        "header",
        [None, b"", b"Bearer", b"Bearer wrong", b"s3cret-\xc3\xa9", b"Basic s3cret", b"Bearer s3cret-\xff"],
    )
    def test_a_missing_or_wrong_key_is_401(self, locked: Running, path: str, header: bytes | None) -> None:
        headers: dict[bytes, bytes] = {} if header is None else {b"Authorization": header}
        response = locked.client.post(path, json=GOOD[path], headers=headers)
        check_error(response, 401, None, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"

    @pytest.mark.parametrize("content", [b"{", b'{"prompt": 1}', b""])
    def test_without_the_key_the_answer_does_not_depend_on_the_body(self, locked: Running, content: bytes) -> None:
        check_error(locked.client.post("/generate", content=content, headers=JSON), 401, None, "invalid_api_key")

    def test_a_key_with_other_characters_than_ascii_is_sent_as_utf8(self, locked: Running) -> None:
        headers = {"Authorization": "Bearer s3cret-\u00e9".encode()}
        assert locked.post("/tokenize", GOOD["/tokenize"], headers=headers).status_code == 200

    def test_a_key_is_accepted_on_every_post_and_the_scheme_is_case_insensitive(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), api_key="k-1")
        for scheme in ("Bearer", "bearer"):
            for path, body in GOOD.items():
                assert service.post(path, body, headers={"Authorization": f"{scheme} k-1"}).status_code == 200
        for path in ("/health", "/ready", "/metrics"):
            assert service.get(path).status_code == 200
