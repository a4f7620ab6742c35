"""Train a byte-level BPE tokenizer and a small Llama network on text files, as for the bundled checkpoint.

    pip install -e '.[train]'
    python -m model.training.train TEXT... --out DIRECTORY

The optimizer is AdamW with decoupled weight decay (Loshchilov & Hutter 2019). The learning rate rises linearly, then
falls along a cosine to a tenth of its peak. Gradients are clipped. Matrix products are computed
in bfloat16; the weights stay float32.

With `--start`, a checkpoint is trained further, with its tokenizer. `--guidance` and `--copies` form an induction head
(`guided_heads.py`). With `--name-weight`, a name of the stories counts more than another token. The model card of the
bundled checkpoint has the runs that made it.

The end of every text is held out. The weights that predict the held-out text best are saved in Hugging Face layout,
with the log `training.jsonl` and the plot `curve.png`. If a run is stopped and started again, it continues from its
last evaluation. Every step has its own random seed, so on the same device the result is that of an uninterrupted run.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from model.analysis.perplexity import score_texts
from model.checkpoints.load import load_checkpoint
from model.command_line import Parser, number
from model.config import ModelConfig
from model.network.parameters import count_parameters
from model.network.transformer import Transformer
from model.text.corpus import END_OF_TEXT_ID, Corpus, train_tokenizer
from model.text.sampling import Sampler, SamplingParams, sample
from model.text.tokenizer import Tokenizer
from model.training.export import save_checkpoint
from model.training.guided_heads import GuidedHeads, draw_copies
from model.training.log import Log
from model.training.stories import words

SAMPLE_PROMPTS = ("Once upon a time", "It was a dark night, and the captain")


@dataclass(frozen=True)
class Recipe:
    """The sizes of the network and the settings of its training. The defaults are those of the bundled checkpoint.

    `peak` is the highest learning rate. `guidance` is the weight of the losses of two guided heads, in the layers
    `previous_layer` and `induction_layer`, and `copies` the number of windows of a batch that repeat random tokens.
    `name_weight` is the weight of a token that is a name of the stories, where that of another token is 1.
    """

    steps: int = 5000
    vocab_size: int = 4096
    d_model: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    context: int = 512
    batch: int = 8
    peak: float = 2e-3
    weight_decay: float = 0.1
    dropout: float = 0.0
    guidance: float = 0.0
    copies: int = 0
    name_weight: float = 1.0
    previous_layer: int = 1
    induction_layer: int = 3
    held_out: float = 0.02
    evaluations: int = 45
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "steps": self.steps >= 1,
            "vocab_size": self.vocab_size > 256,  # one token for each byte, and the end of a text
            "context": self.context >= 2,
            "batch": self.batch >= 1,
            "peak": self.peak > 0,
            "dropout": 0 <= self.dropout < 1,
            "guidance": self.guidance >= 0,
            "name_weight": self.name_weight > 0,
            "copies": 0 <= self.copies < self.batch and (self.copies == 0 or self.context >= 8),
            "previous_layer": self.guidance == 0 or 0 <= self.previous_layer < self.induction_layer,
            "induction_layer": self.guidance == 0 or self.induction_layer < self.layers,
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
        """The learning rate of a step: it rises linearly to `peak`, then falls along a cosine to a tenth of `peak`.

        `warm_up` is the share of all steps in which it rises.
        """
        progress = step / self.steps
        if progress < warm_up:
            return self.peak * progress / warm_up
        return self.peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up))))


def mean_loss(model: Transformer, inputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Mean cross entropy in nats, with products in bfloat16: inputs and targets (B, T) int64 -> ().

    `weights` (vocabulary,) are those of the targets in the mean; without them, all are equal.
    """
    with torch.autocast(inputs.device.type, torch.bfloat16):
        logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), weights)


def find_names(tokenizer: Tokenizer) -> Tensor:
    """1 for each token that is a name of the stories after a space, 0 for any other: (vocabulary,) float32."""
    is_name = torch.zeros(tokenizer.vocab_size)
    for name in (*words.GIRLS, *words.BOYS):
        ids = tokenizer.encode(f" {name}")
        if len(ids) == 1:
            is_name[ids] = 1
    return is_name


def add_dropout(model: Transformer, probability: float) -> None:
    """Add dropout (Srivastava et al. 2014) to the outputs of the embedding, attention and feed-forward modules.

    It acts in training mode only.
    """

    def drop(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return F.dropout(out, probability, module.training)

    model.embed.register_forward_hook(drop)
    for block in model.blocks:
        for part in ("attn", "mlp"):
            block.get_submodule(part).register_forward_hook(drop)


def validate(
    model: Transformer, ids: Tensor, length: int, weights: Tensor | None = None, num_windows: int = 64
) -> float:
    """Mean loss over evenly spaced windows of the held-out ids (N,), in nats per token.

    Windows without a token that has a weight (vocabulary,) are left out.
    """
    losses = []
    for start in torch.linspace(0, len(ids) - length - 1, num_windows).long():
        window = ids[start : start + length + 1].to(model.embed.weight.device)
        if weights is None or weights[window[1:]].any():
            losses.append(float(mean_loss(model, window[None, :-1], window[None, 1:], weights)))
    return sum(losses) / len(losses)


def generate_sample(model: Transformer, tokenizer: Tokenizer, prompt: str) -> str:
    """The prompt and up to 60 generated tokens, at temperature 0.8."""
    ids = tokenizer.encode(prompt)
    num_tokens = min(60, model.config.max_positions - len(ids))
    sampler = Sampler(SamplingParams(temperature=0.8, seed=0), ids)
    cache = model.new_cache(len(ids) + num_tokens)
    new_ids, generated_ids = ids, []
    for _ in range(num_tokens):
        inputs = torch.tensor([new_ids], device=model.embed.weight.device)
        logits = model(inputs, cache, rows=[len(new_ids) - 1])[0]
        choice = sample(logits.cpu(), [sampler])[0]
        assert isinstance(choice, int)
        new_ids = [choice]
        generated_ids.append(choice)
    return prompt + tokenizer.decode_inside(generated_ids)


class Run:
    """A training run: the network, its optimizer, the token ids to train on, and the held-out token ids.

    The log begins with that of its start, the recipe and a digest of the texts. They identify the run.
    """

    def __init__(self, corpus: Corpus, out: Path, recipe: Recipe, device: str, start: Path | None = None) -> None:
        self.recipe, self.out, self.device = recipe, out, device
        first = None if start is None else load_checkpoint(str(start))
        if first is None:
            self.tokenizer = Tokenizer(train_tokenizer(corpus.training, recipe.vocab_size))
        elif first.tokenizer is None:
            raise ValueError(f"{start} has no tokenizer; start with a checkpoint that has one")
        else:
            self.tokenizer = first.tokenizer
        self.ids, self.held_out_ids = (self._encode(texts) for texts in (corpus.training, corpus.held_out))
        held_out_bytes = sum(len(text.encode()) for text in corpus.held_out)
        self.tokens_per_byte = len(self.held_out_ids) / held_out_bytes
        self.model = Transformer(recipe.config())
        self.model.initialize(torch.Generator().manual_seed(recipe.seed))
        if first is not None:
            if first.model.config != self.model.config:
                raise ValueError(f"{start} is another kind of network than the recipe describes; use its sizes")
            self.model.load_state_dict(first.model.state_dict())
        add_dropout(self.model, recipe.dropout)
        self.model.to(device)
        self.is_name = find_names(self.tokenizer).to(device)
        self.optimizer = self._new_optimizer()
        about = {
            "recipe": asdict(recipe),
            "training_tokens": len(self.ids),
            "held_out_bytes": held_out_bytes,
            "parameters": count_parameters(self.model.config).total,
            "texts_sha256": hashlib.sha256("\0".join((*corpus.training, *corpus.held_out)).encode()).hexdigest(),
        }
        self.log = Log(out, [*Log.read(start), about])
        self.num_steps, self.seconds = 0, 0.0
        self.losses: list[Tensor] = []

    def _encode(self, texts: Sequence[str]) -> Tensor:
        ids = [token_id for text in texts for token_id in (END_OF_TEXT_ID, *self.tokenizer.encode(text))]
        if len(ids) <= self.recipe.context:
            raise ValueError(f"too little text: {len(ids)} tokens, but the context has {self.recipe.context}")
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
        """Continue a stopped run with the same recipe and texts, if there is one.

        Raises `ValueError` if `out` holds a finished checkpoint, or the state of a run with other texts, another
        recipe or another start.
        """
        if not self.state_path.exists():
            if (self.out / "config.json").exists():
                raise ValueError(f"{self.out} already holds a checkpoint; choose another directory, or delete it")
            return
        state = torch.load(self.state_path, weights_only=True)
        if state["entries"][: len(self.log.entries)] != self.log.entries:
            raise ValueError(f"{self.state_path} belongs to another run; use its recipe, texts and start, or delete it")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps, self.seconds = state["num_steps"], state["seconds"]
        self.log = Log(self.out, state["entries"])

    def save_state(self) -> None:
        """Replace the saved state by renaming a complete file, so that a killed run keeps its last state."""
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "seconds": self.seconds,
            "entries": self.log.entries,
        }
        unfinished = self.state_path.with_suffix(".new")
        torch.save(state, unfinished)
        unfinished.replace(self.state_path)

    def step(self, compute_loss: Callable[[Transformer, Tensor, Tensor], Tensor]) -> None:
        start = time.monotonic()
        self.num_steps += 1
        torch.manual_seed(self.recipe.seed * self.recipe.steps + self.num_steps)
        inputs, targets = self._draw_batch()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate(self.num_steps)
        loss = compute_loss(self.model, inputs.to(self.device), targets.to(self.device))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type annotations for it
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.losses.append(loss.detach())
        self.seconds += time.monotonic() - start

    def _draw_batch(self) -> tuple[Tensor, Tensor]:
        """Draw random windows: inputs, and the token that follows each input, both (batch, context)."""
        recipe = self.recipe
        starts = torch.randint(len(self.ids) - recipe.context, (recipe.batch - recipe.copies,))
        windows = torch.stack([self.ids[start : start + recipe.context + 1] for start in starts])
        if recipe.copies == 0:
            return windows[:, :-1], windows[:, 1:]
        copies = draw_copies(self.ids, recipe.vocab_size, recipe.copies, recipe.context)
        return torch.cat([windows[:, :-1], copies[0]]), torch.cat([windows[:, 1:], copies[1]])

    def evaluate(self) -> str:
        """Compute the losses on held-out text, on copies and on names, save the weights if their sum is the lowest so
        far, and return a report to print.

        Raises `ValueError` if the loss is not finite.
        """
        self.model.eval()
        with torch.no_grad():
            nats = validate(self.model, self.held_out_ids, self.recipe.context)
            losses = {"validation_loss": round(nats, 4)}
            if self.recipe.copies:
                losses["copies_loss"] = round(self._validate_copies(), 4)
            if self.recipe.name_weight != 1:
                nats_of_names = validate(self.model, self.held_out_ids, self.recipe.context, self.is_name)
                losses["names_loss"] = round(nats_of_names, 4)
            if not math.isfinite(sum(losses.values())):
                raise ValueError("the loss is not finite: use a lower peak learning rate, --peak")
            samples = [generate_sample(self.model, self.tokenizer, prompt) for prompt in SAMPLE_PROMPTS]
        self.model.train()
        if sum(losses.values()) < min(
            (sum(entry[key] for key in losses) for entry in self.log.evaluations), default=math.inf
        ):
            save_checkpoint(self.model, self.tokenizer, self.out)
        entry = {
            "step": self.num_steps,
            "tokens": self.num_steps * self.recipe.batch * self.recipe.context,
            "minutes": round(self.seconds / 60, 2),
            "training_loss": round(float(torch.stack(self.losses).mean()), 4),
            **losses,
            "bits_per_byte": round(nats * self.tokens_per_byte / math.log(2), 4),
        }
        self.losses = []
        self.log.add(entry)
        return json.dumps(entry) + "".join(f"\n  {text!r}" for text in samples)

    def _validate_copies(self) -> float:
        """Mean loss of repeated random tokens, always the same ones, in nats."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            inputs, targets = draw_copies(self.ids, self.recipe.vocab_size, self.recipe.batch, self.recipe.context)
        return float(mean_loss(self.model, inputs.to(self.device), targets.to(self.device)))


def train(
    texts: Sequence[Path],
    out: Path,
    recipe: Recipe,
    *,
    prose: Sequence[Path] = (),
    start: Path | None = None,
    device: str,
    compiled: bool,
) -> None:
    """Train, or continue a stopped run, until the last step of the recipe.

    In the files of `prose`, the lines of each paragraph are joined. A new run begins with the checkpoint `start`.

    Raises `ValueError` if there is too little text, if `out` holds a finished checkpoint or the state of another run,
    if `start` is no network of the recipe's sizes, or if the loss becomes infinite or NaN.
    """
    corpus = Corpus.read(texts, recipe.held_out, prose)
    out.mkdir(parents=True, exist_ok=True)
    run = Run(corpus, out, recipe, device, start)
    run.resume()
    loss = mean_loss
    if recipe.guidance:
        loss = GuidedHeads(recipe.previous_layer, recipe.induction_layer, recipe.guidance).loss
    weights = None if recipe.name_weight == 1 else 1 + (recipe.name_weight - 1) * run.is_name
    step_loss = partial(torch.compile(loss) if compiled else loss, weights=weights)
    interval = max(recipe.steps // recipe.evaluations, 1)
    with tqdm(initial=run.num_steps, total=recipe.steps, unit="step") as bar:
        while run.num_steps < recipe.steps:
            run.step(step_loss)
            bar.update()
            if run.num_steps % interval == 0 or run.num_steps == recipe.steps:
                bar.write(run.evaluate())
                run.save_state()
    best = load_checkpoint(str(out)).model
    run.log.add({"held_out": score_texts(best, run.tokenizer, corpus.held_out).figures()})
    run.log.plot(out / "curve.png")
    run.state_path.unlink()


def make_parser() -> Parser:
    parser = Parser(description="Train a small network on text files.")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument(
        "--prose",
        nargs="+",
        action="extend",
        type=Path,
        default=[],
        help="books of prose, in which the lines of a paragraph are joined",
    )
    parser.add_argument("--start", type=Path, help="directory of a checkpoint to train further")
    parser.add_argument("--out", type=Path, required=True, help="directory of the checkpoint, the log and the state")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--compile", dest="compiled", action="store_true", help="use torch.compile, which needs a C++ compiler"
    )
    for field in fields(Recipe):
        option = "--" + field.name.replace("_", "-")
        parser.add_argument(
            option,
            type=number(int if isinstance(field.default, int) else float),
            default=field.default,
            help="default: %(default)s",
        )
    return parser


def main() -> None:
    parser = make_parser()
    options = vars(parser.parse_args())
    try:
        recipe = Recipe(**{field.name: options.pop(field.name) for field in fields(Recipe)})
        train(recipe=recipe, **options)
    except (ValueError, OSError) as error:
        parser.exit(1, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(
            130, "\nstopped; the same command continues from the last evaluation, or from the start if there was none\n"
        )


if __name__ == "__main__":
    main()
