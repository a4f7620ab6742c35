"""One pass on the network's thread, from the byte budget to the answer: what /forward and /logits share."""

import time
from collections.abc import Callable

from fastapi import Request, Response

from service.errors import ApiError
from service.state import State

SAFETENSORS = "application/x-safetensors"
# At most, in JSON:
STAGE_BYTES = 512  # name, shape, dims and summary of a stage
TOKEN_BYTES = 160  # a token or a prediction, without its text
ESCAPED_BYTES = 6  # one byte of a text, where it is a control character


def wants_safetensors(request: Request) -> bool:
    return SAFETENSORS in request.headers.get("accept", "")


def text_bytes(num_stages: int, num_tokens: int, longest_token_bytes: int, *, as_safetensors: bool) -> int:
    """An upper bound of all that is no tensor. In a safetensors file it is JSON inside JSON: every quote is escaped."""
    size = STAGE_BYTES * (1 + num_stages) + (TOKEN_BYTES + ESCAPED_BYTES * longest_token_bytes) * num_tokens
    return 2 * size if as_safetensors else size


async def answer_pass(
    state: State, job: Callable[[float], bytes], *, num_tokens: int, estimate: int, narrow: str, as_safetensors: bool
) -> Response:
    """The answer of `job`, which is given the seconds waited and runs on the network's thread.

    413 where the answer may pass the limit, with its size and what to ask less of: before the pass.
    """
    limit = state.settings.max_response_bytes
    if estimate > limit:
        state.metrics.budget_refusals.inc()
        message = f"the answer would take up to {estimate} bytes, the limit is {limit}; narrow {narrow}"
        raise ApiError(413, message, code="response_too_large")
    async with state.worker.place() as waited:
        start = time.perf_counter()
        content = await state.worker.run(lambda: job(waited))
        state.metrics.trace_seconds.observe(time.perf_counter() - start)
    state.metrics.trace_bytes.inc(len(content))
    state.metrics.prompt_tokens.inc(num_tokens)
    return Response(content, media_type=SAFETENSORS if as_safetensors else "application/json")
