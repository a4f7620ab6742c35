"""Write tiny checkpoints in Hugging Face layout: a Llama with grouped-query attention and a byte-level BPE."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = ["the cat sat on the mat and the dog sat on the log; that was that, the cats ran on and the dogs ran there"]
EOS = "<eos>"
NUM_TOKENS = 280
VOCAB_SIZE = 284  # more rows than the tokenizer has tokens, as in many published checkpoints
FIM_TOKENS = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>")  # of StarCoder2
CACHE_BYTES = 128 << 20  # for long contexts: by default, the cache would have 1 GiB
CONTEXT = 64
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-3,
    "rope_theta": 100.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def write_checkpoint(
    directory: Path, *, generation: dict[str, Any] | None = None, extra_token: str | None = None, **config: Any
) -> Path:
    """Write a checkpoint. Its weights are the same in every call; `config` replaces keys of `CONFIG`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    write_tokenizer(directory / "tokenizer.json", extra_token)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    save_file(_weights(CONFIG | config), directory / "model.safetensors")
    return directory


def write_fim_checkpoint(directory: Path, **config: Any) -> Path:
    """Write a checkpoint whose tokenizer has the `FIM_TOKENS`, from the id `NUM_TOKENS` on."""
    write_checkpoint(directory, vocab_size=288, **config)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    for index, name in enumerate(FIM_TOKENS):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        content["added_tokens"].append({"id": NUM_TOKENS + index, "content": name, **flags})
    path.write_text(json.dumps(content))
    return directory


def write_tokenizer(path: Path, extra_token: str | None = None) -> None:
    """Write a tokenizer of bytes and a few words. With it, sampled text has many incomplete characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TOKENS,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    assert tokenizer.get_vocab_size() == NUM_TOKENS
    if extra_token is not None:
        tokenizer.add_tokens([extra_token])
    tokenizer.save(str(path))


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    width, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(rows, columns, generator=generator) / columns**0.5
        return values

    def gain() -> torch.Tensor:
        return 1 + 0.3 * torch.randn(width, generator=generator)

    weights = {"model.embed_tokens.weight": torch.randn(config["vocab_size"], width, generator=generator)}
    for layer in range(config["num_hidden_layers"]):
        of = f"model.layers.{layer}"
        weights |= {
            f"{of}.input_layernorm.weight": gain(),
            f"{of}.self_attn.q_proj.weight": matrix(queries, width),
            f"{of}.self_attn.k_proj.weight": matrix(keys, width),
            f"{of}.self_attn.v_proj.weight": matrix(keys, width),
            f"{of}.self_attn.o_proj.weight": matrix(width, queries),
            f"{of}.post_attention_layernorm.weight": gain(),
            f"{of}.mlp.gate_proj.weight": matrix(inner, width),
            f"{of}.mlp.up_proj.weight": matrix(inner, width),
            f"{of}.mlp.down_proj.weight": matrix(width, inner),
        }
    return weights | {"model.norm.weight": gain(), "lm_head.weight": 1.5 * matrix(config["vocab_size"], width)}
