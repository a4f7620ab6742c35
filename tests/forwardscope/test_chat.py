"""Chat with a real model: in this process, over HTTP, streamed, and on the terminal, with the same answer."""

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from forwardscope import ApiError, Client
from forwardscope.local import load
from tests.forwardscope.conftest import url_of
from tests.published_models import smollm2
from tests.service.running import ROOT, Running, running

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def chatting() -> Iterator[Running]:
    with running(model=str(smollm2()), dtype="float32") as service:
        yield service


@pytest.mark.slow
def test_an_answer_is_the_same_in_this_process_over_http_and_streamed(chatting: Running) -> None:
    local = load(str(smollm2()), dtype="float32")
    with Client(url_of(chatting)) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTION}]
        for _ in range(2):
            ours, theirs = local.chat(messages, **GREEDY), client.chat(messages, **GREEDY)
            streamed = list(client.stream_chat(messages, **GREEDY))
            assert ours.text == theirs.text == "".join(event.text for event in streamed)
            assert ours.finish_reason == theirs.finish_reason == streamed[-1].finish_reason
            assert ours.usage.prompt_tokens == theirs.usage.prompt_tokens
            assert ours.usage.completion_tokens == theirs.usage.completion_tokens
            messages += [theirs.message, {"role": "user", "content": "And of Italy?"}]
        assert messages[1]["content"] == ANSWER


@pytest.mark.slow
def test_a_wrong_field_of_a_chat_is_named(chatting: Running) -> None:
    with Client(url_of(chatting)) as client, pytest.raises(ApiError) as raised:
        client.chat(QUESTION, temprature=1)
    assert raised.value.param == "temprature"


def test_a_model_without_a_template_is_a_clear_error(client: Client) -> None:
    with pytest.raises(ApiError, match="chat template"):
        client.chat(QUESTION)


@pytest.mark.slow
def test_the_chat_command_prints_the_answer(chatting: Running) -> None:
    command = [sys.executable, "-m", "service", "chat", url_of(chatting), "--temperature", "0"]
    found = subprocess.run(command, input=f"{QUESTION}\n", capture_output=True, text=True, cwd=ROOT)
    assert (found.returncode, found.stdout) == (0, f"{ANSWER}\n"), found.stderr
