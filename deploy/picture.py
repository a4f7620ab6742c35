"""Draw the picture of the README from two answers of a running service. Needs matplotlib.

python deploy/picture.py http://localhost:8000 deploy/picture.png
"""

import sys

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from forwardscope import Client

PROMPT = "It was a dark night, and the captain"
STAGE, HEAD = "blocks.1.attn.pattern", 0
NUM_TOKENS = 8


def label(text: str | None) -> str:
    """The text of a token as a label: line breaks escaped, and a visible sign for a space."""
    return str(text).replace("\n", "\\n").strip(" ") or "\u2423"


def draw_pattern(axes: Axes, client: Client) -> None:
    """Draw how much each token attends to each earlier one, in one head."""
    trace = client.run(PROMPT, STAGE, heads=[HEAD])
    texts = [label(token.text) for token in trace.tokens]
    axes.imshow(trace[STAGE][0][0], cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(len(texts)), texts, rotation=50, ha="right")
    axes.set_yticks(range(len(texts)), texts)
    axes.set_title(f"POST /forward: {STAGE}, head {HEAD}", fontsize=10)


def draw_lens(axes: Axes, client: Client) -> None:
    """Draw the most likely token after each layer, for each generated token."""
    trace = {"stages": ["*.resid_post"], "detail": "none", "logit_lens": True, "top_k": 1}
    found = client.generate(PROMPT, max_tokens=NUM_TOKENS, temperature=0, trace=trace)
    steps = [[layer.top[0] for layer in step.logit_lens or ()] for step in found.trace or ()]
    num_layers = len(steps[0])
    cells = [[step[layer].probability for step in steps] for layer in range(num_layers)]
    axes.imshow(cells, cmap="Greens", vmin=0, vmax=1, aspect="auto", origin="lower")
    for column, step in enumerate(steps):
        for layer, top in enumerate(step):
            colour = "white" if top.probability > 0.6 else "black"
            axes.text(column, layer, label(top.text), ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(steps)), [label(step[-1].text) for step in steps])
    axes.set_yticks(range(num_layers), [f"layer {layer}" for layer in range(num_layers)])
    axes.set_title("POST /generate with logit_lens: the most likely token after each layer", fontsize=10)


def main(address: str, path: str) -> None:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.6))
    with Client(address) as client:
        draw_pattern(left, client)
        draw_lens(right, client)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(*sys.argv[1:])
