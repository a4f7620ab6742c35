"""With LongRoPE, the tokens that are there choose the rotary frequencies, and not a limit of the request.

So a generation has at each token the very logits of a pass over the tokens before it, on both sides of the trained
length.
"""

from dataclasses import replace

import pytest
import torch

from model.engine.engine import Engine
from model.network.transformer import Transformer
from model.text.sampling import token_logprobs
from tests.engine.driving import Drive, ask, new_engine, prompt, run
from tests.engine.test_speculation import greedy
from tests.ops.cpu.common import by_kernels
from tests.tiny import CONFIGS

TRAINED = 24


def network() -> Transformer:
    """A tiny Phi-3 on our kernels, whose greedy text repeats itself."""
    base = CONFIGS["phi3"]
    assert base.rope_scaling is not None
    scaling = replace(base.rope_scaling, original_max_positions=TRAINED)
    model = Transformer(replace(base, d_head=16, max_positions=160, rope_scaling=scaling))
    model.initialize(torch.Generator().manual_seed(0), std=0.1)
    return by_kernels(model.requires_grad_(False))


def expected(model: Transformer, ids: list[int], num_prompt: int) -> list[float]:
    """The log-probability of each generated token, from one pass over the tokens before it."""
    with torch.inference_mode():
        passes = [model(torch.tensor([ids[:end]]))[0, -1:] for end in range(num_prompt, len(ids))]
    return [
        token_logprobs(logits, [token_id], 0)[0].chosen
        for logits, token_id in zip(passes, ids[num_prompt:], strict=True)
    ]


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("num_prompt", [9, TRAINED - 1, TRAINED, TRAINED + 1, 40])
def test_a_generation_has_the_logits_of_passes_over_its_tokens(num_prompt: int, speculates: bool) -> None:
    model = network()
    engine = new_engine(model, speculates=speculates)
    ids = prompt(num_prompt)
    found = run(engine, greedy("a", ids, max_tokens=50, logprobs=0))["a", 0]
    values = [entry.chosen for entry in found.logprobs if entry is not None]
    assert values == expected(model, [*ids, *found.ids], num_prompt)
    assert engine.stats().num_preemptions == (num_prompt <= TRAINED)  # computed anew once


def test_the_limit_of_a_request_changes_no_bit() -> None:
    model = network()
    ids = prompt(12)
    results = [
        run(new_engine(model), greedy("a", ids, max_tokens=max_tokens))["a", 0] for max_tokens in (4, 12, 13, 100)
    ]
    for found in results:
        assert found.ids[:4] == results[0].ids[:4]
        assert found.logprob_values[:12] == results[0].logprob_values[:12]


def test_sequences_on_both_sides_of_the_trained_length_share_steps_but_no_blocks() -> None:
    model = network()
    ids = prompt(TRAINED - 4)
    engine: Engine = new_engine(model)
    drive = Drive(engine)
    requests = [
        greedy("short", ids, max_tokens=3, logprobs=0),
        greedy("grows", ids, max_tokens=30, logprobs=0),
        greedy("long", [*ids, *prompt(20, seed=3)], max_tokens=9, logprobs=0),
        ask("sampled", ids, max_tokens=30, n=2, logprobs=0),
    ]
    drive.add(*requests)
    drive.until(lambda: all(result.end is not None for result in drive.results.values()))
    for request in requests:
        for choice in range(request.params.n):
            found = drive.results[request.id, choice]
            values = [entry.chosen for entry in found.logprobs if entry is not None]
            assert values == expected(model, [*request.prompt_ids, *found.ids], len(request.prompt_ids))
    again = run(engine, greedy("again", [*ids, *prompt(20, seed=3)], max_tokens=1))["again", 0]
    assert again.num_cached == 36  # the blocks of the long one
