"""How the bundled checkpoint was made: a byte-level BPE and a small Llama-shaped network, trained on text files.

    python -m model.train TEXT... --out model/bundled --steps 8000

AdamW with decoupled weight decay (Loshchilov & Hutter 2019), linear warm-up, then a cosine to a tenth; gradients are
clipped. The last twentieth of every text is held out. Writes Hugging Face layout and `training.jsonl`, the log.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from model.config import ModelConfig
from model.families import llama
from model.families.family import stacked_rows
from model.transformer import Transformer

END_OF_TEXT = "<|endoftext|>"


def read_text(path: Path) -> str:
    """UTF-8 or, where it is not, Latin-1; line ends as newlines."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        text = raw.decode("latin-1")
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def split(texts: Sequence[str], held_out: float) -> tuple[list[str], list[str]]:
    """(training, validation): the end of every text is held out."""
    borders = [int(len(text) * (1 - held_out)) for text in texts]
    pairs = list(zip(texts, borders, strict=True))
    return [text[:border] for text, border in pairs], [text[border:] for text, border in pairs]


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((line for text in texts for line in text.splitlines(keepends=True)), trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, texts: Sequence[str]) -> Tensor:
    """All texts in one row of ids (N,), an end-of-text token before each."""
    ids = [token_id for text in texts for token_id in [0, *tokenizer.encode(text).ids]]
    return torch.tensor(ids)


def batch_of(ids: Tensor, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows: inputs and the ids one further, each (size, length)."""
    starts = torch.randint(len(ids) - length - 1, (size,), generator=generator)
    windows = torch.stack([ids[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


@torch.no_grad()
def validate(model: Transformer, ids: Tensor, length: int, device: str, num_windows: int = 64) -> float:
    """Mean loss over evenly spaced windows of the held-out text, in nats a token."""
    starts = torch.linspace(0, len(ids) - length - 2, num_windows).long()
    losses = []
    for start in starts:
        window = ids[start : start + length + 1].to(device)
        losses.append(float(loss_of(model, window[None, :-1], window[None, 1:])))
    return sum(losses) / len(losses)


def learning_rate(progress: float, peak: float, warm_up: float = 0.03) -> float:
    """Linear to `peak`, then a cosine to a tenth of it; `progress` from 0 to 1."""
    if progress < warm_up:
        return peak * progress / warm_up
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))))


def save(model: Transformer, tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Hugging Face layout, bfloat16: what `load_checkpoint` and `transformers` read."""
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        source = llama.FAMILY.source(name)
        weights = parameter.detach().cpu().bfloat16()
        parts = torch.split(weights, stacked_rows(name, config)) if len(source.names) > 1 else (weights,)
        tensors |= {part_name: part.contiguous() for part_name, part in zip(source.names, parts, strict=True)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    tokenizer.save(str(directory / "tokenizer.json"))
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_mlp,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.d_head,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": config.tied_head,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the bundled checkpoint on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab-size", type=int, default=2048)
    parser.add_argument("--d-model", type=int, default=160)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--train-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    train(options)


def train(options: argparse.Namespace) -> None:
    device = options.device
    options.out.mkdir(parents=True, exist_ok=True)
    training, held_out = split([read_text(path) for path in options.texts], 0.05)
    tokenizer = train_tokenizer(training, options.vocab_size)
    ids, held_out_ids = encode(tokenizer, training), encode(tokenizer, held_out)
    bits_per_nat = len(held_out_ids) / sum(len(text.encode()) for text in held_out) / math.log(2)

    config = ModelConfig(
        vocab_size=options.vocab_size,
        d_model=options.d_model,
        num_layers=options.layers,
        num_heads=options.heads,
        num_kv_heads=1,
        d_mlp=options.d_model * 8 // 3 // 32 * 32,
        max_positions=options.context,
    )
    generator = torch.Generator().manual_seed(options.seed)
    model = Transformer(config)
    model.initialize(generator)
    model.to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.peak, betas=(0.9, 0.95))

    log = (options.out / "training.jsonl").open("w")
    start = time.monotonic()
    for step in range(1, options.steps + 1):
        inputs, targets = batch_of(ids, options.batch, options.train_length, generator)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step / options.steps, options.peak)
        loss = loss_of(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % (options.steps // 20 or 1) == 0:
            nats = validate(model, held_out_ids, options.train_length, device)
            entry = {
                "step": step,
                "tokens": step * inputs.numel(),
                "minutes": round((time.monotonic() - start) / 60, 2),
                "training_loss": round(loss.item(), 4),
                "validation_loss": round(nats, 4),
                "bits_per_byte": round(nats * bits_per_nat, 4),
            }
            log.write(json.dumps(entry) + "\n")
            log.flush()
            print(json.dumps(entry), flush=True)  # noqa: T201 (command-line output)
    log.close()
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
