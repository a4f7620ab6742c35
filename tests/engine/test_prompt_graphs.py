"""Steps with prompts are recorded and replayed: tokens and log-probabilities have the bits of steps that are not."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.engine import step_graphs
from model.engine.engine import Engine
from model.engine.request import Request
from model.engine.step_budget import StepBudget
from model.engine.step_graph import StepGraph
from model.engine.step_graphs import Shape, StepGraphs
from model.ops.cpu import recording
from model.ops.torch_ops import TORCH
from model.tracing.edits import Edit
from tests.engine.driving import Drive, Result, ask, new_engine, prompt
from tests.engine.test_edits import edited
from tests.ops.cpu.common import NO_KERNELS
from tests.ops.cpu.test_networks import with_kernel_heads
from tests.tiny import CONFIGS

Results = dict[tuple[str, int], Result]


@pytest.fixture(autouse=True)
def _steps_of_equal_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepBudget, "max_prompt_tokens", lambda self, num_decoding, num_prompts: 32)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """For each replayed step with prompts, the rows with logits."""
    found: list[list[int]] = []
    replay = StepGraph.replay

    def noted(graph: StepGraph, sequences: Any, rows: Any) -> Any:
        found.extend([] if rows is None else [rows])
        return replay(graph, sequences, rows)

    monkeypatch.setattr(StepGraph, "replay", noted)
    return found


def requests(first_seed: int = 0, **options: Any) -> list[Request]:
    """Two that decode while 15 prompts of different lengths are computed: their rows are at different places."""
    lengths = [3, 5, *torch.randint(18, 44, (15,), generator=torch.Generator().manual_seed(4)).tolist()]
    return [
        ask(f"{seed}", prompt(length, seed=seed), max_tokens=40 if length < 9 else 1, **options)
        for seed, length in enumerate(lengths, first_seed)
    ]


def served(engine: Engine, *asked: Request) -> tuple[Engine, Results]:
    drive = Drive(engine)
    drive.add(*asked)
    return engine, drive.finish()


def assert_equal(found: Results, expected: Results) -> None:
    for key, result in expected.items():
        assert found[key].error is None
        assert found[key].ids == result.ids
        assert found[key].logprob_values == result.logprob_values


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_replayed_prompts_of_every_network_have_the_same_bits(
    name: str, dtype: str, replayed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_kernel_heads(CONFIGS[name], dtype)
    engine, found = served(new_engine(model, num_blocks=256), *requests())
    scaling = model.config.rope_scaling
    is_recordable = (
        model.config.positions != "sinusoidal"
        and model.config.num_experts == 0
        and (scaling is None or scaling.kind != "dynamic")
    )
    assert engine._runner.records_prompts == is_recordable
    if not is_recordable:
        assert replayed == []
        return
    assert len(replayed) > 9
    places = {tuple(rows) for rows in replayed}
    assert len(places) > len({len(rows) for rows in places}), "rows of equal number are never elsewhere"
    monkeypatch.setattr(StepGraphs, "run_prompts", lambda self, *args: None)
    assert_equal(found, served(new_engine(model, num_blocks=256), *requests())[1])


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_replayed_prompts_with_quantized_weights_and_caches_have_the_same_bits(
    quantize: Any, kv_cache_dtype: Any, replayed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_checkpoint(str(BUNDLED), dtype="bfloat16", quantize=quantize, kernels="auto").model
    if model.backend is TORCH:
        pytest.skip(NO_KERNELS)
    _, found = served(new_engine(model, num_blocks=256, kv_cache_dtype=kv_cache_dtype), *requests())
    assert len(replayed) > 9
    monkeypatch.setattr(StepGraphs, "run_prompts", lambda self, *args: None)
    assert_equal(found, served(new_engine(model, num_blocks=256, kv_cache_dtype=kv_cache_dtype), *requests())[1])


def test_shared_prefixes_preemption_and_more_sequences_than_a_recording_has_room_for(
    replayed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_kernel_heads(CONFIGS["llama"], "float32")
    start = prompt(20)
    asked = [
        ask(f"{seed}", start + prompt(3 + 2 * (seed % 9), seed=seed), max_tokens=7 + seed % 3) for seed in range(30)
    ]

    def serve() -> tuple[Engine, Results]:
        """Two of the sequences lose their blocks, and are computed again."""
        drive = Drive(new_engine(model, num_blocks=70, max_sequences=14))
        drive.add(*asked)
        drive.step(6)
        for id in ("1", "4"):
            drive.engine.pause(id, True)
        drive.step(2)
        for id in ("1", "4"):
            drive.engine.pause(id, False)
        return drive.engine, drive.finish()

    engine, found = serve()
    shapes = [shape for shape in engine._runner._step_graphs._graphs if shape.has_prompts]
    assert {shape.num_sequences for shape in shapes} == {8, 16}
    assert engine.stats().num_preemptions > 0
    assert engine.stats().num_prefix_hits > 0
    assert len(replayed) > 3
    monkeypatch.setattr(StepGraphs, "run_prompts", lambda self, *args: None)
    assert_equal(found, serve()[1])


@pytest.mark.parametrize("options", [{"prompt_logprobs": 2}, {"edits": True}])
def test_steps_with_more_rows_or_edits_are_not_replayed(options: dict[str, Any], replayed: list[list[int]]) -> None:
    model = with_kernel_heads(CONFIGS["llama"], "float32")
    if options.pop("edits", None):
        edit = Edit(stage="blocks.0.resid_pre", op="scale", factor=2.0)
        asked = [edited(model, each, edit) for each in requests()]
    else:
        asked = requests(**options)
    engine, found = served(new_engine(model, num_blocks=256), *asked)
    assert not any(each.error for each in found.values())
    assert replayed == []
    assert engine._runner.records_prompts


def test_a_recording_gives_later_tensors_the_memory_of_earlier_ones() -> None:
    """A pass over a prompt would otherwise take the memory of all its intermediate results."""
    model = with_kernel_heads(CONFIGS["llama"], "float32")
    sizes = {}
    for num_layers in (1, 9):
        blocks, model.blocks = model.blocks, model.blocks[:num_layers]
        engine, _ = served(new_engine(model, num_blocks=256), *requests())
        graphs = [graph for shape, graph in engine._runner._step_graphs._graphs.items() if shape.has_prompts]
        recordings = [graph._recording for graph in graphs if isinstance(graph._recording, recording.Recording)]
        sizes[num_layers] = max(sum(each._taken) for each in recordings)
        model.blocks = blocks
    assert sizes[9] < 2 * sizes[1]


def failing(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("no memory")


def incomplete(*arguments: Any, **options: Any) -> Any:
    graph: Any = StepGraph(*arguments, **options)
    graph.is_complete = False
    return graph


@pytest.mark.parametrize("make", [failing, incomplete])
def test_steps_with_prompts_that_cannot_be_recorded_are_computed_and_decoding_is_replayed(
    make: Callable[..., StepGraph], replayed: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_kernel_heads(CONFIGS["llama"], "float32")
    expected = served(new_engine(model, num_blocks=256), *requests())[1]
    replayed.clear()

    def make_some(*arguments: Any, **options: Any) -> Any:
        chosen: Callable[..., Any] = make if "rows" in options else StepGraph
        return chosen(*arguments, **options)

    monkeypatch.setattr(step_graphs, "StepGraph", make_some)
    engine, found = served(new_engine(model, num_blocks=256), *requests())
    assert_equal(found, expected)
    assert replayed == []
    assert not engine._runner.records_prompts
    assert engine._runner.replays


def serve_many_shapes(monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    """The shapes with prompts whose graphs are left after steps of three sizes."""
    model = with_kernel_heads(CONFIGS["llama"], "float32")
    limits = cycle((32, 48, 64))
    monkeypatch.setattr(StepBudget, "max_prompt_tokens", lambda self, num_decoding, num_prompts: next(limits))
    engine, _ = served(new_engine(model, num_blocks=256), *requests(), *requests(first_seed=100))
    assert engine._runner.replays
    return [shape for shape in engine._runner._step_graphs._graphs if shape.has_prompts]


def test_of_very_many_shapes_with_prompts_the_graphs_that_were_used_last_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert len(serve_many_shapes(monkeypatch)) > 2
    monkeypatch.setattr(step_graphs, "MAX_PROMPT_GRAPHS", 2)
    assert len(serve_many_shapes(monkeypatch)) == 2


def test_the_memory_of_recordings_with_prompts_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "CHUNK", 1)
    monkeypatch.setattr(step_graphs, "MAX_PROMPT_BYTES", 1)
    assert serve_many_shapes(monkeypatch) == []
