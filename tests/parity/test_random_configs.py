"""Random combinations of the options of every family, compared with `transformers`."""

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.parity.reference import CLASSES, ROPE, assert_same_numbers, config_of
from tests.tiny import write_reference

SLIDING, FULL = "sliding_attention", "full_attention"
ACTIVATIONS = st.sampled_from(["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
EPSILONS = st.sampled_from([1e-6, 1e-2])
THETAS = st.sampled_from([20.0, 10000.0])
WINDOWS = st.sampled_from([1, 2, 7, 100])
FACTORS = {
    "attention_multiplier": [0.2, 0.5],
    "embedding_multiplier": [0.5, 1.7],
    "residual_multiplier": [0.5, 1.0],
    "logits_scaling": [1.0, 1.7],
}
MAX_POSITIONS = 40


@st.composite
def ropes(draw: st.DrawFn, fraction: float | None = None) -> dict[str, Any]:
    """A value of `rope_parameters` with any scaling but `dynamic` and `longrope`, which have their own tests."""
    original = {"original_max_position_embeddings": draw(st.sampled_from([8, 24]))}
    scaling: dict[str, Any] = draw(
        st.sampled_from(
            [
                {"rope_type": "default"},
                {"rope_type": "linear", "factor": 2.5},
                {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 0.5, "high_freq_factor": 2.0} | original,
                {"rope_type": "yarn", "factor": 3.0, "beta_fast": 4.0, "truncate": False} | original,
                {"rope_type": "yarn", "factor": 3.0, "mscale": 0.7, "mscale_all_dim": 1.3} | original,
            ]
        )
    )
    parameters = {"rope_theta": draw(THETAS)} | scaling
    return parameters if fraction is None else parameters | {"partial_rotary_factor": fraction}


@st.composite
def layer_types(draw: st.DrawFn, num_layers: int) -> list[str]:
    return draw(st.lists(st.sampled_from([SLIDING, FULL]), min_size=num_layers, max_size=num_layers))


@st.composite
def gpt2(draw: st.DrawFn) -> dict[str, Any]:
    num_heads = draw(st.integers(1, 6))
    return {
        "n_head": num_heads,
        "n_embd": num_heads * draw(st.sampled_from([3, 6, 8])),
        "n_layer": draw(st.integers(1, 4)),
        "n_inner": draw(st.sampled_from([None, 29])),
        "activation_function": draw(ACTIVATIONS),
        "layer_norm_epsilon": draw(EPSILONS),
        "tie_word_embeddings": draw(st.booleans()),
    }


@st.composite
def sizes(draw: st.DrawFn, *, has_head_dim: bool = True, eps_key: str = "rms_norm_eps") -> dict[str, Any]:
    """The options that all Llama-like families have. Heads have a multiple of 4 dims, so that half of them are even."""
    num_kv_heads = draw(st.integers(1, 3))
    num_heads = num_kv_heads * draw(st.integers(1, 3))
    options: dict[str, Any] = {
        "hidden_size": num_heads * draw(st.sampled_from([4, 8])),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "num_hidden_layers": draw(st.integers(1, 4)),
        "hidden_act": draw(ACTIVATIONS),
        eps_key: draw(EPSILONS),
        "tie_word_embeddings": draw(st.booleans()),
        "rope_parameters": draw(ropes()),
    }
    if has_head_dim:
        options["head_dim"] = draw(st.sampled_from([4, 6, 8, 16]))
    return options


@st.composite
def flags(draw: st.DrawFn, *keys: str) -> dict[str, bool]:
    return {key: draw(st.booleans()) for key in keys}


@st.composite
def llama(draw: st.DrawFn) -> dict[str, Any]:
    return draw(sizes()) | draw(flags("attention_bias", "mlp_bias"))


@st.composite
def mistral(draw: st.DrawFn) -> dict[str, Any]:
    return draw(sizes()) | {"sliding_window": draw(st.none() | WINDOWS)}


@st.composite
def mixtral(draw: st.DrawFn) -> dict[str, Any]:
    num_experts = draw(st.integers(1, 6))
    experts = {"num_local_experts": num_experts, "num_experts_per_tok": draw(st.integers(1, num_experts))}
    return draw(mistral()) | experts


@st.composite
def qwen2(draw: st.DrawFn) -> dict[str, Any]:
    return windowed(draw, draw(sizes(has_head_dim=False)))


@st.composite
def qwen3(draw: st.DrawFn) -> dict[str, Any]:
    return windowed(draw, draw(sizes()) | draw(flags("attention_bias")))


def windowed(draw: st.DrawFn, options: dict[str, Any]) -> dict[str, Any]:
    if not draw(st.booleans()):
        return options
    kinds = draw(layer_types(options["num_hidden_layers"]))
    return options | {"use_sliding_window": True, "sliding_window": draw(WINDOWS), "layer_types": kinds}


@st.composite
def qwen3_moe(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes()) | draw(flags("attention_bias", "norm_topk_prob", "use_sliding_window"))
    num_experts = draw(st.integers(1, 6))
    layers = st.integers(0, options["num_hidden_layers"] - 1)
    return options | {
        "sliding_window": draw(WINDOWS),
        "num_experts": num_experts,
        "num_experts_per_tok": draw(st.integers(1, num_experts)),
        "decoder_sparse_step": draw(st.integers(1, 2)),
        "mlp_only_layers": draw(st.lists(layers, max_size=2, unique=True)),
    }


@st.composite
def gpt_neox(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes(has_head_dim=False, eps_key="layer_norm_eps"))
    del options["num_key_value_heads"]
    rope = draw(ropes(fraction=draw(st.sampled_from([0.5, 1.0]))))
    return options | {"rope_parameters": rope} | draw(flags("use_parallel_residual", "attention_bias"))


@st.composite
def gemma(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes()) | draw(flags("attention_bias"))
    return options | {
        "hidden_activation": options.pop("hidden_act"),
        "query_pre_attn_scalar": draw(st.sampled_from([4, 30])),
        "sliding_window": draw(WINDOWS),
        "layer_types": draw(layer_types(options["num_hidden_layers"])),
        "final_logit_softcapping": draw(st.sampled_from([None, 3.0])),
    }


@st.composite
def gemma2(draw: st.DrawFn) -> dict[str, Any]:
    return draw(gemma()) | {"attn_logit_softcapping": draw(st.sampled_from([None, 2.0]))}


@st.composite
def gemma3_text(draw: st.DrawFn) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": draw(THETAS)}
    shared = draw(ropes())
    shared.pop("truncate", None)  # transformers does not find this key in the parameters of one layer type
    return draw(gemma()) | {"rope_parameters": {FULL: shared, SLIDING: local}}


@st.composite
def phi3(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes(has_head_dim=False))
    d_head = options["hidden_size"] // options["num_attention_heads"]
    fraction = draw(st.sampled_from([0.5, 1.0]))
    rope: dict[str, Any] = ROPE | {"partial_rotary_factor": fraction}
    if draw(st.booleans()):
        num_pairs = int(d_head * fraction) // 2
        divisors = st.lists(st.floats(1.0, 9.0), min_size=num_pairs, max_size=num_pairs)
        rope |= {"rope_type": "longrope", "short_factor": draw(divisors), "long_factor": draw(divisors)}
    return options | {
        "rope_parameters": rope,
        "original_max_position_embeddings": draw(st.sampled_from([8, 30, MAX_POSITIONS])),
        "sliding_window": draw(st.none() | WINDOWS),
    }


@st.composite
def olmo2(draw: st.DrawFn) -> dict[str, Any]:
    return draw(sizes(has_head_dim=False)) | draw(flags("attention_bias"))


@st.composite
def smollm3(draw: st.DrawFn) -> dict[str, Any]:
    options = windowed(draw, draw(sizes(has_head_dim=False)) | draw(flags("attention_bias", "mlp_bias")))
    num_layers = options["num_hidden_layers"]
    rotated = st.lists(st.sampled_from([0, 1]), min_size=num_layers, max_size=num_layers)
    return options | {"no_rope_layers": draw(st.none() | rotated), "no_rope_layer_interval": draw(st.integers(1, 3))}


@st.composite
def granite(draw: st.DrawFn) -> dict[str, Any]:
    return draw(llama()) | {key: draw(st.sampled_from(values)) for key, values in FACTORS.items()}


@st.composite
def stablelm(draw: st.DrawFn) -> dict[str, Any]:
    options = draw(sizes(has_head_dim=False, eps_key="layer_norm_eps"))
    rope = draw(ropes(fraction=draw(st.sampled_from([0.5, 1.0]))))
    keys = ("use_parallel_residual", "qk_layernorm", "use_qkv_bias")
    return options | {"rope_parameters": rope} | draw(flags(*keys))


STRATEGIES: dict[str, Any] = {
    strategy.__name__: strategy()
    for strategy in (
        *(gpt2, gpt_neox, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe),
        *(gemma2, gemma3_text, phi3, olmo2, smollm3, granite, stablelm),
    )
}


def test_every_family_has_a_strategy() -> None:
    assert STRATEGIES.keys() == CLASSES.keys()


@pytest.mark.parametrize("family", STRATEGIES)
def test_random_configs_equal_transformers(family: str) -> None:
    """The tolerance is three times that of named cases, because Hypothesis searches for the largest rounding error."""

    @settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(STRATEGIES[family], st.sampled_from([1, 2, 19, MAX_POSITIONS]), st.integers(0, 2**20))
    def compare(options: dict[str, Any], num_tokens: int, seed: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            reference = write_reference(config_of(family, options), Path(directory), seed=seed)
            assert_same_numbers(reference, Path(directory), num_tokens, tolerance=3e-5)

    compare()
