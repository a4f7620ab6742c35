"""Whole networks with our kernels: they agree with PyTorch, and are bitwise equal in every pass, batch and engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.config import ModelConfig
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.step_graphs import StepGraphs
from model.network.transformer import Transformer
from model.ops.cpu import libraries
from model.ops.cpu.packed_linear import PackedLinear
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder
from tests.engine.driving import ask, assert_greedy_in_one_pass, new_engine, prompt, run
from tests.ops.cpu.common import by_kernels
from tests.service.running import running
from tests.tiny import CONFIGS, ROUNDING, quick, random_ids, record
from tests.tiny import build as build_network

pytestmark = pytest.mark.usefixtures("instructions")

DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_with_kernels_agrees_with_pytorch(dtype: str) -> None:
    """In bfloat16, which rounds in each layer, it is as close to the logits in float32 as PyTorch is."""
    plain = load_checkpoint(str(BUNDLED), dtype=dtype).model
    packed = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    ids = torch.randint(4096, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = plain(ids), packed(ids)
        exact = load_checkpoint(str(BUNDLED), dtype="float32").model(ids)
    if dtype == "float32":
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    else:
        ours, theirs = ((logits - exact).square().mean().sqrt() for logits in (found, expected))
        assert ours < 1.2 * theirs < 0.1


@pytest.mark.parametrize("name", CONFIGS)
def test_every_network_has_the_same_residuals_and_logits_with_kernels_as_with_pytorch(name: str) -> None:
    """In float32, to the rounding of sums in another order (`ROUNDING`), in proportion where values exceed 1."""
    config = with_heads_of_16(CONFIGS[name])
    ids = random_ids(config.vocab_size, 40, batch=2)
    with torch.inference_mode():
        expected_logits, expected = record(build_network(config), ids)
        logits, found = record(by_kernels(build_network(config)), ids)
    for stage, value in {**expected, "logits": expected_logits}.items():
        if stage.endswith(("resid_pre", "resid_post", "logits")):
            tolerance = 2 * ROUNDING[torch.float32] * max(1.0, value.abs().max().item())
            torch.testing.assert_close({**found, "logits": logits}[stage], value, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_and_traced_passes_are_bitwise_equal_to_a_plain_pass(dtype: str) -> None:
    model = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    ids = torch.randint(4096, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(ids)
        cache = model.new_cache(80, batch=2)
        parts = [model(part, cache) for part in ids.split([40, 1, 1, 20, 3, 5], dim=1)]
        recorder = Recorder(stages_of(model.config))
        traced = model(ids, tap=recorder)
        edited = model(ids, tap=lambda name, stage: stage if "pattern" in name else stage.clone())
    assert torch.equal(torch.cat(parts, dim=1), plain)
    assert torch.equal(traced, plain)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # after an edit, norms and attention are computed by PyTorch
    torch.testing.assert_close(edited, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_last_block_skips_unselected_rows_and_no_bit_changes(name: str, dtype: str) -> None:
    model = with_kernel_heads(CONFIGS[name], dtype)
    ids = torch.randint(67, (2, 30), generator=torch.Generator().manual_seed(0))
    num_computed = []
    for block in model.blocks:
        block.get_submodule("mlp").register_forward_hook(lambda _, given, __: num_computed.append(given[0].shape[1]))
    with torch.inference_mode():
        plain = model(ids)
        found = model(ids, rows=[29, 3])
        traced = model(ids, rows=[29, 3], tap=lambda name, value: value)
    assert num_computed == [30, 30, 30, 30, 30, 2, 30, 30, 30]
    assert torch.equal(found, plain[:, [29, 3]])
    assert torch.equal(traced, found)


def with_heads_of_16(config: ModelConfig) -> ModelConfig:
    """The config with a size of heads that our attention kernels support."""
    return replace(config, d_head=16, rotary_dim=0 if config.rotary_dim == config.d_head else config.rotary_dim)


def with_kernel_heads(config: ModelConfig, dtype: str) -> Transformer:
    """A network of the config, computed by our kernels."""
    model = Transformer(with_heads_of_16(config))
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return by_kernels(model.to(DTYPES_BY_NAME[dtype]).requires_grad_(False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generated_tokens_and_logprobs_are_bitwise_those_of_one_pass_over_the_whole_text(dtype: str) -> None:
    """The engine divides prompts, batches sequences, replays recorded steps and tries drafts; no bit changes."""
    model = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    requests = [
        ask(f"{seed}", prompt(60, seed=seed, config=model.config), max_tokens=40, temperature=0.0) for seed in range(3)
    ]
    results = run(new_engine(model, max_step_tokens=50, num_blocks=128), *requests)
    for request in requests:
        assert_greedy_in_one_pass(model, request, results[request.id, 0])


@pytest.mark.slow
def test_the_service_gives_the_same_text_and_parameter_count_with_our_kernels_and_with_pytorch() -> None:
    answers = []
    for kernels in ("auto", "torch"):
        with running(model="bundled", dtype="float32", kernels=kernels) as service:
            is_packed = isinstance(service.checkpoint.model.head, PackedLinear)
            assert is_packed == (kernels == "auto" and libraries.load("elementwise") is not None)
            text = service.answer("/generate", prompt="the cat sat on", max_tokens=20, temperature=0)["text"]
            answers.append((text, service.get("/model").json()["parameters"]))
    assert answers[0] == answers[1]


def generate(engine: Engine, *seeds: int, num_out: int = 60) -> dict[str, list[int]]:
    """Sample a request for each seed, all together. Returns the token ids of each."""
    for seed in seeds:
        params = GenerationParams(max_tokens=num_out, sampling=SamplingParams(temperature=0.8, seed=seed))
        engine.add(Request(id=str(seed), prompt_ids=[5 + seed] * (3 + 9 * seed), params=params))
    tokens: dict[str, list[int]] = {str(seed): [] for seed in seeds}
    while engine.can_step:
        for output in engine.step().outputs:
            assert output.error is None
            tokens[output.request_id] += [token.token_id for token in output.tokens]
    return tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestEngine:
    @pytest.fixture
    def build(self, dtype: str) -> Callable[[int], Engine]:
        model = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
        return lambda cache_bytes: Engine(model, None, EngineConfig(cache_bytes=cache_bytes))

    def test_a_request_gets_the_same_tokens_alone_in_a_batch_and_after_preemption(
        self, build: Callable[[int], Engine]
    ) -> None:
        alone = {str(seed): generate(build(1 << 24), seed)[str(seed)] for seed in range(8)}
        assert generate(build(1 << 24), *range(8)) == alone
        small = build((1 << 24) * 400 // build(1 << 24).num_cache_tokens)
        assert generate(small, *range(8)) == alone
        assert small.stats().num_preemptions > 0

    @pytest.mark.parametrize("first", quick(1, [3, 1]))
    @pytest.mark.parametrize("name", CONFIGS)
    def test_a_network_with_complete_kernels_is_recorded_and_replayed_steps_give_the_same_tokens(
        self, dtype: str, name: str, first: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whether the first recorded step has one or three decoding sequences."""
        config = CONFIGS[name]
        model = with_kernel_heads(config, dtype)
        engines = [Engine(model, None, EngineConfig(cache_bytes=1 << 22, block_size=4)) for _ in range(2)]
        monkeypatch.setattr(engines[1]._runner._step_graphs, "_attention", None)
        found = [
            [generate(engine, *seeds, num_out=12) for seeds in (range(first), range(3), range(1))] for engine in engines
        ]
        assert found[0] == found[1]
        has_all_kernels = config.positions != "sinusoidal" and config.num_experts == 0
        is_dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
        assert (engines[0]._runner._step_graphs._graphs != {}) == (has_all_kernels and not is_dynamic)

    def test_replayed_steps_give_the_same_tokens_as_steps_that_are_not_replayed(
        self, build: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replayed: list[int] = []
        run = StepGraphs.run

        def noted(graphs: StepGraphs, *arguments: Any) -> Any:
            replayed.append(len(graphs._graphs))
            return run(graphs, *arguments)

        monkeypatch.setattr(StepGraphs, "run", noted)
        found = generate(build(1 << 24), 1, 2, 3)
        assert max(replayed) > 0
        monkeypatch.setattr(StepGraphs, "run", lambda self, *args: None)
        assert generate(build(1 << 24), 1, 2, 3) == found

    def test_a_step_that_pytorch_computes_in_part_is_never_replayed_whatever_its_number_of_sequences(
        self, build: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PyTorch computes sums of three rows, while steps of one or two rows are recorded and replayed."""
        engine, plain = build(1 << 24), build(1 << 24)
        engine.config = replace(engine.config, speculates=False)  # two sequences with a draft have three rows, too
        monkeypatch.setattr(plain._runner._step_graphs, "_attention", None)
        ops = engine._model.backend.ops
        add = ops.add
        monkeypatch.setattr(ops, "add", lambda a, b: add(a, b) * 1 if a.shape[1] == 3 else add(a, b))
        assert plain._model.backend.ops is ops
        for seeds in ((1, 2), (1, 2, 3)):
            was_recorded = len(engine._runner._step_graphs._graphs) > 0
            assert generate(engine, *seeds) == generate(plain, *seeds)
        assert was_recorded
        assert len(engine._runner._step_graphs._graphs) == 0
