"""The noise that edits add: normal numbers that depend on the seed, the stage, the position and the index alone.

So the noise stays the same if a sequence is computed again, or divided into other passes.
"""

import hashlib
import math
from collections.abc import Iterable

from torch import Tensor

from model.ops.torch_sampling import uniforms_of


def normal_noise(seed: int, stage: str, coordinates: Iterable[tuple[int, ...]], size: int) -> Tensor:
    """Draw numbers of the standard normal distribution: (N, size) float64, a row for each of N coordinates.

    A coordinate is a position, or a position and a head. Each number is computed from two uniform numbers (Box and
    Muller 1958).
    """
    words = [f"{seed} {stage} {' '.join(map(str, each))}".encode() for each in coordinates]
    digests = [hashlib.blake2b(word, digest_size=16, person=b"noise").digest() for word in words]
    seeds = [int.from_bytes(digest[half : half + 8], "little") for half in (0, 8) for digest in digests]
    first, second = uniforms_of(seeds, size).double().chunk(2)
    return (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
