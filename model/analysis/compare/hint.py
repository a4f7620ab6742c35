"""A known mistake that explains a difference."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hint:
    """`code` names the kind of mistake for programs, and `message` says how B differs from A."""

    code: str
    message: str
