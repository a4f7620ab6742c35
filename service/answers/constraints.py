"""Structured output: compile the constraint of a request on its generated text."""

import logging
from collections.abc import Callable
from contextlib import suppress

from model.errors import InvalidField
from model.network.ranks import LostRank
from model.text.constraint import Constraint
from model.text.grammar.grammars import Grammars, NotRemembered
from model.text.grammar.process import NeedsMoreTime, NoAnswer
from service.answers.call import RouteCall
from service.http.disconnects import unless_disconnected
from service.http.errors import ApiError, invalid, invalid_field, lost_rank, unexpected, unread_grammar
from service.http.generate_schemas import StructuredOutputs

Compile = Callable[[Grammars], Constraint]
"""Compiles one constraint. Raises `InvalidField` if it is invalid or too expensive, `NeedsMoreTime` if it is slow."""
FIELD = "structured_outputs"
LOG = logging.getLogger(__name__)


def structured_output(asked: StructuredOutputs) -> Compile:
    """How to compile the `structured_outputs` of a request."""
    if (schema := asked.json_schema) is not None:
        return lambda grammars: grammars.json_schema(f"{FIELD}.json", schema)
    if (pattern := asked.regex) is not None:
        return lambda grammars: grammars.regex(f"{FIELD}.regex", pattern)
    if (choices := asked.choice) is not None:
        return lambda grammars: grammars.choice(f"{FIELD}.choice", choices)
    text = asked.grammar
    assert text is not None, "the schema requires exactly one of the four"
    return lambda grammars: grammars.grammar(f"{FIELD}.grammar", text)


async def compile_constraint(call: RouteCall, compile_one: Compile) -> Constraint:
    """Compile a constraint outside of the event loop.

    A slow one is given up after a fraction of a second, and compiled again on a second thread, so that it delays only
    other slow ones. Raises 400 that names the field and the reason for one that is invalid or too expensive, 429 if too
    many wait, and 503 if the process that reads grammars was killed.
    """
    quick, slow, worker = call.state.grammars, call.state.slow_grammars, call.state.worker
    if quick is None or slow is None:
        raise invalid(FIELD, "this checkpoint has no tokenizer.json, so there is no text to constrain", "no_tokenizer")
    worker.check_room(0)  # refuse before the work of compiling, not after it

    def find() -> Constraint | None:
        for grammars in (quick, slow):
            with suppress(NotRemembered, NeedsMoreTime):
                return compile_one(grammars.remembered())
        return None

    try:
        constraint = await worker.run_text(find, 0)  # it does not wait for those of others
        if constraint is None:
            try:
                run = worker.executors.run("grammars", lambda: compile_one(quick))
                constraint = await unless_disconnected(call.request, run)
            except NeedsMoreTime:
                run = worker.executors.run("slow-grammars", lambda: compile_one(slow))
                constraint = await unless_disconnected(call.request, run)
    except NoAnswer:
        raise unread_grammar() from None
    for place, reason in constraint.not_enforced.items():
        LOG.info("the arguments of the function in %s may be any JSON object: %s", place, reason)
    return constraint


def generation_error(error: Exception) -> ApiError:
    """The answer for a failed choice: 400 if its own grammar or edits are the reason, otherwise 500 or 503."""
    if isinstance(error, LostRank):
        return lost_rank()
    return invalid_field(error) if isinstance(error, InvalidField) else unexpected(error)
