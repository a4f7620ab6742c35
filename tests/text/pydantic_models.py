"""Random pydantic models: their JSON schemas have pydantic's own formats, constraints, unions and recursion."""

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from ipaddress import IPv4Address, IPv4Interface, IPv4Network, IPv6Address, IPv6Interface, IPv6Network
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal, Optional
from uuid import UUID

from pydantic import (
    UUID1,
    UUID4,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    Base64UrlBytes,
    BaseModel,
    ConfigDict,
    Field,
    HttpUrl,
    IPvAnyAddress,
    SecretBytes,
    SecretStr,
    create_model,
)


class Color(Enum):
    RED = "red"
    GREEN = "grün"
    QUOTED = 'a "b"\n'


class Level(IntEnum):
    LOW = 1
    HIGH = 20


class Node(BaseModel):
    value: int
    children: "list[Node]" = []
    parent: Optional["Node"] = None


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=0, le=9)]


class Dog(BaseModel):
    kind: Literal["dog", "puppy"]
    name: str | None = None


LEAVES: list[Any] = [
    *(int, float, bool, str, None, bytes, Decimal, SecretStr, SecretBytes, Path, Any),
    *(datetime, date, time, timedelta, AwareDatetime, UUID, UUID1, UUID4),
    *(IPv4Address, IPv6Address, IPv4Network, IPv6Network, IPv4Interface, IPv6Interface, IPvAnyAddress),
    *(AnyUrl, HttpUrl, Base64Bytes, Base64UrlBytes, Color, Level, Node),
]


def constrained(chance: Random) -> Any:
    """A type with constraints."""
    low, size = chance.randrange(-100, 100), chance.randrange(0, 50)
    return chance.choice(
        [
            Annotated[int, Field(ge=low, lt=low + size + 1)],
            Annotated[int, Field(gt=low)],
            Annotated[int, Field(multiple_of=chance.choice([2, 7, 10]))],
            Annotated[float, Field(ge=low / 8, le=low / 8 + size)],
            Annotated[float, Field(gt=low, lt=low + 0.25)],
            Annotated[float, Field(multiple_of=0.25)],
            Annotated[str, Field(min_length=size % 5, max_length=size % 5 + 3)],
            Annotated[str, Field(pattern=chance.choice([r"^[A-Z]{2}\d+$", r"^\S+@\S+$", "ab*c", r"^(a|b)?/x$"]))],
            Literal[tuple(chance.sample(["a", 'b"', "\\", "é", 1, 2, True, None, "c d"], 1 + size % 4))],
        ]
    )


def random_type(chance: Random, depth: int) -> Any:
    """A type whose parts are at most `depth` levels deep."""
    kind = chance.randrange(14 if depth else 7)
    if kind < 4:
        return chance.choice(LEAVES)
    if kind < 7:
        return constrained(chance)
    if kind == 13:
        return random_model(chance, depth - 1)
    inner: Any = random_type(chance, depth - 1)
    if kind == 7:
        return inner | None if inner is not None else None
    if kind == 8:
        return chance.choice([list[inner], Annotated[list[inner], Field(min_length=1, max_length=3)]])
    if kind == 9:
        return chance.choice([tuple[inner, int], tuple[inner, ...], tuple[inner, str, bool]])
    if kind == 10:
        key: Any = chance.choice(
            [str, Literal["x", "y"], Color, Annotated[str, Field(pattern="^[a-z]+$"), Field(max_length=4)]]
        )
        return dict[key, inner]
    if kind == 11:
        return chance.choice([set[Literal["p", "q", "r"]], frozenset[bool], set[int]])
    return chance.choice(
        [
            inner | random_type(chance, depth - 1) if inner is not None else None,
            Annotated[Cat | Dog, Field(discriminator="kind")],
            list[Annotated[Cat | Dog, Field(discriminator="kind")]],
        ]
    )


def random_model(chance: Random, depth: int = 3) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for index in range(chance.randrange(1, 5)):
        name = chance.choice(["name", "value", "größe", "a_b"]) + str(index)
        kind = random_type(chance, depth)
        fields[name] = chance.choice([(kind, ...), (kind | None if kind is not None else None, None)])
    config: ConfigDict = {"extra": chance.choice(["ignore", "forbid", "allow"])}
    model: type[BaseModel] = create_model(f"Model{chance.randrange(10**9)}", __config__=config, **fields)
    return model
