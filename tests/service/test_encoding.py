"""Large answers are encoded in pieces, with the same bytes."""

import json

import numpy as np
import pytest
import torch

from forwardscope.results.records import Columns
from forwardscope.results.stages import Token
from model.tracing.pauses import PAUSE
from service.http.encoding import PIECE_BYTES, PIECE_NUMBERS, Base64, json_in_pieces, to_json


@pytest.mark.parametrize(
    "shape",
    [(0,), (3, 0), (2, 3), (PIECE_NUMBERS,), (PIECE_NUMBERS + 1,), (5, 7, PIECE_NUMBERS // 8), (2, PIECE_NUMBERS + 3)],
    ids=str,
)
def test_pieces_are_the_json_of_the_whole(shape: tuple[int, ...]) -> None:
    numbers = np.random.default_rng(1).integers(-9, 9, shape).astype(np.float32)
    numbers.flat[:1] = np.nan
    content = {"a": numbers, "b": [Columns(Token, [1], ["\0"])], "c": (numbers, numbers[:1], 1.5), "d": None}
    assert json_in_pieces(content) == to_json(content)


@pytest.mark.parametrize("num_bytes", [0, 1, PIECE_BYTES, PIECE_BYTES + 1, 2 * PIECE_BYTES + 2])
def test_base64_in_pieces_is_one_text(num_bytes: int) -> None:
    content = {"values": Base64(torch.arange(num_bytes, dtype=torch.int32).to(torch.uint8)), "n": 1}
    assert json_in_pieces(content) == to_json(content)
    assert json.loads(to_json(content))["n"] == 1


def test_other_work_can_run_between_the_pieces() -> None:
    count = 0

    def note() -> None:
        nonlocal count
        count += 1

    token = PAUSE.set(note)
    try:
        json_in_pieces([np.zeros((10, PIECE_NUMBERS)), Base64(torch.zeros(10 * PIECE_BYTES, dtype=torch.uint8))])
    finally:
        PAUSE.reset(token)
    assert count >= 20
