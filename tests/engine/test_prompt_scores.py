"""The log-probabilities of the last tokens of a prompt, whose beginning several requests share."""

from dataclasses import replace

import pytest
import torch

from model.engine.request import Request
from model.network.transformer import Transformer
from model.text.transcript import GenerationParams
from model.tracing.edits import Edit, plan_edits
from model.tracing.stages import stages_of
from tests.engine.driving import new_engine, prompt
from tests.tiny import CONFIGS, build, every_engine_config

SHARED = prompt(22)
CONTINUATIONS = [prompt(length, seed=length) for length in (5, 1, 9, 2)]


def requests() -> list[Request]:
    params = GenerationParams(max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=len(SHARED))
    return [
        Request(
            id=str(index),
            prompt_ids=[*SHARED, *each],
            params=params,
            owner="one",
            prefix_leader="0" if index else None,
        )
        for index, each in enumerate(CONTINUATIONS)
    ]


def run(model: Transformer, asked: list[Request], max_step_tokens: int = 512) -> tuple[dict[str, list[float]], int]:
    """The log-probabilities of each continuation, and the number of tokens that the engine computed."""
    engine, found, num_tokens = new_engine(model, max_step_tokens=max_step_tokens), dict[str, list[float]](), 0
    for each in asked:
        engine.add(each)
    while engine.has_work:
        step = engine.step()
        engine.check_integrity()
        num_tokens += step.num_tokens
        for output in step.outputs:
            assert output.error is None
            entries = [token.logprobs for token in output.prompt_tokens]
            assert all(entry is None for entry in entries[: len(SHARED)])
            found[output.request_id] = [entry.chosen for entry in entries[len(SHARED) :] if entry is not None]
    return found, num_tokens


@every_engine_config
@pytest.mark.parametrize("max_step_tokens", [512, 8], ids=["whole prompts", "prompts in parts"])
def test_each_token_after_a_shared_prefix_has_the_log_probability_of_one_pass(name: str, max_step_tokens: int) -> None:
    model = build(CONFIGS[name])
    found, num_tokens = run(model, requests(), max_step_tokens)
    for index, each in enumerate(CONTINUATIONS):
        logprobs = model(torch.tensor([[*SHARED, *each]]))[0].log_softmax(-1)
        expected = [logprobs[len(SHARED) + place - 1, token_id].item() for place, token_id in enumerate(each)]
        torch.testing.assert_close(torch.tensor(found[str(index)]), torch.tensor(expected), atol=1e-4, rtol=1e-4)
    # The prefix is computed once. Of its last block (4 tokens), each continuation computes its own part.
    num_alone = len(CONTINUATIONS[0]) + sum(len(SHARED) % 4 + len(each) for each in CONTINUATIONS[1:])
    assert num_tokens <= len(SHARED) + num_alone


def test_edits_count_the_tokens_after_the_shared_prefix_as_generated() -> None:
    model = build(CONFIGS["llama"])
    edit = Edit(stage="blocks.0.resid_post", op="scale", factor=3.0, positions="generated")
    plan = plan_edits([edit], model.config, stages_of(model.config), SHARED, len(SHARED) + 9)
    edited, _ = run(model, [replace(each, edits=plan.bind([])) for each in requests()])
    plain, _ = run(model, requests())
    for index, each in enumerate(CONTINUATIONS):
        assert edited[str(index)][0] == pytest.approx(plain[str(index)][0], abs=1e-5)  # before the first edited token
        assert len(each) == 1 or edited[str(index)][1:] != pytest.approx(plain[str(index)][1:], abs=1e-3)
