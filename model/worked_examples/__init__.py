"""The networks of three articles, with the numbers that the articles print.

The articles are "How LLMs learn: forward pass", "A token's journey" and "Understanding gradients"; README.md has their
links. The networks are small enough to follow number by number.
"""

from functools import cache

import torch

from model.worked_examples.a_tokens_journey import ATokensJourney
from model.worked_examples.ai_rocks import AIRocks
from model.worked_examples.comparison import compare
from model.worked_examples.i_like_transformers import ILikeTransformers
from model.worked_examples.worked_example import WorkedExample

__all__ = ["WORKED_EXAMPLES", "WorkedExample", "compare", "worked_example"]

WORKED_EXAMPLES: dict[str, type[WorkedExample]] = {
    example.name: example for example in (AIRocks, ATokensJourney, ILikeTransformers)
}


@cache
def worked_example(name: str) -> WorkedExample:
    """Return the worked example with this name; each is built once. Raises `ValueError` if there is none."""
    if name not in WORKED_EXAMPLES:
        raise ValueError(f"unknown worked example {name!r}; the worked examples are {', '.join(WORKED_EXAMPLES)}")
    with torch.inference_mode(False):  # `compare` needs gradients, so no weight may be an inference tensor
        return WORKED_EXAMPLES[name]()
