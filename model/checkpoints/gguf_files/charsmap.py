"""The characters map of SentencePiece (`tokenizer.ggml.precompiled_charsmap`), which normalizes texts.

The map is a trie in a double array (Aoe 1989, in the layout of darts-clone), and the texts that replace its keys. The
library that applies the map checks no place in the array, so a damaged map would fail at a request.
"""

import numpy as np

MAX_BYTES = 1 << 24  # that of T5 has 240 kB
BLOCK = 0xFF  # children of a unit are in the 256 units around its offset
IS_VALUE = 1 << 31


def check_charsmap(data: bytes) -> None:
    """Raise `ValueError` unless every place that a lookup can reach is inside the map."""
    size = int.from_bytes(data[:4], "little")
    if len(data) > MAX_BYTES or len(data) < 4 or not 0 < size <= len(data) - 4 or size % 4:
        raise ValueError("the sizes do not fit")
    units = np.frombuffer(data, "<u4", count=size // 4, offset=4).astype(np.int64)
    texts = np.frombuffer(data, np.uint8, offset=4 + size)
    data[4 + size :].decode()  # a UnicodeDecodeError is a ValueError
    is_value = units & IS_VALUE != 0
    children = (np.arange(len(units)) ^ ((units >> 10) << ((units & (1 << 9)) >> 6)))[~is_value]
    if (children | BLOCK >= len(units)).any():
        raise ValueError("a unit has children outside the array")
    leaves = units[children[(units[~is_value] & (1 << 8)) != 0]] & (IS_VALUE - 1)
    if (leaves >= len(texts)).any() or (texts[leaves] & 0xC0 == 0x80).any():
        raise ValueError("a key has its text outside the texts, or inside a character")
