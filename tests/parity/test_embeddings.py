"""POST /v1/embeddings returns the pooled hidden states of Hugging Face `transformers`."""

import base64
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.parity.reference import config_of
from tests.service.running import running
from tests.tiny import random_ids, write_reference


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_embeddings_are_the_pooled_hidden_states_of_transformers(family: str, tmp_path: Path) -> None:
    reference = write_reference(config_of(family, {}), tmp_path)
    texts = [random_ids(71, length, seed=length)[0].tolist() for length in (5, 30, 1, 17)]
    hidden = [reference(torch.tensor([ids]), output_hidden_states=True).hidden_states for ids in texts]
    means, last, inner = [
        np.stack([pool(states).detach().numpy() for states in hidden])
        for pool in (
            lambda states: states[-1][0].mean(0),
            lambda states: states[-1][0, -1],
            lambda states: states[1][0].mean(0),
        )
    ]
    with running(model=str(tmp_path), max_step_tokens=16, max_num_seqs=4) as service:

        def embed(**fields: object) -> np.ndarray:
            answer = service.answer("/v1/embeddings", input=texts, encoding_format="base64", **fields)
            assert answer["usage"] == {"prompt_tokens": 53, "total_tokens": 53}
            return np.stack([np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in answer["data"]])

        np.testing.assert_allclose(embed(normalize=False), means, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(embed(pooling="last", normalize=False), last, atol=1e-5, rtol=1e-5)
        np.testing.assert_allclose(embed(stage="blocks.0.resid_post", normalize=False), inner, atol=1e-5, rtol=1e-5)
        short = means[:, :8] / np.linalg.norm(means[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(embed(dimensions=8), short, atol=1e-5, rtol=1e-5)
