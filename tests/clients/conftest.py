"""Services for real clients, and OpenAI's own SDK as one of them."""

from collections.abc import Iterator

import openai
import pytest

from tests.published_models import smollm2
from tests.service.checkpoints import write_checkpoint
from tests.service.running import Running, running


@pytest.fixture(scope="session")
def bundled() -> Iterator[Running]:
    """A service with the bundled model, which has no chat template."""
    with running(model="bundled", dtype="float32", kernels="torch") as service:
        yield service


@pytest.fixture(scope="session")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A service with a random network, a chat template without tools, and a long context."""
    directory = write_checkpoint(tmp_path_factory.mktemp("checkpoints") / "roomy", max_position_embeddings=8192)
    with running(model=str(directory), max_num_seqs=4) as service:
        yield service


@pytest.fixture(scope="session")
def instruct() -> Iterator[Running]:
    """A service with SmolLM2-135M-Instruct, in float32, so that rounding swaps no likely tokens. It keeps responses."""
    with running(model=str(smollm2()), dtype="float32", threads=None, max_stored_responses=64) as service:
        yield service


@pytest.fixture(scope="session", params=["bundled", pytest.param("instruct", marks=pytest.mark.slow)])
def service(request: pytest.FixtureRequest) -> Running:
    """Each of the two services."""
    found: Running = request.getfixturevalue(request.param)
    return found


def sdk(service: Running) -> openai.OpenAI:
    """OpenAI's SDK for a service. It does not try again, so that no error is hidden."""
    return openai.OpenAI(base_url=f"{service.client.base_url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def client(service: Running) -> Iterator[openai.OpenAI]:
    with sdk(service) as client:
        yield client
