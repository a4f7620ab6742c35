"""The articles' networks: small enough to follow number by number, each with the numbers that its article prints."""

from functools import cache

import torch

from model.worked_examples.a_tokens_journey import ATokensJourney
from model.worked_examples.ai_rocks import AIRocks
from model.worked_examples.comparison import Comparison, compare
from model.worked_examples.i_like_transformers import ILikeTransformers
from model.worked_examples.published import Published
from model.worked_examples.worked_example import WorkedExample

__all__ = ["WORKED_EXAMPLES", "Comparison", "Published", "WorkedExample", "compare", "worked_example"]

WORKED_EXAMPLES: dict[str, type[WorkedExample]] = {
    example.name: example for example in (AIRocks, ATokensJourney, ILikeTransformers)
}


@cache
def worked_example(name: str) -> WorkedExample:
    """The network of that name, built once. Raises `ValueError` listing the names."""
    if name not in WORKED_EXAMPLES:
        raise ValueError(f"no worked example {name!r}; there are {', '.join(WORKED_EXAMPLES)}")
    with torch.inference_mode(False):  # `compare` differentiates, which weights made in inference mode forbid
        return WORKED_EXAMPLES[name]()
