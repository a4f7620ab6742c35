"""Tests that use `instructions` run with the CPU's own, and with others that decide what the kernels do."""

from collections.abc import Iterator

import pytest

from tests.kernels.common import INSTRUCTIONS, compiled_for


@pytest.fixture(scope="module", params=["own", *INSTRUCTIONS])
def instructions(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param == "own":
        yield
    else:
        with compiled_for(request.param):
            yield
