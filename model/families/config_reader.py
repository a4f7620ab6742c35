"""A `config.json` read key by key, so that none is overlooked."""

from collections.abc import Mapping
from typing import Any

from model.config import is_finite_number, short_repr


class ConfigReader:
    """Reads a `config.json` and remembers which keys were read; one left unread at the end is one nobody understood.

    `place` is the name of the key that holds this object inside of the file, empty for the file itself. Every method
    raises `ValueError` naming the key.
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

    def __init__(self, config: Mapping[str, Any], place: str = "") -> None:
        self._config = config
        self._prefix = f"config.json: {place}." if place else "config.json: "
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
            raise ValueError(f"{self._prefix}{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """The key's value, an integer from `low` to `high`; without a `default` the key must be there."""
        value = self.need(key) if default is None else self.take(key, default)
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} is no integer from {low} to {high}")
        return value

    def number(self, key: str) -> float | None:
        """The key's value, a finite number of at least zero; None where it is missing or null."""
        value = self.take(key)
        if value is not None and not (is_finite_number(value) and value >= 0):
            raise ValueError(f"{self._prefix}{key} = {short_repr(value)} is no finite number of at least 0")
        return None if value is None else float(value)

    def expect(self, key: str, value: Any) -> None:
        """The key may be missing, null or this value; anything else changes the computation and is not implemented."""
        found = self.take(key, value)
        if found != value:
            raise ValueError(f"{self._prefix}{key} = {short_repr(found)} is not implemented (only {value!r})")

    def ignore(self, *keys: str) -> None:
        """Keys of this family that do not change what an inference pass computes."""
        self._unread.difference_update(keys)

    def choice(self, key: str, names: Mapping[str, Any], default: str) -> Any:
        """The key's value, translated."""
        found = self.take(key, default)
        if not isinstance(found, str) or found not in names:
            raise ValueError(f"{self._prefix}{key} = {short_repr(found)} is not implemented; known: {', '.join(names)}")
        return names[found]

    def finish(self) -> None:
        for key, value in self.NEUTRAL.items():
            self.expect(key, value)
        if self._unread:
            raise ValueError(
                f"{self._prefix}{_listed(self._unread)}: not known for this family; if it changes the computation it "
                "is not implemented"
            )


def _listed(keys: set[str], limit: int = 20) -> str:
    """Keys for an error message of one line: a file may hold any number of them, of any length."""
    named = [key if key.isprintable() and len(key) <= 100 else short_repr(key) for key in sorted(keys)[:limit]]
    return ", ".join(named) + (f" and {len(keys) - limit} more" if len(keys) > limit else "")
