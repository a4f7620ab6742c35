"""Tell networks apart whose keys and values may differ in any bit, also those of another process."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from model import __version__
from model.choices import KVCacheDtype
from model.files import file_statuses
from model.network.transformer import Transformer

NUM_TOKENS = 64  # of the pass whose result is compared


@torch.inference_mode()
def network_identity(model: Transformer, files: Sequence[Path], kv_cache_dtype: KVCacheDtype, block_size: int) -> bytes:
    """A digest of the files of the weights, and of everything that changes what the network makes of them.

    The logits of a pass show the dtype, the quantization with its calibration, the kernels, and the compiler and the
    libraries behind them.
    """
    num_tokens = min(NUM_TOKENS, model.config.max_positions)
    ids = torch.arange(num_tokens, device=model.embed.weight.device) * 7919 % model.config.vocab_size
    logits = model(ids[None], rows=[num_tokens - 1]).float().cpu().numpy()
    parts = (
        (__version__, torch.__version__, model.backend.kernels, kv_cache_dtype, block_size),
        (str(model.embed.weight.dtype), repr(model.config), file_statuses(files)),
    )
    return hashlib.sha256(repr(parts).encode() + logits.tobytes()).digest()
