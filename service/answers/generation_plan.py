"""Plan a generation: check the fields that all routes share, and make one request of the engine for each prompt.

A route reads its prompts and the fields that only it has (`Options`), and passes everything as one `Inputs`.
"""

import secrets
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from model.checkpoints.load import Checkpoint
from model.engine.request import Request as EngineRequest
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.text.constraint import Constraint
from model.text.sampling import SamplingParams
from model.text.token_rules import TokenRules
from model.text.transcript import GenerationParams
from model.tracing.edits import EditPlan
from service.answers.budget import Budget, total
from service.answers.call import ModelCall
from service.answers.constraints import compile_constraint, structured_output
from service.answers.edits import EditPlanner, answer_bytes, bind_edits, read_edits
from service.answers.generation_budget import make_budget
from service.answers.generation_changes import make_changes_budget
from service.answers.pooling import Pooling
from service.answers.prompts import check_ids, param_of
from service.answers.step_trace_answers import plan_trace, traced_stages
from service.http.errors import invalid, invalid_field
from service.http.generate_schemas import GenerationRequest
from service.state import get_engine


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a generation that each route reads from its own fields, or from fields with another meaning there.

    If `max_tokens` is None, it is `default_max_tokens`, or less if the context or the cache has less room. If both are
    None, it is all of this room. `n` choices are generated for each prompt. With `baseline`, the only prompt
    is also continued without edits. With `num_shared`, all prompts begin with the same tokens: these are the prompt for
    edits, they are computed once, and the log-probabilities of the others are reported. `pooling` reads a stage of each
    prompt, and needs no text of the answer. `field_names` maps fields of the engine to the route's names for them, for
    error messages.
    """

    id_prefix: str
    max_tokens: int | None
    default_max_tokens: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    baseline: bool = False
    num_shared: int = 0
    pooling: Pooling | None = None
    is_chat: bool = False  # ends at the end-of-sequence tokens of chats
    field_names: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """A request to generate, as its route has read it. `options` have the final word over fields of `body`.

    `constraint` is that of a chat. Without one, the constraint is that of `body.structured_outputs`.
    """

    call: ModelCall
    body: GenerationRequest
    options: Options
    prompts: Sequence[list[int]]
    constraint: Constraint | None = None
    scales: Sequence[float] | None = None  # of the edits, one for each prompt


@dataclass(frozen=True)
class GenerationPlan:
    """A checked request: one request of the engine for each prompt, and its edits.

    With a baseline, the last request has the same prompt and no edits, and its trace is not asked for.
    """

    id: str
    requests: list[EngineRequest]
    edit_plans: list[EditPlan | None]
    budget: Budget
    reserved_bytes: int  # reserved before the start; 0 for a stream, whose outputs are counted while they are unread


async def plan_generation(inputs: Inputs) -> GenerationPlan:
    """Check a request and its budget, and run the passes from which its edits take values.

    Raises 400 for a wrong field, and 413 for an answer that would be too large.
    """
    call, body, edit_planner = inputs.call, inputs.body, None
    if inputs.constraint is None and body.structured_outputs is not None:
        constraint = await compile_constraint(call, structured_output(body.structured_outputs))
        inputs = replace(inputs, constraint=constraint)
    if body.edits or inputs.scales is not None:
        scales: Sequence[float | None] = inputs.scales or [None] * len(inputs.prompts)
        edit_planner = await read_edits(body.edits, list(zip(inputs.prompts, scales, strict=True)), call)
    num_strings = num_preparations(body, len(inputs.prompts), edit_planner)
    plan = await call.run_here_or_on_thread(num_strings, lambda: make_plan(inputs, edit_planner))
    plan.budget.check(call.state)
    edit_plans = [each for each in plan.edit_plans if each is not None]
    if not edit_plans:
        return plan
    bound = iter(await bind_edits(edit_plans, call, get_engine(call.state).config.max_step_tokens))
    requests = [
        each if edit_plan is None else replace(each, edits=next(bound))
        for each, edit_plan in zip(plan.requests, plan.edit_plans, strict=True)
    ]
    return replace(plan, requests=requests)


def num_preparations(body: GenerationRequest, num_prompts: int, edit_planner: EditPlanner | None) -> int:
    """The number of strings, prompts and edits that `make_plan` prepares, as an estimate of its time."""
    stages = body.trace.stages if body.trace is not None else None
    num_strings = len(stages or ()) + (len(body.stop) if isinstance(body.stop, list) else 0)
    num_strings += len(body.bad_words)
    return num_strings + num_prompts * (1 + (0 if edit_planner is None else edit_planner.num_checks))


def make_plan(inputs: Inputs, edit_planner: EditPlanner | None) -> GenerationPlan:
    """Check a request against the checkpoint and the settings. Raises 400 for a wrong field."""
    options = inputs.options
    check_num_sequences(inputs)
    prompts = PromptPlanner(inputs, edit_planner)
    plans = [prompts.plan(index, ids) for index, ids in enumerate(inputs.prompts)]
    budgets = [each.budget for each in plans]
    if options.baseline:
        plans.append(prompts.baseline(plans[0]))
        budgets += plans[-1].budget, make_changes_budget(inputs.call, plans[0].num_positions, options.n)
    budget = total(budgets)
    edit_plans = [each.edit_plan for each in plans]
    uses = Counter(each for each in edit_plans if each is not None)  # prompts of one length share a plan
    edits_bytes = options.n * sum(number * answer_bytes(each) for each, number in uses.items())
    budget = replace(budget, response_bytes=budget.response_bytes + edits_bytes)
    return GenerationPlan(
        prompts.id,
        [each.request for each in plans],
        edit_plans,
        budget,
        0 if inputs.body.stream else budget.response_bytes,
    )


@dataclass(frozen=True)
class PlannedPrompt:
    """The plan for one prompt. Its request computes at most `num_positions` positions."""

    request: EngineRequest
    edit_plan: EditPlan | None
    budget: Budget
    num_positions: int


class PromptPlanner:
    """Plans the prompts of a request. Prompts of one length share their trace and their budget."""

    def __init__(self, inputs: Inputs, edit_planner: EditPlanner | None) -> None:
        trace = inputs.body.trace
        self.id = f"{inputs.options.id_prefix}{uuid.uuid4().hex}"
        self._inputs = inputs
        self._edit_planner = edit_planner
        self._call = inputs.call
        self._engine = get_engine(inputs.call.state)
        self._stages = [] if trace is None else traced_stages(trace, inputs.call.checkpoint)
        self._params = read_params(inputs)
        self._traces: dict[int, TraceParams] = {}  # by the length of the prompt
        self._budgets: dict[int, Budget] = {}  # likewise

    def plan(self, index: int, ids: list[int]) -> PlannedPrompt:
        """Check a prompt, and the fields of the request that depend on its length. Raises 400 for a wrong one."""
        inputs, options, is_list = self._inputs, self._inputs.options, len(self._inputs.prompts) > 1
        has_several = is_list and inputs.scales is None
        param = param_of(options.field_names.get("prompt", "prompt"), index, has_several)
        try:
            most = find_max_tokens(options, self._call, len(ids))
            params = self._params.with_max_tokens(most)
            num_positions = len(ids) + max(most, 1) - 1
            trace = self._trace(len(ids), num_positions)
            request = EngineRequest(
                id=f"{self.id}-{index}" if is_list else self.id,
                prompt_ids=ids,
                params=params,
                trace=trace if options.pooling is None else options.pooling.trace_params(len(ids)),
                cache_salt=inputs.body.cache_salt,
                adapter=self._call.adapter,
                owner=self.id,
                prefix_leader=f"{self.id}-0" if options.num_shared and index else None,
                tap=self._call.notes.hooks,  # None over HTTP
            )
            self._engine.check(request)
        except InvalidField as error:
            name = options.field_names.get(error.field, error.field)
            raise invalid_field(error, param if error.field == "prompt" else name) from None
        edit_plan = None
        if self._edit_planner is not None:
            scale = None if inputs.scales is None else inputs.scales[index]
            of_prompt = param if has_several else "prompt"
            edit_plan = self._edit_planner.plan(ids[: options.num_shared or None], num_positions, of_prompt, scale)
        if len(ids) not in self._budgets:
            self._budgets[len(ids)] = self._budget(request)
        return PlannedPrompt(request, edit_plan, self._budgets[len(ids)], num_positions)

    def baseline(self, plan: PlannedPrompt) -> PlannedPrompt:
        """The plan for the same prompt without edits and trace."""
        request = replace(plan.request, id=f"{self.id}-baseline", trace=None)
        return PlannedPrompt(request, None, self._budget(request), plan.num_positions)

    def _trace(self, num_prompt: int, num_positions: int) -> TraceParams | None:
        options = self._inputs.body.trace
        if options is None:
            return None
        if num_prompt not in self._traces:
            checkpoint = self._call.checkpoint
            self._traces[num_prompt] = plan_trace(options, self._stages, checkpoint, num_positions, num_prompt)
        return self._traces[num_prompt]

    def _budget(self, request: EngineRequest) -> Budget:
        max_step_tokens = self._engine.config.max_step_tokens
        if self._inputs.options.pooling is not None:
            return self._inputs.options.pooling.make_budget(max_step_tokens)
        encoding = "json" if self._inputs.body.trace is None else self._inputs.body.trace.encoding
        return make_budget(request, encoding, self._call.checkpoint, max_step_tokens)


def check_num_sequences(inputs: Inputs) -> None:
    """Raise 400 for more choices than the server takes."""
    options, settings = inputs.options, inputs.call.state.settings
    if options.n > settings.max_num_seqs:
        name, limit = options.field_names.get("n", "n"), settings.max_num_seqs
        raise invalid(name, f"{options.n} is more than the {limit} sequences that can run at a time")
    num_runs = len(inputs.prompts) + (1 if options.baseline else 0)
    num_sequences, limit = num_runs * options.n, settings.max_num_seqs + settings.max_waiting_requests
    if num_sequences > limit:
        kind, name = "scales", "scales"
        if inputs.scales is None:
            kind, name = "prompts", options.field_names.get("prompt", "prompt")
        choices = f" with {options.n} choices each" if options.n > 1 else ""
        reason = f"{num_runs} {kind}{choices} are more than the {limit} sequences"
        raise invalid(name, f"{reason} that one request may have; send several requests")


def find_max_tokens(options: Options, call: ModelCall, num_prompt: int) -> int:
    """The maximum number of new tokens after a prompt: that of the request, or the default if there is room for it."""
    if options.max_tokens is not None:
        return options.max_tokens
    limit = min(call.checkpoint.model.config.max_positions, get_engine(call.state).num_cache_tokens)
    room = max(1, limit - num_prompt)
    return room if options.default_max_tokens is None else min(options.default_max_tokens, room)


def read_params(inputs: Inputs) -> GenerationParams:
    """The parameters for all prompts, without `max_tokens`: those of the request, or the checkpoint's defaults.

    Raises 400 for a wrong one.
    """
    body, options, checkpoint = inputs.body, inputs.options, inputs.call.checkpoint
    config = checkpoint.model.config
    check_ids(body.stop_token_ids, config.vocab_size, "stop_token_ids")
    sampling = dict(checkpoint.generation.sampling) | {
        name: value
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        if (value := getattr(body, name)) is not None
    }
    sampling["top_k"] = max(sampling.get("top_k", 0), 0)  # -1 means the same as 0
    defaults = checkpoint.generation
    eos_token_ids = defaults.chat_eos_token_ids if options.is_chat else defaults.eos_token_ids
    eos_token_ids = () if body.ignore_eos else eos_token_ids
    stop = [body.stop] if isinstance(body.stop, str) else body.stop
    named_ids = set() if checkpoint.tokenizer is None else set(checkpoint.tokenizer.special_ids(stop))
    named_ids = {token_id for token_id in named_ids if token_id < config.vocab_size}  # a tokenizer may have more
    stop_token_ids = frozenset(body.stop_token_ids) | frozenset(eos_token_ids) | named_ids
    return GenerationParams(
        n=options.n,
        max_tokens=0,
        sampling=SamplingParams(
            **sampling,
            presence_penalty=body.presence_penalty,
            frequency_penalty=body.frequency_penalty,
            logit_bias=read_bias(body.logit_bias, config.vocab_size),
            seed=find_seed(inputs),
            rules=read_rules(body, checkpoint, stop_token_ids),
        ),
        stop=stop,
        stop_token_ids=stop_token_ids,
        min_tokens=body.min_tokens,
        includes_stop=body.include_stop_str_in_output,
        shows_special=not body.skip_special_tokens,
        logprobs=options.logprobs,
        prompt_logprobs=options.prompt_logprobs,
        prompt_logprobs_start=options.num_shared,
        echo=options.echo,
        constraint=inputs.constraint,
    )


def read_rules(body: GenerationRequest, checkpoint: Checkpoint, stop_token_ids: frozenset[int]) -> TokenRules:
    """The rules on which tokens may be chosen. Raises 400 for those that exclude all."""
    vocab_size, tokenizer = checkpoint.model.config.vocab_size, checkpoint.tokenizer
    check_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids")
    banned: dict[tuple[int, ...], None] = {}
    if body.bad_words and tokenizer is None:
        raise invalid("bad_words", "this checkpoint has no tokenizer.json, so there are no words", "no_tokenizer")
    for index, word in enumerate(body.bad_words):
        assert tokenizer is not None
        for text in (word, f" {word.lstrip()}"):  # at the beginning of a text, and inside of it
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if not ids:
                raise invalid(f"bad_words.{index}", "is empty; send a word")
            if max(ids) < vocab_size:  # otherwise the network never chooses all of them
                banned[ids] = None
    rules = TokenRules(
        allowed=body.allowed_token_ids or (),
        min_tokens=body.min_tokens,
        stop_token_ids=sorted(stop_token_ids) if body.min_tokens else (),
        banned=list(banned),
    )
    excluded = {*rules.stop_token_ids, *(ids[-1] for ids in rules.banned)}
    if body.allowed_token_ids is not None and not set(body.allowed_token_ids) - excluded:
        reason = "leaves no token, as min_tokens excludes stop tokens and bad_words their last ones; send more"
        raise invalid("allowed_token_ids", reason)
    return rules


def find_seed(inputs: Inputs) -> int | None:
    """The seed of the request; None for a new one in each request of the engine, but runs that are compared need the
    same.
    """
    if inputs.body.seed is None:
        return secrets.randbits(63) if inputs.options.baseline or inputs.scales is not None else None
    return inputs.body.seed % 2**63


def read_bias(logit_bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    """Convert the keys to token ids. Raises 400 for a key that is not one."""
    for key in logit_bias:
        is_id = key.isascii() and key.isdigit() and len(key) < 20 and key == str(int(key))
        if not (is_id and int(key) < vocab_size):
            reason = f"is not a token id; the vocabulary has {vocab_size} tokens"
            raise invalid(f"logit_bias.{key[:20]}", reason, "token_id")
    return {int(key): value for key, value in logit_bias.items()}
