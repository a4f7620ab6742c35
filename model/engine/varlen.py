"""One fused kernel for all sequences of a step, where torch has one for the device: `torch.nn.attention.varlen`.

It reads packed keys: those of each sequence are gathered from its blocks, without padding. (The kernel can read blocks
in place only with FlashAttention 3, which torch does not bring along.)
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
from torch import Tensor

from model.attention import CausalMask, fused_attention
from model.config import ModelConfig
from model.engine.scheduler import Share

logger = logging.getLogger(__name__)
Kernel = Callable[..., Tensor]
TOLERANCE = 2e-2  # of bfloat16 sums over numbers of the order of one


@dataclass(frozen=True)
class VarlenRead:
    """Where the keys of a step's sequences lie (`slots` (S,), one sequence behind the other), and where in `slots` and
    in the step each begins."""

    slots: Tensor
    query_begins: Tensor
    key_begins: Tensor
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, shares: Sequence[Share], block_size: int, device: torch.device) -> "VarlenRead":
        num_keys = [share.start + share.num_new for share in shares]
        tables = [share.sequence.blocks[: -(-n // block_size)] for share, n in zip(shares, num_keys, strict=True)]
        blocks = torch.tensor(list(chain.from_iterable(tables)), device=device)
        in_blocks = (blocks[:, None] * block_size + torch.arange(block_size, device=device)).flatten()
        begins = accumulate([0, *(len(table) * block_size for table in tables)])
        slots = torch.cat([in_blocks[begin : begin + n] for begin, n in zip(begins, num_keys, strict=False)])
        num_queries = [share.num_new for share in shares]
        both = [[0, *accumulate(num_queries)], [0, *accumulate(num_keys)]]
        query_begins, key_begins = torch.tensor(both, dtype=torch.int32, device=device)
        return cls(slots, query_begins, key_begins, max(num_queries), max(num_keys))

    def attend(
        self, kernel: Kernel, q: Tensor, keys: Tensor, values: Tensor, window: int | None, *, scale: float
    ) -> Tensor:
        """q (N, H, D), keys and values (num_slots, Hkv, D) -> z (N, H, D); the last query sees all keys but those
        outside the window."""
        return kernel(
            q,
            keys.index_select(0, self.slots),
            values.index_select(0, self.slots),
            self.query_begins,
            self.key_begins,
            self.max_queries,
            self.max_keys,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),
            **({"enable_gqa": True} if q.shape[1] > keys.shape[1] else {}),
        )


def find_kernel(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernel | None:
    """The kernel, if this torch and device have it and it gives on a trial what the formula gives; else None."""
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return None
    try:
        varlen = importlib.import_module("torch.nn.attention.varlen")
        kernel: Kernel = varlen.varlen_attn
        agrees = check_kernel(kernel, config, dtype, device)
    except Exception as error:  # whatever it lacks: there is another way
        logger.info("no fused attention over the paged cache: %s", error)
        return None
    if not agrees:
        logger.warning("torch's varlen_attn is not used: on a trial it differs from the formula")
    return kernel if agrees else None


def check_kernel(kernel: Kernel, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    """Two sequences, one that streams and one with the end of its prompt, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(num, heads, config.d_head) for num, heads in ((4, config.num_heads), *[(12, config.num_kv_heads)] * 2)]
    q, keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes)
    begins = torch.tensor([[0, 1, 4], [0, 5, 12]], dtype=torch.int32, device=device)
    slots = torch.arange(12, device=device).flip(0)
    read = VarlenRead(slots, begins[0], begins[1], 3, 7)
    scale = config.d_head**-0.5
    for window in (None, 4):
        found = read.attend(kernel, q, keys, values, window, scale=scale)
        for rows, own in ((slice(0, 1), slots[:5]), (slice(1, 4), slots[5:])):
            num_new = rows.stop - rows.start
            mask = CausalMask(len(own) - num_new, num_new, window, device)
            expected = fused_attention(q[None, rows], keys[None, own], values[None, own], mask, scale=scale)[0]
            if not torch.allclose(found[rows].float(), expected.float(), atol=TOLERANCE):
                return False
    return True
