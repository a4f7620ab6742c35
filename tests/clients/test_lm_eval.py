"""lm-evaluation-harness finds the same numbers through the service as with its own `hf` backend on the same weights."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoints.load import BUNDLED
from tests.clients.evaluation_tasks import TASKS, write_tasks
from tests.published_models import smollm2
from tests.service.running import Running, running

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[evaluation]'")
pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MAX_LENGTH = 512
# The harness sends one token less than max_length, because the service generates one. Its `hf` backend takes one more,
# because it does not feed the last token. So the same windows of a long text need two more here.
API_LENGTH_DIFFERENCE = 2
Results = dict[str, Any]  # by task: the result of each document; and "metrics"


@dataclass(frozen=True)
class Peer:
    """A service, and the harness's own `hf` backend on the same weights. Both compute in float32."""

    service: Running
    directory: Path
    tasks: Any
    reference: Callable[..., Results]

    def evaluate(self, tasks: tuple[str, ...] = tuple(TASKS), **model_args: Any) -> Results:
        """The results of the harness through the service."""
        fields = {
            "model": self.service.checkpoint.name,
            "base_url": f"{self.service.client.base_url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "max_length": MAX_LENGTH,
            "max_retries": 1,
        }
        if model_args.get("tokenizer_backend") != "remote":
            fields["tokenizer"] = str(self.directory)
        return evaluate("local-completions", self.tasks, tasks, fields | model_args)


def evaluate(
    model: Any, manager: Any, tasks: tuple[str, ...], model_args: dict[str, Any] | None = None, *, chat: bool = False
) -> Results:
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=model_args,
        tasks=list(tasks),
        task_manager=manager,
        bootstrap_iters=0,
        apply_chat_template=chat,
    )
    results: Results = {
        name: [
            [first for first, *_ in sample["resps"]] for sample in sorted(samples, key=lambda sample: sample["doc_id"])
        ]
        for name, samples in found["samples"].items()
    }
    names = ("acc,none", "acc_norm,none", "word_perplexity,none", "bits_per_byte,none")
    return results | {
        "metrics": {
            (task, name): values[name] for task, values in found["results"].items() for name in names if name in values
        }
    }


@pytest.fixture(scope="module")
def peer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Peer]:
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = BUNDLED if request.param == "bundled" else smollm2()
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(directory)

    @cache
    def reference(max_length: int, names: tuple[str, ...] = tuple(TASKS), *, chat: bool = False) -> Results:
        hf = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=1, device="cpu")
        return evaluate(hf, tasks, names, chat=chat)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for each other are slow on a busy machine
    with running(model=str(directory), dtype="float32") as service:
        yield Peer(service, directory, tasks, reference)
    torch.set_num_threads(threads)


def assert_same(found: Results, expected: Results) -> None:
    """The same generations and greedy choices. Log-probabilities may differ by float32's rounding."""
    compared = 0
    for name in set(TASKS) & set(found):
        assert len(found[name]) == len(expected[name]) == len(TASKS[name][0])
        for own, other in zip(found[name], expected[name], strict=True):
            if name == "our_continuations":
                assert own == other
            elif name == "our_texts":
                assert own[0] == pytest.approx(other[0], abs=1e-3)
            else:
                for (own_logprob, own_greedy), (logprob, is_greedy) in zip(own, other, strict=True):
                    assert own_logprob == pytest.approx(logprob, abs=1e-3)
                    assert own_greedy == is_greedy
            compared += 1
    assert compared > 4
    for name, value in found["metrics"].items():
        assert value == pytest.approx(expected["metrics"][name], rel=1e-4), name


@pytest.mark.parametrize(
    ("peer", "model_args"),
    [
        ("bundled", {}),
        ("bundled", {"batch_size": 8}),
        ("bundled", {"batch_size": 8, "num_concurrent": 4}),
        ("bundled", {"tokenized_requests": False}),
        ("bundled", {"tokenized_requests": False, "batch_size": 3, "num_concurrent": 4}),
        ("bundled", {"tokenizer_backend": "remote"}),
        ("bundled", {"tokenizer_backend": "remote", "tokenized_requests": False}),
        ("smollm2", {"batch_size": 8, "num_concurrent": 4}),
        ("smollm2", {"tokenizer_backend": "remote", "tokenized_requests": False}),
    ],
    indirect=["peer"],
    scope="module",
    ids=str,
)
def test_results_are_those_of_the_hf_backend(peer: Peer, model_args: dict[str, Any]) -> None:
    assert_same(peer.evaluate(**model_args), peer.reference(MAX_LENGTH))


@pytest.mark.parametrize("peer", ["bundled"], indirect=True, scope="module")
def test_windows_of_long_texts_are_those_of_the_hf_backend(peer: Peer) -> None:
    """Contexts are truncated, and the long texts are computed in several windows."""
    length = 34
    tasks = ("our_choices", "our_texts")
    expected = peer.reference(length, tasks)
    assert expected["our_texts"] != peer.reference(MAX_LENGTH)["our_texts"]
    assert expected["our_choices"] != peer.reference(MAX_LENGTH)["our_choices"]
    found = peer.evaluate(tasks, max_length=length + API_LENGTH_DIFFERENCE, batch_size=8, num_concurrent=4)
    assert_same(found, expected)


@pytest.mark.parametrize("peer", ["bundled"], indirect=True, scope="module")
def test_generations_after_truncated_contexts_are_those_of_the_hf_backend(peer: Peer) -> None:
    """For generations, the harness's lengths differ by one: the service's own token is counted once."""
    length = 48
    tasks = ("our_continuations",)
    expected = peer.reference(length, tasks)
    assert expected["our_continuations"] != peer.reference(MAX_LENGTH)["our_continuations"]
    assert_same(peer.evaluate(tasks, max_length=length + 1), expected)


@pytest.mark.parametrize("peer", ["bundled"], indirect=True, scope="module")
def test_cached_prefixes_change_no_bit(peer: Peer) -> None:
    """The second evaluation finds blocks of all prompts in the cache, and its generations use them.

    Log-probabilities of prompts are always computed anew: none of their tokens are taken from the cache.
    """
    first = peer.evaluate(batch_size=8, num_concurrent=4)
    cached = peer.service.metric("prefix_cache_hits_total")
    second = peer.evaluate(batch_size=4, num_concurrent=2)
    assert peer.service.metric("prefix_cache_hits_total") > cached
    if peer.service.checkpoint.model.batch_invariant:
        assert second == first
    assert_same(second, first)
    cached = peer.service.metric("prefix_cache_hits_total")
    peer.evaluate(("our_choices", "our_texts"))
    assert peer.service.metric("prefix_cache_hits_total") == cached


@pytest.mark.parametrize("peer", ["smollm2"], indirect=True, scope="module")
@pytest.mark.parametrize("model_args", [{}, {"num_concurrent": 4}], ids=str)
def test_answers_of_the_chat_route_are_those_of_the_hf_backend(peer: Peer, model_args: dict[str, Any]) -> None:
    tasks = ("our_continuations",)
    fields = {
        "model": peer.service.checkpoint.name,
        "base_url": f"{peer.service.client.base_url}/v1/chat/completions",
        "max_retries": 1,
    }
    found = evaluate("local-chat-completions", peer.tasks, tasks, fields | model_args, chat=True)
    expected = peer.reference(MAX_LENGTH, tasks, chat=True)
    assert found["our_continuations"] != peer.reference(MAX_LENGTH)["our_continuations"]
    assert_same(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["smollm2"], indirect=True, scope="module")
@pytest.mark.parametrize("index", [0, 1])
def test_the_commands_of_the_page_print_their_results(peer: Peer, index: int, tmp_path: Path) -> None:
    """With our tasks, because the public ones must be downloaded."""
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    command = re.findall(r"^\.venv/bin/lm_eval (run(?:.*\\\n)*.*)$", page, re.M)[index].replace("\\\n", " ")
    command = command.replace("http://localhost:8000", str(peer.service.client.base_url))
    for public, task in {"arc_easy": "our_choices", "gsm8k": "our_continuations"}.items():
        command = command.replace(public, task)
    write_tasks(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", *command.split(), "--include_path", str(tmp_path), "--limit", "2"],
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\|our_(choices|continuations) *\|", done.stdout, re.M), done.stdout
