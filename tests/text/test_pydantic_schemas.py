"""Texts under the schemas of random pydantic models: valid for jsonschema and for the model, whatever is drawn."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from pydantic import ValidationError

from model.errors import InvalidField
from model.text.constraint import GrammarState, token_masks
from model.text.grammar.grammars import Grammars
from model.text.tokenizer import Tokenizer
from tests.service.checkpoints import VOCAB_SIZE
from tests.text.pydantic_models import random_model
from tests.text.test_constraint import grammars, tokenizer  # noqa: F401  # fixtures

# ruff: noqa: F811  # arguments that are fixtures

MAX_TOKENS = 1500
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
REFUSED = ("uniqueItems", "oneOf")


def no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a key is there twice: {pairs}"
    return dict(pairs)


def refuse_constant(name: str) -> Any:
    raise AssertionError(f"{name} is not JSON")


def strictly_parsed(text: str) -> Any:
    value = json.loads(text, object_pairs_hook=no_key_twice, parse_constant=refuse_constant)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # raises for half of a surrogate pair
    return value


def drawn_text(
    grammars: Grammars, tokenizer: Tokenizer, schema: dict[str, Any], chance: Random, **options: Any
) -> str | None:
    """A text of random tokens that the masks allow; those that end something are likely. None for a long text."""
    state = GrammarState(grammars.json_schema("json", schema, **options), [0])
    ids: list[int] = []
    while not state.is_complete and len(ids) < MAX_TOKENS:
        masks = token_masks([(state, ())], VOCAB_SIZE)
        assert masks is not None
        assert not masks.failures, f"{schema} {tokenizer.decode_inside(ids)} {masks.failures}"
        bits = np.unpackbits(masks.words[0].numpy().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        allowed = bits.nonzero()[0].tolist()
        if 0 in allowed:
            break
        ending = [i for i in allowed if tokenizer.decode_inside([i]) in ('"', "}", "]", ",", ", ", ":")]
        token_id = chance.choice(ending if ending and chance.random() < 0.4 + len(ids) / MAX_TOKENS else allowed)
        ids.append(token_id)
        state.append(token_id)
    return tokenizer.decode_inside(ids) if len(ids) < MAX_TOKENS else None


def check(grammars: Grammars, tokenizer: Tokenizer, seeds: range) -> None:
    refused: list[str] = []
    wrong: list[dict[str, Any]] = []
    num_complete = 0
    for seed in seeds:
        chance = Random(seed)
        model = random_model(chance)
        schema = model.model_json_schema()
        is_closed = chance.random() < 0.7  # an open object may have keys that the model reads in another way
        try:
            text = drawn_text(grammars, tokenizer, schema, chance, is_closed=is_closed)
        except InvalidField as error:
            refused.append(error.reason)
            continue
        if text is not None:
            num_complete += 1
            value = strictly_parsed(text)
            jsonschema.Draft202012Validator(schema, format_checker=FORMATS).validate(value)
            try:
                model.model_validate_json(text)
            except ValidationError as error:
                # The schema of a Decimal allows any string.
                kinds = {each["type"] for each in error.errors()} - {"decimal_parsing"}
                wrong += [{"seed": seed, "text": text, "kinds": kinds}] if is_closed and kinds else []
    assert wrong == []
    assert [reason for reason in refused if not any(keyword in reason for keyword in REFUSED)] == []
    assert len(refused) < 0.2 * len(seeds)
    assert num_complete > 0.8 * (len(seeds) - len(refused))


def test_texts_under_the_schemas_of_pydantic_models_are_valid(grammars: Grammars, tokenizer: Tokenizer) -> None:
    check(grammars, tokenizer, range(30))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 300))
def test_texts_under_3000_schemas_of_pydantic_models_are_valid(
    grammars: Grammars,
    tokenizer: Tokenizer,
    first: int,
) -> None:
    check(grammars, tokenizer, range(first, first + 300))
