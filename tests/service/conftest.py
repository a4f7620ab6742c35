"""Services that several tests use: with a tiny random checkpoint, with the published stories260K, and with none."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import shared
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, Start, running


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_directory: Path) -> Iterator[Running]:
    """A service with the tiny checkpoint and default settings."""
    with running(model=str(tiny_directory)) as service:
        yield service


@pytest.fixture(scope="session")
def stories() -> Iterator[Running]:
    """A service with stories260K and default settings."""
    with running(model=str(shared("checkpoints/stories260K"))) as service:
        yield service


@pytest.fixture(scope="session")
def empty() -> Iterator[Running]:
    """A service without a checkpoint, which serves only the worked examples."""
    with running(model="none") as service:
        yield service


@pytest.fixture
def start() -> Iterator[Start]:
    """Start services with other settings. They stop at the end of the test."""
    with contextlib.ExitStack() as services:
        yield lambda **settings: services.enter_context(running(**settings))


class Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def errors_logged() -> Iterator[list[str]]:
    """Fail every test in which an error is logged. A test that expects an error clears the list."""
    handler = Errors()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.messages == []


THINKING_TEMPLATE = (
    "{% if reasoning_effort == 'absurd' %}{{ raise_exception('no such effort') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a random network, whose prompts end inside the thinking. The token `NUM_TOKENS` ends it."""
    directory = tmp_path_factory.mktemp("checkpoints") / "thinking"
    write_checkpoint(directory, extra_token="</think>", max_position_embeddings=256)
    (directory / "chat_template.jinja").write_text(THINKING_TEMPLATE)
    with running(model=str(directory)) as service:
        yield service
