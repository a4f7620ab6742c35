"""Attention with one fused kernel for all sequences of a step: `torch.nn.attention.varlen`, on devices that have it.

The kernel reads packed keys and values: those of each sequence are gathered from its blocks, without padding. (The
kernel can read blocks in place only with FlashAttention 3, which torch does not include.)
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.attention.interface import PlannedSequence, cu_seqlens, slot_mapping
from model.engine.cache import PagedCache
from model.ops.torch_attention import CausalMask, ScoreRule, fused_attention

logger = logging.getLogger(__name__)
Kernel = Callable[..., Tensor]
TOLERANCE = 2e-2  # for sums in bfloat16 of numbers of the order of 1


@dataclass(frozen=True)
class VarlenRead:
    """The cache slots (S,) that hold the keys and values of a step, in the order of the sequences.

    `query_cu_seqlens` and `key_cu_seqlens` are cumulative lengths: the index at which each sequence begins in the step
    and in `slots`.
    """

    slots: Tensor
    query_cu_seqlens: Tensor
    key_cu_seqlens: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, sequences: Sequence[PlannedSequence], block_size: int, device: torch.device) -> "VarlenRead":
        num_keys = [s.start + s.num_new for s in sequences]
        tables = [s.sequence.blocks[: -(-n // block_size)] for s, n in zip(sequences, num_keys, strict=True)]
        blocks = torch.tensor(list(chain.from_iterable(tables)), device=device)
        in_blocks = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()
        begins = cu_seqlens([len(table) * block_size for table in tables])
        slots = torch.cat([in_blocks[begin : begin + n] for begin, n in zip(begins, num_keys, strict=False)])
        num_queries = [scheduled.num_new for scheduled in sequences]
        both = [cu_seqlens(num_queries), cu_seqlens(num_keys)]
        query_cu_seqlens, key_cu_seqlens = torch.tensor(both, dtype=torch.int32, device=device)
        return cls(slots, query_cu_seqlens, key_cu_seqlens, max(num_queries), max(num_keys))

    def attend_blocks(
        self, kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor, window: int | None, scale: float
    ) -> Tensor:
        """q (N, H, D), keys and values (num_slots, Hkv, D) -> z (N, H, D).

        The last query of a sequence sees all of its keys inside the window.
        """
        return kernel(
            q,
            keys.index_select(0, self.slots),
            values.index_select(0, self.slots),
            self.query_cu_seqlens,
            self.key_cu_seqlens,
            self.max_queries,
            self.max_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": True} if q.shape[1] > keys.shape[1] else {}),
        )


class VarlenBackend:
    """`AttentionBackend` with one fused kernel for all sequences of a step."""

    reads_unwritten_slots = True  # packed keys have no such slots, so False should work; not tested on a GPU

    def __init__(self, cache: PagedCache, kernel: Kernel) -> None:
        self.cache = cache
        self.kernel = kernel

    def prepare(self, sequences: Sequence[PlannedSequence]) -> "VarlenStep":
        return VarlenStep(self, sequences)


class VarlenStep:
    """The tables of one step."""

    def __init__(self, backend: VarlenBackend, sequences: Sequence[PlannedSequence]) -> None:
        self._cache, self._kernel = backend.cache, backend.kernel
        size, device = self._cache.block_size, self._cache.device
        self.positions, self.lengths, self._slots = torch.tensor(slot_mapping(sequences, size), device=device)
        self._read = VarlenRead.of(sequences, size, device)

    def store_and_attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = self._cache
        cache.write(layer, self._slots, k, v)
        keys, values = cache.keys(layer), cache.values(layer)
        assert isinstance(keys, Tensor), "choose_attention does not choose this for a cache in 8 bits"
        assert isinstance(values, Tensor)
        return self._read.attend_blocks(self._kernel, q, keys, values, cache.windows[layer], cache.score_rule.scale)


def find_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel, if this torch and device have it and it agrees with `fused_attention` in a trial; otherwise None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    if config.attention_softcap is not None:  # the kernel has none
        return None
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
        kernel = with_groups(varlen.varlen_attn)
        agrees = check_kernel(kernel, config, dtype, device)
    except Exception as error:  # whatever the reason, `GatheredBackend` works
        logger.info("no fused attention over the paged cache: %s", error)
        return None
    if not agrees:
        logger.warning("torch's varlen_attn is not used: in a trial it differs from fused_attention")
    return kernel if agrees else None


def with_groups(kernel: Kernel) -> Kernel:
    """A kernel that takes `enable_gqa`. That of PyTorch 2.11 does not, and always shares the keys of grouped heads."""
    if "enable_gqa" in inspect.signature(kernel).parameters:
        return kernel

    def grouped(*arguments: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
        return kernel(*arguments, **options)

    return grouped


def check_kernel(kernel: Kernel, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel agrees with `fused_attention`, with and without a window.

    The trial has a decoding sequence and the end of a prompt.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = [(num, heads, config.d_head) for num, heads in ((4, config.num_heads), *[(12, config.num_kv_heads)] * 2)]
    q, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    begins = torch.tensor([[0, 1, 4], [0, 5, 12]], dtype=torch.int32, device=device)
    slots = torch.arange(12, device=device).flip(0)
    read = VarlenRead(slots, begins[0], begins[1], 3, 7)
    rule = ScoreRule(config.attention_scale)
    for window in (None, 4):
        found = read.attend_blocks(kernel, q, keys, values, window, rule.scale)
        for rows, own in ((slice(0, 1), slots[:5]), (slice(1, 4), slots[5:])):
            num_new = rows.stop - rows.start
            mask = CausalMask(len(own) - num_new, num_new, window, device)
            expected = fused_attention(q[None, rows], keys[None, own], values[None, own], mask, rule)[0]
            if not torch.allclose(found[rows].float(), expected.float(), atol=TOLERANCE):
                return False
    return True
