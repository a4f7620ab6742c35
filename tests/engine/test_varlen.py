"""The fused kernel over the paged cache: it is given the right keys, and used only where it gives the right numbers."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.engine import cache as cache_module
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.varlen import check_kernel, find_kernel
from model.generation import GenerationParams
from model.sampling import SamplingParams
from tests.tiny import CONFIGS, exact, random_ids


def stand_in(
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
    """What `torch.nn.attention.varlen.varlen_attn` documents: packed sequences, the last query at the last key."""
    found = []
    for i in range(len(cu_seq_q) - 1):
        own_q, own_k, own_v = q[cu_seq_q[i] : cu_seq_q[i + 1]], *(x[cu_seq_k[i] : cu_seq_k[i + 1]] for x in (k, v))
        num_queries, num_keys = len(own_q), len(own_k)
        assert num_queries <= max_q
        assert num_keys <= max_k
        behind = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
        left, right = window_size
        visible = (behind >= -right) & ((left < 0) | (behind <= left))
        heads = (x.transpose(0, 1) for x in (own_q, own_k, own_v))
        z = F.scaled_dot_product_attention(*heads, attn_mask=visible, scale=scale, enable_gqa=enable_gqa)
        found.append(z.transpose(0, 1))
    return torch.cat(found)


def tokens(engine: Engine) -> dict[str, list[int]]:
    """What a stream, a long prompt and two with a common beginning become."""
    long, common = random_ids(67, 40, seed=1)[0].tolist(), random_ids(67, 20, seed=2)[0].tolist()
    for name, prompt in {"stream": [5], "long": long, "first": [*common, 1], "second": [*common, 2]}.items():
        params = GenerationParams(max_tokens=6, sampling=SamplingParams(temperature=0))
        engine.add(Request(id=name, prompt_ids=prompt, params=params))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step().outputs:
            assert output.error is None
            found.setdefault(output.request_id, []).extend(token.token_id for token in output.tokens)
    return found


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "qwen3"])
def test_the_kernel_is_given_what_the_portable_way_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = exact(name)
    config = EngineConfig(cache_bytes=1 << 20, block_size=4, max_step_tokens=64)
    expected = tokens(Engine(model, None, config))
    monkeypatch.setattr(cache_module, "find_kernel", lambda *_: stand_in)
    assert tokens(Engine(model, None, config)) == expected


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_kernel_with_another_mask_scale_or_group_fails_the_trial(name: str) -> None:
    def check(**wrong: Any) -> bool:
        def kernel(*arguments: Any, **options: Any) -> Tensor:
            return stand_in(*arguments, **options | wrong)

        return check_kernel(kernel, CONFIGS[name], torch.float32, torch.device("cpu"))

    assert check()
    assert not check(window_size=(-1, -1))
    assert not check(window_size=(-1, 0))
    assert not check(scale=1.0)


def test_a_cpu_and_float32_have_no_fused_kernel() -> None:
    assert find_kernel(CONFIGS["llama"], torch.bfloat16, torch.device("cpu")) is None
    assert find_kernel(CONFIGS["llama"], torch.float32, torch.device("cuda")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_torchs_kernel_passes_the_trial(name: str) -> None:
    config = CONFIGS[name]
    d_head = 64  # flash attention wants multiples of eight
    wide = type(config)(**{**config.__dict__, "d_head": d_head, "d_model": config.num_heads * d_head})
    assert find_kernel(wide, torch.bfloat16, torch.device("cuda")) is not None
