"""Drafts change no answer over HTTP, whether they come from the text or from another network, and are counted."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from forwardscope.results.server import ServiceStatus
from model.checkpoints.load import BUNDLED
from model.engine.extra_time import ExtraTime
from model.engine.step_budget import StepBudget
from service.drafts import load_draft
from service.loading import build_engine, load_model
from service.settings import Settings
from tests.ops.cpu.common import cpu_backend
from tests.service.checkpoints import write_checkpoint
from tests.service.running import running, validate

BODY = {"prompt": "to be or not to be or not to be or", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
OBJECT = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}}, "required": ["name"]}


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    cpu_backend(torch.float32)  # skips on machines without our kernels, where nothing is drafted


@pytest.fixture(scope="module")
def random_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network with random weights and the tokenizer of the bundled one, but a shorter context."""
    directory = write_checkpoint(
        tmp_path_factory.mktemp("draft") / "random", vocab_size=4096, head_dim=16, max_position_embeddings=48
    )
    shutil.copy(BUNDLED / "tokenizer.json", directory)
    return directory


@pytest.mark.slow
def test_drafts_change_no_answer_and_no_token_count_and_are_counted(
    random_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that drafts pay off on a busy machine too.
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)
    monkeypatch.setattr(StepBudget, "network_draft", lambda self, decoding, drafting, acceptance, most: min(3, most))
    answers, drafts = [], []
    options: tuple[dict[str, Any], ...] = (
        {},
        {"draft": "int4"},
        {"draft": "bundled"},
        {"draft": str(random_directory)},
        {"draft": "bundled", "quantize": "int8"},
        {"speculate": False, "quantize": "int8"},
        {"speculate": False},
    )
    for each in options:
        with running(model="bundled", dtype="float32", **each) as service:
            answer = service.answer("/generate", **BODY)
            events = service.stream(**BODY)
            ids = [event["token"]["id"] for event in events if event.get("token")]
            assert ids == answer["tokens"]
            counted = [
                service.metric(name) for name in ("generation_tokens_total", "inter_token_latency_seconds_count")
            ]
            choices = service.answer("/generate", **BODY | {"temperature": 0.7, "seed": 3, "n": 2})["choices"]
            constrained = service.answer(
                "/generate", **BODY | {"ignore_eos": False, "structured_outputs": {"json": OBJECT}}
            )
            texts = [answer["text"], constrained["text"], *(choice["text"] for choice in choices)]
            answers.append((texts, ids, answer["usage"]["completion_tokens"], counted))
            drafts.append([service.metric(f"spec_decode_num_{kind}_tokens_total") for kind in ("draft", "accepted")])
    assert answers[0] == answers[1] == answers[2] == answers[3] == answers[6]
    assert answers[4] == answers[5]
    assert answers[0][2:] == (60, [120, 118])
    assert 0 < drafts[0][1] <= drafts[0][0]
    assert all(drafts[0][0] < each[0] and each[1] > 0 for each in drafts[1:5])
    assert drafts[5] == drafts[6] == [0, 0]


def test_the_draft_network_and_its_memory_are_shown_and_counted(random_directory: Path) -> None:
    settings: dict[str, Any] = {"model": "bundled", "cache_bytes": 1 << 24}
    with running(**settings) as service:
        plain = validate(ServiceStatus, service.get("/status").json())
    with running(**settings, draft=str(random_directory)) as service:
        status = validate(ServiceStatus, service.get("/status").json())
    assert plain.draft is None
    assert plain.cache is not None
    assert status.cache is not None
    assert status.draft is not None
    assert status.draft.name == "random"
    assert status.draft.weight_bytes > 24 * 4096 * 2
    token_bytes = 2 * 2 * 2 * 16 * 2  # keys and values of 2 layers and 2 heads of 16 numbers in bfloat16
    assert status.draft.cache_bytes == token_bytes * status.cache.total_tokens
    served_bytes = 2 * 6 * 2 * 32 * 2
    assert plain.cache.total_tokens == (1 << 24) // served_bytes // 16 * 16
    assert status.cache.total_tokens == (1 << 24) // (served_bytes + token_bytes) // 16 * 16


def test_a_draft_network_that_could_not_draft_is_refused(tmp_path: Path, random_directory: Path) -> None:
    with pytest.raises(ValueError, match="--speculate false forbids"):
        Settings(draft="int4", speculate=False)
    with pytest.raises(ValueError, match="draft"):
        Settings(draft="int4", tensor_parallel=2)
    with pytest.raises(ValueError, match="draft: --model none"):
        Settings(draft="int4", model="none")
    served = load_model(Settings(model="bundled"))
    assert served is not None

    def refused(draft: Path | str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_draft(served, Settings(draft=str(draft)))

    refused(tmp_path / "missing", "draft .*missing: no such file or directory.*; for a copy .* int8, int5, int4")
    other = write_checkpoint(tmp_path / "other", head_dim=16)
    refused(other, "draft other has another tokenizer: token 0 is '<eos>' there and '.*' here")
    narrow = write_checkpoint(tmp_path / "narrow", vocab_size=4096, head_dim=4)
    shutil.copy(BUNDLED / "tokenizer.json", narrow)
    refused(narrow, "our own kernels cannot compute this network")
    (narrow / "tokenizer.json").unlink()
    refused(narrow, "without a tokenizer.json, both networks must have none")
    torch_only = load_model(Settings(model="bundled", kernels="torch"))
    assert torch_only is not None
    with pytest.raises(ValueError, match="needs our own kernels"):
        load_draft(torch_only, Settings(draft=str(random_directory), kernels="torch"))


def test_a_draft_network_that_is_not_smaller_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    settings = Settings(model="bundled", draft="bundled")
    checkpoint = load_model(settings)
    assert checkpoint is not None
    draft = load_draft(checkpoint, settings)
    assert draft is not None
    assert "the served one 5,131,520: such drafts save no time" in caplog.text
    assert build_engine(checkpoint, settings, draft).num_cache_tokens > 0


def test_traces_over_http_are_the_same_with_and_without_drafts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the events of a stream: each token has its own event, although a step gives several."""
    monkeypatch.setattr(StepBudget, "min_acceptance", lambda self, num_decoding: 0.05)
    monkeypatch.setattr(ExtraTime, "share_of_token", lambda self, sequence, num_decoding: 0.0)
    directory = write_checkpoint(tmp_path / "model", head_dim=16)
    trace = {"stages": ["blocks.*.resid_post", "blocks.0.attn.pattern"], "top_k": 2, "logit_lens": True}
    body = {"prompt": "the cat sat on the mat and the cat sat on the mat and", "max_tokens": 40, "logprobs": 2}
    body |= {"temperature": 0.05, "seed": 3, "frequency_penalty": -0.5, "ignore_eos": True, "trace": trace}
    found: list[list[Any]] = []
    for speculate in (True, False):
        with running(model=str(directory), speculate=speculate) as service:
            service.answer("/generate", prompt="the", max_tokens=4)  # nothing is drafted before a step was recorded
            answers = [service.answer("/generate", **body), service.stream(**body)]
            found.append(answers)
            num_accepted = service.metric("spec_decode_num_accepted_tokens_total")
            assert num_accepted > 5 if speculate else num_accepted == 0
    for drafted, plain in zip(*found, strict=True):
        assert _without_times(drafted) == _without_times(plain)
    assert len([event for event in found[0][1] if event.get("token")]) == 40


def _without_times(answer: Any) -> Any:
    """An answer without the values that differ between two equal requests."""
    if isinstance(answer, dict):
        return {k: _without_times(v) for k, v in answer.items() if k not in ("id", "created", "timings", "usage")}
    return [_without_times(each) for each in answer] if isinstance(answer, list) else answer
