"""Draw docs/images/ioi.svg: what each patch of a sweep changes, for the example of docs/interventions.md.

    python -m tests.benchmarks.draw_ioi [MODEL]

MODEL is a checkpoint directory; by default SmolLM2-135M-Instruct, which is downloaded. It is served in float32, and the
numbers are those of POST /attribute. The picture is written without a library for drawings.
"""

import argparse
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from forwardscope import Client
from tests.benchmarks.serve import end_as_a_whole, serving
from tests.published_models import smollm2

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "ioi.svg"
CLEAN, CORRUPTED = (f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
CELL, GAP, TOP, LEFT = 18, 110, 92, 62  # pixels
BLUE, RED = (33, 102, 172), (178, 24, 43)


def color(share: float) -> str:
    """From red (-1) over white (0) to blue (1)."""
    end, size = (BLUE if share > 0 else RED), min(1.0, abs(share))
    return "#" + "".join(f"{round(255 + (channel - 255) * size):02x}" for channel in end)


def text(x: float, y: float, content: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" {more}>{escape(content)}</text>'


def grid(x: float, rows: Sequence[Sequence[float]], columns: Sequence[str], title: str) -> list[str]:
    """A cell for each number, the first row at the bottom, with the names of the columns below it."""
    parts = [text(x, TOP - 18, title, 'font-weight="bold"')]
    bottom = TOP + CELL * len(rows)
    for index, row in enumerate(rows):
        y = bottom - CELL * (index + 1)
        for column, share in enumerate(row):
            left = x + CELL * column
            parts.append(
                f'<rect x="{left}" y="{y}" width="{CELL}" height="{CELL}" fill="{color(share)}" stroke="#ddd">'
                f"<title>{escape(columns[column])}, layer {index}: {100 * share:.0f} %</title></rect>"
            )
            if abs(share) >= 0.1:
                tone = "#fff" if abs(share) > 0.6 else "#000"
                more = f'font-size="8" text-anchor="middle" fill="{tone}"'
                parts.append(text(left + CELL / 2, y + CELL / 2 + 3, f"{100 * share:.0f}", more))
        if index % 5 == 0 or index == len(rows) - 1:
            parts.append(text(x - 6, y + CELL / 2 + 4, str(index), 'text-anchor="end"'))
    for column, name in enumerate(columns):
        middle = x + CELL * column + CELL / 2 + 4
        turned = f'text-anchor="end" transform="rotate(-60 {middle:g} {bottom + 14})"'
        parts.append(text(middle, bottom + 14, name, turned))
    return parts


def draw(residuals: Sequence[Sequence[float]], heads: Sequence[Sequence[float]], tokens: Sequence[str]) -> str:
    """The picture, from the shares of the logit difference that each patch restores."""
    second = LEFT + CELL * len(tokens) + GAP
    width, height = second + CELL * len(heads[0]) + 40, TOP + CELL * len(heads) + 80
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        text(LEFT, 24, "How much of the logit difference Mary - John one patch restores (%)", 'font-size="14"'),
        text(LEFT, 44, f"patched from: {CLEAN}"),
        text(LEFT, 58, f"patched into: {CORRUPTED}"),
        *grid(LEFT, residuals, tokens, "the residual before a block, at one position"),
        *grid(second, heads, [f"head {head}" for head in range(len(heads[0]))], "one head, at all positions"),
        "</svg>\n",
    ]
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    arguments = parser.parse_args()
    end_as_a_whole()
    with (
        serving(arguments.model or smollm2(), 2, "--dtype=float32") as port,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        fields: dict[str, Any] = {"corrupted": CORRUPTED, "token": " Mary", "minus": " John"}
        by_position = client.attribute("patching", CLEAN, stages="*.resid_pre", **fields)
        by_head = client.attribute("patching", CLEAN, stages="*.attn.z", by=["head"], **fields)
    clean, corrupted = (by_head.answer[name] for name in ("clean_value", "corrupted_value"))

    def shares(numbers: Iterable[float]) -> list[float]:
        return [(float(number) - corrupted) / (clean - corrupted) for number in numbers]

    tokens = [token.text or "" for token in by_position.tokens]
    picture = draw(
        [shares(by_position[name]) for name in by_position], [shares(by_head[name]) for name in by_head], tokens
    )
    PICTURE.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
