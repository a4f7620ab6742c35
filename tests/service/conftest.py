"""Services that the tests share: a tiny random checkpoint, and the published stories260K."""

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
    """Serves the tiny checkpoint with default settings."""
    with running(model=str(tiny_directory)) as service:
        yield service


@pytest.fixture(scope="session")
def stories() -> Iterator[Running]:
    with running(model=str(shared("checkpoints/stories260K"))) as service:
        yield service


@pytest.fixture(scope="session")
def empty() -> Iterator[Running]:
    """Serves no checkpoint: the worked examples alone."""
    with running(model="none") as service:
        yield service


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts services with other settings, which end with the test."""
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
    """A service that logs an error fails the test, whatever it answered; a test that means it clears the list."""
    handler = Errors()
    logging.getLogger().addHandler(handler)
    try:
        yield handler.messages
    finally:
        logging.getLogger().removeHandler(handler)
    assert handler.messages == []
