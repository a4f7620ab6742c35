"""Texts under random schemas with `not`, `if`, `oneOf` and `contains`: valid for jsonschema, whatever is drawn."""

import json
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher

from model.text.grammar.limits import InvalidGrammar
from tests.text.random_schemas import random_schema
from tests.text.test_schema_rules import schema_matcher

MAX_BYTES = 300
LIKELY = b'"]},:0123456789abcx.tfn{['
ENDING = b'"]},'


def drawn_text(matcher: LLMatcher, chance: Random) -> bytes | None:
    """A text of random bytes that the masks allow. None for a long one."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < MAX_BYTES:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")[:256]
        allowed = bits.nonzero()[0].tolist()
        if matcher.is_accepting() and (not allowed or chance.random() < 0.3):
            return bytes(text)
        assert allowed, f"nothing can follow {bytes(text)!r}"
        likely = [byte for byte in allowed if byte in LIKELY]
        ending = [byte for byte in allowed if byte in ENDING]
        allowed = likely if likely and chance.random() < 0.95 else allowed
        byte = chance.choice(ending if ending and chance.random() < 0.3 + len(text) / MAX_BYTES else allowed)
        text.append(byte)
        assert matcher.consume_token(byte), matcher.get_error()
    return None


def check(seeds: range) -> None:
    num_valid = 0
    refused: list[str] = []
    for seed in seeds:
        chance = Random(seed)
        schema: dict[str, Any] = random_schema(chance)
        validator = jsonschema.Draft202012Validator(schema)
        try:
            matcher = schema_matcher(schema, is_closed=chance.random() < 0.5)
        except InvalidGrammar as error:
            refused.append(str(error))
            continue
        for _ in range(8):
            text = drawn_text(matcher, chance)
            try:
                value = json.loads((text or b"").decode())
            except UnicodeDecodeError:  # each byte is a token, and any byte may be drawn
                continue
            except ValueError:
                assert text is None, f"seed {seed}: {text!r} is no JSON"
                continue
            wrong = next(validator.iter_errors(value), None)
            assert wrong is None, f"seed {seed}: {text!r} is not valid: {wrong.message}"
            num_valid += 1
    reasons = (
        "no text satisfies",
        "inside of not",
        "too complex",
        "oneOf cannot be told apart",
        "anchors or look-around",
    )
    assert [each for each in refused if not any(reason in each for reason in reasons)] == []
    assert len(refused) < 0.5 * len(seeds)
    assert num_valid > 2 * len(seeds)


def test_texts_under_random_combinations_of_schemas_are_valid() -> None:
    check(range(40))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 500))
def test_texts_under_3000_random_combinations_of_schemas_are_valid(first: int) -> None:
    check(range(first, first + 500))
