"""Count the values of a JSON text, and how deep they are nested, before the text is parsed."""

from itertools import accumulate

from service.http.errors import ApiError, invalid

BYTES_PER_VALUE = 16  # a body may hold one JSON value per this many bytes of the largest allowed body
MAX_DEPTH = 100  # of lists and objects inside each other
DEPTH_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
NO_BRACKETS = bytes(set(range(256)) - DEPTH_STEPS.keys())


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
