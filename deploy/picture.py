"""Draw the picture of the README from two answers of a running service. Needs matplotlib.

python deploy/picture.py http://localhost:8000 deploy/picture.png
"""

import json
import sys
import urllib.request
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PROMPT = "It was a dark night, and the captain"
STAGE, HEAD = "blocks.1.attn.pattern", 0
NUM_TOKENS = 8


def post(address: str, path: str, body: dict[str, Any]) -> Any:
    content = json.dumps(body).encode()
    request = urllib.request.Request(address + path, content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def label(text: str) -> str:
    """The text of a token as a label: line breaks escaped, and a visible sign for a space."""
    return text.replace("\n", "\\n").strip(" ") or "\u2423"


def draw_pattern(axes: Axes, address: str) -> None:
    """Draw how much each token attends to each earlier one, in one head."""
    body = {"prompt": PROMPT, "stages": [STAGE], "heads": [HEAD], "detail": "values"}
    answer = post(address, "/forward", body)
    texts = [label(token["text"]) for token in answer["tokens"]]
    axes.imshow(answer["stages"][0]["values"][0][0], cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(texts)), texts, rotation=50, ha="right")
    axes.set_yticks(range(len(texts)), texts)
    axes.set_title(f"POST /forward: {STAGE}, head {HEAD}", fontsize=10)


def draw_lens(axes: Axes, address: str) -> None:
    """Draw the most likely token after each layer, for each generated token."""
    trace = {"stages": ["*.resid_post"], "detail": "none", "logit_lens": True, "top_k": 1}
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "trace": trace}
    steps = [step["logit_lens"] for step in post(address, "/generate", body)["trace"]]
    most_likely = [[layer["top"][0] for layer in step] for step in steps]
    num_layers = len(steps[0])
    cells = [[step[layer]["probability"] for step in most_likely] for layer in range(num_layers)]
    axes.imshow(cells, cmap="Greens", vmin=0, vmax=1, aspect="auto", origin="lower")
    for column, step in enumerate(most_likely):
        for layer, top in enumerate(step):
            colour = "white" if top["probability"] > 0.6 else "black"
            axes.text(column, layer, label(top["text"]), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(steps)), [label(step[-1]["text"]) for step in most_likely])
    axes.set_yticks(range(num_layers), [f"layer {layer}" for layer in range(num_layers)])
    axes.set_title("POST /generate with logit_lens: the most likely token after each layer", fontsize=10)


def main(address: str, path: str) -> None:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    draw_pattern(left, address)
    draw_lens(right, address)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
