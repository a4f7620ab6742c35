"""A request's body -> the model that its route declares. The cost is bounded before it is paid: the number of JSON
values is counted before they are parsed, and lists end at their first error."""

import codecs
import difflib
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from service.errors import ApiError
from service.streaming import unless_disconnected

INLINE_BYTES = 1 << 16  # larger bodies are parsed on another thread
BYTES_PER_VALUE = 16  # a body may hold one JSON value for so many bytes of the largest body
MAX_KEYS = 4096  # of one JSON object
MAX_NUMBER = 1000  # digits of one number
MAX_ERRORS = 20


class JsonRoute(APIRoute):
    """A route whose body is parsed and validated here, instead of on the event loop by FastAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None, "a JSON route declares a body"
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]  # a model, for a JSON body

        async def handle_json(request: Request) -> Response:
            content = await request.body()
            check_content_type(request.headers.get("content-type", ""))
            state = request.app.state.forwardscope
            max_values = state.settings.max_body_bytes // BYTES_PER_VALUE
            if len(content) <= INLINE_BYTES:
                body = parse(content, model, max_values)
            else:
                job = state.worker.run_body(lambda: parse(content, model, max_values))
                body = await unless_disconnected(request, job)
            return await handle(ParsedRequest(request.scope, request.receive, body))

        return handle_json


class ParsedRequest(Request):
    """A request whose JSON is parsed and validated already."""

    def __init__(self, scope: Any, receive: Any, body: BaseModel) -> None:
        super().__init__(scope, receive)
        self._parsed = body

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only looks whether there is one

    async def json(self) -> Any:
        return self._parsed


def check_content_type(content_type: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise misshapen("body", "send JSON with the header 'Content-Type: application/json'", "content_type")


def parse(content: bytes, model: type[BaseModel], max_values: int) -> BaseModel:
    """The validated body. Raises 413 where it holds too many values, 422 where its shape is not the model's."""
    content = content.removeprefix(codecs.BOM_UTF8)
    check_num_values(content, max_values)
    try:
        values = json.loads(
            content.decode(),  # of bytes, `loads` would guess the encoding, and others than UTF-8 were not counted
            object_pairs_hook=_object,
            parse_int=_number(int) if len(content) > INLINE_BYTES else None,
            parse_float=_number(float) if len(content) > INLINE_BYTES else None,
        )
    except (ValueError, RecursionError) as error:  # also not UTF-8, a number of thousands of digits, nested too deep
        raise misshapen("body", f"not valid JSON: {error}", "json_invalid") from None
    if isinstance(values, dict):
        check_names(values, model)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise describe(error) from None


def check_num_values(content: bytes, max_values: int) -> None:
    """413 for more JSON values than `max_values`, counted without parsing: values and keys are divided by commas and
    brackets outside of strings."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_values = content.count(b'"') // 2
    if num_values <= max_values:
        outside = b"".join(content.split(b'"')[::2])
        num_values = sum(outside.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > max_values:
        message = (
            f"body: holds {num_values} JSON values, the limit is {max_values}: one for {BYTES_PER_VALUE} bytes of "
            "--max-body-bytes"
        )
        raise ApiError(413, message, param="body", code="too_many_values")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different. Raises 422 for others: two readers would take two different values."""
    if len(pairs) > MAX_KEYS:
        raise misshapen("body", f"an object has {len(pairs)} keys, the limit is {MAX_KEYS}", "too_many_keys")
    found = dict(pairs)
    if len(found) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise misshapen("body", f"the key {key[:100]!r} is there twice in one object", "duplicate_key")
    return found


def _number(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """For large bodies. A Python function lets other threads run between two numbers, which the C parser does not."""

    def read(text: str) -> Any:
        if len(text) > MAX_NUMBER:
            raise ValueError(f"a number has {len(text)} digits, the limit is {MAX_NUMBER}")
        return convert(text)

    return read


def check_names(values: dict[str, Any], model: type[BaseModel]) -> None:
    """422 for unknown fields, which names the nearest known one. (Those of nested objects are found by the model.)"""
    unknown = [name for name in values if name not in model.model_fields]
    if unknown:
        known = list(model.model_fields)
        near = difflib.get_close_matches(unknown[0][:100], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        more = f" ({_some(unknown[1:])} as well)" if len(unknown) > 1 else ""
        name = unknown[0][:100] if unknown[0].isprintable() else "body"
        raise misshapen(name or "body", f"this field is not known{more}; {hint}", "extra_forbidden")


def describe(error: ValidationError) -> ApiError:
    """422 that names the fields that are wrong, at most `MAX_ERRORS`. `param` is the most deeply nested one: prompt.3
    rather than "prompt is not a string"."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    fields = [_field(problem["loc"]) for problem in problems]
    deepest = max(range(len(fields)), key=lambda i: len(fields[i]))
    param = ".".join(map(str, fields[deepest])) or "body"
    same = [i for i in range(len(fields)) if fields[i] == fields[deepest]]
    messages = dict.fromkeys(problems[i]["msg"].removeprefix("Value error, ") for i in same)
    others = dict.fromkeys(str(field[0]) for field in fields if field and field[0] != fields[deepest][0])
    more = f"; wrong as well: {_some(list(others))}" if others else ""
    return misshapen(param, f"{'; or '.join(list(messages)[:MAX_ERRORS])}{more}", problems[deepest]["type"])


def misshapen(param: str, message: str, code: str) -> ApiError:
    """422: the body does not have the documented shape."""
    return ApiError(422, f"{param}: {message}", param=param, code=code)


def _some(names: list[str]) -> str:
    shown = ", ".join(name[:100] for name in names[: MAX_ERRORS - 1])
    return shown if len(names) < MAX_ERRORS else f"{shown} and {len(names) - MAX_ERRORS + 1} more"


def _field(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Where in the body: a field (of a trace, its own), and indices in it. Words further in are a union's branches or a
    client's own keys."""
    num_names = 2 if loc[:1] == ("trace",) else 1
    return tuple(part for depth, part in enumerate(loc) if depth < num_names or isinstance(part, int))
