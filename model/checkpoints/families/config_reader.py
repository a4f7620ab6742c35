"""Read a `config.json` key by key, and refuse or name keys that nothing has read."""

import logging
import sys
from collections.abc import Mapping
from typing import Any

from model.config import is_finite_number
from model.errors import join_names, short_repr

logger = logging.getLogger(__name__)

# Keys that change the network in some family. A family that does not read such a key refuses it: the checkpoint may be
# of another architecture. The networks of our families read no other keys in transformers (a test compares the lists);
# the last two lines are keys of architectures that are not implemented.
# fmt: off
NETWORK_KEYS = frozenset((
    "_sliding_window_pattern", "activation_function", "attention_bias", "attention_factor", "attention_multiplier",
    "attn_logit_softcapping", "beta_fast", "beta_slow", "decoder_sparse_step", "embedding_multiplier", "factor",
    "final_logit_softcapping", "full_attn_mod", "head_dim", "hidden_act", "hidden_activation", "hidden_size",
    "high_freq_factor", "interpolate_factor", "intermediate_size", "layer_norm_eps", "layer_norm_epsilon",
    "layer_types", "lm_head_bias", "logits_scaling", "long_factor", "low_freq_factor", "max_position_embeddings",
    "max_window_layers", "mlp_bias", "mlp_only_layers", "moe_intermediate_size", "mscale", "mscale_all_dim", "n_embd",
    "n_head", "n_inner", "n_layer", "n_positions", "no_rope_layer_interval", "no_rope_layers", "norm_topk_prob",
    "num_attention_heads", "num_experts", "num_experts_per_tok", "num_hidden_layers", "num_key_value_heads",
    "num_local_experts", "original_max_position_embeddings", "partial_rotary_factor", "qk_layernorm",
    "query_pre_attn_scalar", "reorder_and_upcast_attn", "residual_multiplier", "rms_norm_eps", "rope_interleaved",
    "rope_local_base_freq", "rope_parameters", "rope_scaling", "rope_theta", "rope_type", "rotary_emb_base",
    "rotary_pct", "scale_attn_by_inverse_layer_idx", "scale_attn_weights", "short_factor", "sliding_window",
    "sliding_window_pattern", "text_config", "tie_word_embeddings", "truncate", "type", "use_bidirectional_attention",
    "use_mrope", "use_parallel_residual", "use_qkv_bias", "use_sliding_window", "vision_config", "vocab_size",
    "attention_chunk_size", "kv_sharing_modes", "per_layer_config",
    "alibi", "clip_qkv", "kv_lora_rank", "logit_scale", "mamba_d_state", "n_routed_experts", "n_shared_experts",
    "num_shared_experts", "parallel_attn", "q_lora_rank", "shared_expert_intermediate_size", "use_alibi",
))
# fmt: on


class ConfigReader:
    """Reads one JSON object of a `config.json` and remembers which keys were read; `finish` treats the other keys.

    `parent_key` is the key of this object in the file, or empty for the whole file. A method that checks a key raises
    `ValueError` naming the key if it is wrong.
    """

    # Keys that do not change the forward pass in any family: metadata, and settings of training and generation.
    # fmt: off
    HARMLESS = frozenset((
        "_attn_implementation", "_attn_implementation_autoset", "_model_name_or_path", "_name_or_path", "architectures",
        "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "auto_map", "bad_words_ids",
        "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
        "classifier_dropout", "cls_token_id", "cross_attention_hidden_size", "custom_pipelines",
        "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype", "early_stopping", "embd_pdrop",
        "encoder_no_repeat_ngram_size", "eos_token_id", "exponential_decay_length_penalty", "finetuning_task",
        "forced_bos_token_id", "forced_eos_token_id", "gradient_checkpointing", "hidden_dropout", "hidden_dropout_prob",
        "id2label", "initializer_range", "label2id", "length_penalty", "line_by_line", "max_length", "min_length",
        "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
        "output_attentions", "output_hidden_states", "output_scores", "pad_token_id", "prefix", "pretraining_tp",
        "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
        "return_dict_in_generate", "selective_checkpoint_enabled", "sep_token_id", "sequence_parallel_enabled",
        "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss", "tie_encoder_decoder",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers_version", "typical_p",
        "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16", "use_cache",
    ))
    # fmt: on
    # Keys that may be present in every family, each with the only value that does not change the forward pass.
    NEUTRAL: Mapping[str, Any] = {
        "add_cross_attention": False,
        "is_causal": True,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "pruned_heads": {},
    }

    def __init__(self, config: Mapping[str, Any], parent_key: str = "") -> None:
        self._config = config
        self._prefix = f"config.json: {parent_key}." if parent_key else "config.json: "
        self._unread = {key for key, value in config.items() if value is not None} - self.HARMLESS

    def has(self, key: str) -> bool:
        """Whether the key is present, even if its value is null."""
        return key in self._config

    def take(self, key: str, default: Any = None) -> Any:
        """The key's value, or `default` if the key is missing or null."""
        self._unread.discard(key)
        value = self._config.get(key)
        return default if value is None else value

    def take_nullable(self, key: str, default: Any) -> Any:
        """The key's value, which may be None, or `default` if the key is missing."""
        return self.take(key) if self.has(key) else default

    def need(self, key: str, default: Any = None) -> Any:
        """The key's value. Without a `default` the key must be present and not null."""
        value = self.take(key, default)
        if value is None:
            raise ValueError(f"{self._prefix}{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """The key's value, an integer from `low` to `high`. Without a `default` the key must be present."""
        value = self.need(key) if default is None else self.take(key, default)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} must be an integer from {low} to {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """The key's value, true or false."""
        value = self.take(key, default)
        if type(value) is not bool:
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} must be true or false")
        return value

    def number(self, key: str) -> float | None:
        """The key's value, a finite number of at least 0, or None if the key is missing or null."""
        value = self.take(key)
        if value is not None and not (is_finite_number(value) and value >= 0):
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} must be a finite number of at least 0")
        return None if value is None else float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        """The key's value, a list of finite numbers. The key must be present."""
        values = self.need(key)
        if not isinstance(values, list) or not all(map(is_finite_number, values)):
            raise ValueError(f"{self._prefix}{key} = {short_repr(values)} must be a list of finite numbers")
        return tuple(map(float, values))

    def positive(self, key: str, default: float, *, high: float = sys.float_info.max) -> float:
        """The key's value, a number above 0 and up to `high`."""
        value = self.take(key, default)
        if not (is_finite_number(value) and 0 < value <= high):
            limit = f"a number above 0 and at most {high:g}" if high < sys.float_info.max else "a finite number above 0"
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} must be {limit}")
        return float(value)

    def expect(self, key: str, value: Any) -> None:
        """Check that the key is missing, null or this value. Other values are not implemented."""
        actual = self.take(key, value)
        if actual != value:
            raise ValueError(f"{self._prefix}{key} = {short_repr(actual)} is not implemented (only {value!r})")

    def ignore(self, *keys: str) -> None:
        """Accept any value of these keys, because in this family they do not change the forward pass."""
        self._unread.difference_update(keys)

    def choice(self, key: str, names: Mapping[str, Any], default: str) -> Any:
        """Look up the key's value in `names`. A missing or null key means `default`."""
        value = self.take(key, default)
        if not isinstance(value, str) or value not in names:
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} is not implemented; known: {', '.join(names)}")
        return names[value]

    def finish(self) -> None:
        """Raise `ValueError` for keys of other networks, and name unknown keys in a warning. Call it last."""
        for key, value in self.NEUTRAL.items():
            self.expect(key, value)
        refused = sorted(key for key in self._unread & NETWORK_KEYS if not _asks_for_nothing(key, self._config[key]))
        if refused:
            raise ValueError(
                f"{self._prefix}{join_names(refused, limit=20)}: unknown in this family; a key that changes the "
                "network of other families is refused"
            )
        unknown = sorted(self._unread - NETWORK_KEYS)
        if unknown:
            logger.warning(
                "%s%s: unknown, so without effect, as in transformers", self._prefix, join_names(unknown, limit=20)
            )


def require_object(key: str, value: Any) -> dict[str, Any]:
    """The value of a key, which must be an object; an empty one if it is missing, null or empty."""
    if value and not isinstance(value, dict):
        raise ValueError(f"config.json: {key} = {short_repr(value)} is not an object")
    return value or {}


def _asks_for_nothing(key: str, value: Any) -> bool:
    """Whether a key of other families has a value that changes no network."""
    return not value or (
        key == "layer_types" and isinstance(value, list) and set(map(str, value)) == {"full_attention"}
    )
