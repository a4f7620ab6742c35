"""The noise that edits add: normal numbers that follow from the seed, the stage, the position and the index alone.

So the noise is the same in whatever parts a sequence is computed, and how often.
"""

import hashlib
import math
from collections.abc import Iterable

from torch import Tensor

from model.ops.torch_sampling import uniforms_of


def normal_noise(seed: int, stage: str, places: Iterable[tuple[int, ...]], size: int) -> Tensor:
    """Numbers of the standard normal distribution: (N, size) float64, a row for each of N places.

    A place is a position, or a position and a head. Two uniform numbers make each number (Box and Muller 1958).
    """
    words = [f"{seed} {stage} {' '.join(map(str, place))}".encode() for place in places]
    digests = [hashlib.blake2b(word, digest_size=16, person=b"noise").digest() for word in words]
    first, second = (
        uniforms_of([int.from_bytes(digest[half : half + 8], "little") for digest in digests], size).double()
        for half in (0, 8)
    )
    return (-2 * first.log()).sqrt() * (2 * math.pi * second).cos()
