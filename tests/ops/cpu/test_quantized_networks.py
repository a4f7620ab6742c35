"""Networks with quantized weights and our kernels are bitwise equal in every pass, batch, replayed step and trace."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from model.checkpoints.load import BUNDLED, load_checkpoint
from model.engine.engine import Engine
from model.network.prepare import keeps_any_format
from model.network.transformer import Transformer
from model.ops.torch_ops import TORCH
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder
from tests.engine.driving import ask, assert_greedy_in_one_pass, new_engine, prompt, run
from tests.engine.test_recorded_traces import assert_same_bits, num_traced_graphs, traced, without_recordings
from tests.ops.cpu.common import NO_KERNELS
from tests.tiny import random_ids, write_reference
from tests.tiny_gguf import write_gguf

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("instructions")

# A quantization and a dtype. Stored: a GGUF file in Q5_0, whose heads have a size that our kernels support.
CASES = [("int8", "float32"), ("int8", "bfloat16"), ("int5", "bfloat16"), ("int4", "bfloat16"), ("stored", "bfloat16")]
STORED = transformers.LlamaConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def stored_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("stored")
    write_reference(STORED, directory)
    return write_gguf(directory, directory / "q5_0.gguf", kind=Kind.Q5_0)


@pytest.fixture(params=CASES, ids=lambda case: " ".join(case))
def model(request: pytest.FixtureRequest, stored_file: Path) -> Transformer:
    """A network of which every linear layer is quantized, computed by our kernels."""
    quantize, dtype = request.param
    source = stored_file if quantize == "stored" else BUNDLED
    model = load_checkpoint(str(source), dtype=dtype, quantize=quantize, kernels="auto").model
    if model.backend is TORCH:
        pytest.skip(NO_KERNELS)
    assert keeps_any_format(model)
    return model


def requests_of(model: Transformer, seeds: Sequence[int], **params: Any) -> list[Any]:
    """Prompts of different lengths."""
    return [ask(f"{seed}", prompt(5 + 13 * seed, seed=seed, config=model.config), **params) for seed in seeds]


def assert_steps_are_recorded(engine: Engine) -> None:
    assert len(engine._runner._step_graphs._graphs) > 0


def test_cached_and_traced_passes_are_bitwise_equal_to_a_plain_pass(model: Transformer) -> None:
    ids = random_ids(model.config.vocab_size, 70, batch=2)
    with torch.inference_mode():
        plain = model(ids)
        cache = model.new_cache(80, batch=2)
        parts = [model(part, cache) for part in ids.split([40, 1, 1, 20, 3, 5], dim=1)]
        recorded = model(ids, tap=Recorder(stages_of(model.config)))
        last = model(ids, rows=[69, 3])
    assert torch.equal(torch.cat(parts, dim=1), plain)
    assert torch.equal(recorded, plain)
    assert torch.equal(last, plain[:, [69, 3]])


def test_generated_tokens_and_logprobs_are_bitwise_those_of_one_pass_over_the_whole_text(model: Transformer) -> None:
    """The engine divides prompts, batches sequences, replays recorded steps and tries drafts; no bit changes."""
    requests = requests_of(model, range(3), max_tokens=30, temperature=0.0)
    engine = new_engine(model, max_step_tokens=25, num_blocks=128)
    results = run(engine, *requests)
    assert_steps_are_recorded(engine)
    for request in requests:
        assert_greedy_in_one_pass(model, request, results[request.id, 0])


def test_a_request_gets_the_same_bits_alone_in_a_batch_without_recordings_and_after_preemption(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of(model, range(4), max_tokens=24, temperature=1.1)
    alone = {key: result for request in requests for key, result in run(new_engine(model), request).items()}
    engine, small = new_engine(model, num_blocks=128), new_engine(model, num_blocks=20)
    assert_same_bits(run(engine, *requests), alone)
    assert_steps_are_recorded(engine)
    assert_same_bits(run(small, *requests), alone)
    assert small.stats().num_preemptions > 0
    assert_same_bits(without_recordings(monkeypatch, new_engine(model), *requests), alone)


def test_a_traced_step_is_recorded_and_has_the_bits_of_one_that_is_not(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = requests_of(model, range(2), max_tokens=10)
    requests = [traced(model, first, "summaries of all stages"), second]
    engine = new_engine(model)
    found = run(engine, *requests)
    assert num_traced_graphs(engine) > 0
    assert_same_bits(found, without_recordings(monkeypatch, new_engine(model), *requests))


def test_a_layer_with_an_operation_of_pytorch_would_end_the_recordings(
    model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the assertions that steps are recorded can fail."""
    layer = model.get_submodule("blocks.0.mlp.down")
    forward = layer.forward
    monkeypatch.setattr(layer, "forward", lambda x: forward(x.clone()))
    engine = new_engine(model)
    run(engine, *requests_of(model, range(1), max_tokens=8))
    assert len(engine._runner._step_graphs._graphs) == 0
