"""The logits of tokens that a request names are those of the network, for prompts of any length and beside others."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from model.engine.request import Request
from model.errors import InvalidField
from tests.engine.driving import ask, new_engine, prompt
from tests.tiny import CONFIGS, build, every_engine_config

SCORED = (5, 0, 66)


def scored(id: str, ids: list[int], max_tokens: int, **params: Any) -> Request:
    return replace(ask(id, ids, max_tokens=max_tokens, **params), scored_ids=SCORED)


@every_engine_config
@pytest.mark.parametrize("max_step_tokens", [512, 8], ids=["whole prompts", "prompts in parts"])
def test_the_scores_of_each_step_are_the_logits_after_which_its_token_was_chosen(
    name: str, max_step_tokens: int
) -> None:
    model = build(CONFIGS[name])
    engine = new_engine(model, max_step_tokens=max_step_tokens)
    prompts = {str(seed): prompt(5 + seed, seed=seed) for seed in range(4)}
    for id, ids in prompts.items():
        engine.add(scored(id, ids, 6, echo=id == "2"))  # the logits of an echoed prompt are computed for all its tokens
    engine.add(ask("unscored", prompt(7, seed=9), max_tokens=6))
    found: dict[str, list[list[float]]] = {id: [] for id in prompts}
    tokens = {id: list(ids) for id, ids in prompts.items()}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.request_id == "unscored":
                assert output.scores == []
            elif output.tokens:
                found[output.request_id].append(output.scores)
                tokens[output.request_id] += [token.token_id for token in output.tokens]
    for id, ids in prompts.items():
        passes = [torch.tensor([tokens[id][: len(ids) + step]]) for step in range(6)]
        logits = torch.stack([model(each)[0, -1, list(SCORED)] for each in passes])
        assert len(found[id]) == 6
        torch.testing.assert_close(torch.tensor(found[id]), logits, atol=1e-4, rtol=1e-4)


def test_scored_ids_outside_the_vocabulary_are_refused() -> None:
    engine = new_engine(build(CONFIGS["llama"]))
    with pytest.raises(InvalidField, match=r"scored_ids: 67 is no token id"):
        engine.add(replace(scored("one", prompt(5), 1), scored_ids=(3, 67)))
