"""The keywords of JSON schemas for numbers: the range that they leave, and the common multiple."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal

from model.errors import shortened
from model.text.grammar.limits import InvalidGrammar
from model.text.grammar.number_regex import Bound

Plains = Sequence[Mapping[str, Any]]
"""Plain schemas that a number satisfies together."""
End = Literal["minimum", "maximum"]
MAX_DIVISOR = 90_000  # of multipleOf, without its decimal point; takes up to 0.7 s, growing with its square
HUGE = Decimal(10) ** 30  # texts have fewer digits


def narrowest(plains: Plains, end: End) -> Bound | None:
    """The lowest number, as `minimum` and `exclusiveMinimum` say, or the highest one, likewise."""

    def inward(bound: Bound) -> Decimal:  # no product: it would be rounded to 28 digits
        return bound.value if end == "minimum" else bound.value.copy_negate()

    direction = "ROUND_CEILING" if end == "minimum" else "ROUND_FLOOR"
    bounds = [_rounded(bound, direction) for bound in _bounds(plains, end) if inward(bound) > -HUGE]
    if any(inward(bound) > HUGE for bound in bounds):
        raise InvalidGrammar(f"is too complex: a {end} has more than 30 digits")
    return max(bounds, key=lambda bound: (inward(bound), bound.is_strict), default=None)


def within(plain: Mapping[str, Any], value: float) -> bool:
    """Whether a number satisfies the keywords for numbers."""
    number, divisor = Decimal(str(value)), plain.get("multipleOf")
    lower, upper = _bounds([plain], "minimum"), _bounds([plain], "maximum")
    return (
        all(bound.value < number or (bound.value == number and not bound.is_strict) for bound in lower)
        and all(number < bound.value or (bound.value == number and not bound.is_strict) for bound in upper)
        and (not divisor or Fraction(number) % Fraction(Decimal(str(divisor))) == 0)
    )


def _bounds(plains: Plains, end: End) -> list[Bound]:
    """The bounds as the schemas write them, without the rounding of binary numbers."""
    bounds = []
    for plain in plains:
        strict = plain.get(f"exclusive{end.capitalize()}", False)
        if end in plain:
            bounds.append(Bound(Decimal(str(plain[end])), strict is True))
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
