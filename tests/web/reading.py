"""Read numbers and tokens as the page writes them."""

import re
from decimal import ROUND_HALF_UP, Decimal

NO_BREAK = "\N{NO-BREAK SPACE}"
ZERO = f"0{NO_BREAK}%"
TINY = f"<{NO_BREAK}0.01{NO_BREAK}%"
SIGNIFICANT = 6e-4  # numbers are shown with four significant digits


def read_number(text: str) -> float:
    """The first number of a text: 0.2363 of "max 0.2363", and 12.5 of "12.5 %". Negative ones have a minus sign."""
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text.replace("\N{MINUS SIGN}", "-"))
    assert found is not None, text
    return float(found[0].replace(",", ""))


def shown(text: str) -> str:
    """A token with its white space visible."""
    return text.replace(" ", "␣").replace("\n", "↵")


def quoted(text: str) -> str:
    """A token in a sentence. A line of the page does not end inside it."""
    return f"“{text.replace(' ', NO_BREAK)}”"


def percent(probability: float) -> str:
    """A probability as the page writes it."""
    value = 100 * probability
    if value < 0.01:
        return TINY if value else ZERO
    digits = Decimal("0.1" if value >= 10 else "0.01")
    return f"{Decimal(float(value)).quantize(digits, ROUND_HALF_UP)}{NO_BREAK}%"  # as JavaScript rounds
