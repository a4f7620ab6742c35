"""Read numbers and tokens as the page writes them."""

import re

SIGNIFICANT = 6e-4  # numbers are shown with four significant digits


def read_number(text: str) -> float:
    """The first number of a text: 0.2363 of "max 0.2363", and 12.5 of "12.5 %". Negative ones have a minus sign."""
    found = re.search(r"-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text.replace("\N{MINUS SIGN}", "-"))
    assert found is not None, text
    return float(found[0].replace(",", ""))


def shown(text: str) -> str:
    """A token with its white space visible."""
    return text.replace(" ", "␣").replace("\n", "↵")


def percent(probability: float) -> str:
    """A probability above 0.01 % as the page writes it."""
    value = 100 * probability
    return f"{value:.1f} %" if value >= 10 else f"{value:.2f} %"
