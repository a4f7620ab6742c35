"""Convert a checkpoint to the format of a peer, without changing the weights.

    python -m tests.benchmarks.peer_formats gguf|openvino|openvino-int8|openvino-int4|ctranslate2 CHECKPOINT OUT
    python -m tests.benchmarks.peer_formats checkpoint FILE.gguf OUT

Run this with an interpreter that has the packages of the peer. The tokenizers of random weights are dummies, in
which every token is a word of its own, because all prompts are token ids.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path


def words(vocab_size: int) -> list[str]:
    return [f"w{token_id} " for token_id in range(vocab_size)]


def write_dummy_tokenizer(directory: Path) -> None:
    """Write a `tokenizer.json` for a checkpoint that has none."""
    from tokenizers import Tokenizer, decoders, models

    names = words(json.loads((directory / "config.json").read_text())["vocab_size"])
    tokenizer = Tokenizer(models.WordLevel({name: token_id for token_id, name in enumerate(names)}, names[0]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(directory / "tokenizer.json"))
    special = {name: names[token_id] for token_id, name in enumerate(("unk_token", "bos_token", "eos_token"))}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def write_gguf(checkpoint: Path, out: Path) -> None:
    """Write float32 GGUF, from which `llama-quantize` makes the other types.

    In GGUF, the two dims of a rotary pair are adjacent. In Hugging Face's layout they are half a head apart, so the
    rows of q and k are reordered.
    """
    import gguf
    import numpy as np
    from safetensors.numpy import load_file

    config = json.loads((checkpoint / "config.json").read_text())
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_kv_heads)
    writer.add_rope_dimension_count(config["hidden_size"] // num_heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words(config["vocab_size"]))
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([gguf.TokenType.NORMAL] * config["vocab_size"])
    writer.add_add_bos_token(False)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = num_heads if "q_proj" in name else num_kv_heads
            weight = np.ascontiguousarray(weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2))
            weight = weight.reshape(-1, weight.shape[-1])
        own_name = names.get_name(name, try_suffixes=(".weight",))
        assert own_name is not None, name
        writer.add_tensor(own_name, weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_checkpoint(gguf_file: Path, out: Path) -> None:
    """Write the dequantized weights of a GGUF file in Hugging Face layout, as transformers reads them."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    out.mkdir(parents=True)
    added = ("quantization_config", "_model_name_or_path")  # by transformers, for the GGUF file
    config = {key: value for key, value in model.config.to_dict().items() if key not in added}
    (out / "config.json").write_text(json.dumps(config))
    is_tied = config["tie_word_embeddings"]
    weights = {
        name: weight for name, weight in model.state_dict().items() if not (is_tied and name == "lm_head.weight")
    }
    save_file(weights, out / "model.safetensors")
    tokenizer.save_pretrained(out)
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (out / "generation_config.json").write_text(json.dumps(ids))


def write_windows(checkpoint: Path, text: str, window: int, out: Path) -> None:
    """Write the token ids of the text in windows of `window` tokens; a last window that is not full is left out."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    out.write_text(json.dumps([ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]))


def write_openvino(checkpoint: Path, out: Path, weights: str = "fp32", options: Sequence[str] = ()) -> None:
    command = ["-c", "from optimum.commands.optimum_cli import main; main()", "export", "openvino"]
    task = ["--task", "text-generation-with-past", "--weight-format", weights]
    subprocess.run([sys.executable, *command, "--model", checkpoint, *task, *options, out], check=True)


def write_ctranslate2(checkpoint: Path, out: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(checkpoint)).convert(str(out))


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "gguf": write_gguf,
    "openvino": write_openvino,
    "openvino-int8": lambda checkpoint, out: write_openvino(checkpoint, out, "int8"),
    "openvino-int4": lambda checkpoint, out: write_openvino(checkpoint, out, "int4", ["--group-size", "64"]),
    "ctranslate2": write_ctranslate2,
    "checkpoint": write_checkpoint,
}

if __name__ == "__main__":
    WRITERS[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
