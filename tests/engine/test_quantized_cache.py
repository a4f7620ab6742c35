"""A cache in 8 bits: half the memory, and the same results however the tokens of a sequence are computed."""

import pytest
import torch

from model.engine.cache import PagedCache, bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.ops.quantized_rows import dequantize_rows, quantize_rows
from model.tracing.selection import Selection
from model.tracing.stages import select, stages_of
from tests.engine.driving import Drive, Result, ask, new_engine, prompt, run, values_of
from tests.engine.test_adapters import served
from tests.engine.test_recorded_traces import assert_same_bits, without_recordings
from tests.tiny import CONFIGS
from tests.tiny import build as build_network


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_depends_on_chunks_batches_preemption_or_shared_prefixes(name: str, dtype: torch.dtype) -> None:
    model = served(name, dtype)
    requests = [ask(str(i), prompt(13 + i, seed=i % 2), max_tokens=12, echo=i == 3) for i in range(4)]
    requests += [ask("late", [*requests[0].prompt_ids, 3], max_tokens=9)]
    expected: dict[tuple[str, int], Result] = {}
    for request in requests:
        expected |= run(new_engine(model, kv_cache_dtype="int8"), request)
    for options in ({"max_step_tokens": 6, "max_sequences": 4}, {"num_blocks": 16}, {"speculates": False}):
        drive = Drive(new_engine(model, kv_cache_dtype="int8", **options))
        drive.add(*requests[:-1])
        drive.step(8)
        drive.add(requests[-1])
        assert_same_bits(drive.finish(), expected)
        if "num_blocks" in options:
            assert drive.engine.stats().num_preemptions > 0
    plain = run(new_engine(model), *requests)
    assert any(plain[key].logprobs != expected[key].logprobs for key in expected)


def test_pytorch_and_our_kernels_agree_on_a_cache_in_8_bits() -> None:
    """To the rounding of float32, because both store the same bits (a key may round differently: tolerance)."""
    plain = build_network(served("llama").config)
    requests = [ask(str(i), prompt(9 + 6 * i, seed=i), max_tokens=6, temperature=0.0) for i in range(3)]
    expected = run(new_engine(plain, kv_cache_dtype="int8"), *requests)
    found = run(new_engine(served("llama"), kv_cache_dtype="int8"), *requests)
    for key, result in expected.items():
        assert found[key].ids == result.ids
        assert found[key].logprob_values == pytest.approx(result.logprob_values, abs=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_traces_show_the_scores_of_the_stored_keys(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scores of the last token are those of the dequantized keys, and recorded traces have the same bits."""
    model = served("llama", dtype)
    stages = select(stages_of(model.config), ["blocks.0.attn.*"])
    trace = TraceParams(selection=Selection(stages=stages, detail="values"))
    request = ask("1", prompt(21), max_tokens=5, trace=trace)
    found = run(new_engine(model, kv_cache_dtype="int8"), request)
    assert_same_bits(found, without_recordings(monkeypatch, new_engine(model, kv_cache_dtype="int8"), request))
    steps = [
        {name.rpartition(".")[2]: values for name, values in values_of(step).items()} for step in found["1", 0].traces
    ]
    keys = torch.cat([step["rot_k"][0] for step in steps])  # (S, Hkv, D)
    stored = dequantize_rows(quantize_rows(keys), dtype).repeat_interleave(3, dim=1)
    q = steps[-1]["rot_q"][0, -1]  # (H, D)
    exact, unrounded = (
        torch.einsum("hd,shd->hs", q.double(), k.double()) * model.config.attention_scale
        for k in (stored, keys.repeat_interleave(3, dim=1))
    )
    tolerance = 1e-5 if dtype == torch.float32 else 2**-8 * exact.abs().max().item()
    torch.testing.assert_close(steps[-1]["scores"][0, :, -1].double(), exact, atol=tolerance, rtol=0)
    assert (exact - unrounded).abs().max() > 1e-3


def test_about_twice_as_many_tokens_fit_into_the_same_memory() -> None:
    model = served("llama", torch.bfloat16)
    sizes = {
        each: Engine(model, None, EngineConfig(cache_bytes=1 << 20, kv_cache_dtype=each)).num_cache_tokens
        for each in ("auto", "int8")
    }
    assert sizes["int8"] / sizes["auto"] == pytest.approx(2 * 16 / 18, rel=0.01)  # heads of 16 numbers
    cache = PagedCache(model, 10, 4, "int8")
    stored = sum(each.nbytes for each in (*cache._pools, *cache._magnitudes))
    assert stored == 10 * 4 * bytes_of_token(model.config, torch.bfloat16, "int8")


def test_an_unknown_format_of_the_cache_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(InvalidField, match="kv_cache_dtype: 'fp8' is not one of 'auto', 'int8'"):
        Engine(build_network(CONFIGS["llama"]), None, EngineConfig(kv_cache_dtype="fp8"))  # type: ignore[arg-type]
