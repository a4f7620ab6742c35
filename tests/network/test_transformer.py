"""The network as a whole: batches, selected rows, gradients and the tied head."""

import pytest
import torch

from model.config import ModelConfig
from model.network.transformer import Transformer
from tests.tiny import CONFIGS, ROUNDING, build, quick, random_ids


@pytest.mark.parametrize("name", CONFIGS)
def test_a_prompt_gets_the_same_logits_alone_and_in_a_batch(name: str) -> None:
    model = build(CONFIGS[name])
    ids = random_ids(67, 17, batch=3)
    alone = torch.cat([model(row[None]) for row in ids])
    torch.testing.assert_close(model(ids), alone, atol=ROUNDING[torch.float32], rtol=ROUNDING[torch.float32])


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_selected_rows_equal_these_rows_of_a_full_pass(name: str) -> None:
    model = build(CONFIGS[name])
    ids = random_ids(67, 17, batch=2)
    rows = [16, 0, 5]
    found = model(ids, rows=rows)
    assert found.shape == (2, 3, 67)
    torch.testing.assert_close(found, model(ids)[:, rows], atol=ROUNDING[torch.float32], rtol=ROUNDING[torch.float32])


def trainable(config: ModelConfig) -> Transformer:
    model = Transformer(config)
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    return model


def loss_of(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_reach_every_parameter(name: str) -> None:
    model = trainable(CONFIGS[name])
    loss_of(model, random_ids(67, 33, batch=4)).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.isfinite().all(), parameter_name
        if not parameter_name.endswith("attn.qkv.bias"):
            assert parameter.grad.abs().max() > 0, parameter_name
            continue
        # Without rotation, the bias of the keys adds the same number to all scores of a query, so its gradient is zero.
        config, rows = model.config, parameter.grad.unflatten(0, (-1, model.config.d_head))
        queries, keys, values = rows.split((config.num_heads, config.num_kv_heads, config.num_kv_heads))
        assert queries.abs().max() > 0
        assert values.abs().max() > 0
        assert config.positions != "rotary" or keys.abs().max() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_a_tied_head_is_the_embedding_and_an_untied_one_is_not(name: str) -> None:
    model = build(CONFIGS[name])
    assert (model.head.weight is model.embed.weight) == model.config.tied_head
    assert torch.equal(model.get_parameter("head.weight"), model.embed.weight) == model.config.tied_head


@pytest.mark.parametrize("name", quick(6, CONFIGS))
def test_a_tiny_network_learns_to_predict_one_batch(name: str) -> None:
    """From chance (ln 67 = 4.2 nats) to near certainty. This needs context, since each token has two successors."""
    model = trainable(CONFIGS[name])
    ids = torch.cat((torch.arange(12), torch.arange(0, 24, 2)))[None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = loss_of(model, ids).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(model, ids).backward()
        optimizer.step()
    assert first > 3
    assert loss_of(model, ids) < 0.1
    assert model(ids[:, :-1]).argmax(-1).equal(ids[:, 1:])
