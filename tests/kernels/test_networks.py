"""Whole networks by our kernels: PyTorch's numbers, and to the bit the same in any pass, batch and engine."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.engine.engine import Engine, EngineConfig
from model.engine.replay import StreamSteps
from model.engine.request import Request
from model.generation import GenerationParams
from model.kernels import native
from model.kernels.linear import PackedLinear
from model.sampling import SamplingParams, token_logprobs
from model.stages import Editor, Recorder, stages_of
from model.transformer import Transformer
from service.app import BUNDLED
from tests.engine.driving import ask, new_engine, prompt, run
from tests.kernels.common import by_kernels
from tests.service.running import running
from tests.tiny import CONFIGS

pytestmark = pytest.mark.usefixtures("instructions")

DTYPES_BY_NAME = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_network_by_kernels_is_the_same_network(dtype: str) -> None:
    plain = load_checkpoint(str(BUNDLED), dtype=dtype).model
    packed = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    assert not any(isinstance(module, nn.Linear) for module in packed.modules())
    ids = torch.randint(4096, (2, 50), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = plain(ids), packed(ids)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # bfloat16 has 8 bits, and each layer rounds
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cached_and_traced_passes_are_the_plain_one_to_the_bit(dtype: str) -> None:
    model = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    ids = torch.randint(4096, (2, 70), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        plain = model(ids)
        cache = model.new_cache(80, batch=2)
        parts = [model(part, cache) for part in ids.split([40, 1, 1, 20, 3, 5], dim=1)]
        recorder = Recorder(stages_of(model.config))
        traced = model(ids, tap=recorder)
        edited = model(ids, tap=Editor({name: torch.clone for name in recorder.kept if "pattern" not in name}))
    assert torch.equal(torch.cat(parts, dim=1), plain)
    assert torch.equal(traced, plain)
    tolerance = 1e-4 if dtype == "float32" else 0.2  # edited norms and scores are spelled out
    torch.testing.assert_close(edited, plain, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_nobody_wants_are_left_out_of_the_last_block_and_change_no_bit(name: str, dtype: str) -> None:
    model = of_whole_vectors(CONFIGS[name], dtype)
    ids = torch.randint(67, (2, 30), generator=torch.Generator().manual_seed(0))
    num_computed = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda _, given, __: num_computed.append(given[0].shape[1]))
    with torch.inference_mode():
        plain = model(ids)
        found = model(ids, rows=[29, 3])
        traced = model(ids, rows=[29, 3], tap=lambda name, value: value)
    assert num_computed == [30, 30, 30, 30, 30, 2, 30, 30, 30]
    assert torch.equal(found, plain[:, [29, 3]])
    assert torch.equal(traced, found)


def of_whole_vectors(config: ModelConfig, dtype: str) -> Transformer:
    """A network of the config, but with heads that our kernels can read."""
    model = Transformer(replace(config, d_head=16))
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return by_kernels(model.to(DTYPES_BY_NAME[dtype]).requires_grad_(False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_generated_is_what_one_pass_over_all_of_it_says(dtype: str) -> None:
    """To the bit: prompt in parts, streams beside it, replayed steps with guesses, and the pass of `/forward`."""
    model = by_kernels(load_checkpoint(str(BUNDLED), dtype=dtype).model)
    requests = [
        ask(f"{seed}", prompt(60, seed=seed, config=model.config), max_tokens=40, temperature=0.0) for seed in range(3)
    ]
    results = run(new_engine(model, max_step_tokens=50, num_blocks=128), *requests)
    for request in requests:
        found = results[request.id, 0]
        with torch.inference_mode():
            logits = model(torch.tensor([[*request.prompt_ids, *found.ids]]))[0, len(request.prompt_ids) - 1 : -1]
        assert found.ids == logits.argmax(-1).tolist()
        assert found.logprobs == token_logprobs(logits, found.ids, 1)


def test_the_service_runs_on_either_kernels_and_tells_the_same_of_the_model() -> None:
    answers = []
    for kernels in ("auto", "torch"):
        with running(model="bundled", dtype="float32", kernels=kernels) as service:
            is_packed = isinstance(service.checkpoint.model.head, PackedLinear)
            assert is_packed == (kernels == "auto" and native.load("elementwise") is not None)
            text = service.answer("/generate", prompt="the cat sat on", max_tokens=20, temperature=0)["text"]
            answers.append((text, service.get("/model").json()["parameters"]))
    assert answers[0] == answers[1]


def generated(engine: Engine, *seeds: int, num_out: int = 60) -> dict[str, list[int]]:
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

    def test_a_request_has_the_same_tokens_in_any_company_and_when_it_is_preempted(
        self, build: Callable[[int], Engine]
    ) -> None:
        alone = {str(seed): generated(build(1 << 24), seed)[str(seed)] for seed in range(8)}
        assert generated(build(1 << 24), *range(8)) == alone
        small = build((1 << 24) * 400 // build(1 << 24).num_cache_tokens)
        assert generated(small, *range(8)) == alone
        assert small.stats().num_preemptions > 0

    @pytest.mark.parametrize("first", [1, 3])
    def test_every_family_is_recorded_and_replayed_steps_are_the_steps(
        self, dtype: str, first: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """However many streams the first recorded step has."""
        for name, config in CONFIGS.items():
            model = of_whole_vectors(config, dtype)
            engines = [Engine(model, None, EngineConfig(cache_bytes=1 << 22, block_size=4)) for _ in range(2)]
            monkeypatch.setattr(engines[1]._runner._stream_steps, "_can_record", False)
            found = [
                [generated(engine, *seeds, num_out=12) for seeds in (range(first), range(3), range(1))]
                for engine in engines
            ]
            assert found[0] == found[1], name
            can_be = config.positions != "sinusoidal" and config.activation != "gelu"
            is_dynamic = config.rope_scaling is not None and config.rope_scaling.kind == "dynamic"
            assert (engines[0]._runner._stream_steps._steps != {}) == (can_be and not is_dynamic), name

    def test_replayed_steps_are_the_steps(
        self, build: Callable[[int], Engine], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        replayed: list[int] = []
        run = StreamSteps.run
        monkeypatch.setattr(
            StreamSteps, "run", lambda self, shares: replayed.append(len(self._steps)) or run(self, shares)
        )
        found = generated(build(1 << 24), 1, 2, 3)
        assert max(replayed) > 0
        monkeypatch.setattr(StreamSteps, "run", lambda self, shares: None)
        assert generated(build(1 << 24), 1, 2, 3) == found
