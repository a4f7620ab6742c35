"""Texts that a network writes itself, for measurements and calibrations without texts of others."""

from model.checkpoints.load import Checkpoint
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.errors import CheckpointError
from model.text.sampling import SamplingParams
from model.text.transcript import GenerationParams


def generate_texts(checkpoint: Checkpoint, count: int, length: int | None = None) -> list[list[int]]:
    """Let the network generate texts of `length` tokens, or that fill its context, from its own probabilities.

    Text i starts with token i and has the seed i. Raises `CheckpointError` if the network cannot generate, because its
    logits are not numbers, for example.
    """
    model = checkpoint.model
    length = model.config.max_positions if length is None else length
    engine = Engine(model, None, EngineConfig(cache_bytes=1 << 28))
    for seed in range(count):
        params = GenerationParams(max_tokens=length - 1, sampling=SamplingParams(seed=seed))
        engine.add(Request(id=str(seed), prompt_ids=[seed], params=params))
    texts: dict[str, list[int]] = {str(seed): [seed] for seed in range(count)}
    while engine.has_work:
        for output in engine.step().outputs:
            if output.error is not None:
                raise CheckpointError(f"{checkpoint.name} cannot generate texts to measure with: {output.error}")
            texts[output.request_id] += [token.token_id for token in output.tokens]
    return list(texts.values())
