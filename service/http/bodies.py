"""Parse and validate JSON request bodies, at a bounded cost.

The JSON values of a body are counted before they are parsed, and the validation of a list stops at its first error.
"""

import codecs
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from itertools import accumulate
from typing import Any, get_args

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, RootModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Scope

from model.errors import shortened
from service.http.disconnects import unless_disconnected
from service.http.errors import MAX_NAMES, ApiError, invalid, join_some, wrong_shape
from service.http.field_names import alternatives, check_names, known_part
from service.http.field_types import check_text
from service.request_notes import notes_of

INLINE_BYTES = 1 << 14  # larger bodies are parsed on another thread
# What JSON writes for a lone surrogate, a NUL character, or a number that is not finite. Rare in other texts.
UNUSUAL = re.compile(rb"\\u(0000|[dD][89a-fA-F])|NaN|Infinity|[eE]\+?\d{3}|\d{200}")
UNUSUAL_BYTES = 200  # the longest match
PIECE = 1 << 18  # bytes that are searched at a time, so that other threads can run in between
OPEN_ROUTES = ("/v1/", "/infill")  # other programs define what their clients send here
STRICT = re.compile(r"\bhandling=strict\b", re.I)
MAX_KEYS = 4096  # in one JSON object
MAX_DIGITS = 1000  # in one number
BYTES_PER_VALUE = 16  # a body may hold one JSON value per this many bytes of the largest allowed body
PREFIX = "Value error, "  # of pydantic's messages for our own errors
NO_OBJECT = frozenset({"model_type", "dict_type"})  # whose messages name classes of Python
MAX_DEPTH = 100  # of lists and objects inside each other
DEPTH_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - DEPTH_STEPS.keys())


class JsonRoute(APIRoute):
    """A route whose body is parsed and validated by this module, large ones outside the event loop.

    `OPEN_ROUTES` leave out the unknown fields of their clients, unless `is_strict`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None, "a JSON route declares a body"
        model: type[BaseModel] = self.body_field.field_info.annotation  # type: ignore[assignment]  # a model, for a JSON body

        async def handle_json(request: Request) -> Response:
            content = await request.body()
            check_content_type(request.headers.get("content-type", ""))
            state = request.app.state.forwardscope
            limit = max_values(state.settings.max_body_bytes)
            ignored: list[str] | None = None
            if self.path.startswith(OPEN_ROUTES) and not is_strict(request.scope, state.settings.strict_fields):
                ignored = []
            if len(content) <= INLINE_BYTES:
                body = parse(content, model, limit, ignored)
            else:
                job = state.worker.executors.run("bodies", lambda: parse(content, model, limit, ignored))
                body = await unless_disconnected(request, job)
            notes_of(request.scope).ignored_fields += ignored or ()
            return await handle(ParsedRequest(request.scope, request.receive, body))

        return handle_json


class ParsedRequest(Request):
    """A request whose JSON body has already been parsed and validated. FastAPI takes it from `json`, as it is."""

    def __init__(self, scope: Any, receive: Any, body: BaseModel) -> None:
        super().__init__(scope, receive)
        self._parsed = body

    async def body(self) -> bytes:
        return b"{}"  # FastAPI only checks that the body is not empty

    async def json(self) -> Any:
        return self._parsed


def is_strict(scope: Scope, strict_fields: bool) -> bool:
    """Whether fields that have no effect are errors: by the setting `strict_fields`, or because the client asks.

    A client asks with `Prefer: handling=strict` (RFC 7240).
    """
    return strict_fields or STRICT.search(", ".join(Headers(scope=scope).getlist("prefer"))) is not None


def check_content_type(content_type: str) -> None:
    """Raise 422 unless the type is `application/json` or ends in `+json`."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise wrong_shape("body", "send JSON with the header 'Content-Type: application/json'", "content_type")


def parse(content: bytes, model: type[BaseModel], limit: int, ignored: list[str] | None = None) -> BaseModel:
    """Parse and validate a body of at most `limit` values.

    With `ignored`, unknown fields are left out where the model allows that, and their paths are added to it. Raises 413
    for more values, 400 for values that are nested too deeply, and 422 if the body does not fit the model.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    check_values(content, limit)
    try:
        values = json.loads(
            content.decode(),  # for bytes, `loads` guesses the encoding, but the values were counted as UTF-8
            object_pairs_hook=_object,
            parse_int=_number(int) if len(content) > INLINE_BYTES else None,
            parse_float=_number(float) if len(content) > INLINE_BYTES else None,
        )
    except UnicodeDecodeError as error:
        raise wrong_shape("body", f"is not UTF-8 at byte {error.start}; encode it as UTF-8", "json_invalid") from None
    except (ValueError, RecursionError) as error:  # also: too many digits, nested too deeply
        raise wrong_shape("body", f"not valid JSON: {error}", "json_invalid") from None
    branch = branch_of(values, model)
    check_names(values, branch, ignored=ignored)
    try:
        body = branch.model_validate(values)
    except ValidationError as error:
        raise shape_error(error, branch) from None
    if any(UNUSUAL.search(content, start, start + PIECE + UNUSUAL_BYTES) for start in range(0, len(content), PIECE)):
        check_open_values(values)
    return body if branch is model else model.model_construct(root=body)


def max_values(max_body_bytes: int) -> int:
    """The number of values that a body of a request may hold, the texts in it that are JSON included."""
    return max_body_bytes // BYTES_PER_VALUE


def check_values(content: bytes, limit: int, param: str = "body", before: int = 0) -> int:
    """Raise 413 for more JSON values or strings than `limit`, and 400 for a nesting deeper than `MAX_DEPTH`.

    Returns their number, with that of texts `before` this one, which share the limit. Each entry of a list or object
    follows a comma or an opening bracket outside strings, so these are counted.
    """
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # every quote left begins or ends a string
    num_values = before + content.count(b'"') // 2
    counted = "strings"  # they are counted first, as `split` makes an object for each
    if num_values <= limit:
        counted = "JSON values"
        content = b"".join(content.split(b'"')[::2])
        num_values = before + sum(content.count(mark) for mark in (b",", b"[", b"{"))
    if num_values > limit:
        message = (
            f"{param}: contains {num_values} {counted}; the limit is {limit}, one per {BYTES_PER_VALUE} bytes of "
            "--max-body-bytes"
        )
        raise ApiError(413, message, param=param, code="too_many_values")
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        steps = map(DEPTH_STEPS.__getitem__, content.translate(None, delete=NO_BRACKETS))
        if max(accumulate(steps)) > MAX_DEPTH:
            reason = f"has lists and objects that are nested deeper than {MAX_DEPTH}, the limit"
            raise invalid(param, reason, "nested_too_deeply")
    return num_values


def branch_of(values: Any, model: type[BaseModel]) -> type[BaseModel]:
    """The model of a body: `model`, or if that is a union of models, the one that a field of the body names.

    Raises 422 if the field is missing or names none of them. Errors in other fields then concern one model only.
    """
    union = model.model_fields.get("root")
    if union is None or not issubclass(model, RootModel) or not isinstance(values, dict):
        return model
    field = union.discriminator
    if not isinstance(field, str):
        return model
    branches: dict[str, type[BaseModel]] = {
        name: branch
        for branch in alternatives(union.annotation)
        for name in get_args(branch.model_fields[field].annotation)
    }
    known = ", ".join(branches)
    if field not in values:
        check_names(values, *branches.values())  # the field may be misspelt
        raise wrong_shape(field, f"is required; send one of {known}", "missing")
    name = values[field]
    if not isinstance(name, str) or name not in branches:
        raise wrong_shape(field, f"{shortened(name)} is not one of {known}", "literal_error")
    return branches[name]


def check_open_values(values: dict[str, Any]) -> None:
    """Raise 422 for texts and numbers that no field may have, in objects that may have any keys, such as schemas."""
    for name, value in values.items():
        stack = [value]
        while stack:
            each = stack.pop()
            if isinstance(each, dict):
                stack += [*each, *each.values()]
            elif isinstance(each, list):
                stack += each
            elif isinstance(each, str):
                try:
                    check_text(each)
                except ValueError as error:
                    raise wrong_shape(name, str(error), "value_error") from None
            elif isinstance(each, float) and not math.isfinite(each):
                raise wrong_shape(name, "contains a number that is not finite", "finite_number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object from its keys and values. Raises 422 for too many keys and for duplicate keys.

    A duplicate key has no defined meaning: parsers differ in which of the values they use.
    """
    if len(pairs) > MAX_KEYS:
        raise wrong_shape("body", f"an object has {len(pairs)} keys; the limit is {MAX_KEYS}", "too_many_keys")
    result = dict(pairs)
    if len(result) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise wrong_shape("body", f"the key {key[:100]!r} occurs twice in one object", "duplicate_key")
    return result


def _number(convert: Callable[[str], Any]) -> Callable[[str], Any]:
    """A converter for the numbers of large bodies.

    Because it is a Python function, other threads can run between two numbers. The C parser alone would block them.
    """

    def read(text: str) -> Any:
        if len(text) > MAX_DIGITS:
            raise ValueError(f"a number has {len(text)} digits; the limit is {MAX_DIGITS}")
        return convert(text)

    return read


def shape_error(error: ValidationError, model: type[BaseModel]) -> ApiError:
    """422 that names the fields of a `model` that are wrong, at most `MAX_NAMES`.

    `param` is the most deeply nested one: for a prompt with a wrong token id, `prompt.3` says more than "prompt is not
    a string", which is also an error of the same union.
    """
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    fields = [known_part(problem["loc"], model) for problem in problems]
    deepest = max(range(len(fields)), key=lambda i: len(fields[i]))
    param = ".".join(map(str, fields[deepest])) or "body"
    same = [i for i in range(len(fields)) if fields[i] == fields[deepest]]
    messages = dict.fromkeys(
        "Input should be an object" if problems[i]["type"] in NO_OBJECT else problems[i]["msg"].removeprefix(PREFIX)
        for i in same
    )
    others = dict.fromkeys(str(field[0]) for field in fields if field and field[0] != fields[deepest][0])
    more = f"; also wrong: {join_some(list(others))}" if others else ""
    return wrong_shape(param, f"{'; or '.join(list(messages)[:MAX_NAMES])}{more}", problems[deepest]["type"])
