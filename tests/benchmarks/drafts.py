"""Compare decoding with and without drafts in five tasks with real text.

    python -m tests.benchmarks.drafts --model DIRECTORY [--dtype bfloat16] [--rounds 5] [--tokens 200] [--temperature 0]
        [--draft int4]

Drafts come from earlier text (prompt lookup), and with `--draft` also from another network, as in the service.

The model must have a chat template. Two engines in this process, with and without drafts, take turns: each round runs
every task on both, and the order alternates. A ratio compares tokens per second between the first and the last token
of an answer, which is the same answer with both. Other options are passed to the service's loader, such as
`--quantize int8`.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass

import torch
from pydantic_settings import CliApp

from model.checkpoints.load import DTYPES, Checkpoint
from model.engine.engine import Engine
from model.engine.request import Request
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams
from service.drafts import load_draft
from service.loading import build_engine, load_model
from service.settings import Settings
from tests.benchmarks.draft_tasks import TASKS


@dataclass(frozen=True)
class Answer:
    """The tokens of one answer, the seconds from its first token to its last, and how many tokens were drafted."""

    ids: list[int]
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int


@dataclass(frozen=True)
class Figures:
    """The figures of one task over all rounds. `ratios` compare tokens per second with and without drafts."""

    num_tokens: int
    tokens_per_step: float
    num_drafted: int
    num_accepted: int
    tokens_per_second: float
    ratios: list[float]


def answer(engine: Engine, prompt_ids: list[int], params: GenerationParams) -> Answer:
    before = engine.stats()
    engine.add(Request(id="task", prompt_ids=prompt_ids, params=params))
    ids: list[int] = []
    first = num_steps = 0.0
    while engine.has_work:
        for output in engine.step().outputs:
            ids += [token.token_id for token in output.tokens]
        num_steps += bool(first)
        first = first or (time.perf_counter() if ids else 0.0)
    after = engine.stats()
    return Answer(
        ids,
        time.perf_counter() - first,
        int(num_steps),
        after.num_drafted - before.num_drafted,
        after.num_accepted - before.num_accepted,
    )


def compare(engines: tuple[Engine, Engine], prompt_ids: list[int], params: GenerationParams, rounds: int) -> Figures:
    """Run one task on both engines, with and without drafts, in turn."""
    drafting, plain = ([answer(engine, prompt_ids, params)] for engine in engines)  # the first ones warm up
    for number in range(rounds):
        for index in (0, 1) if number % 2 else (1, 0):
            (drafting, plain)[index].append(answer(engines[index], prompt_ids, params))
    if any(each.ids != plain[0].ids for each in (*drafting, *plain)):
        raise SystemExit("drafts changed an answer, which they must never do")
    num_after_first = len(plain[0].ids) - 1
    return Figures(
        num_tokens=len(plain[0].ids),
        tokens_per_step=num_after_first / drafting[-1].num_steps,
        num_drafted=drafting[-1].num_drafted,
        num_accepted=drafting[-1].num_accepted,
        tokens_per_second=statistics.median(num_after_first / each.seconds for each in drafting[1:]),
        ratios=[own.seconds / with_drafts.seconds for with_drafts, own in zip(drafting[1:], plain[1:], strict=True)],
    )


def make_engines(model: str, threads: int, draft: str, options: list[str]) -> tuple[Checkpoint, tuple[Engine, Engine]]:
    """One checkpoint, and two engines of it: with and without drafts."""
    torch.set_num_threads(threads)
    common = ["--model", model, "--threads", str(threads), *options]
    settings = [
        CliApp.run(Settings, cli_args=[*common, *more]) for more in (["--draft", draft], ["--speculate", "false"])
    ]
    checkpoint = load_model(settings[0])
    assert checkpoint is not None
    drafting, plain = (build_engine(checkpoint, each, load_draft(checkpoint, each)) for each in settings)
    return checkpoint, (drafting, plain)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="checkpoint with a chat template, as for the service")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=200, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--draft", default="none", help="as for the service")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    arguments, options = parser.parse_known_args()
    checkpoint, engines = make_engines(
        arguments.model, arguments.threads, arguments.draft, ["--dtype", arguments.dtype, *options]
    )
    template = checkpoint.chat_template
    if template is None:
        parser.error(f"{arguments.model} has no chat template")
    sampling = SamplingParams(temperature=arguments.temperature, seed=0)
    params = GenerationParams(max_tokens=arguments.tokens, sampling=sampling)
    sys.stdout.write("task  tokens  tokens/step  drafted  accepted  tokens/s  ratio median (min-max)\n")
    found = {}
    for name in arguments.tasks:
        ids = template.encode([{"role": "user", "content": TASKS[name]}], add_generation_prompt=True)
        task = compare(engines, ids, params, arguments.rounds)
        found[name] = vars(task)
        ratios = f"{statistics.median(task.ratios):.2f} ({min(task.ratios):.2f}-{max(task.ratios):.2f})"
        counts = f"{task.num_tokens}  {task.tokens_per_step:.2f}  {task.num_drafted}  {task.num_accepted}"
        sys.stdout.write(f"{name}: {counts}  {task.tokens_per_second:.0f}  {ratios}\n")
    own = {name: getattr(arguments, name) for name in ("model", "dtype", "threads", "temperature", "draft")}
    sys.stdout.write(json.dumps({"benchmark": "drafts", **own, "options": options, "tasks": found}) + "\n")


if __name__ == "__main__":
    main()
