"""The keywords of JSON schemas for numbers: the range that they leave, and the common multiple."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

from model.errors import shortened
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.number_regex import Bound

Plains = Sequence[Mapping[str, Any]]
"""Plain schemas that a number satisfies together."""
MAX_DIVISOR = 90_000  # of multipleOf, without its decimal point; takes up to 0.7 s, growing with its square
HUGE = Decimal(10) ** 30  # texts have fewer digits


def lower_bound(plains: Plains) -> Bound | None:
    """The lowest number, as `minimum` and `exclusiveMinimum` say."""
    bounds = _bounds(plains, "minimum", "exclusiveMinimum")
    bounds = [_rounded(bound, "ROUND_CEILING") for bound in bounds if bound.value > -HUGE]
    if any(bound.value > HUGE for bound in bounds):
        raise InvalidGrammar("is too complex: a minimum has more than 30 digits")
    return max(bounds, key=lambda bound: (bound.value, bound.is_strict), default=None)


def upper_bound(plains: Plains) -> Bound | None:
    """The highest number, as `maximum` and `exclusiveMaximum` say."""
    bounds = _bounds(plains, "maximum", "exclusiveMaximum")
    bounds = [_rounded(bound, "ROUND_FLOOR") for bound in bounds if bound.value < HUGE]
    if any(bound.value < -HUGE for bound in bounds):
        raise InvalidGrammar("is too complex: a maximum has more than 30 digits")
    return min(bounds, key=lambda bound: (bound.value, not bound.is_strict), default=None)


def within(plain: Mapping[str, Any], value: float) -> bool:
    """Whether a number satisfies the keywords for numbers."""
    number, divisor = Decimal(str(value)), plain.get("multipleOf")
    lower = _bounds([plain], "minimum", "exclusiveMinimum")
    upper = _bounds([plain], "maximum", "exclusiveMaximum")
    return (
        all(bound.value < number or (bound.value == number and not bound.is_strict) for bound in lower)
        and all(number < bound.value or (bound.value == number and not bound.is_strict) for bound in upper)
        and (not divisor or Fraction(number) % Fraction(Decimal(str(divisor))) == 0)
    )


def _bounds(plains: Plains, name: str, strict_name: str) -> list[Bound]:
    """The bounds as the schemas write them, without the rounding of binary numbers."""
    bounds = []
    for plain in plains:
        strict = plain.get(strict_name, False)
        if name in plain:
            bounds.append(Bound(Decimal(str(plain[name])), strict is True))
        if not isinstance(strict, bool):
            bounds.append(Bound(Decimal(str(strict)), True))
    return bounds


def _rounded(bound: Bound, direction: str) -> Bound:
    """A bound with at most 15 places, not outside of the given one."""
    rounded = bound.value.quantize(Decimal("1e-15"), direction) if abs(bound.value) < 10**12 else bound.value
    return Bound(rounded, bound.is_strict and rounded == bound.value)


def common_multiple(plains: Plains) -> Fraction | None:
    """The smallest number that all multiples of all `multipleOf` are multiples of."""
    result: Fraction | None = None
    for plain in plains:
        if (divisor := plain.get("multipleOf")) is None:
            continue
        if divisor <= 0:
            raise InvalidGrammar("the keyword multipleOf must be positive")
        value = Decimal(str(divisor)).normalize()
        _, digits, exponent = value.as_tuple()
        if not isinstance(exponent, int) or len(digits) + max(exponent, 0) > 6 or exponent < -15:
            raise _too_many_digits(divisor)
        fraction = Fraction(value)
        if result is not None:
            fraction = Fraction(
                math.lcm(result.numerator, fraction.numerator), math.gcd(result.denominator, fraction.denominator)
            )
        result = fraction
        scaled = result.numerator * 10 ** max(len(str(result.denominator)) - 1, 0) // result.denominator
        if max(scaled, result.numerator) > MAX_DIVISOR:
            raise _too_many_digits(divisor)
    return result


def _too_many_digits(divisor: float) -> InvalidGrammar:
    reason = f"is too complex: multipleOf {shortened(divisor)} has too many digits; use at most {MAX_DIVISOR}"
    return InvalidGrammar(reason)
