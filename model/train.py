"""How the bundled checkpoint was made: a byte-level BPE and a small Llama-shaped network, trained on text files.

    pip install 'forwardscope[train]'
    python -m model.train TEXT... --out model/bundled

AdamW with decoupled weight decay (Loshchilov & Hutter 2019), linear warm-up, then a cosine to a tenth; gradients are
clipped; products are bfloat16, weights float32. The end of every text is held out, and the weights that predict it best
are kept, in Hugging Face layout, beside `training.jsonl`, the log, and `curve.png`. A run that was stopped goes on from
its last evaluation when it is started again: every step draws from a seed of its own, so it becomes the same run.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm import tqdm

from model.config import ModelConfig
from model.corpus import END_OF_TEXT_ID, Corpus, train_tokenizer
from model.families import llama
from model.families.family import stacked_rows
from model.sampling import Sampler, SamplingParams, sample
from model.tokenizer import Tokenizer
from model.transformer import Transformer

SAMPLE_PROMPTS = ("It was a dark night, and the captain", "The cat sat on")


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how. The default is the bundled checkpoint's."""

    steps: int = 4500
    vocab_size: int = 4096
    d_model: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    context: int = 512
    batch: int = 8
    peak: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.1
    held_out: float = 0.05
    evaluations: int = 45
    seed: int = 0

    def config(self) -> ModelConfig:
        return ModelConfig(
            vocab_size=self.vocab_size,
            d_model=self.d_model,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            d_mlp=self.d_model * 8 // 3 // 32 * 32,
            max_positions=self.context,
        )

    def learning_rate(self, step: int, warm_up: float = 0.03) -> float:
        """Linear to `peak`, then a cosine to a tenth of it."""
        progress = step / self.steps
        if progress < warm_up:
            return self.peak * progress / warm_up
        return self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))))


def batch_of(ids: Tensor, size: int, length: int) -> tuple[Tensor, Tensor]:
    """Random windows of ids (N,): inputs and the ids one further, each (size, length)."""
    starts = torch.randint(len(ids) - length, (size,))
    windows = torch.stack([ids[start : start + length + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def loss_of(model: Transformer, inputs: Tensor, targets: Tensor) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def add_dropout(model: Transformer, probability: float) -> None:
    """On what the embedding and every attention and feed-forward give (Srivastava et al. 2014), while training."""

    def drop(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return F.dropout(out, probability, module.training)

    model.embed.register_forward_hook(drop)
    for block in model.blocks:
        for part in ("attn", "mlp"):
            block.get_submodule(part).register_forward_hook(drop)


@contextmanager
def evaluating(model: Transformer) -> Iterator[None]:
    model.eval()
    with torch.no_grad():
        yield
    model.train()


def validate(model: Transformer, ids: Tensor, length: int, num_windows: int = 64) -> float:
    """Mean loss over evenly spaced windows of the held-out ids (N,), in nats a token."""
    losses = []
    for start in torch.linspace(0, len(ids) - length - 1, num_windows).long():
        window = ids[start : start + length + 1].to(model.embed.weight.device)
        losses.append(float(loss_of(model, window[None, :-1], window[None, 1:])))
    return sum(losses) / len(losses)


def write(model: Transformer, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and up to 60 tokens, at temperature 0.8."""
    ids = tokenizer.encode(prompt)
    num_tokens = min(60, model.config.max_positions - len(ids))
    sampler = Sampler(SamplingParams(temperature=0.8, seed=0), ids)
    cache = model.new_cache(len(ids) + num_tokens)
    new, written = ids, []
    for _ in range(num_tokens):
        logits = model(torch.tensor([new], device=model.embed.weight.device), cache, rows=[len(new) - 1])[0]
        choice = sample(logits.cpu(), [sampler])[0]
        assert isinstance(choice, int)
        new = [choice]
        written.append(choice)
    return prompt + tokenizer.decode_inside(written)


def save(model: Transformer, tokenizer: Tokenizer, directory: Path) -> None:
    """Hugging Face layout, bfloat16: what `load_checkpoint` and `transformers` read."""
    config = model.config
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        source = llama.FAMILY.source(name)
        weights = parameter.detach().cpu().bfloat16()
        parts = torch.split(weights, stacked_rows(name, config)) if len(source.names) > 1 else (weights,)
        tensors |= {part_name: part.contiguous() for part_name, part in zip(source.names, parts, strict=True)}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # it is written for its owner alone
    tokenizer.save(directory / "tokenizer.json")
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
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
    }
    (directory / "config.json").write_text(json.dumps(content, indent=2) + "\n")


class Log:
    """`training.jsonl`: the recipe, then a line for every evaluation."""

    def __init__(self, directory: Path, entries: list[dict[str, Any]]) -> None:
        self._path = directory / "training.jsonl"
        self.entries = entries
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")

    def draw(self, path: Path) -> None:
        """Training and validation loss over tokens, as a picture."""
        from matplotlib.figure import Figure  # slow to import: after the run, not before it

        evaluations = self.entries[1:]
        millions = [entry["tokens"] / 1e6 for entry in evaluations]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key, label in (("training_loss", "training"), ("validation_loss", "held out")):
            axes.plot(millions, [entry[key] for entry in evaluations], label=label)
        axes.set(xlabel="million tokens", ylabel="nats a token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=120)


def train(paths: list[Path], out: Path, recipe: Recipe, *, device: str, compiled: bool) -> None:
    out.mkdir(parents=True, exist_ok=True)
    corpus = Corpus.read(paths, recipe.held_out)
    tokenizer = Tokenizer(train_tokenizer(corpus.training, recipe.vocab_size))
    ids, held_out_ids = (
        torch.tensor([token_id for text in texts for token_id in (END_OF_TEXT_ID, *tokenizer.encode(text))])
        for texts in (corpus.training, corpus.held_out)
    )
    held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
    model = Transformer(recipe.config())
    model.initialize(torch.Generator().manual_seed(recipe.seed))
    add_dropout(model, recipe.dropout)
    model.to(device)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak, betas=(0.9, 0.95), fused=True)
    step_loss = torch.compile(loss_of) if compiled else loss_of

    state_path = out / "training.pt"
    about = {"recipe": asdict(recipe), "training_tokens": len(ids), "held_out_bytes": held_out_bytes}
    first_step, seconds, entries = 1, 0.0, [about | {"parameters": model.num_parameters()}]
    if state_path.exists():
        state = torch.load(state_path, weights_only=True)
        if state["about"] != about:
            raise SystemExit(f"{state_path} is the state of another run: give its recipe and texts, or delete it")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_step, seconds, entries = state["step"] + 1, state["seconds"], state["entries"]
    log = Log(out, entries)
    interval = max(recipe.steps // recipe.evaluations, 1)
    start, losses = time.monotonic() - seconds, []
    bar = tqdm(range(first_step, recipe.steps + 1), initial=first_step - 1, total=recipe.steps, unit="step")
    for step in bar:
        torch.manual_seed(recipe.seed * recipe.steps + step)
        inputs, targets = batch_of(ids, recipe.batch, recipe.context)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step)
        loss = step_loss(model, inputs.to(device), targets.to(device))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
        if step % interval and step != recipe.steps:
            continue

        with evaluating(model):
            nats = validate(model, held_out_ids, recipe.context)
            samples = [write(model, tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
        best = min((entry["validation_loss"] for entry in log.entries[1:]), default=math.inf)
        if nats < best:
            save(model, tokenizer, out)
        entry = {
            "step": step,
            "tokens": step * inputs.numel(),
            "minutes": round((time.monotonic() - start) / 60, 2),
            "training_loss": round(float(torch.stack(losses).mean()), 4),
            "validation_loss": round(nats, 4),
            "bits_per_byte": round(nats * len(held_out_ids) / math.log(2) / held_out_bytes, 4),
        }
        losses = []
        log.add(entry)
        bar.write(json.dumps(entry) + "".join(f"\n  {text!r}" for text in samples))
        state = {"about": about, "step": step, "seconds": time.monotonic() - start, "entries": log.entries}
        torch.save(state | {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{state_path}.new")
        Path(f"{state_path}.new").replace(state_path)
    log.draw(out / "curve.png")
    state_path.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, the log and the state")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="with torch.compile; needs a C++ compiler")
    for field in fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(option, type=type(field.default), default=field.default, help="default: %(default)s")
    options = vars(parser.parse_args())
    recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe)})
    train(options["texts"], options["out"], recipe, device=options["device"], compiled=options["compile"])


if __name__ == "__main__":
    main()
