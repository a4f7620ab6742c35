"""One running service with the bundled model, the clients of it, and the same model in this process."""

from collections.abc import Iterator

import pytest

from forwardscope import Client
from forwardscope.local import LocalModel, load
from tests.service.running import Running, running


@pytest.fixture(scope="session")
def service() -> Iterator[Running]:
    with running(model="bundled") as service:
        yield service


def url_of(service: Running) -> str:
    return f"http://{service.address[0]}:{service.address[1]}"


@pytest.fixture(scope="session")
def client(service: Running) -> Iterator[Client]:
    with Client(url_of(service)) as client:
        yield client


@pytest.fixture(scope="session")
def local() -> LocalModel:
    return load("bundled")
