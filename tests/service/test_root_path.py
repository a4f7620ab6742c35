"""With `--root-path`, the server works behind a proxy that leaves the path below which it serves in its requests."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import pytest

from forwardscope import Client
from tests.service.running import Running, running

ROOT = "/models/small"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def below(tiny_directory: Path) -> Iterator[Running]:
    with running(model=str(tiny_directory), api_key="secret", root_path=ROOT) as service:
        yield service


def test_clients_page_and_documentation_reach_the_server_below_the_root_and_without_it(below: Running) -> None:
    for root in (ROOT, ""):
        with Client(f"http://127.0.0.1:{below.address[1]}{root}", api_key="secret") as client:
            assert client.generate([1], max_tokens=2).usage.completion_tokens == 2
        for path in ("/", "/page/page.js", "/docs", "/openapi.json", "/health", "//health"):
            assert below.get(f"{root}{path}").status_code == 200, path
    for path in (f"{ROOT}er/health", "/models/health", f"{ROOT}{ROOT}/health"):
        assert below.get(path, headers=KEY).status_code == 404, path


def test_the_key_protects_the_same_routes_below_the_root(below: Running) -> None:
    assert below.get(f"{ROOT}/model").status_code == 401
    assert below.get(f"{ROOT}/model", headers=KEY).status_code == 200


def test_the_root_itself_leads_to_the_page_whose_addresses_are_relative(below: Running) -> None:
    answer = below.get(ROOT)
    assert answer.status_code == 308
    assert urljoin(f"http://host{ROOT}", answer.headers["location"]) == f"http://host{ROOT}/"
