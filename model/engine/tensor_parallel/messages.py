"""The messages of rank 0 to the other ranks, and their form as integers.

A pass is described by what every rank needs to compute its part: token ids, positions and blocks, and which stages the
taps of rank 0 want (as indices into `stages_of`). Taps and edits themselves stay on rank 0.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from model.engine.attention.interface import BlockTable, PlannedSequence, StepTokens


@dataclass(frozen=True)
class KeepAlive:
    """Nothing is computed; all ranks show that they are there."""


@dataclass(frozen=True)
class End:
    """The service ends."""


@dataclass(frozen=True)
class OpenCache:
    """Allocate a paged cache. `is_quantized`: keys and values are stored in 8 bits."""

    num_blocks: int
    block_size: int
    is_quantized: bool


@dataclass(frozen=True)
class ClearBlocks:
    """Fill blocks of the cache with zeros."""

    blocks: Sequence[int]


@dataclass(frozen=True)
class SinglePass:
    """Compute `ids`, one list for each sequence of the batch, without a cache."""

    ids: Sequence[Sequence[int]]
    stages: Sequence[int]


@dataclass(frozen=True)
class StepPass:
    """Compute one step of the engine. `stages` are those that the tap of each sequence wants."""

    sequences: Sequence[PlannedSequence]
    stages: Sequence[Sequence[int]]


Message = KeepAlive | End | OpenCache | ClearBlocks | SinglePass | StepPass
KINDS = (KeepAlive, End, OpenCache, ClearBlocks, SinglePass, StepPass)


def encode(message: Message) -> list[int]:
    """The message as integers."""
    numbers = [KINDS.index(type(message))]
    match message:
        case OpenCache():
            numbers += message.num_blocks, message.block_size, message.is_quantized
        case ClearBlocks():
            _put(numbers, message.blocks)
        case SinglePass():
            numbers.append(len(message.ids))
            for ids in message.ids:
                _put(numbers, ids)
            _put(numbers, message.stages)
        case StepPass():
            numbers.append(len(message.sequences))
            for each in message.sequences:
                numbers += each.start, each.is_decoding, each.sequence.length
                _put(numbers, each.new_tokens)
                _put(numbers, each.sequence.blocks)
            for stages in message.stages:
                _put(numbers, stages)
    return numbers


def decode(numbers: Sequence[int]) -> Message:
    """The message that `encode` has turned into these integers."""
    source = iter(numbers)
    kind = KINDS[next(source)]
    if kind is OpenCache:
        return OpenCache(next(source), next(source), bool(next(source)))
    if kind is ClearBlocks:
        return ClearBlocks(_take(source))
    if kind is SinglePass:
        return SinglePass([_take(source) for _ in range(next(source))], _take(source))
    if kind is StepPass:
        sequences = [_take_sequence(source) for _ in range(next(source))]
        return StepPass(sequences, [_take(source) for _ in sequences])
    return KeepAlive() if kind is KeepAlive else End()


def _put(numbers: list[int], more: Sequence[int]) -> None:
    numbers.append(len(more))
    numbers += more


def _take(source: Iterator[int]) -> list[int]:
    return list(islice(source, next(source)))


def _take_sequence(source: Iterator[int]) -> StepTokens:
    start, is_decoding, length = islice(source, 3)
    new_tokens, blocks = _take(source), _take(source)
    return StepTokens(start, new_tokens, bool(is_decoding), BlockTable(blocks, length))
