"""A `config.json` read key by key, so that none is overlooked."""

from collections.abc import Mapping
from typing import Any


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
