"""Requests with different adapters, and with none, share a batch: each gets what it gets alone, to the last bit."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.engine import Engine
from model.engine.request import Request
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.network.adapters import Adapter, LowRankLayer
from model.network.joint_passes import AdaptedNetwork
from model.network.prepare import prepare_model
from model.network.transformer import Transformer
from model.tracing.selection import Selection
from model.tracing.stages import select, stages_of
from tests.editor import Editor
from tests.engine.driving import Drive, Result, alone, ask, new_engine, prompt, run
from tests.tiny import CONFIGS, build, random_ids

NAMES = (None, "a", "b", "c")


def layer_sizes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """The inputs and outputs of every layer that an adapter may change."""
    linear = {
        name.removesuffix(".weight"): parameter.shape
        for name, parameter in Transformer(config).named_parameters()
        if name.endswith(("qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight"))
    }
    return {name: (shape[1], shape[0]) for name, shape in linear.items()}


def random_adapter(model: Transformer, name: str, *, seed: int, rank: int = 3, places: str = "") -> Adapter:
    """An adapter with random matrices for all layers whose name contains `places`."""
    generator = torch.Generator().manual_seed(seed)
    dtype = model.embed.weight.dtype

    def matrix(rows: int, columns: int) -> Tensor:
        values: Tensor = (0.6 * torch.randn(rows, columns, generator=generator) / columns**0.5).to(dtype)
        return values

    layers = {
        layer: LowRankLayer(matrix(rank, num_inputs), matrix(num_outputs, rank), model.backend.ops)
        for layer, (num_inputs, num_outputs) in layer_sizes(model.config).items()
        if places in layer
    }
    return Adapter(name, layers, [rank])


def random_adapters(model: Transformer) -> dict[str, Adapter]:
    return {
        "a": random_adapter(model, "a", seed=1),
        "b": random_adapter(model, "b", seed=2, rank=4, places="attn"),
        "c": random_adapter(model, "c", seed=3, rank=1, places="blocks.2.mlp"),
    }


def served(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """The network as it is served: computed by our kernels. The test is skipped where there are none."""
    config = replace(CONFIGS[name], d_head=16)  # our kernels need heads of whole vectors
    model = prepare_model(config, build(config).to(dtype).state_dict())
    if not model.batch_invariant:
        pytest.skip("this machine has no kernels")
    return model


def engine_of(model: Transformer, **options: Any) -> Engine:
    engine = new_engine(model, **options)
    return Engine(model, None, engine.config, random_adapters(model))


def with_adapter(request: Request, adapter: str | None) -> Request:
    return replace(request, adapter=adapter)


def mixed(num_requests: int = 8, **params: Any) -> list[Request]:
    """Requests whose adapters alternate, with prompts of different lengths."""
    return [
        with_adapter(ask(f"{index}", prompt(3 + 4 * index, seed=index), **params), NAMES[index % len(NAMES)])
        for index in range(num_requests)
    ]


def same_bits(results: dict[tuple[str, int], Result], request: Request, expected: Result) -> bool:
    found = results[request.id, 0]
    return found.ids == expected.ids and found.logprob_values == expected.logprob_values


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "stablelm", "2017 block"])
def test_each_request_gets_the_tokens_of_its_adapter_alone(name: str) -> None:
    model = build(CONFIGS[name], dtype=torch.float64)
    requests = mixed(temperature=0.0)
    results = run(engine_of(model), *requests)
    adapters = random_adapters(model)
    for request in requests:
        adapter = None if request.adapter is None else adapters[request.adapter]
        expected = alone(model, request, adapter=adapter)
        assert results[request.id, 0].ids == expected.ids
        assert results[request.id, 0].logprob_values == pytest.approx(expected.logprob_values, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "granite"])
def test_with_our_kernels_a_batch_of_adapters_changes_no_bit_of_any_request(name: str, dtype: torch.dtype) -> None:
    model = served(name, dtype)
    requests = mixed(max_tokens=12)
    together = run(engine_of(model), *requests)
    assert len({tuple(result.ids) for result in together.values()}) > 4
    for request in requests:
        assert same_bits(together, request, run(engine_of(model), request)[request.id, 0])


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_neighbours_without_adapter_keep_every_bit(kernels: Any) -> None:
    """Here with PyTorch, too: the same batch, with adapters for the others and without."""
    config = replace(CONFIGS["llama"], d_head=16)
    model = prepare_model(config, build(config).state_dict(), kernels=kernels)
    without = run(engine_of(model), *[with_adapter(request, None) for request in mixed()])
    adapted = run(engine_of(model), *mixed())
    for request in mixed():
        assert same_bits(adapted, request, without[request.id, 0]) == (request.adapter is None)


def test_an_engine_with_loaded_adapters_computes_the_bits_of_one_without() -> None:
    model = served("llama")
    requests = [with_adapter(request, None) for request in mixed(max_tokens=12)]
    with_adapters, without = run(engine_of(model), *requests), run(new_engine(model), *requests)
    assert all(same_bits(with_adapters, request, without[request.id, 0]) for request in requests)


def test_steps_with_adapters_are_replayed_and_only_the_last_layouts_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.engine.step_graphs.MAX_CUSTOMIZED_GRAPHS", 3)
    model = served("llama")
    requests = [
        replace(request, params=replace(request.params, max_tokens=19 - 2 * i)) for i, request in enumerate(mixed())
    ]
    engine = engine_of(model)
    together = run(engine, *requests)
    graphs = engine._runner._step_graphs._graphs
    assert sum(bool(shape.adapted) for shape in graphs) == 3
    for request in requests:
        assert same_bits(together, request, run(engine_of(model), request)[request.id, 0])


def test_a_recorded_step_is_not_replayed_for_other_adapters_or_rows() -> None:
    """All of these batches have four sequences, and most have as many runs of rows with the same adapter."""
    model = served("llama")
    engine = engine_of(model)
    for names in (("a", "a", None, "b"), ("a", "b", "b", None), ("a", "a", None, "c"), (None, None, None, None)):
        requests = [with_adapter(ask(f"{i}", prompt(5, seed=i)), name) for i, name in enumerate(names)]
        together = run(engine, *requests)
        for request in requests:
            assert same_bits(together, request, run(engine_of(model), request)[request.id, 0])


def test_requests_with_different_adapters_share_no_prefix() -> None:
    model = build(CONFIGS["llama"])
    engine, ids = engine_of(model), prompt(24)
    for adapter in ("a", None, "b"):
        assert run(engine, with_adapter(ask("1", ids), adapter))["1", 0].num_cached == 0
    for adapter in ("a", None, "b"):
        assert run(engine, with_adapter(ask("1", ids), adapter))["1", 0].num_cached == 20


def test_a_salt_that_imitates_an_adapter_shares_nothing_with_it() -> None:
    model = build(CONFIGS["llama"])
    engine, ids = engine_of(model), prompt(24)
    run(engine, with_adapter(ask("1", ids), "a"))
    for salt in ("a", "(None, False, 'a')", "None, False, 'a'"):
        assert run(engine, replace(ask("1", ids), cache_salt=salt))["1", 0].num_cached == 0


def test_preemption_changes_no_bit_of_an_adapted_request() -> None:
    model = served("llama")
    requests = mixed(4, max_tokens=16)
    engine = engine_of(model, num_blocks=14)
    drive = Drive(engine)
    drive.add(*requests)
    results = drive.finish()
    assert engine.stats().num_preemptions > 0
    for request in requests:
        assert same_bits(results, request, run(engine_of(model), request)[request.id, 0])


def test_prompts_in_parts_and_drafts_change_no_bit_of_an_adapted_request() -> None:
    model = served("llama")
    repeated = prompt(4) * 7
    requests = [with_adapter(ask(f"{name}", repeated, temperature=0.0, max_tokens=16), name) for name in NAMES]
    engine = engine_of(model, max_step_tokens=9)
    parts = run(engine, *requests)
    assert engine.stats().num_drafted > 0
    plain = run(engine_of(model, speculates=False), *requests)
    assert all(same_bits(parts, request, plain[request.id, 0]) for request in requests)


def test_an_unknown_adapter_is_refused_with_the_names_of_the_loaded_ones() -> None:
    engine = engine_of(build(CONFIGS["llama"]))
    with pytest.raises(InvalidField, match=r"adapter: 'd' is not loaded; loaded: a, b, c$"):
        engine.add(with_adapter(ask("1", prompt(3)), "d"))


class TestStages:
    def traced(self, model: Transformer, adapter: str | None, others: Sequence[str | None] = ()) -> dict[str, Tensor]:
        """All stages of a prompt with an adapter, computed in a batch with requests of other adapters."""
        stages = stages_of(model.config, adapters=True)
        trace = TraceParams(selection=Selection(stages=stages, detail="values"), top_k=1)
        own = with_adapter(ask("own", prompt(7), max_tokens=1, trace=trace), adapter)
        neighbours = [with_adapter(ask(f"{i}", prompt(9, seed=5 + i)), name) for i, name in enumerate(others)]
        [found] = run(engine_of(model), *neighbours, own)["own", 0].traces
        assert [each.stage.name for each in found.stages] == [stage.name for stage in stages]
        return {each.stage.name: each.values for each in found.stages if each.values is not None}

    @pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "mixtral"])
    def test_they_are_offered_in_the_order_and_shapes_of_the_table(self, name: str) -> None:
        model = build(CONFIGS[name])
        seen: list[tuple[str, int]] = []

        def tap(stage: str, tensor: Tensor) -> Tensor:
            seen.append((stage, tensor.dim()))
            return tensor

        AdaptedNetwork(model, random_adapters(model)["a"])(random_ids(67, 5), tap=tap)
        table = [
            stage for stage in stages_of(model.config, adapters=True) if stage.name not in ("probabilities", "loss")
        ]
        assert seen == [(stage.name, len(stage.dims)) for stage in table]

    def test_they_are_what_is_added(self) -> None:
        model = build(CONFIGS["llama"], dtype=torch.float64)
        found = self.traced(model, "a", others=("b", None, "c"))
        adapter = random_adapters(model)["a"]
        x = found["blocks.0.ln1.out"]
        plain, added = model.get_submodule("blocks.0.attn.qkv")(x), adapter.layers["blocks.0.attn.qkv"](x)
        stages = {
            kind: torch.cat([found[f"blocks.0.attn.{kind}{part}"].flatten(2) for part in "qkv"], -1)
            for kind in ("", "lora_")
        }
        torch.testing.assert_close(stages["lora_"], added, atol=1e-12, rtol=0)
        torch.testing.assert_close(stages[""], plain + added, atol=1e-12, rtol=0)
        normed = found["blocks.1.ln2.out"]
        pre = torch.cat([found["blocks.1.mlp.lora_pre"], found["blocks.1.mlp.lora_pre_linear"]], -1)
        torch.testing.assert_close(pre, adapter.layers["blocks.1.mlp.up"](normed), atol=1e-12, rtol=0)
        for out, layer, inputs in (("attn", "out", "attn.z"), ("mlp", "down", "mlp.post")):
            own = adapter.layers[f"blocks.1.{out}.{layer}"](found[f"blocks.1.{inputs}"].flatten(2))
            torch.testing.assert_close(found[f"blocks.1.{out}.lora_out"], own, atol=1e-12, rtol=0)
            whole = getattr(getattr(model.blocks[1], out), layer)(found[f"blocks.1.{inputs}"].flatten(2)) + own
            torch.testing.assert_close(found[f"blocks.1.{out}_out"], whole, atol=1e-12, rtol=0)

    def test_they_are_zero_without_an_adapter_and_in_layers_that_it_does_not_change(self) -> None:
        model = build(CONFIGS["llama"])
        for adapter, places in ((None, ""), ("b", "mlp"), ("c", "attn")):
            found = self.traced(model, adapter, others=("a", "b"))
            shown = [value for name, value in found.items() if ".lora_" in name and places in name]
            assert shown
            assert not any(value.any() for value in shown)

    def test_steps_that_decode_show_them_also_without_an_adapter(self) -> None:
        model = served("llama")
        stages = select(stages_of(model.config, adapters=True), ["*.lora_*"])
        trace = TraceParams(selection=Selection(stages=stages))
        steps = run(engine_of(model), ask("own", prompt(5), max_tokens=6, trace=trace))["own", 0].traces
        assert len(steps) == 6
        assert all([each.stage for each in step.stages] == stages for step in steps)

    def test_tracing_changes_no_bit(self) -> None:
        model = served("llama")
        trace = TraceParams(selection=Selection(stages=stages_of(model.config, adapters=True)))
        requests = [replace(request, trace=trace) for request in mixed()]
        traced, plain = run(engine_of(model), *requests), run(engine_of(model), *mixed())
        assert all(same_bits(traced, request, plain[request.id, 0]) for request in requests)

    def test_an_edit_of_what_is_added_counts_for_its_own_sequence_only(self) -> None:
        """Without what the adapter adds, its request computes what one without an adapter does."""
        model = served("llama")
        stages = select(stages_of(model.config, adapters=True), ["*.lora_*"])
        tap = Editor({stage.name: torch.zeros_like for stage in stages})
        edited = [replace(request, tap=tap if request.id == "1" else None) for request in mixed()]
        expected = [with_adapter(request, None if request.id == "1" else request.adapter) for request in mixed()]
        found, wanted = run(engine_of(model), *edited), run(engine_of(model), *expected)
        assert all(same_bits(found, request, wanted[request.id, 0]) for request in expected)
