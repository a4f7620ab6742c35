"""Texts that a network writes itself, for measurements and calibrations without texts of others."""

from model.checkpoints.load import Checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.errors import CheckpointError
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams

STRIDE = 7919  # a prime number


def generate_texts(checkpoint: Checkpoint, count: int, length: int | None = None) -> list[list[int]]:
    """Let the network generate texts of `length` tokens, or that fill its context, from its own probabilities.

    Text i has the seed i. The first tokens are spread over the vocabulary, because the first tokens of a vocabulary are
    signs and bytes, behind which a network does not write prose. Raises `CheckpointError` if the network cannot
    generate, because its logits are not numbers, for example.
    """
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    num_tokens = model.config.vocab_size if tokenizer is None else min(model.config.vocab_size, tokenizer.vocab_size)
    length = model.config.max_positions if length is None else length
    engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28))
    texts = [[seed * STRIDE % num_tokens] for seed in range(count)]
    for seed, text in enumerate(texts):
        params = GenerationParams(max_tokens=length - 1, sampling=SamplingParams(seed=seed))
        engine.add(Request(id=str(seed), prompt_ids=list(text), params=params))
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise CheckpointError(f"{checkpoint.name} cannot generate texts to measure with: {output.error}")
            texts[int(output.request_id)] += [token.token_id for token in output.tokens]
    return texts
