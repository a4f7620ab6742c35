"""The bundled checkpoint: `transformers` loads the same network from its directory, and its model card is correct."""

import json
import re
from dataclasses import fields

import pytest
import torch
import transformers

from model.checkpoints.load import BUNDLED, Checkpoint, load_checkpoint
from model.tracing.stages import stages_of
from model.tracing.tap import Recorder
from model.training.guided_heads import keys_after_earlier_occurrences
from model.training.train import Recipe, make_parser
from tests.conftest import source_tree

CARD = (BUNDLED / "README.md").read_text(encoding="utf-8")
*LOG, MEAN = (json.loads(line) for line in (BUNDLED / "training.jsonl").read_text().splitlines())
STARTS = [index for index, entry in enumerate(LOG) if "recipe" in entry]
RUNS = [LOG[start:end] for start, end in zip(STARTS, [*STARTS[1:], None], strict=True)]
PROMPTS = ("It was a dark night, and the captain", "the cat sat on", "Emma")  # as in the README


@pytest.fixture(scope="module")
def bundled() -> Checkpoint:
    return load_checkpoint(str(BUNDLED), dtype="float32")


def encode(checkpoint: Checkpoint, text: str) -> list[int]:
    assert checkpoint.tokenizer is not None
    return checkpoint.tokenizer.encode(text)


def test_transformers_loads_the_same_network_and_tokenizer(bundled: Checkpoint) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    for text in (*PROMPTS, "Two\n\n  lines,\tand a caf\u00e9 \u2603."):
        ids = encode(bundled, text)
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == text
        with torch.inference_mode():
            batch = torch.tensor([ids])
            torch.testing.assert_close(bundled.model(batch), theirs(batch).logits, atol=1e-4, rtol=1e-4)
    assert theirs.generation_config.temperature == bundled.generation.sampling["temperature"] == 0.8


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_text_does_not_loop(bundled: Checkpoint, prompt: str) -> None:
    """Among 60 tokens, no run of up to 20 tokens occurs three times in a row."""
    assert bundled.tokenizer is not None
    ids = encode(bundled, prompt)
    with torch.inference_mode():
        for _ in range(60):
            ids.append(int(bundled.model(torch.tensor([ids]))[0, -1].argmax()))
    generated = ids[-60:]
    for size in range(1, 21):
        for start in range(60 - 3 * size + 1):
            repeated = generated[start : start + size] * 3
            assert generated[start : start + 3 * size] != repeated, bundled.tokenizer.decode(generated)


def test_the_model_card_has_the_commands_of_the_runs_in_the_log() -> None:
    commands = [
        line.split()[3:] for line in CARD.splitlines() if line.startswith("      python -m model.training.train")
    ]
    assert len(commands) == len(RUNS)
    for command, (run, *evaluations, result) in zip(commands, RUNS, strict=True):
        options = vars(make_parser().parse_args(command))
        recipe = Recipe(**{field.name: options[field.name] for field in fields(Recipe)})
        assert Recipe(**run["recipe"]) == recipe
        assert evaluations[-1]["step"] == recipe.steps
        assert set(result) == {"held_out"}
    first, *_ = RUNS[0][1:]
    assert RUNS[0][-2]["validation_loss"] < first["validation_loss"]


def test_the_figures_of_the_model_card_agree_with_the_log_and_the_weights(bundled: Checkpoint) -> None:
    run, *_, last, _ = RUNS[-1]
    assert run["parameters"] == bundled.parameters.total
    for figure in (
        f"{run['parameters']:,} parameters",
        f"{run['training_tokens']:,} tokens to learn from",
        f"{run['held_out_bytes']:,} bytes",
        " + ".join(f"{entries[-2]['minutes']:.0f}" for entries in RUNS) + " minutes",
        f"{sum(entries[-2]['tokens'] for entries in RUNS) / 1e6:.1f} million tokens",
        f"{last['validation_loss']} nats",
        f"{last['copies_loss']} nats",
        f"**{MEAN['held_out']['bits_per_byte']}** bits | {MEAN['held_out']['perplexity']:.1f} |",
    ):
        assert figure in CARD, figure
    readme = (source_tree() / "README.md").read_text(encoding="utf-8")
    ngram = re.search(r"Kneser-Ney smoothing \| ([\d.]+) bits", CARD)
    assert ngram is not None
    assert f"{MEAN['held_out']['bits_per_byte']:.2f} bits a byte" in readme
    assert f"a 5-gram model of the same tokens {float(ngram[1]):.2f}" in readme


def test_the_bundled_network_has_a_previous_token_head_and_an_induction_head(bundled: Checkpoint) -> None:
    """In repeated random tokens, they attend as the model card says, and the repetition is predicted."""
    row = torch.randint(1, bundled.model.config.vocab_size, (8, 64), generator=torch.Generator().manual_seed(5))
    ids = torch.cat([torch.zeros(8, 1, dtype=torch.long), row.repeat(1, 3)], 1)
    previous, induction = "blocks.1.attn.pattern", "blocks.3.attn.pattern"
    recorder = Recorder(stage for stage in stages_of(bundled.model.config) if stage.name in (previous, induction))
    with torch.inference_mode():
        logits = bundled.model(ids, tap=recorder)
    keys = keys_after_earlier_occurrences(ids)
    shares = (
        recorder.kept[previous][:, 0].diagonal(-1, 1, 2).mean(),
        (recorder.kept[induction][:, 0] * keys).sum(-1)[keys.any(-1)].mean(),
        (logits[:, 65:-1].argmax(-1) == ids[:, 66:]).float().mean(),
    )
    found = [int(number) / 100 for number in re.findall(r"(\d+) %", CARD[CARD.index("previous-token head") :])[:3]]
    assert [float(share) for share in shares] == pytest.approx(found, abs=0.01)
