"""Tests of the fused kernel: it reads the right keys, and is used only if a trial shows that it computes correctly."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.engine.attention import step_context
from model.engine.attention.varlen import check_kernel, find_kernel
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from tests.tiny import CONFIGS, exact, random_ids


def reference_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as `varlen_attn` documents it: sequences are packed, and the last query is at the last key."""
    results = []
    for i in range(len(cu_seq_q) - 1):
        own_q, own_k, own_v = q[cu_seq_q[i] : cu_seq_q[i + 1]], *(x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (k, v))
        num_queries, num_keys = len(own_q), len(own_k)
        assert num_queries <= max_q
        assert num_keys <= max_k
        behind = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        left, right = window_size
        visible = (behind >= -right) & ((left < 0) | (behind <= left))
        q_heads, k_heads, v_heads = (x.transpose(0, 1) for x in (own_q, own_k, own_v))
        z = F.scaled_dot_product_attention(
            q_heads, k_heads, v_heads, attn_mask=visible, scale=scale, enable_gqa=enable_gqa
        )
        results.append(z.transpose(0, 1))
    return torch.cat(results)


def generate(engine: Engine) -> dict[str, list[int]]:
    """The tokens after a short prompt, a long prompt, and two prompts with a common prefix."""
    long, common = random_ids(67, 40, seed=1)[0].tolist(), random_ids(67, 20, seed=2)[0].tolist()
    for name, prompt in {"short": [5], "long": long, "first": [*common, 1], "second": [*common, 2]}.items():
        params = GenerationParams(max_tokens=6, sampling=SamplingParams(temperature=0))
        engine.add(Request(id=name, prompt_ids=prompt, params=params))
    generated: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            generated.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    return generated


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3"])
def test_the_kernel_reads_the_same_keys_as_gathered_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact(name)
    config = EngineConfig(cache_bytes=1 << 20, block_size=4, max_step_tokens=64)
    expected = generate(Engine(model, None, config))
    num_calls = 0

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        nonlocal num_calls
        num_calls += 1
        return reference_kernel(*arguments, **options)

    monkeypatch.setattr(step_context, "find_kernel", lambda *_: kernel)
    assert generate(Engine(model, None, config)) == expected
    assert num_calls > 0


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_kernel_with_another_mask_scale_or_group_fails_the_trial(name: str) -> None:
    def check(**wrong: Any) -> bool:
        def kernel(*arguments: Any, **options: Any) -> Tensor:
            return reference_kernel(*arguments, **options | wrong)

        return check_kernel(kernel, CONFIGS[name], torch.float32, torch.device("cpu"))

    assert check()
    assert not check(window_size=(-1, -1))
    assert not check(window_size=(-1, 0))
    assert not check(scale=1.0)


def test_there_is_no_fused_kernel_on_a_cpu_or_for_float32() -> None:
    assert find_kernel(CONFIGS["llama"], torch.bfloat16, torch.device("cpu")) is None
    assert find_kernel(CONFIGS["llama"], torch.float32, torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_torchs_kernel_passes_the_trial(name: str) -> None:
    config = CONFIGS[name]
    d_head = 64  # flash attention needs a multiple of eight
    wide = type(config)(**{**config.__dict__, "d_head": d_head, "d_model": config.num_heads * d_head})
    assert find_kernel(wide, torch.bfloat16, torch.device("cuda")) is not None
