"""The accuracy of quantization on a published model: how much the perplexity of a real text grows."""

import pytest

from model.analysis.perplexity import score_ids
from model.checkpoints.load import load_checkpoint
from model.choices import Quantization
from model.ops.torch_ops import TORCH
from model.text.corpus import read_text
from tests.conftest import shared
from tests.ops.cpu.common import NO_KERNELS
from tests.published_models import smollm2

NUM_WINDOWS, WINDOW = 8, 512
# Measured on 4,096 tokens, plus the standard error of so few tokens.
MAX_INCREASE = {"int8": 0.01, "int4": 0.06}


@pytest.mark.slow
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_keeps_the_perplexity_of_a_published_model(quantization: Quantization) -> None:
    reference = load_checkpoint(str(smollm2()), dtype="float32", kernels="auto")
    if reference.model.backend is TORCH:
        pytest.skip(NO_KERNELS)
    assert reference.tokenizer is not None
    ids = reference.tokenizer.encode(read_text(shared("corpora/gutenberg/austen-emma.txt"))[:20_000])
    texts = [ids[start : start + WINDOW] for start in range(0, NUM_WINDOWS * WINDOW, WINDOW)]
    quantized = load_checkpoint(str(smollm2()), dtype="bfloat16", quantize=quantization, kernels="auto")
    before, after = (score_ids(checkpoint.model, texts).perplexity for checkpoint in (reference, quantized))
    assert after / before - 1 < MAX_INCREASE[quantization]
