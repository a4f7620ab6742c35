"""Random JSON schemas whose parts are combined with `not`, `if`, `oneOf`, `contains` and look-around."""

from random import Random
from typing import Any

VALUES: list[Any] = [None, True, False, 0, 1, 2, 2.5, -3, "", "a", "b.c", 'x"y', [], [1], {}, {"a": 1}]
PATTERNS = ["^a", "b$", "^[ab]{1,3}$", "^(?!a)", "^(?=.*a)[abc]+$", "^((?!ab).)*$", "^[a-c]+(?<!b)$", "a|^b"]
NAMES = ["a", "b", "kind"]


def random_plain(chance: Random, depth: int) -> dict[str, Any]:
    """A schema of one value, without combinations."""
    kind = chance.randrange(9 if depth else 6)
    if kind == 0:
        return {"type": chance.sample(["null", "boolean", "integer", "number", "string", "array", "object"], 2)}
    if kind == 1:
        return {"enum": chance.sample(VALUES, chance.randrange(1, 5))}
    if kind == 2:
        return {"const": chance.choice(VALUES)}
    if kind == 3:
        low = chance.randrange(-4, 4)
        return {"type": chance.choice(["integer", "number"]), "minimum": low, "maximum": low + chance.randrange(5)}
    if kind == 4:
        return {"type": "string", "minLength": chance.randrange(3), "maxLength": chance.randrange(3, 6)}
    if kind == 5:
        return {"type": "string", "pattern": chance.choice(PATTERNS)}
    if kind == 6:
        array: dict[str, Any] = {"type": "array", "items": random_schema(chance, depth - 1), "maxItems": 4}
        if chance.random() < 0.7:
            array["contains"] = random_schema(chance, depth - 1)
            array |= chance.choice([{}, {"minContains": 2}, {"maxContains": 1}, {"minContains": 0, "maxContains": 2}])
        return array
    names = chance.sample(NAMES, chance.randrange(1, 4))
    schema: dict[str, Any] = {"properties": {name: random_schema(chance, depth - 1) for name in names}}
    schema["required"] = chance.sample(names, chance.randrange(len(names) + 1))
    return schema | chance.choice([{}, {"type": "object"}, {"type": "object", "additionalProperties": False}])


def random_schema(chance: Random, depth: int = 3) -> dict[str, Any]:
    kind = chance.randrange(8)
    if not depth or kind < 3:
        return random_plain(chance, depth)
    inner = [random_schema(chance, depth - 1) for _ in range(3)]
    if kind == 3:
        return random_plain(chance, depth) | {"not": inner[0]}
    if kind == 4:
        return random_plain(chance, depth) | dict(zip(("if", "then", "else"), inner, strict=True))
    if kind == 5:
        return {"oneOf": inner[: chance.randrange(2, 4)]}
    if kind == 6:
        return {"anyOf": inner[:2]}
    return {"allOf": [{"if": inner[0], "then": inner[1]}, inner[2]]}
