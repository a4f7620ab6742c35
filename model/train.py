"""How the bundled checkpoint was made: a byte-level BPE and a small Llama-shaped network, trained on text files.

    pip install -e '.[train]'
    python -m model.train TEXT... --out DIRECTORY

AdamW with decoupled weight decay (Loshchilov & Hutter 2019), linear warm-up, then a cosine to a tenth; gradients are
clipped; products are bfloat16, weights float32. The end of every text is held out, and the weights that predict it best
are kept, in Hugging Face layout, beside `training.jsonl`, the log, and `curve.png`. A run that was stopped goes on from
its last evaluation when it is started again: every step draws from a seed of its own, so that on the same device it
becomes the same run.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model.checkpoint import load_checkpoint
from model.config import ModelConfig
from model.corpus import END_OF_TEXT_ID, Corpus, train_tokenizer
from model.export import save_checkpoint
from model.perplexity import predict_texts
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

    def __post_init__(self) -> None:
        ranges = {
            "steps": self.steps >= 1,
            "vocab_size": self.vocab_size > 256,  # a token for each byte, and the end of a text
            "context": self.context >= 2,
            "batch": self.batch >= 1,
            "peak": self.peak > 0,
            "dropout": 0 <= self.dropout < 1,
            "held_out": 0 < self.held_out < 1,
            "evaluations": self.evaluations >= 1,
        }
        for name, is_valid in ranges.items():
            if not is_valid:
                raise ValueError(f"{name.replace('_', '-')}: {getattr(self, name)} is out of range")

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


class Log:
    """`training.jsonl`: the recipe, a line for every evaluation, and how the saved checkpoint does at the end."""

    def __init__(self, directory: Path, entries: list[dict[str, Any]]) -> None:
        self._path = directory / "training.jsonl"
        self.entries = entries

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if "step" in entry]

    def add(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self._path.write_text("".join(json.dumps(entry) + "\n" for entry in self.entries))

    def draw(self, path: Path) -> None:
        """Training and validation loss over tokens, as a picture."""
        from matplotlib.figure import Figure  # slow to import: after the run, not before it

        evaluations = self.evaluations
        millions = [entry["tokens"] / 1e6 for entry in evaluations]
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for key, label in (("training_loss", "training"), ("validation_loss", "held out")):
            axes.plot(millions, [entry[key] for entry in evaluations], label=label)
        axes.set(xlabel="million tokens", ylabel="nats a token")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=120)


class Run:
    """A training run: the network, its optimizer, the ids that it learns from and those that it must predict."""

    def __init__(self, corpus: Corpus, out: Path, recipe: Recipe, device: str) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        self.tokenizer = Tokenizer(train_tokenizer(corpus.training, recipe.vocab_size))
        self.ids, self.held_out_ids = (self._encode(texts) for texts in (corpus.training, corpus.held_out))
        held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
        self.tokens_per_byte = len(self.held_out_ids) / held_out_bytes
        self.model = Transformer(recipe.config())
        self.model.initialize(torch.Generator().manual_seed(recipe.seed))
        add_dropout(self.model, recipe.dropout)
        self.model.to(device)
        self.optimizer = self._new_optimizer()
        self.about = {
            "recipe": asdict(recipe),
            "training_tokens": len(self.ids),
            "held_out_bytes": held_out_bytes,
            "parameters": self.model.num_parameters(),
            "texts_sha256": hashlib.sha256("\0".join((*corpus.training, *corpus.held_out)).encode()).hexdigest(),
        }
        self.log = Log(out, [self.about])
        self.num_steps, self.seconds = 0, 0.0
        self.losses: list[Tensor] = []

    def _encode(self, texts: Sequence[str]) -> Tensor:
        ids = [token_id for text in texts for token_id in (END_OF_TEXT_ID, *self.tokenizer.encode(text))]
        if len(ids) <= self.recipe.context:
            raise ValueError(f"too little text: {len(ids)} tokens, and the context takes {self.recipe.context}")
        return torch.tensor(ids)

    def _new_optimizer(self) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        vectors = [parameter for parameter in self.model.parameters() if parameter.dim() == 1]
        decay = self.recipe.weight_decay
        groups = [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=self.recipe.peak, betas=(0.9, 0.95), fused=True)

    @property
    def state_path(self) -> Path:
        return self.out / "training.pt"

    def resume(self) -> None:
        """Go on where a run of the same recipe and texts was stopped, if one was. Raises `ValueError` where `out` holds
        the checkpoint or the state of another."""
        if not self.state_path.exists():
            if (self.out / "config.json").exists():
                raise ValueError(f"{self.out} holds a checkpoint already: give another directory, or delete it")
            return
        state = torch.load(self.state_path, weights_only=True)
        if state["about"] != self.about:
            raise ValueError(f"{self.state_path} is of another run: give its recipe and texts, or delete it")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self.seconds = state["num_steps"], state["seconds"]
        self.log = Log(self.out, state["entries"])

    def save_state(self) -> None:
        state = {
            "about": self.about,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "entries": self.log.entries,
        }
        unfinished = self.state_path.with_suffix(".new")
        torch.save(state, unfinished)
        unfinished.replace(self.state_path)

    def step(self, loss_of: Callable[[Transformer, Tensor, Tensor], Tensor]) -> None:
        start = time.monotonic()
        self.num_steps += 1
        torch.manual_seed(self.recipe.seed * self.recipe.steps + self.num_steps)
        inputs, targets = batch_of(self.ids, self.recipe.batch, self.recipe.context)
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate(self.num_steps)
        loss = loss_of(self.model, inputs.to(self.device), targets.to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.seconds += time.monotonic() - start

    def evaluate(self) -> str:
        """Keeps the weights if they are the best so far; what to show of them."""
        best = min((entry["validation_loss"] for entry in self.log.evaluations), default=math.inf)
        with evaluating(self.model):
            nats = validate(self.model, self.held_out_ids, self.recipe.context)
            if not math.isfinite(nats):
                raise ValueError("the loss is no number any more: lower --peak")
            samples = [write(self.model, self.tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
        if nats < best:
            save_checkpoint(self.model, self.tokenizer, self.out)
        entry = {
            "step": self.num_steps,
            "tokens": self.num_steps * self.recipe.batch * self.recipe.context,
            "minutes": round(self.seconds / 60, 2),
            "training_loss": round(float(torch.stack(self.losses).mean()), 4),
            "validation_loss": round(nats, 4),
            "bits_per_byte": round(nats * self.tokens_per_byte / math.log(2), 4),
        }
        self.losses = []
        self.log.add(entry)
        return json.dumps(entry) + "".join(f"\n  {text!r}" for text in samples)


def train(paths: Sequence[Path], out: Path, recipe: Recipe, *, device: str, compiled: bool) -> None:
    """Train, or go on, until the recipe's last step. Raises `ValueError` where there is too little text, or another
    run's checkpoint or state in `out`."""
    corpus = Corpus.read(paths, recipe.held_out)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(corpus, out, recipe, device)
    run.resume()
    step_loss = torch.compile(loss_of) if compiled else loss_of
    interval = max(recipe.steps // recipe.evaluations, 1)
    with tqdm(initial=run.num_steps, total=recipe.steps, unit="step") as bar:
        while run.num_steps < recipe.steps:
            run.step(step_loss)
            bar.update()
            if run.num_steps % interval == 0 or run.num_steps == recipe.steps:
                bar.write(run.evaluate())
                run.save_state()
    best = load_checkpoint(str(out)).model
    run.log.add({"held_out": predict_texts(best, run.tokenizer, corpus.held_out).figures()})
    run.log.draw(out / "curve.png")
    run.state_path.unlink()


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
    try:
        recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe)})
        train(options["texts"], options["out"], recipe, device=options["device"], compiled=options["compile"])
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "\nstopped; the same command goes on from the last evaluation\n")


if __name__ == "__main__":
    main()
