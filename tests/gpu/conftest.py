"""The device of the tests of a GPU. With FORWARDSCOPE_TEST_DEVICE=cpu a CPU runs them, to try the tests themselves."""

import os

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    name = os.environ.get("FORWARDSCOPE_TEST_DEVICE", "cuda")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    return torch.device(name)
