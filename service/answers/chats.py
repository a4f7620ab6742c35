"""Start the answer to a conversation: the work that is the same for every protocol of chats."""

from functools import partial

from service.answers.call import ModelCall
from service.answers.call_forms import form_of
from service.answers.call_ids import demands_short_ids, new_call_id
from service.answers.chat_constraints import chat_constraint
from service.answers.chat_pieces import PieceReader
from service.answers.chat_stream import ChatStream
from service.answers.chat_thinking import find_thinking
from service.answers.constraints import compile_constraint
from service.answers.conversations import conversation_ids, find_template
from service.answers.generation import start_generation
from service.answers.generation_plan import Inputs, Options
from service.answers.offered_tools import OfferedTools, read_tools
from service.answers.tool_calls import ToolCallParser
from service.http.errors import invalid, wrong_shape
from service.http.openai_schemas import ChatRequest

BYTES_PER_CHECK = 1 << 10  # converting so much of a conversation takes less time than checking a glob
DEFAULT_LARGE_MAX_TOKENS = 1024  # with log-probabilities or a trace for each token


async def start_chat(body: ChatRequest, call: ModelCall, id_prefix: str) -> ChatStream:
    """Check a conversation, and begin to generate its answer.

    Routes of other protocols convert their body to a `ChatRequest`, and rename the fields in errors with
    `RouteCall.renamed`. Raises the errors of `start_generation`.
    """
    checkpoint = call.checkpoint
    options = read_options(body, id_prefix)
    template = find_template(checkpoint)
    tools = find_tools(body, call)
    source = template.source_for(with_tools=bool(tools.offered))
    form = form_of(source)
    if tools.enforced and body.stop:
        reason = "cannot be combined with a tool_choice that demands a call; leave out one of them"
        call.leave_out(["stop"], lambda name: invalid(name, reason))
        body = body.model_copy(update={"stop": []})  # a stop string could end the text inside the call
    ids = await conversation_ids(body, tools, call, template)
    thinking = find_thinking(source, ids, body, checkpoint.tokenizer)
    compile_one = chat_constraint(body, tools, form, checkpoint.tokenizer)
    constraint = None if compile_one is None else await compile_constraint(call, compile_one)
    if constraint is not None and thinking is not None and checkpoint.tokenizer is not None:
        constraint = thinking.constrained(constraint, checkpoint.tokenizer)
    generation = await start_generation(Inputs(call, body, options, [ids], constraint))
    functions = {function.name: function.parameters for function in tools.offered}
    new_id = partial(new_call_id, is_short=demands_short_ids(source))

    def new_reader() -> PieceReader | None:
        calls = ToolCallParser(form, functions, new_id) if functions else None
        return calls if thinking is None else thinking.reader(calls)

    return ChatStream(generation, [new_reader() for _ in range(body.n)], hides_reasoning=not body.include_reasoning)


async def count_prompt(body: ChatRequest, call: ModelCall) -> int:
    """The number of tokens of a conversation's prompt."""
    ids = await conversation_ids(body, find_tools(body, call), call, find_template(call.checkpoint))
    call.note_tokens(len(ids))
    return len(ids)


def find_tools(body: ChatRequest, call: ModelCall) -> OfferedTools:
    """The tools of a request. Tools of types that nobody here runs are left out, or a 422 if the request is strict."""
    tools = read_tools(body)
    reason = "only tools of the type 'function' are known"
    call.leave_out(tools.left_out, lambda place: wrong_shape(f"{place}.type", reason, "literal_error"))
    return tools


def read_options(body: ChatRequest, id_prefix: str) -> Options:
    """The fields that only chats have. Raises 400 for fields that contradict each other."""
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise invalid("max_tokens", f"{body.max_tokens} is not max_completion_tokens; send only one of them")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "0 generates nothing; send at least 1")
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "is only for answers with log-probabilities; send logprobs: true")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is only for streams; send stream: true")
    max_tokens = body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    max_tokens_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return Options(
        id_prefix=id_prefix,
        max_tokens=max_tokens,
        # Memory for the whole answer is reserved, which would be much for a long context.
        default_max_tokens=DEFAULT_LARGE_MAX_TOKENS if body.logprobs or body.trace is not None else None,
        n=body.n,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        is_chat=True,
        field_names={"prompt": "messages", "max_tokens": max_tokens_name},
    )
