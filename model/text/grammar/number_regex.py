"""Regular expressions for JSON numbers in a range, with a bounded number of digits.

No number is infinite when it is read, and none goes on until the limit of tokens. Numbers with a bound have no
exponent, and so few digits that a reader cannot round one onto the other side of its bound.
"""

from dataclasses import dataclass
from decimal import Decimal

ANY_NUMBER = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,16})?([eE][+-]?[0-9]{1,2})?"
MAX_INTEGER_DIGITS = 19
MAX_DIGITS = 15  # of a number with a bound: different texts are different floats


@dataclass(frozen=True)
class Bound:
    """The lowest or highest number of a range. The range of a strict bound does not contain the bound itself."""

    value: Decimal
    is_strict: bool = False


def number_regex(low: Bound | None, high: Bound | None, *, is_integer: bool, max_places: int | None = None) -> str:
    """An expression, as a terminal of Lark, for the numbers between two bounds; empty if there are none.

    A number has at most `max_places` digits behind the decimal point.
    """
    if low is None and high is None and max_places is None:
        return f"/-?(0|[1-9][0-9]{{0,{MAX_INTEGER_DIGITS - 1}}})/" if is_integer else f"/{ANY_NUMBER}/"
    if is_integer:
        low, high = _integer_bound(low, 1), _integer_bound(high, -1)
    bounds = [bound for bound in (low, high) if bound is not None]
    longest = max((len(text) for bound in bounds for text in _digits(bound.value)), default=0)
    length = max(MAX_INTEGER_DIGITS if is_integer else MAX_DIGITS, longest + 1) + 1
    places = "" if is_integer else rf"(\.[0-9]{{1,{max_places or length}}})?"
    zero = Bound(Decimal(0))
    options = []
    if high is None or high.value > 0 or (high.value == 0 and not high.is_strict):
        options.append(("", zero if low is None or low.value < 0 else low, high))
    if low is None or low.value < 0:
        mirrored = None if low is None else Bound(-low.value, low.is_strict)
        options.append(
            ("-", Bound(-high.value, high.is_strict) if high is not None and high.value <= 0 else zero, mirrored)
        )
    parts = []
    for sign, least, most in options:
        is_strict = most is not None and (least.is_strict or most.is_strict)
        if most is not None and (least.value > most.value or (least.value == most.value and is_strict)):
            continue
        conditions = [f"/(0|[1-9][0-9]*){places}/", f"/[0-9.]{{1,{length}}}/", f"/{_at_least(least)}/"]
        if most is not None:
            conditions.append(f"~/{_at_least(Bound(most.value, not most.is_strict))}/")
        parts.append(f'("{sign}" ({" & ".join(conditions)}))' if sign else f"({' & '.join(conditions)})")
    return " | ".join(parts)


def _integer_bound(bound: Bound | None, step: int) -> Bound | None:
    """The first integer inside of a bound, in the direction of `step`."""
    if bound is None:
        return None
    rounded = bound.value.to_integral_value("ROUND_CEILING" if step > 0 else "ROUND_FLOOR")
    return Bound(rounded + step if bound.is_strict and rounded == bound.value else rounded)


def _digits(value: Decimal) -> tuple[str, str]:
    """The digits of a number without its sign: before the decimal point, and behind it without zeros at the end."""
    whole, _, places = f"{abs(value):f}".partition(".")
    return whole.lstrip("0") or "0", places.rstrip("0")


def _above(digits: str, rest: str) -> list[str]:
    """Expressions for the digits that first differ from `digits` in a higher one. `rest` stands for the n after it."""
    return [
        f"{digits[:i]}[{int(digit) + 1}-9]{rest.format(len(digits) - i - 1)}"
        for i, digit in enumerate(digits)
        if digit != "9"
    ]


def _at_least(bound: Bound) -> str:
    whole, places = _digits(bound.value)
    above = [f"[1-9][0-9]{{{len(whole)},}}", *_above(whole, "[0-9]{{{0}}}")]
    options = [rf"({'|'.join(above)})(\.[0-9]+)?"]
    if places:
        options += [rf"{whole}\.{each}" for each in _above(places, "[0-9]*")]
        options.append(rf"{whole}\.{places}{'[0-9]*[1-9][0-9]*' if bound.is_strict else '[0-9]*'}")
    else:
        options.append(rf"{whole}\.[0-9]*[1-9][0-9]*" if bound.is_strict else rf"{whole}(\.[0-9]+)?")
    return "|".join(options)
