"""Request bodies: the cost of parsing is bounded, large bodies do not block the event loop, and errors are helpful."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from service.http import bodies
from service.http.bodies import INLINE_BYTES, MAX_DEPTH, check_values, parse
from service.http.errors import MAX_NAMES, ApiError
from service.http.forward_schemas import ForwardRequest
from service.http.generate_schemas import GenerateRequest
from tests.service.running import PATIENCE_SECONDS, Running, Start, wait_until
from tests.service.test_bad_input import JSON

MAX_VALUES = 1 << 18


def error_of(body: bytes | dict[str, Any], model: Any = GenerateRequest) -> ApiError:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(ApiError) as caught:
        parse(content, model, MAX_VALUES)
    return caught.value


class TestNumberOfValues:
    @pytest.mark.parametrize(
        "body",
        [
            b'{"stop":[' + b",".join([b"1"] * 300_000) + b"]}",
            b'{"prompt":[' + b",".join([b"-1"] * 300_000) + b"]}",
            b'{"targets":[' + b",".join([b"{}"] * 300_000) + b"]}",
            b"{" + b",".join(b'"k%d":1' % i for i in range(300_000)) + b"}",
            b'{"stop":[' + b",".join([b'""'] * 300_000) + b"]}",
            b"[" * 300_000 + b"]" * 300_000,
        ],
        ids=["numbers", "negative numbers", "objects", "keys", "strings", "nested"],
    )
    def test_a_body_with_too_many_values_is_413_and_never_parsed(
        self, body: bytes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(json, "loads", lambda *_, **__: pytest.fail("the body was parsed"))
        error = error_of(body)
        assert (error.status, error.code, error.param) == (413, "too_many_values", "body")
        assert str(MAX_VALUES) in error.message

    @pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1"])
    def test_other_encodings_than_utf8_are_refused(self, encoding: str) -> None:
        """The standard library's parser detects these encodings, but their values would have been counted wrongly."""
        error = error_of(('{"pr\u00f6mpt\\"":[' + ",".join(["[]"] * 1000) + "]}").encode(encoding))
        assert (error.status, error.code) == (422, "json_invalid")
        if encoding == "latin-1":
            assert error.message == "body: is not UTF-8 at byte 4; encode it as UTF-8"

    def test_a_byte_order_mark_is_ignored(self) -> None:
        body = b'{"prompt":[1]}'
        assert parse(b"\xef\xbb\xbf" + body, GenerateRequest, 10) == parse(body, GenerateRequest, 10)

    @pytest.mark.parametrize("text", [",[{" * 1000, '"' * 1000, "\\" * 1001, '\\"' * 1000 + ",", '\\\\",[' * 100])
    def test_brackets_and_commas_inside_strings_do_not_count_as_values(self, text: str) -> None:
        check_values(json.dumps({"prompt": text, text: [1]}).encode(), 5)

    @pytest.mark.parametrize("value", [[1, 2, 3], {"a": 1, "b": [2]}, [[], []], ["a,b", "c"], [[[]]]])
    def test_every_value_of_a_nested_list_or_object_is_counted(self, value: Any) -> None:
        content = json.dumps(value).encode()
        with pytest.raises(ApiError):
            check_values(content, 1)
        check_values(content, 6)

    @pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a":', "}"), ('[{"[[":', "}]")])
    def test_values_may_be_nested_up_to_the_limit(self, begin: str, end: str) -> None:
        times = MAX_DEPTH // (begin.count("[{") + 1)
        check_values((begin * times + "1" + end * times).encode(), 1000)
        for deeper in (times + 1, 957, 100_000):
            with pytest.raises(ApiError, match="nested deeper than 100") as raised:
                check_values((begin * deeper + "1" + end * deeper).encode(), 10**6)
            assert (raised.value.status, raised.value.code) == (400, "nested_too_deeply")

    def test_many_lists_next_to_each_other_are_not_deep(self) -> None:
        check_values(b"[" + b"[[]]," * 1000 + b"1]", 10_000)


class TestErrors:
    def test_validation_of_a_list_stops_at_its_first_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        counts = []
        shape_error = bodies.shape_error

        def counted(error: ValidationError, model: type[BaseModel]) -> Exception:
            counts.append(error.error_count())
            return shape_error(error, model)

        monkeypatch.setattr(bodies, "shape_error", counted)
        wrong: list[tuple[Any, dict[str, Any]]] = [
            (GenerateRequest, {"prompt": [-1] * 100_000}),
            (GenerateRequest, {"prompt": [1], "stop": [1] * 200}),
            (GenerateRequest, {"prompt": [1], "stop": [1] * 100_000}),
            (GenerateRequest, {"prompt": [1], "stop_token_ids": ["a"] * 100_000}),
            (GenerateRequest, {"prompt": [1], "logit_bias": {f"{i}": "a" for i in range(2000)}}),
            (ForwardRequest, {"prompt": [1], "targets": [{}] * 100_000}),
            (ForwardRequest, {"prompt": [1], "stages": [1] * 100_000}),
            (ForwardRequest, {"prompt": [1], "heads": ["a"] * 100_000, "positions": ["a"] * 100_000}),
        ]
        for model, body in wrong:
            error_of(body, model)
        assert max(counts) <= 4, counts

    def test_all_wrong_fields_are_named_up_to_a_limit(self) -> None:
        error = error_of({"prompt": [1], "temperature": "a", "top_p": 2, "seed": -1})
        assert error.param == "temperature"
        assert "top_p, seed" in error.message

    def test_the_error_for_an_unknown_field_suggests_the_nearest_known_one(self) -> None:
        error = error_of({"prompt": [1], "max_token": 3})
        assert (error.status, error.param, error.code) == (422, "max_token", "extra_forbidden")
        assert "did you mean 'max_tokens'?" in error.message

    def test_at_most_twenty_unknown_fields_are_named(self) -> None:
        error = error_of({"prompt": [1]} | {f"unknown{i}": 1 for i in range(4000)})
        assert error.message.count("unknown") == MAX_NAMES
        assert "3980 more" in error.message

    @pytest.mark.parametrize("body", [b'{"prompt":[1],"prompt":[2]}', b'{"prompt":[1],"trace":{"top_k":1,"top_k":1}}'])
    def test_a_duplicate_key_in_an_object_is_refused(self, body: bytes) -> None:
        error = error_of(body)
        assert (error.status, error.code) == (422, "duplicate_key")
        assert "'prompt'" in error.message or "'top_k'" in error.message

    def test_an_object_with_too_many_keys_is_refused(self) -> None:
        assert error_of({f"k{i}": 1 for i in range(5000)}).code == "too_many_keys"

    def test_a_number_with_thousands_of_digits_is_refused_in_large_bodies_too(self) -> None:
        long = b'{"prompt":[' + b"9" * 4000 + b"]" + b" " * INLINE_BYTES + b"}"
        assert error_of(long).code == "json_invalid"

    def test_large_bodies_are_parsed_like_small_ones(self) -> None:
        body = {"prompt": [1, 2, 3], "temperature": 0.25, "seed": 5}
        small = json.dumps(body).encode()
        assert parse(small, GenerateRequest, 100) == parse(small + b" " * INLINE_BYTES, GenerateRequest, 100)


class TestOutsideTheLoop:
    @pytest.fixture
    def gate(self, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
        """An event until which the parsing of large bodies is blocked."""
        gate = threading.Event()

        def parse_late(content: bytes, *more: Any) -> Any:
            if len(content) > INLINE_BYTES:
                assert gate.wait(PATIENCE_SECONDS)
            return parse(content, *more)

        monkeypatch.setattr(bodies, "parse", parse_late)
        return gate

    def test_other_requests_are_served_while_large_bodies_are_parsed(
        self, tiny: Running, gate: threading.Event
    ) -> None:
        large = b'{"text":"' + b"a" * INLINE_BYTES + b'"}'
        with ThreadPoolExecutor(4) as pool:
            pending = [pool.submit(tiny.client.post, "/tokenize", content=large, headers=JSON) for _ in range(4)]
            wait_until(lambda: tiny.metric("num_requests_running") == 1, "one body is being parsed")
            wait_until(lambda: tiny.metric("num_requests_waiting") == 3, "the others wait")
            assert tiny.get("/health").status_code == 200
            assert tiny.post("/tokenize", {"text": "a"}).status_code == 200
            gate.set()
            assert [future.result(PATIENCE_SECONDS).status_code for future in pending] == [200] * 4
        assert tiny.metric("num_requests_running") == tiny.metric("num_requests_waiting") == 0

    def test_a_body_that_waits_too_long_is_503(self, tiny_directory: Path, start: Start, gate: threading.Event) -> None:
        service = start(model=str(tiny_directory), request_timeout_seconds=0.3)
        large = b'{"text":"' + b"a" * INLINE_BYTES + b'"}'
        response = service.client.post("/tokenize", content=large, headers=JSON)
        gate.set()
        assert (response.status_code, response.json()["error"]["code"]) == (503, "timeout")


HUGE = [10**309, -(10**309), 2**31, 2**63, 2**64, -(2**63), 10**18]
FLOATS = [*HUGE, 1e-320, -1e-320, 1e308, -1e308]
NUMERIC: dict[str, list[str]] = {
    "/generate": [
        *("n", "max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "seed", "logprobs"),
    ],
    "/forward": ["top_k"],
    "/logits": ["top_k"],
}


@pytest.mark.parametrize(("path", "field"), [(path, field) for path, fields in NUMERIC.items() for field in fields])
def test_extreme_numbers_do_not_change_the_tokens_of_another_request(tiny: Running, path: str, field: str) -> None:
    neighbour = {"prompt": [257, 69, 270], "max_tokens": 40, "seed": 3, "ignore_eos": True}
    alone = tiny.answer("/generate", **neighbour)["tokens"]
    body = {"prompt": [1, 2]} | ({"max_tokens": 2} if path == "/generate" else {})
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(tiny.answer, "/generate", **neighbour)
        for value in FLOATS:
            response = tiny.post(path, body | {field: value})
            assert response.status_code in (200, 400, 422), (value, response.text)
            if response.status_code != 200:
                assert response.json()["error"]["param"] == field
                assert len(response.text) < 1000
        assert pending.result(PATIENCE_SECONDS)["tokens"] == alone


def test_shape_error_turns_a_validation_error_of_pydantic_into_a_422() -> None:
    with pytest.raises(ValidationError) as caught:
        GenerateRequest.model_validate({"prompt": 1.5})
    error = bodies.shape_error(caught.value, GenerateRequest)
    assert (error.status, error.param) == (422, "prompt")


@pytest.mark.parametrize("field", ["trace", "logit_bias"])
def test_an_error_names_no_class_of_python(field: str) -> None:
    error = error_of(json.dumps({"prompt": "a", field: "b"}).encode())
    assert (error.param, error.message) == (field, f"{field}: Input should be an object")
