"""Tests of constrained sequences in the engine: their texts fit, and other sequences get the same bits as without them.

The networks are random, so that nothing but the grammar makes a text fit.
"""

import json
import math
import random
import re
import string
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
import torch

from model.checkpoints.load import load_checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.step_budget import StepBudget
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.network.transformer import Transformer
from model.text.constraint import Constraint, GrammarState
from model.text.grammar.grammars import Grammars
from model.text.tokenizer import Tokenizer
from model.text.transcript import End
from model.tracing.selection import Selection
from tests.engine.driving import Drive, ask, assert_each_equals_alone, new_engine, prompt, run
from tests.ops.cpu.common import by_kernels
from tests.published_models import smollm2
from tests.service.checkpoints import VOCAB_SIZE, write_tokenizer
from tests.tiny import CONFIGS, build

CONFIG = replace(CONFIGS["llama"], vocab_size=VOCAB_SIZE, max_positions=400, d_head=16)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["cat", "dog", None]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("constraints") / "tokenizer.json"
    write_tokenizer(path)
    return Tokenizer.from_file(path)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def exact_model() -> Transformer:
    return build(CONFIG, dtype=torch.float64)


@pytest.fixture(scope="module")
def repeating_model() -> Transformer:
    """A network on our kernels, whose greedy text repeats itself."""
    model = Transformer(CONFIG)
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    return by_kernels(model.requires_grad_(False))


def ids(num_tokens: int, seed: int = 1) -> list[int]:
    return prompt(num_tokens, seed=seed, config=CONFIG)


def constrained(id: str, constraint: Constraint, prompt_ids: Sequence[int] | None = None, **params: Any) -> Request:
    defaults: dict[str, Any] = {"max_tokens": 200, "stop_token_ids": frozenset({0})}
    return ask(id, prompt_ids or ids(7), constraint=constraint, **defaults | params)


def mixed(grammars: Grammars) -> list[Request]:
    person = grammars.json_schema("json", PERSON)
    code = grammars.regex("regex", "[a-f]{3}(-[0-9]{2,4})+")
    return [
        constrained("person", person, n=3, max_tokens=45),
        ask("plain", ids(9, seed=2), max_tokens=25, temperature=1.2),
        constrained("greedy", person, ids(20, seed=3), temperature=0.0, max_tokens=45),
        constrained("penalized", code, ids(5, seed=4), repetition_penalty=1.3, logit_bias={20: 4.0}, max_tokens=20),
        ask("greedy plain", ids(15, seed=5), max_tokens=30, temperature=0.0),
        constrained("narrow", code, ids(12, seed=6), top_k=5, top_p=0.9, min_p=0.01, max_tokens=40),
        constrained(
            "echoed", grammars.choice("choice", ["the cat", "the dog"]), ids(6, seed=7), echo=True, max_tokens=20
        ),
        constrained("stopped", person, ids(4, seed=8), stop=[":"], max_tokens=40),
    ]


@pytest.mark.parametrize(
    "limits",
    [{"num_blocks": 400}, {"num_blocks": 400, "max_step_tokens": 9, "max_sequences": 4}, {"num_blocks": 30}],
    ids=["together", "in chunks", "preempted"],
)
def test_constrained_requests_get_the_same_tokens_as_alone_and_so_do_their_neighbours(
    grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer, limits: dict[str, Any]
) -> None:
    engine = new_engine(exact_model, tokenizer=tokenizer, **limits)
    results = run(engine, *mixed(grammars))
    assert (engine.stats().num_preemptions > 0) == (limits["num_blocks"] < 100)
    assert_each_equals_alone(exact_model, results, *mixed(grammars), tokenizer=tokenizer)
    for id, choice in (("person", 0), ("person", 1), ("person", 2), ("greedy", 0)):
        if results[id, choice].end == End("stop"):
            jsonschema.validate(json.loads(results[id, choice].text), PERSON)


def test_log_probabilities_are_those_of_the_network_before_the_mask(
    grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer
) -> None:
    request = constrained("a", grammars.choice("choice", ["dog"]), logprobs=2)
    result = run(new_engine(exact_model, tokenizer=tokenizer), request)["a", 0]
    logits = exact_model(torch.tensor([request.prompt_ids]))[0, -1]
    first = result.logprobs[0]
    assert first is not None
    assert first.chosen == pytest.approx(logits.log_softmax(-1)[result.ids[0]].item())
    assert first.top[0][0] == int(logits.argmax())


@pytest.mark.parametrize("stop_token_ids", [frozenset({0}), frozenset()], ids=["with eos", "without eos"])
def test_a_sequence_ends_when_nothing_can_follow(
    grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer, stop_token_ids: frozenset[int]
) -> None:
    engine = new_engine(exact_model, tokenizer=tokenizer)
    request = constrained("a", grammars.choice("choice", ["yes", "no"]), stop_token_ids=stop_token_ids)
    result = run(engine, request)["a", 0]
    assert result.end == End("stop")
    assert result.text in ("yes", "no")


def test_a_stop_token_ends_a_text_that_could_go_on_only_where_it_is_complete(
    grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer
) -> None:
    constraint = grammars.regex("regex", "(ab)+")
    request = constrained("a", constraint, logit_bias={0: 100.0}, n=4)
    results = run(new_engine(exact_model, tokenizer=tokenizer), request)
    assert [(result.text, result.end) for result in results.values()] == [("ab", End("stop", 0))] * 4
    request = constrained("a", constraint, stop_token_ids=frozenset(), max_tokens=9)
    [result] = run(new_engine(exact_model, tokenizer=tokenizer), request).values()
    assert result.end == End("length")
    assert result.text == "ababababa"


@pytest.mark.parametrize("speculates", [True, False])
def test_the_bits_of_unconstrained_neighbours_do_not_change(
    grammars: Grammars, tokenizer: Tokenizer, repeating_model: Transformer, speculates: bool
) -> None:
    plain = [request for request in mixed(grammars) if request.params.constraint is None]
    options: dict[str, Any] = {"tokenizer": tokenizer, "num_blocks": 400, "speculates": speculates}
    alone = run(new_engine(repeating_model, **options), *plain)
    together = run(new_engine(repeating_model, **options), *mixed(grammars))
    assert {key: together[key] for key in alone} == alone


def test_results_are_bitwise_the_same_with_and_without_drafts(
    grammars: Grammars, tokenizer: Tokenizer, repeating_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)
    items = grammars.json_schema("json", {"type": "array", "items": PERSON, "minItems": 2, "maxItems": 3})
    row = grammars.regex("regex", "(the cat sat on the (mat|log); )+")
    word = grammars.grammar("grammar", 'start: ("the dog " | "a dog ")~6')
    requests = [
        constrained("items", items, temperature=0.0, max_tokens=300),
        constrained("row", row, ids(9, seed=2), temperature=0.0),
        constrained("word", word, ids(12, seed=3), temperature=0.0),
        constrained("sampled", row, ids(12, seed=4)),
        ask("plain", [5] * 8, temperature=0.0, max_tokens=100),
    ]
    stats = {}
    results = {}
    for speculates in (True, False):
        engine = new_engine(repeating_model, tokenizer=tokenizer, num_blocks=600, speculates=speculates)
        results[speculates] = [run(engine, request) for request in requests] + [run(engine, *requests)]
        stats[speculates] = engine.stats()
    assert results[True] == results[False]
    assert stats[True].num_accepted > 20
    assert stats[False].num_drafted == 0


def test_a_mask_that_is_too_expensive_ends_its_request_alone(
    grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With many optional keys, the second step has more alternatives than llguidance allows.
    many = {"type": "object", "properties": {f"key{i}": {"type": "string"} for i in range(900)}}
    rules = f"start: %json {json.dumps({'type': 'array', 'items': many, 'minItems': 1})}"
    bad = constrained("bad", grammars.grammar("grammar", rules))
    good = constrained("good", grammars.choice("choice", ["yes", "no"]), temperature=0.0)
    plain = ask("plain", ids(9), max_tokens=20)
    results = run(new_engine(exact_model, tokenizer=tokenizer), bad, good, plain)
    error = results["bad", 0].error
    assert isinstance(error, InvalidField)
    assert error.field == "grammar"
    assert re.search(r"after \d+ tokens: .*[Tt]oo many items|items; max is", error.reason)
    assert_each_equals_alone(exact_model, results, good, plain, tokenizer=tokenizer)


def test_a_constraint_needs_a_tokenizer(grammars: Grammars, exact_model: Transformer) -> None:
    with pytest.raises(InvalidField, match="no tokenizer"):
        new_engine(exact_model).add(constrained("a", grammars.choice("choice", ["a"])))


class TestTrace:
    def test_each_step_that_chose_a_token_reports_what_the_mask_changed(
        self, grammars: Grammars, tokenizer: Tokenizer, exact_model: Transformer
    ) -> None:
        trace = TraceParams(selection=Selection(stages=(), positions=[0]))
        constraint = grammars.regex("regex", "[a-d]{4}x")
        request = constrained("a", constraint, trace=trace, temperature=0.7, max_tokens=20)
        result = run(new_engine(exact_model, tokenizer=tokenizer, max_step_tokens=4), request)["a", 0]
        effects = [step.constraint for step in result.traces if step.constraint is not None]
        assert len(effects) == len(result.ids) < len(result.traces)
        state, tokens = GrammarState(constraint, [0]), list(request.prompt_ids)
        for token_id, effect in zip(result.ids, effects, strict=True):
            logprobs = exact_model(torch.tensor([tokens]))[0, -1].log_softmax(-1)
            allowed = [
                other for other in range(tokenizer.vocab_size) if GrammarStateAfter(constraint, state).accepts(other)
            ]
            mass = logprobs[allowed].exp().sum().item()
            assert effect.logprob == pytest.approx(logprobs[token_id].item())
            assert effect.removed_mass == pytest.approx(1 - mass, abs=1e-12)
            assert effect.constrained_logprob == pytest.approx(logprobs[token_id].item() - math.log(mass))
            state.append(token_id)
            tokens.append(token_id)

    def test_a_step_without_a_constraint_reports_none(self, tokenizer: Tokenizer, exact_model: Transformer) -> None:
        trace = TraceParams(selection=Selection(stages=()))
        result = run(new_engine(exact_model, tokenizer=tokenizer), ask("a", ids(5), trace=trace))["a", 0]
        assert [step.constraint for step in result.traces] == [None] * len(result.ids)


class GrammarStateAfter:
    """Whether a token may follow a state, from the matcher itself, without masks."""

    def __init__(self, constraint: Constraint, state: GrammarState) -> None:
        self._matcher = constraint.new_matcher()
        self._matcher.consume_tokens(state._tokens)

    def accepts(self, token_id: int) -> bool:
        return self._matcher.validate_tokens([token_id]) == 1


# Random schemas and regular expressions. All texts are bounded, so that most of them end within the context.


def random_schema(generator: random.Random, depth: int = 2) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "boolean", "enum", "const", "null"]
    kind = generator.choice([*kinds, "object", "array", "anyOf"] if depth else kinds)
    if kind == "string":
        patterns: list[dict[str, Any]] = [
            {"maxLength": generator.randrange(1, 6)},
            {"minLength": 2, "maxLength": 4},
            {"pattern": generator.choice(["^[a-z]{2,4}$", "^x?[0-9]+y$", "^(ab|cd)*$"]), "maxLength": 6},
            {"format": generator.choice(["date", "uuid", "ipv4"])},
        ]
        return {"type": "string", **generator.choice(patterns)}
    if kind in ("integer", "number"):
        low = generator.randrange(-50, 50)
        bounds: dict[str, Any] = {"minimum": low, "maximum": low + generator.randrange(1, 200)}
        return {"type": kind, **bounds, **({"multipleOf": 1} if kind == "number" else {})}
    if kind == "object":
        keys = generator.sample(["a", "b", "long key", 'q"uote', "é"], generator.randrange(0, 4))
        return {
            "type": "object",
            "properties": {key: random_schema(generator, depth - 1) for key in keys},
            "required": [key for key in keys if generator.random() < 0.6],
            "additionalProperties": False,
        }
    if kind == "array":
        low = generator.randrange(0, 2)
        items = random_schema(generator, depth - 1)
        return {"type": "array", "items": items, "minItems": low, "maxItems": low + generator.randrange(0, 3)}
    if kind == "anyOf":
        return {"anyOf": [random_schema(generator, depth - 1) for _ in range(2)]}
    values = [1, "one", None, True, "é", 2.5, "a\nb"]
    if kind == "enum":
        return {"enum": generator.sample(values, 3)}
    return {"const": generator.choice(values)} if kind == "const" else {"type": kind}


def random_regex(generator: random.Random, depth: int = 3) -> str:
    if depth == 0 or generator.random() < 0.2:
        parts: list[str] = [*string.ascii_lowercase[:6], "[a-f]", "[^a-z]", r"\d", "é", r"\.", " ", "[€-₿]"]
        return generator.choice(parts)
    first, second = (random_regex(generator, depth - 1) for _ in range(2))
    low = generator.randrange(0, 3)
    return generator.choice(
        [f"{first}{second}", f"({first}|{second})", f"({first}){{{low},{low + 2}}}", f"({first})?{second}"]
    )


def check_texts(engine: Engine, grammars: Grammars, seeds: range, *, batch: int, prompt_ids: list[int]) -> int:
    """Generate texts for random schemas and expressions. Returns how many texts were complete, and so were checked."""
    num_checked = 0
    for begin in range(seeds.start, seeds.stop, batch):
        drive, specs = Drive(engine), {}
        for seed in range(begin, begin + batch):
            generator = random.Random(seed)
            params = {"temperature": generator.choice([0.0, 1.0]), "n": generator.choice([1, 2]), "seed": seed}
            try:
                if seed % 2:
                    spec: Any = random_schema(generator)
                    constraint = grammars.json_schema("json", spec)
                else:
                    spec = random_regex(generator)
                    constraint = grammars.regex("regex", spec)
            except InvalidField as error:
                if "empty text" not in error.reason:
                    raise
                continue
            specs[f"{seed}"] = spec
            drive.add(constrained(f"{seed}", constraint, prompt_ids, max_tokens=150, logprobs=None, **params))
        for (id, _), result in drive.finish().items():
            spec, text = specs[id], result.text
            assert result.error is None, (spec, result.error)
            if result.end is not None and result.end.finish_reason == "stop":
                num_checked += 1
                if isinstance(spec, str):
                    assert re.fullmatch(spec, text), (spec, text)
                else:
                    jsonschema.validate(json.loads(text), spec)
    return num_checked


@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in (125, 250, 375))])
def test_every_finished_text_fits_its_schema_or_expression(
    grammars: Grammars, tokenizer: Tokenizer, repeating_model: Transformer, first: int
) -> None:
    engine = new_engine(repeating_model, tokenizer=tokenizer, num_blocks=700, max_sequences=16)
    assert check_texts(engine, grammars, range(first, first + 125), batch=25, prompt_ids=ids(7)) > 120


@pytest.mark.slow
def test_every_finished_text_of_smollm2_fits_its_schema_or_expression() -> None:
    checkpoint = load_checkpoint(str(smollm2()), dtype="bfloat16", kernels="auto")
    assert checkpoint.tokenizer is not None
    engine = Engine(checkpoint.model, checkpoint.tokenizer, EngineConfig(cache_bytes=1 << 28, max_sequences=16))
    grammars = Grammars(checkpoint.tokenizer, checkpoint.model.config.vocab_size)
    prompt_ids = checkpoint.tokenizer.encode("An example of the requested format:\n")
    assert check_texts(engine, grammars, range(1000, 1040), batch=20, prompt_ids=prompt_ids) > 40
