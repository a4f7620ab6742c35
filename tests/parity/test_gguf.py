"""A network from a GGUF file computes the same numbers as the network of `transformers` that the file was made from."""

from pathlib import Path

import pytest

from tests.checkpoints.test_gguf_models import CASES, tiny_config
from tests.parity.reference import assert_same_numbers
from tests.tiny import write_reference
from tests.tiny_gguf import write_gguf


@pytest.mark.parametrize("case", CASES)
def test_logits_and_every_residual_of_a_gguf_file_equal_transformers(case: str, tmp_path: Path) -> None:
    directory = tmp_path / "reference"
    directory.mkdir()
    reference = write_reference(tiny_config(*CASES[case]), directory)
    assert_same_numbers(reference, write_gguf(directory, tmp_path / "model.gguf"), num_tokens=33)
