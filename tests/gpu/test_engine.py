"""An engine on a GPU: recorded steps, edits, adapters and traces give the tokens of one pass on a CPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from model.analysis.edit_sources import edited_pass
from model.engine.engine import Engine
from model.engine.request import Request
from model.network.adapters import Adapter, LowRankLayer
from model.network.float_copy import linear_weight
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.text.sampling import token_logprobs
from model.tracing.hooks import Hooks
from model.tracing.stages import stages_of
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run
from tests.engine.test_adapters import random_adapter, with_adapter
from tests.engine.test_edits import EDITS, requests_with, select_or_none
from tests.engine.test_recorded_traces import SELECTIONS, traced
from tests.gpu.test_networks import on_device
from tests.tiny import CONFIGS, build, every_config

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
NEAR = 2e-3  # of log-probabilities in float32
TRACED = {torch.float32: 1e-4, torch.bfloat16: 0.1}


def pair(name: str, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Transformer, Transformer]:
    """A network on a CPU in float64, and the same as it is served on the GPU."""
    config = replace(CONFIGS[name], d_head=16)
    exact = build(config, dtype=torch.float64)
    return exact, on_device(build(config).to(dtype), device)


def num_graphs(engine: Engine) -> int:
    return len(engine._runner._step_graphs._graphs)


def num_customized(engine: Engine) -> int:
    return sum(shape.is_customized for shape in engine._runner._step_graphs._graphs)


def assert_tokens_of_one_pass(exact: Transformer, request: Request, result: Result, near: float = NEAR) -> None:
    """Each log-probability is that of one pass in float64 over the prompt and all generated tokens."""
    assert result.error is None
    ids = [*request.prompt_ids, *result.ids]
    ends = range(len(request.prompt_ids), len(ids))
    if request.edits is not None:
        logits = edited_pass(exact, ids[:-1], request.edits)[ends.start - 1 :]
    else:  # with longrope, the logits of a token depend on how many tokens there are
        logits = torch.cat([exact(torch.tensor([ids[:end]]), rows=[end - 1])[0] for end in ends])
    expected = token_logprobs(logits, result.ids, 1)
    for found, wanted in zip(result.logprobs, expected, strict=True):
        assert found is not None
        assert found.chosen == pytest.approx(wanted.chosen, abs=near)
        if request.params.sampling.temperature == 0:
            assert found.chosen == pytest.approx(wanted.top[0][1], abs=2 * near)


def requests(**params: Any) -> list[Request]:
    return [ask(f"{i}", prompt(3 + 4 * i, seed=i), **params) for i in range(7)]


@every_config
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_are_those_of_one_pass(name: str, temperature: float, device: torch.device) -> None:
    exact, model = pair(name, device)
    engine = new_engine(model, max_step_tokens=12, num_blocks=40)  # prompts in parts, and preemptions
    asked = requests(temperature=temperature, max_tokens=12)
    results = run(engine, *asked)
    for each in asked:
        assert_tokens_of_one_pass(exact, each, results[each.id, 0])
    assert device.type == "cpu" or (num_graphs(engine) > 0) == (exact.config.num_experts == 0)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_streams_in_bfloat16(name: str, device: torch.device) -> None:
    exact, model = pair(name, device, torch.bfloat16)
    exact = build(exact.config).to(torch.bfloat16).double()
    asked = requests(temperature=0.0, max_tokens=12)
    results = run(new_engine(model), *asked)
    for each in asked:
        assert_tokens_of_one_pass(exact, each, results[each.id, 0], near=0.5)


def test_a_cache_in_8_bits(device: torch.device) -> None:
    exact, model = pair("llama", device)
    asked = requests(temperature=0.0)
    results = run(new_engine(model, kv_cache_dtype="int8"), *asked)
    for each in asked:
        assert_tokens_of_one_pass(exact, each, results[each.id, 0], near=0.2)


@pytest.mark.parametrize("edits", EDITS)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_edited_streams_are_those_of_one_edited_pass(name: str, edits: str, device: torch.device) -> None:
    exact, model = pair(name, device)
    own = [edit for edit in EDITS[edits] if select_or_none(exact, edit.stage)]
    asked = requests_with(exact, own, temperature=0.0)
    engine = new_engine(model, max_step_tokens=16)
    results = run(engine, *asked)
    for each in asked:
        assert_tokens_of_one_pass(exact, each, results[each.id, 0], near=10 * NEAR)


def test_steps_with_edits_are_recorded(device: torch.device) -> None:
    exact, model = pair("llama", device)
    engine = new_engine(model)
    run(engine, *requests_with(exact, EDITS["zero heads"]))
    graphs = engine._runner._step_graphs
    assert any(shape.edited for shape in graphs._graphs) or device.type == "cpu"
    assert not graphs._unrecordable


def test_adapters(device: torch.device) -> None:
    exact, model = pair("llama", device)
    on_cpu = {"a": random_adapter(exact, "a", seed=1), "b": random_adapter(exact, "b", seed=2, rank=4, places="attn")}
    on_gpu = {name: moved(each, model) for name, each in on_cpu.items()}
    engine = Engine(model, None, new_engine(model).config, on_gpu)
    asked = [with_adapter(each, (None, "a", "b")[i % 3]) for i, each in enumerate(requests(temperature=0.0))]
    results = run(engine, *asked)
    for each in asked:
        expected = run(Engine(exact, None, new_engine(exact).config, on_cpu), each)[each.id, 0]
        assert results[each.id, 0].ids == expected.ids
        assert results[each.id, 0].logprob_values == pytest.approx(expected.logprob_values, abs=NEAR)


def moved(adapter: Adapter, model: Transformer) -> Adapter:
    weight, ops = model.embed.weight, model.backend.ops
    layers = {}
    for name, layer in adapter.layers.items():
        a, b = (linear_weight(each).to(weight.device, weight.dtype) for each in (layer.a, layer.b))
        layers[name] = LowRankLayer(a, b, ops)
    return Adapter(adapter.name, layers, adapter.ranks)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tracing_changes_no_bit(selection: str, dtype: torch.dtype, device: torch.device) -> None:
    """But traced logits of a prompt do: the product with the head has more rows then, and other sums."""
    _, model = pair("llama", device, dtype)
    asked = [ask(f"{i}", prompt(5 + 8 * i, seed=i), max_tokens=9) for i in range(3)]
    plain = run(new_engine(model), *asked)
    engine = new_engine(model)
    found = run(engine, *(traced(model, each, selection) for each in asked))
    for each in asked:
        one, other = found[each.id, 0], plain[each.id, 0]
        assert one.error is None
        assert one.traces
        assert one.ids == other.ids
        params = traced(model, each, selection).trace
        if params is not None and params.needs_logits:
            assert one.logprob_values == pytest.approx(other.logprob_values, abs=TRACED[dtype])
        else:
            assert one.logprobs == other.logprobs
    assert device.type == "cpu" or num_customized(engine) > 0


@pytest.mark.parametrize("selection", SELECTIONS)
def test_traces_are_those_of_a_cpu(selection: str, device: torch.device) -> None:
    config = replace(CONFIGS["gemma2"], d_head=16)
    on_cpu = prepare_model(config, dict(build(config).state_dict()), kernels="torch")
    asked = traced(on_cpu, ask("0", prompt(13), max_tokens=9, temperature=0.0), selection)
    found, expected = (run(new_engine(each), asked)["0", 0] for each in (on_device(build(config), device), on_cpu))
    assert found.ids == expected.ids
    for one, other in zip(found.traces, expected.traces, strict=True):
        assert one.positions == other.positions
        for this, that in zip(one.stages, other.stages, strict=True):
            assert (this.stage, this.shape) == (that.stage, that.shape)
            if that.summary is not None:
                assert this.summary == pytest.approx(that.summary, rel=1e-3, abs=1e-3)
            if that.values is not None:
                assert this.values is not None
                torch.testing.assert_close(this.values.cpu(), that.values, atol=1e-3, rtol=1e-3)


def test_a_step_that_runs_out_of_memory_ends_no_other_request(device: torch.device) -> None:
    """One edit needs more memory than there is; its neighbour goes on."""
    _, model = pair("llama", device)
    drive = Drive(new_engine(model))

    def allocate(resid: Any, context: Any) -> None:
        torch.empty(1 << 60, dtype=torch.uint8, device=device)

    hooks = Hooks({"blocks.1.resid_mid": allocate}, stages_of(model.config))
    drive.add(replace(ask("greedy", prompt(9)), tap=hooks), ask("plain", prompt(9, seed=2)))
    results = drive.finish()
    assert results["greedy", 0].error is not None
    assert results["plain", 0].error is None
    assert len(results["plain", 0].ids) == 8
