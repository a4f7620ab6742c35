"""Our network computes the same numbers as Hugging Face `transformers`, from checkpoints that transformers writes.

For every family, the logits and the residual stream before and after every block are compared in float32. The random
weights (`tests/tiny.py`) make biases, gains and epsilons matter. The prompts are longer than the windows, and longer
than the original length of a rope scaling.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoints.families import FAMILIES, translate
from model.checkpoints.load import load_checkpoint
from tests.parity.reference import BASES, CLASSES, LINEAR, LLAMA, assert_same_numbers, config_of, transformers
from tests.tiny import ROUNDING, random_ids, write_reference

YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 3.0, "original_max_position_embeddings": 24}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 150.0, "factor": 2.5},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 150.0,
        "factor": 4.0,
        # The four pairs of a head of 8 make 2.5, 0.7, 0.2 and 0.06 turns over the 16 positions. So one keeps its
        # frequency, one is between, and two are interpolated.
        "low_freq_factor": 0.5,
        "high_freq_factor": 2.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": YARN,
    "yarn with a steep ramp": YARN | {"beta_fast": 2.0, "beta_slow": 0.5},
    "yarn not truncated": YARN | {"beta_fast": 4.0, "truncate": False},
    "yarn with mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn with an attention factor": YARN | {"attention_factor": 1.25},
}
TRAINED = 12
DYNAMIC = {
    "max_position_embeddings": TRAINED,
    "rope_parameters": {"rope_type": "dynamic", "rope_theta": 150.0, "factor": 3.0},
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 6}
SLIDING, FULL = "sliding_attention", "full_attention"

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2 with the exact gelu": ("gpt2", {"activation_function": "gelu"}),
    "gpt2 with another inner size": ("gpt2", {"n_inner": 37}),
    "gpt2 with heads of 6": ("gpt2", {"n_embd": 18, "n_head": 3}),
    "gpt2 untied": ("gpt2", {"tie_word_embeddings": False}),
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama with one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama with as many kv heads as heads": ("llama", {"num_key_value_heads": 4}),
    "llama with heads of 6": ("llama", {"head_dim": 6}),
    "llama with heads wider than d_model / heads": ("llama", {"head_dim": 14}),
    "llama with attention biases": ("llama", {"attention_bias": True}),
    "llama with feed-forward biases": ("llama", {"mlp_bias": True}),
    "llama with gelu": ("llama", {"hidden_act": "gelu"}),
    "llama with another epsilon and base": (
        "llama",
        {"rms_norm_eps": 0.05, "rope_parameters": {"rope_type": "default", "rope_theta": 31.0}},
    ),
    **{f"llama, {name}": ("llama", {"rope_parameters": scaling}) for name, scaling in SCALINGS.items()},
    "mistral with a window": ("mistral", {"sliding_window": 6}),
    "mistral with a window of one": ("mistral", {"sliding_window": 1}),
    "mistral with no window": ("mistral", {"sliding_window": None}),
    "mistral with heads of 10": ("mistral", {"head_dim": 10, "sliding_window": 9}),
    "mistral, yarn": ("mistral", {"rope_parameters": YARN, "sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with a window in layer 0": ("qwen2", WINDOWS | {"layer_types": [SLIDING, FULL]}),
    "qwen2 with a window from layer 1 on": ("qwen2", WINDOWS | {"max_window_layers": 1}),
    "qwen2 with a window switched off": ("qwen2", {"use_sliding_window": False, "sliding_window": 3}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3 with attention biases": ("qwen3", {"head_dim": 12, "attention_bias": True}),
    "qwen3 with a window in layer 1": ("qwen3", WINDOWS | {"head_dim": 6, "layer_types": [FULL, SLIDING]}),
    "qwen3 tied, yarn": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True, "rope_parameters": YARN}),
}


def test_every_family_is_compared() -> None:
    assert CLASSES.keys() == BASES.keys() == FAMILIES.keys() - {"gemma3"}, "test_stored_formats.py compares gemma3"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_residual_equal_transformers(case: str, tmp_path: Path) -> None:
    family, options = CASES[case]
    reference = write_reference(config_of(family, options), tmp_path)
    assert_same_numbers(reference, tmp_path, num_tokens=33)


def test_yarn_allows_as_many_positions_as_its_factor_times_the_original_length(tmp_path: Path) -> None:
    """A prompt of 60 tokens with max_position_embeddings 40: yarn's own limit is 3 * 24 = 72 positions."""
    reference = write_reference(config_of("llama", {"rope_parameters": YARN}), tmp_path)
    assert load_checkpoint(str(tmp_path)).model.config.max_positions == 72
    assert_same_numbers(reference, tmp_path, num_tokens=60)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox", "stablelm"])
def test_linear_scaling_allows_as_many_positions_as_its_factor_times_the_stated_length(
    family: str, tmp_path: Path
) -> None:
    """A prompt of 90 tokens with max_position_embeddings 40, the trained length: the limit is 2.5 * 40 positions."""
    partial = {"partial_rotary_factor": 0.5} if family in ("gpt_neox", "stablelm") else {}
    reference = write_reference(config_of(family, {"rope_parameters": LINEAR | partial}), tmp_path)
    assert load_checkpoint(str(tmp_path)).model.config.max_positions == 100
    assert_same_numbers(reference, tmp_path, num_tokens=90)


class TestDynamicScaling:
    """Dynamic scaling: within the trained length both networks agree.

    Beyond it, ours computes what transformers computes token by token with its cache. An uncached pass of transformers
    rotates all positions with the frequencies of the last one, which no cache can reproduce.
    """

    @pytest.mark.parametrize("family", ["llama", "qwen3"])
    def test_a_pass_within_the_trained_length_equals_transformers(self, family: str, tmp_path: Path) -> None:
        options = DYNAMIC | {"head_dim": 8}
        reference = write_reference(config_of(family, options), tmp_path)
        assert_same_numbers(reference, tmp_path, num_tokens=TRAINED)

    def test_a_pass_beyond_the_trained_length_equals_transformers_decoding_with_its_cache(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("llama", DYNAMIC), tmp_path)
        model = load_checkpoint(str(tmp_path)).model
        ids = random_ids(model.config.vocab_size, 3 * TRAINED)
        cache = transformers.DynamicCache()  # passed by position: its name depends on the version of transformers
        steps = [reference(token, None, None, cache, use_cache=True).logits for token in ids.split(1, dim=1)]
        torch.testing.assert_close(
            model(ids), torch.cat(steps, dim=1), atol=ROUNDING[torch.float32], rtol=ROUNDING[torch.float32]
        )

    def test_an_uncached_pass_of_transformers_beyond_the_trained_length_differs(self, tmp_path: Path) -> None:
        reference = write_reference(config_of("llama", DYNAMIC), tmp_path)
        model = load_checkpoint(str(tmp_path)).model
        ids = random_ids(model.config.vocab_size, 3 * TRAINED)
        difference = (model(ids) - reference(ids, use_cache=False).logits).abs()
        assert difference.max() > 1e-2


def as_older_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Write rope as transformers before version 5: `rope_theta` and `rope_scaling`, with `type` for `rope_type`."""
    config = dict(config)
    scaling = dict(config.pop("rope_parameters"))
    config["rope_theta"] = scaling.pop("rope_theta")
    kind = scaling.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **scaling}
    config["torch_dtype"] = config.pop("dtype", "float32")
    return config


@pytest.mark.parametrize("rope", [LLAMA["rope_parameters"], *SCALINGS.values(), DYNAMIC["rope_parameters"]], ids=str)
def test_the_old_and_the_new_spelling_of_rope_give_the_same_network(rope: dict[str, Any], tmp_path: Path) -> None:
    reference = write_reference(config_of("llama", {"rope_parameters": rope}), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    assert "rope_parameters" in config
    older = as_older_spelling(config)
    assert translate(older)[1] == translate(config)[1]
    assert translate(config)[1].rope_theta == 150.0
    path.write_text(json.dumps(older))
    assert_same_numbers(reference, tmp_path, num_tokens=33)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("first_windowed", [0, 1, 2, 3])
def test_windows_given_by_max_window_layers_give_the_same_network(
    family: str, first_windowed: int, tmp_path: Path
) -> None:
    """Older versions of transformers wrote `max_window_layers` instead of `layer_types`."""
    options = WINDOWS | {"max_window_layers": first_windowed, "num_hidden_layers": 3}
    reference = write_reference(config_of(family, options), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    del config["layer_types"]
    path.write_text(json.dumps(config))
    assert_same_numbers(reference, tmp_path, num_tokens=20)


@pytest.mark.parametrize("family", ["gpt2", "qwen2"])
def test_a_sharded_checkpoint_gives_the_same_network(family: str, tmp_path: Path) -> None:
    reference = write_reference(config_of(family, {}), tmp_path, max_shard_size="12KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_numbers(reference, tmp_path, num_tokens=20)


@pytest.mark.parametrize("with_masks", [False, True])
def test_gpt2_tensor_names_without_the_transformer_prefix_give_the_same_network(
    with_masks: bool, tmp_path: Path
) -> None:
    """The first published GPT-2 files have no prefix, and store causal masks among the weights."""
    reference = write_reference(config_of("gpt2", {}), tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()}
    if with_masks:
        tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 40, 40).tril() for layer in range(2)}
    assert "wte.weight" in tensors
    save_file(tensors, path, metadata={"format": "pt"})
    assert_same_numbers(reference, tmp_path, num_tokens=20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", CLASSES)
def test_16_bit_weights_give_errors_no_larger_than_those_of_transformers(
    family: str, dtype: str, tmp_path: Path
) -> None:
    """Weights in float32 on disk, loaded with 16 bits.

    Both programs round, but at different places, so each is compared with the same cast weights in float64. Our error
    may be at most 1.25 times that of transformers; the quarter allows for chance (measured: 0.77 to 1.004 times). Two
    blocks round some dozen times, up or down by chance, so the two programs differ by less than 8 units in the last
    place of the largest logit (measured: 0.9 to 4.6).
    """
    options = {
        "mistral": {"sliding_window": 6},
        # With fewer experts per token than experts, rounding may choose another expert.
        "mixtral": {"num_experts_per_tok": 5},
        "qwen3_moe": {"num_experts_per_tok": 5},
    }
    write_reference(config_of(family, options.get(family, {})), tmp_path)
    half = getattr(torch, dtype)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=half, attn_implementation="eager")
    model = load_checkpoint(str(tmp_path), dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {half}
    ids = random_ids(model.config.vocab_size, 33, batch=4)
    with torch.no_grad():
        found, theirs = model(ids), reference.eval()(ids).logits
        exact = model.to(torch.float64)(ids)
    assert found.dtype == theirs.dtype == half
    our_error, their_error = (found - exact).square().mean().sqrt(), (theirs - exact).square().mean().sqrt()
    assert our_error < 1.25 * their_error
    assert (found - theirs).abs().max() < 8 * torch.finfo(half).eps * exact.abs().max()


def test_a_checkpoint_loads_in_its_stored_dtype_unless_another_one_is_given(tmp_path: Path) -> None:
    reference = write_reference(config_of("llama", {}), tmp_path)
    reference.to(torch.bfloat16).save_pretrained(tmp_path)
    assert load_checkpoint(str(tmp_path)).model.embed.weight.dtype == torch.bfloat16
    wide = load_checkpoint(str(tmp_path), dtype="float32").model
    assert wide.embed.weight.dtype == torch.float32
    assert torch.equal(wide.get_parameter("head.weight"), reference.lm_head.weight.float())


def test_different_config_files_translate_to_different_configs() -> None:
    """Otherwise the comparisons above could pass with an option that is ignored."""
    base = translate(config_of("llama", {}).to_dict() | {"architectures": ["LlamaForCausalLM"]})[1]
    translated = {base}
    scalings = ({"rope_parameters": scaling} for scaling in SCALINGS.values())
    changes: list[dict[str, Any]] = [{"rms_norm_eps": 0.05}, {"hidden_act": "gelu"}, *scalings]
    for options in changes:
        config = config_of("llama", options).to_dict() | {"architectures": ["LlamaForCausalLM"]}
        translated.add(translate(config)[1])
    assert len(translated) == 3 + len(SCALINGS)
    assert replace(base, norm_eps=0.05) in translated
