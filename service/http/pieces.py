"""Encode the numbers of a large tensor piece by piece: Python's lock is free in between, so other threads can run."""

import base64
from collections.abc import Iterator

import torch
from torch import Tensor

from service.http.encoding import json_array, to_json

NUMBERS = 1 << 15  # of a piece, at least one row of the last dim
BYTES = 3 << 16  # of a piece of base64; a multiple of 3, so that the pieces join to one text


def json_pieces(tensor: Tensor) -> Iterator[bytes]:
    """The numbers as nested lists."""
    num_inner = max(1, tensor[0].numel())
    yield b"["
    for start in range(0, len(tensor), step := max(1, NUMBERS // num_inner)):
        piece = tensor[start : start + step]
        yield b"," if start else b""
        if piece.dim() > 1 and num_inner > NUMBERS:
            yield from json_pieces(piece[0])
        else:
            yield to_json(json_array(piece))[1:-1]
    yield b"]"


def base64_pieces(tensor: Tensor) -> Iterator[bytes]:
    """The numbers in row-major order, little-endian, as a JSON string of base64."""
    raw = tensor.contiguous().cpu().view(-1).view(torch.uint8).numpy().data
    yield b'"'
    for start in range(0, len(raw), BYTES):
        yield base64.b64encode(raw[start : start + BYTES])
    yield b'"'
