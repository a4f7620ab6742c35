"""The config: invalid fields, default values, and the number of parameters of a network."""

from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

from model.config import MAX_SIZES, RANGES, ModelConfig, RopeScaling
from model.network.norms import Norm
from model.network.parameters import count_parameters
from model.network.rotary import rotary_frequencies, sinusoidal_positions
from model.network.transformer import Transformer
from model.ops.interface import NormRule
from model.tracing.stages import norm_stages
from model.tracing.tap import Probe, Recorder

TINY: dict[str, Any] = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "d_mlp": 12}
SCALING: dict[str, Any] = {"kind": "yarn", "factor": 2.0, "original_max_positions": 16}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        *((field, {field: value}) for field in (*TINY, "max_positions") for value in (0, -1)),
        ("num_heads", {"num_heads": 3}),
        ("d_head", {"d_head": -2}),
        ("d_head", {"d_head": 3}),
        ("d_head", {"d_model": 6}),
        ("num_kv_heads", {"num_kv_heads": 3}),
        ("num_kv_heads", {"num_heads": 4, "num_kv_heads": 3}),
        ("num_kv_heads", {"num_kv_heads": -1}),
        ("norm_eps", {"norm_eps": 0.0}),
        ("norm_eps", {"norm_eps": float("nan")}),
        ("norm", {"norm": "batch"}),
        ("norm_placement", {"norm_placement": "middle"}),
        ("positions", {"positions": "alibi"}),
        ("activation", {"activation": "tanh"}),
        ("rope_theta", {"rope_theta": 1.0}),
        ("rope_theta", {"rope_theta": float("nan")}),
        ("rope_scaling", {"positions": "learned", "rope_scaling": RopeScaling(**SCALING)}),
        ("rope_scaling", {"positions": "sinusoidal", "rope_scaling": RopeScaling(**SCALING)}),
        ("d_head", {"d_head": 2, "rope_scaling": RopeScaling(**SCALING | {"kind": "dynamic"})}),
        ("window", {"window": 0}),
        ("windowed_layers", {"windowed_layers": (True, False)}),
        ("windowed_layers", {"window": 4, "windowed_layers": (True,)}),
        ("windowed_layers", {"window": 4, "windowed_layers": (True, False, True)}),
    ],
    ids=str,
)
def test_an_invalid_field_is_refused_and_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: ."):
        ModelConfig(**TINY | options)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("kind", {"kind": "ntk"}),
        ("factor", {"factor": 0.5}),
        ("factor", {"factor": float("nan")}),
        ("original_max_positions", {"original_max_positions": 0}),
        ("high_freq_factor", {"low_freq_factor": 4.0}),
        ("low_freq_factor", {"low_freq_factor": 0.0}),
        ("beta_fast", {"beta_fast": 0.5}),
        ("beta_slow", {"beta_slow": 0.0}),
        ("attention_factor", {"attention_factor": 0.0}),
    ],
    ids=str,
)
def test_an_invalid_field_of_a_rope_scaling_is_refused_and_named(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^rope_scaling\.{field}: ."):
        RopeScaling(**SCALING | options)


@pytest.mark.parametrize("value", [10**9, 2**63, 10**30, 10**5000], ids=["1e9", "2^63", "1e30", "1e5000"])
@pytest.mark.parametrize("field", MAX_SIZES)
def test_a_size_beyond_its_limit_is_refused_and_the_limit_is_stated(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"^{field}: .* must be at most {MAX_SIZES[field]}$") as error:
        ModelConfig(**TINY | {"d_head": 4} | {field: value})
    assert len(str(error.value)) < 100


def test_the_largest_allowed_sizes_are_accepted() -> None:
    sizes: dict[str, Any] = dict(MAX_SIZES)
    assert ModelConfig(**sizes).max_positions == sizes["max_positions"]


NOT_FINITE = [float("inf"), float("-inf"), float("nan"), 10**400, -(10**400)]


@pytest.mark.parametrize("value", NOT_FINITE, ids=["inf", "-inf", "nan", "1e400", "-1e400"])
@pytest.mark.parametrize("field", RANGES)
def test_a_number_that_is_not_a_finite_float_is_refused_and_named(field: str, value: float) -> None:
    prefix, _, name = field.rpartition(".")
    build = RopeScaling if prefix else ModelConfig
    with pytest.raises(ValueError, match=rf"^{field}: .* is not a finite number$"):
        build(**(SCALING if prefix else TINY) | {name: value})


FACTORS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
@pytest.mark.parametrize("d_head", [2, 64, MAX_SIZES["d_head"]])
@pytest.mark.parametrize("theta", RANGES["rope_theta"])
@pytest.mark.parametrize("length", [1, MAX_SIZES["max_positions"]])
def test_rotary_frequencies_are_finite_at_the_limits_of_every_range(
    kind: Any, d_head: int, theta: float, length: int
) -> None:
    lows, highs = ({name: RANGES[f"rope_scaling.{name}"][end] for name in FACTORS} for end in (0, 1))
    cases: list[dict[str, Any]] = [lows | {"high_freq_factor": 1.0}, highs | {"low_freq_factor": 1.0}]
    for factors in cases:
        scaling = RopeScaling(kind=kind, original_max_positions=length, **factors)
        assert rotary_frequencies(d_head, theta, scaling).isfinite().all()


def test_a_config_cannot_be_changed() -> None:
    config = ModelConfig(**TINY)
    with pytest.raises(FrozenInstanceError):
        config.d_model = 16  # type: ignore[misc]  # on purpose


def test_default_head_sizes_follow_from_the_other_fields() -> None:
    config = ModelConfig(**TINY)
    assert (config.num_kv_heads, config.d_head) == (2, 4)
    assert ModelConfig(**TINY | {"num_heads": 3, "d_head": 4}).num_kv_heads == 3


def test_a_window_applies_to_the_layers_that_the_config_selects() -> None:
    assert [ModelConfig(**TINY).window_of(layer) for layer in range(2)] == [None, None]
    assert [ModelConfig(**TINY, window=4).window_of(layer) for layer in range(2)] == [4, 4]
    mixed = ModelConfig(**TINY, window=4, windowed_layers=(False, True))
    assert [mixed.window_of(layer) for layer in range(2)] == [None, 4]


SMALL: dict[str, Any] = {"vocab_size": 50257, "d_model": 768, "num_layers": 12, "num_heads": 12}
MODERN = ModelConfig(**SMALL, d_mlp=2048)
CLASSICAL: dict[str, Any] = {"norm": "layer", "norm_placement": "post", "gated": False, "activation": "gelu"}
GPT2_SMALL = ModelConfig(
    **SMALL,
    d_mlp=3072,
    max_positions=1024,
    norm="layer",
    positions="learned",
    activation="gelu_tanh",
    gated=False,
    qkv_bias=True,
    attention_out_bias=True,
    mlp_bias=True,
)


class TestParameterCounts:
    """The exact counts of articles 001 and 002."""

    def test_the_modern_decoder_has_the_counts_of_its_table(self) -> None:
        count = count_parameters(MODERN)
        assert count.components == {
            "token_embedding": 38_597_376,
            "position_embedding": 0,
            "attention": 12 * 2_359_296,
            "feed_forward": 12 * 4_718_592,
            "block_norms": 12 * 1_536,
            "final_norm": 768,
            "head": 0,
        }
        assert 12 * (2_359_296 + 4_718_592 + 1_536) == 12 * 7_079_424 == 84_953_088
        assert (count.total, count.non_embedding) == (123_551_232, 84_953_856)

    def test_one_block_has_the_counts_of_its_table(self) -> None:
        with torch.device("meta"):
            block = Transformer(MODERN).blocks[0]
        sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in block.named_children()}
        assert sizes == {"ln1": 768, "attn": 2_359_296, "ln2": 768, "mlp": 4_718_592}
        assert sum(sizes.values()) == 7_079_424

    def test_an_untied_head_adds_one_embedding(self) -> None:
        count = count_parameters(ModelConfig(**SMALL, d_mlp=2048, tied_head=False))
        assert count.total == 162_148_608 == 123_551_232 + 38_597_376
        assert count.non_embedding == 84_953_856
        assert count.components["head"] == 38_597_376

    def test_gpt2_small_has_its_published_size(self) -> None:
        count = count_parameters(GPT2_SMALL)
        assert count.total == 124_439_808
        assert count.components["position_embedding"] == 1024 * 768
        assert count.non_embedding == 124_439_808 - 38_597_376 - 1024 * 768

    def test_the_classical_block_has_no_final_norm_and_a_bias_in_each_norm(self) -> None:
        count = count_parameters(ModelConfig(**SMALL, d_mlp=3072, **CLASSICAL))
        assert count.components["final_norm"] == 0
        assert count.components["block_norms"] == 12 * 4 * 768
        assert count.components["feed_forward"] == 12 * 2 * 768 * 3072

    @pytest.mark.parametrize("tied_head", [True, False])
    def test_the_components_add_up_to_every_parameter_once(self, tied_head: bool) -> None:
        model = Transformer(ModelConfig(**TINY, qk_norm="head", qkv_bias=True, mlp_bias=True, tied_head=tied_head))
        count = count_parameters(model.config)
        assert sum(count.components.values()) == count.total == sum(p.numel() for p in model.parameters())


class TestSmallExamplesOfArticle002:
    @pytest.mark.parametrize("traced", [False, True])
    def test_layer_norm_gives_the_printed_numbers(self, traced: bool) -> None:
        norm = Norm(4, rule=NormRule(1e-12, "layer"))
        recorder = Recorder(norm_stages("ln") if traced else [])
        out = norm(torch.tensor([0.5, -0.3, 1.2, 0.8]), Probe(recorder).at("ln"))
        printed = torch.tensor([-0.091, -1.545, 1.182, 0.455])
        torch.testing.assert_close(out, printed, atol=5e-4, rtol=0)  # printed to three decimals
        if traced:
            torch.testing.assert_close(recorder.kept["ln.scale"], torch.tensor([0.55]))
            torch.testing.assert_close(recorder.kept["ln.normalized"], printed, atol=5e-4, rtol=0)

    def test_sinusoidal_positions_follow_the_formula(self) -> None:
        table = sinusoidal_positions(torch.arange(50), 16).double()
        for position in (0, 1, 7, 49):
            for pair in range(8):
                angle = torch.tensor(position / 10000 ** (2 * pair / 16), dtype=torch.float64)
                # An angle of up to 49 in float32 is off by up to 2e-6.
                torch.testing.assert_close(table[position, 2 * pair], angle.sin(), atol=4e-6, rtol=0)
                torch.testing.assert_close(table[position, 2 * pair + 1], angle.cos(), atol=4e-6, rtol=0)

    def test_position_zero_is_zeros_and_ones(self) -> None:
        assert sinusoidal_positions(torch.tensor([0]), 6).tolist() == [[0, 1, 0, 1, 0, 1]]

    def test_an_odd_width_ends_in_a_sine(self) -> None:
        table = sinusoidal_positions(torch.arange(9), 7)
        assert table.shape == (9, 7)
        torch.testing.assert_close(table[:, 6], (torch.arange(9) / 10000 ** (6 / 7)).sin())
