"""What a family file states: how its `config.json` translates, and which of its tensors fill which of ours."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from model.config import ModelConfig, RopeScaling


class ConfigReader:
    """Reads a `config.json` and remembers which keys were read; one left unread at the end is one nobody understood.

    Every method raises `ValueError` naming the key.
    """

    # Keys that do not change what an inference pass computes, in every family.
    HARMLESS = frozenset(
        {
            "_attn_implementation_autoset",
            "_name_or_path",
            "architectures",
            "attention_dropout",
            "attn_pdrop",
            "auto_map",
            "bad_words_ids",
            "begin_suppress_tokens",
            "bos_token_id",
            "chunk_size_feed_forward",
            "cls_token_id",
            "cross_attention_hidden_size",
            "decoder_start_token_id",
            "diversity_penalty",
            "do_sample",
            "dtype",
            "early_stopping",
            "embd_pdrop",
            "encoder_no_repeat_ngram_size",
            "eos_token_id",
            "exponential_decay_length_penalty",
            "finetuning_task",
            "forced_bos_token_id",
            "forced_eos_token_id",
            "gradient_checkpointing",
            "id2label",
            "initializer_range",
            "label2id",
            "length_penalty",
            "max_length",
            "min_length",
            "model_type",
            "no_repeat_ngram_size",
            "num_beam_groups",
            "num_beams",
            "num_return_sequences",
            "output_attentions",
            "output_hidden_states",
            "output_scores",
            "pad_token_id",
            "prefix",
            "pretraining_tp",
            "problem_type",
            "remove_invalid_values",
            "repetition_penalty",
            "resid_pdrop",
            "return_dict",
            "return_dict_in_generate",
            "sep_token_id",
            "suppress_tokens",
            "task_specific_params",
            "temperature",
            "tf_legacy_loss",
            "tie_encoder_decoder",
            "tokenizer_class",
            "top_k",
            "top_p",
            "torch_dtype",
            "torchscript",
            "transformers_version",
            "typical_p",
            "unk_token_id",
            "unsloth_fixed",
            "unsloth_version",
            "use_bfloat16",
            "use_cache",
        }
    )
    # Keys that every family may state, with the one value that changes nothing.
    NEUTRAL: Mapping[str, Any] = {
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
        "quantization_config": None,
    }

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config
        self._unread = {key for key, value in config.items() if value is not None} - self.HARMLESS

    def has(self, key: str) -> bool:
        """Whether the key is there at all, be it null."""
        return key in self._config

    def take(self, key: str, default: Any = None) -> Any:
        """The key's value; `default` where it is missing or null."""
        self._unread.discard(key)
        value = self._config.get(key)
        return default if value is None else value

    def need(self, key: str) -> Any:
        value = self.take(key)
        if value is None:
            raise ValueError(f"config.json: {key} is missing")
        return value

    def expect(self, key: str, value: Any) -> None:
        """The key may be missing, null or this value; anything else changes the computation and is not implemented."""
        found = self.take(key, value)
        if found != value:
            raise ValueError(f"config.json: {key} = {found!r} is not implemented (only {value!r})")

    def ignore(self, *keys: str) -> None:
        """Keys of this family that do not change what an inference pass computes."""
        self._unread.difference_update(keys)

    def choice(self, key: str, names: Mapping[str, Any], default: str) -> Any:
        """The key's value, translated."""
        found = self.take(key, default)
        if found not in names:
            raise ValueError(f"config.json: {key} = {found!r} is not implemented; known: {', '.join(names)}")
        return names[found]

    def finish(self) -> None:
        for key, value in self.NEUTRAL.items():
            self.expect(key, value)
        if self._unread:
            raise ValueError(
                f"config.json: {', '.join(sorted(self._unread))}: not known for this family; if it changes the "
                "computation it is not implemented"
            )


def rope_of(reader: ConfigReader, max_position_embeddings: int) -> tuple[float, RopeScaling | None, int]:
    """(rope_theta, rope_scaling, longest position) from either spelling: `rope_theta` and `rope_scaling`, or the
    `rope_parameters` that holds both since transformers 5.

    The longest position is `max_position_embeddings`, but for `dynamic` and `yarn` the stretched length, where larger:
    their checkpoints state the length trained on.
    """
    theta = reader.take("rope_theta", 10000.0)
    parameters = reader.take("rope_parameters") or reader.take("rope_scaling") or {}
    again = reader.take("rope_scaling")  # said again beside rope_parameters
    if again and _one_spelling(again, theta) != _one_spelling(parameters, theta):
        raise ValueError("config.json: rope_scaling and rope_parameters differ")
    reader.expect("partial_rotary_factor", 1.0)
    if not isinstance(parameters, dict):
        raise ValueError(f"config.json: rope_scaling = {parameters!r} is not an object")
    scaling = ConfigReader(parameters)
    kind = scaling.take("rope_type") or scaling.take("type", "default")
    scaling.ignore("type", "finetuned")
    theta = scaling.take("rope_theta", theta)
    scaling.expect("partial_rotary_factor", 1.0)
    if kind == "default":
        scaling.ignore("factor")
        scaling.finish()
        return theta, None, max_position_embeddings

    original = reader.take("original_max_position_embeddings") or scaling.take("original_max_position_embeddings")
    scaling.ignore("original_max_position_embeddings")
    original = original or max_position_embeddings
    factor = scaling.take("factor")
    if kind == "yarn" and factor is None:
        factor = max_position_embeddings / original
    if factor is None:
        raise ValueError("config.json: rope_scaling.factor is missing")
    options: dict[str, Any] = {}
    if kind == "llama3":
        options = {key: scaling.need(key) for key in ("low_freq_factor", "high_freq_factor")}
    elif kind == "yarn":
        options = {
            "beta_fast": scaling.take("beta_fast", 32.0),
            "beta_slow": scaling.take("beta_slow", 1.0),
            "truncate": scaling.take("truncate", True),
            "attention_factor": _yarn_attention_factor(scaling, factor),
        }
    elif kind not in ("linear", "dynamic"):
        raise ValueError(
            f"config.json: rope_scaling type {kind!r} is not implemented; known: linear, dynamic, llama3, yarn"
        )
    if kind == "dynamic":  # counts from max_position_embeddings whatever else is stated, as transformers does
        original = max_position_embeddings
    scaling.finish()
    stretched = int(original * factor) if kind in ("dynamic", "yarn") else 0
    return (
        theta,
        RopeScaling(kind=kind, factor=factor, original_max_positions=original, **options),
        max(max_position_embeddings, stretched),
    )


def _one_spelling(parameters: Any, theta: float) -> Any:
    if not isinstance(parameters, dict):
        return parameters
    stated = {key: value for key, value in parameters.items() if value is not None and key != "type"}
    kind = parameters.get("rope_type") or parameters.get("type", "default")
    return {"rope_theta": theta} | stated | {"rope_type": kind}


def _yarn_attention_factor(scaling: ConfigReader, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    stated = scaling.take("attention_factor")
    numerator, denominator = scaling.take("mscale"), scaling.take("mscale_all_dim")
    if stated is not None:
        return float(stated)
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


@dataclass(frozen=True)
class Source:
    """Where one of our tensors comes from: these tensors of the checkpoint, their rows stacked in this order."""

    names: tuple[str, ...]
    transposed: bool = False  # stored as (in, out)


def stacked_rows(parameter: str, config: ModelConfig) -> list[int]:
    """How many rows of one of our stacked parameters each of its sources gives: q, k, v; gate and up."""
    if ".qkv." in parameter:
        return [heads * config.d_head for heads in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    assert ".up." in parameter
    return [config.d_mlp, config.d_mlp]


def rows(*names: str) -> Source:
    return Source(names)


def transposed(name: str) -> Source:
    return Source((name,), transposed=True)


@dataclass(frozen=True)
class Family:
    """One family of checkpoints.

    `tensors` maps each of our parameters to its source, `{i}` being the layer; one that a config leaves out (a bias,
    the head of a tied model) is not looked for. `surplus` are globs of tensors that hold no weights.
    """

    model_type: str
    architecture: str
    read: Callable[[ConfigReader], ModelConfig]
    tensors: Mapping[str, Source]
    optional_prefix: str = ""  # some checkpoints write every name without it
    surplus: tuple[str, ...] = ()

    def translate(self, config: Mapping[str, Any]) -> ModelConfig:
        architectures = config.get("architectures") or [self.architecture]
        if architectures != [self.architecture]:
            raise ValueError(
                f"config.json: architectures {architectures} is not implemented for model_type "
                f"{self.model_type!r} (only {self.architecture})"
            )
        reader = ConfigReader(config)
        model_config = self.read(reader)
        reader.finish()
        return model_config

    def source(self, parameter: str) -> Source:
        """The source of one of our parameters, by its full name."""
        parts = parameter.split(".")
        layer = parts[1] if parts[0] == "blocks" else ""
        template = ".".join(["blocks", "{i}", *parts[2:]]) if layer else parameter
        source = self.tensors[template]
        return Source(tuple(name.replace("{i}", layer) for name in source.names), source.transposed)
