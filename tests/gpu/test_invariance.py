"""With the kernels `invariant`, no bit of a token on a GPU depends on what else is computed: like on a CPU."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from model.engine.engine import Engine
from model.engine.request import Request
from model.network.transformer import Transformer
from model.text.sampling import token_logprobs
from tests.engine.driving import Result, ask, new_engine, prompt, run
from tests.engine.test_adapters import random_adapter, with_adapter
from tests.engine.test_edits import EDITS, UNRECORDED, bits, requests_with
from tests.engine.test_recorded_traces import SELECTIONS, traced
from tests.gpu.test_engine import moved
from tests.gpu.test_networks import on_device
from tests.tiny import CONFIGS, build, every_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def served(name: str, dtype: torch.dtype, device: torch.device) -> Transformer:
    config = replace(CONFIGS[name], d_head=16)
    model = on_device(build(config).to(dtype), device, kernels="invariant")
    assert model.batch_invariant
    return model


def requests(**params: Any) -> list[Request]:
    return [ask(f"{i}", prompt(3 + 5 * i, seed=i), **{"max_tokens": 12} | params) for i in range(6)]


def assert_bits_of_one_pass(model: Transformer, requests: list[Request], results: Mapping[Any, Result]) -> None:
    for request in requests:
        found = results[request.id, 0]
        assert found.error is None
        ids = torch.tensor([[*request.prompt_ids, *found.ids]], device=model.embed.weight.device)
        with torch.inference_mode():
            logits = model(ids)[0, len(request.prompt_ids) - 1 : -1]
        assert found.ids == logits.argmax(-1).tolist()
        assert found.logprobs == token_logprobs(logits, found.ids, 1)


@every_dtype
@every_config
def test_a_stream_has_the_bits_of_one_pass(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Prompts in parts, preemptions, and a growing batch."""
    model = served(name, dtype, device)
    if model.config.rope_scaling is not None and model.config.rope_scaling.kind == "longrope":
        pytest.skip("one pass has the frequencies of a longer sequence")
    asked = requests(temperature=0.0)
    engine = new_engine(model, max_step_tokens=10, num_blocks=11)
    assert_bits_of_one_pass(model, asked, run(engine, *asked))
    assert engine.stats().num_preemptions > 0 or name != "llama"


@every_dtype
@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "gpt2"])
def test_a_request_has_the_same_bits_alone_and_beside_others(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    model, asked = served(name, dtype, device), requests(temperature=1.0)
    together = bits(run(new_engine(model), *asked))
    for request in asked:
        assert bits(run(new_engine(model, max_step_tokens=7), request))[request.id, 0] == together[request.id, 0]


@every_dtype
@pytest.mark.parametrize("selection", SELECTIONS)
def test_tracing_changes_no_bit(selection: str, dtype: torch.dtype, device: torch.device) -> None:
    model, asked = served("gemma2", dtype, device), requests()
    plain = bits(run(new_engine(model), *asked))
    assert bits(run(new_engine(model), *(traced(model, each, selection) for each in asked))) == plain


@every_dtype
@pytest.mark.parametrize("edits", [name for name in EDITS if name not in UNRECORDED])
def test_an_edited_request_has_the_same_bits_alone(edits: str, dtype: torch.dtype, device: torch.device) -> None:
    on_cpu = build(replace(CONFIGS["llama"], d_head=16))
    model, asked = served("llama", dtype, device), requests_with(on_cpu, EDITS[edits])
    together = bits(run(new_engine(model), *asked))
    plain = bits(run(new_engine(model), *requests_with(on_cpu, ())))
    for request in asked:
        alone = bits(run(new_engine(model, max_step_tokens=9), request))[request.id, 0]
        assert alone == together[request.id, 0]
        assert (alone == plain[request.id, 0]) == (request.edits is None)


def test_neighbours_with_adapters(device: torch.device) -> None:
    model, exact = served("llama", torch.bfloat16, device), build(replace(CONFIGS["llama"], d_head=16))
    adapters = {"a": moved(random_adapter(exact, "a", seed=1), model)}
    asked = [with_adapter(each, "a" if i % 2 else None) for i, each in enumerate(requests())]

    def engine() -> Engine:
        return Engine(model, None, new_engine(model).config, adapters)

    together = bits(run(engine(), *asked))
    for request in asked:
        assert bits(run(engine(), request))[request.id, 0] == together[request.id, 0]
