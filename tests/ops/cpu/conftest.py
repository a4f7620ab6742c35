"""The fixture `instructions`: run the tests with the CPU's own instructions, and with others that kernels depend on."""

from collections.abc import Iterator

import pytest

from tests.kernels import compile_kernels
from tests.ops.cpu.common import INSTRUCTIONS, compiled_for


@pytest.fixture(scope="module", params=["own", *INSTRUCTIONS])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "own":
        yield
    else:
        with compiled_for(request.param):
            compile_kernels()
            yield
