"""A network that two processes compute gives what one process computes: logits, tokens, stages and edits.

This process is rank 0; `other_rank.py` is rank 1. Each row-wise layer adds up two sums instead of one, so results
differ by rounding from those of one process.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from model.config import ModelConfig
from model.engine.attention.interface import BlockTable, StepTokens
from model.engine.cache import bytes_of_token
from model.engine.engine import Engine, EngineConfig
from model.engine.request import Request
from model.engine.tensor_parallel.leading_network import LeadingNetwork
from model.engine.tensor_parallel.messages import (
    ClearBlocks,
    End,
    KeepAlive,
    Message,
    OpenCache,
    SinglePass,
    StepPass,
    decode,
    encode,
)
from model.engine.trace_params import TraceParams
from model.errors import InvalidField
from model.network.prepare import prepare_model
from model.network.ranks import Place, Ranks
from model.network.tensor_parallel import Shard
from model.network.transformer import Transformer
from model.tracing.edits import BoundEdits, Edit, plan_edits
from model.tracing.selection import Selection
from model.tracing.stages import select, stages_of
from tests.editor import Editor
from tests.engine.driving import alone, ask, assert_equal, new_engine, prompt, run
from tests.engine.other_rank import NETWORKS, ROOT, TIMEOUT, free_port, share_of, two_ranks
from tests.tiny import CONFIGS, GPT2, build, random_ids, record

TOLERANCE = 1e-5  # of logits in float32, which are about 1 to 10; see tests/tiny.py
EVERY_NETWORK = pytest.mark.parametrize("name", NETWORKS)
IN_ENGINE = pytest.mark.parametrize(
    "name", ["gpt2", "mistral", "qwen3", "gemma2", "phi3", "olmo2", "mixtral", "one key-value head"]
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that wait for work would take the processor from the other rank
    with two_ranks() as connected:
        yield connected
    torch.set_num_threads(threads)


@contextmanager
def shared(name: str, ranks: Ranks) -> Iterator[LeadingNetwork]:
    """The network of rank 0, while rank 1 follows it."""
    ranks.send([list(NETWORKS).index(name)])
    network = share_of(name, ranks)
    assert isinstance(network, LeadingNetwork)
    yield network
    network.end()


def engine_of(model: Transformer, **options: Any) -> Engine:
    """An engine with a cache of 256 tokens."""
    num_bytes = 256 * bytes_of_token(model.share, torch.float32)
    return Engine(model, None, EngineConfig(cache_bytes=num_bytes, block_size=4, max_sequences=8, **options))


def assert_close(found: Tensor, expected: Tensor, name: str = "") -> None:
    """Assert a difference of rounding. Scores are larger than logits, so their tolerance is relative as well."""
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{name}: {text}")


def edits_of(config: ModelConfig, request: Request, *edits: Edit) -> Request:
    length = len(request.prompt_ids) + request.params.max_tokens
    bound: BoundEdits = plan_edits(edits, config, stages_of(config), request.prompt_ids, length).bind([])
    return replace(request, edits=bound)


@EVERY_NETWORK
@torch.inference_mode()
def test_two_ranks_give_the_logits_and_the_whole_stages_of_one(name: str, ranks: Ranks) -> None:
    whole, ids = build(NETWORKS[name]), random_ids(67, 20, batch=2)
    expected, stages = record(whole, ids)
    with shared(name, ranks) as network:
        plain = network(ids)
        assert (plain - expected).abs().max() <= TOLERANCE
        found, found_stages = record(network, ids)
        assert torch.equal(found, plain), "reading stages has changed a bit"
        assert torch.equal(network(ids, rows=[3, 19]), plain[:, [3, 19]])
    assert list(found_stages) == list(stages)
    for stage, value in stages.items():
        assert_close(found_stages[stage], value, stage)


@IN_ENGINE
def test_generations_of_two_ranks_equal_uncached_passes_of_one(name: str, ranks: Ranks) -> None:
    whole = build(NETWORKS[name])
    requests = [
        ask("greedy", prompt(9), temperature=0.0),
        ask("drawn", prompt(21, seed=2), temperature=0.9, n=2),
        ask("long", prompt(30, seed=3), max_tokens=12, temperature=0.7),
    ]
    with shared(name, ranks) as network:
        results = run(engine_of(network, max_step_tokens=16), *requests)  # prompts are computed in parts
    for request in requests:
        for choice in range(request.params.n):
            assert_equal(results[request.id, choice], alone(whole, request, choice))


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
def test_each_rank_stores_the_keys_of_its_own_heads(kv_cache_dtype: Any, ranks: Ranks) -> None:
    whole, request = build(NETWORKS["llama"]), ask("a", prompt(9), temperature=0.0)
    expected = run(new_engine(whole, kv_cache_dtype=kv_cache_dtype), request)["a", 0]
    with shared("llama", ranks) as network:
        engine = engine_of(network, kv_cache_dtype=kv_cache_dtype)
        assert_equal(run(engine, request)["a", 0], expected)
        assert 2 * bytes_of_token(network.share, torch.float32) == bytes_of_token(whole.config, torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "one key-value head", "mixtral"])
def test_traces_of_generations_show_whole_stages(name: str, ranks: Ranks) -> None:
    whole = build(NETWORKS[name])
    wanted = select(stages_of(whole.config), ["blocks.*", "ln_final.*", "logits"])
    trace = TraceParams(selection=Selection(stages=wanted, detail="values"), top_k=2, logit_lens=2)
    requests = [ask("traced", prompt(7), trace=trace, max_tokens=3), ask("plain", prompt(12, seed=2), max_tokens=3)]
    expected = run(new_engine(whole), *requests)["traced", 0]
    with shared(name, ranks) as network:
        found = run(engine_of(network), *requests)["traced", 0]
    assert_equal(found, expected)
    for own, one in zip(found.traces, expected.traces, strict=True):
        assert [stage.stage for stage in own.stages] == [stage.stage for stage in one.stages]
        for stage, value in zip(own.stages, one.stages, strict=True):
            assert stage.values is not None
            assert value.values is not None
            assert_close(stage.values, value.values, stage.stage.name)
        lens = [[layer.top.token_ids for layer in each.logit_lens or ()] for each in (own, one)]
        assert lens[0] == lens[1]


@pytest.mark.parametrize("name", ["gpt2", "qwen3"])
def test_edits_of_one_head_and_of_one_neuron_equal_those_of_one_rank(name: str, ranks: Ranks) -> None:
    whole = build(NETWORKS[name])
    heads, keys = whole.config.num_heads, [0, 2]
    neuron = torch.zeros(whole.config.d_mlp)
    neuron[-1] = 4.0  # a neuron of rank 1
    edits = {
        "head of rank 1": [Edit(stage="blocks.1.attn.z", op="zero", heads=[heads - 1])],
        "head of rank 0": [Edit(stage="blocks.0.attn.z", op="scale", factor=3.0, heads=[0])],
        "neuron": [Edit(stage="blocks.0.mlp.post", op="add", vector=neuron)],
        "residual": [Edit(stage="blocks.1.resid_pre", op="scale", factor=2.0, positions="generated")],
        "pattern": [Edit(stage="blocks.1.attn.pattern", op="zero", heads=[1, heads - 1], keys=keys)],
        "logits": [Edit(stage="logits", op="scale", factor=0.5)],
    }
    plain = ask("plain", prompt(9), temperature=0.0)
    requests = [edits_of(whole.config, replace(plain, id=key), *own) for key, own in edits.items()]
    expected = run(new_engine(whole), plain, *requests)
    with shared(name, ranks) as network:
        found = run(engine_of(network), plain, *requests)
    for choice in expected:
        assert_equal(found[choice], expected[choice])
    unchanged = expected["plain", 0].logprob_values
    for key in edits:
        assert expected[key, 0].logprob_values != pytest.approx(unchanged, abs=1e-3), f"{key} has no effect"


@torch.inference_mode()
def test_a_tap_that_fails_ends_its_own_pass_or_sequence_alone(ranks: Ranks) -> None:
    def fail(tensor: Tensor) -> Tensor:
        raise RuntimeError("a planted error")

    whole, ids = build(NETWORKS["llama"]), random_ids(67, 9)
    with shared("llama", ranks) as network:
        for stage in ("blocks.1.attn.z", "blocks.1.resid_mid", "logits"):
            with pytest.raises(RuntimeError, match="a planted error"):
                network(ids, tap=Editor({stage: fail}))
            assert (network(ids) - whole(ids)).abs().max() <= TOLERANCE
        engine, plain = engine_of(network), ask("plain", prompt(9))
        results = run(engine, plain, ask("failing", prompt(9, seed=2), tap=Editor({"blocks.1.attn.pattern": fail})))
        assert str(results["failing", 0].error) == "a planted error"
        assert_equal(results["plain", 0], alone(whole, plain))


def test_what_needs_whole_weights_is_refused(ranks: Ranks) -> None:
    with shared("llama", ranks) as network:
        with pytest.raises(ValueError, match="passes with a cache are steps of an engine"):
            network(random_ids(67, 3), cache=network.new_cache(8))
        with pytest.raises(ValueError, match="49 tokens exceed the 48 positions"):
            network(random_ids(67, 49))
        network.keep_alive()


def test_a_rank_has_its_share_of_the_parameters_of_every_block(ranks: Ranks) -> None:
    with shared("mixtral", ranks) as network:
        whole = dict(build(NETWORKS["mixtral"]).named_parameters())
        for name, own in network.named_parameters():
            is_divided = name.startswith("blocks.") and own.dim() > 1 and "router" not in name
            assert own.numel() * (2 if is_divided else 1) == whole[name].numel(), name


@pytest.mark.parametrize(
    ("config", "size", "message"),
    [
        (GPT2, 3, r"3 ranks cannot divide 4 \(num_heads\) equally; take one of 1, 2, 4 ranks"),
        (CONFIGS["llama"], 3, r"3 ranks and 2 key-value heads .*; take one of 1, 2 ranks"),
        (replace(GPT2, d_mlp=41), 2, r"2 ranks cannot divide 41 \(d_mlp\) equally; take one of 1 ranks"),
        (replace(CONFIGS["mixtral"], d_expert=11), 2, r"2 ranks cannot divide 11 \(d_expert\) equally"),
    ],
)
def test_a_network_that_cannot_be_divided_is_refused_with_its_numbers(
    config: ModelConfig, size: int, message: str
) -> None:
    with pytest.raises(InvalidField, match=message):
        Shard(config, 0, size)


@pytest.mark.parametrize("size", [1, 3, 6])
@pytest.mark.parametrize("name", ["llama", "olmo2", "stablelm", "mixtral"])
def test_the_shards_of_all_ranks_are_the_whole_network(name: str, size: int) -> None:
    config = replace(CONFIGS[name], d_mlp=42, num_kv_heads=3)
    model = build(config)
    shards = [Shard(config, rank, size) for rank in range(size)]
    for parameter, value in model.state_dict().items():
        division = shards[0].division(parameter)
        parts = [shard.take(parameter, value.clone()) for shard in shards]
        if division is None:
            assert all(torch.equal(part, value) for part in parts)
            continue
        seen = torch.zeros(value.shape[division.axis], dtype=torch.int64)
        for shard, part in zip(shards, parts, strict=True):
            own = shard.division(parameter)
            assert own is not None
            index = torch.cat([torch.arange(rows.start, rows.stop) for rows in own.ranges])
            assert torch.equal(part, value.index_select(division.axis, index))
            seen[index] += 1
        assert seen.min() >= 1, f"{parameter}: no rank has a part of it"
        assert seen.max() <= shards[0].num_copies, f"{parameter}: ranks have the same part"


@pytest.mark.parametrize(
    "message",
    [
        KeepAlive(),
        End(),
        OpenCache(7, 16, True),
        ClearBlocks([3, 1]),
        SinglePass([[1, 2], [3, 4]], [0, 9]),
        StepPass(
            [StepTokens(4, [5], True, BlockTable([2, 0], 9)), StepTokens(0, [1, 2, 3], False, BlockTable([], 3))],
            [[], [3, 4]],
        ),
    ],
)
def test_a_message_is_read_as_it_was_written(message: Message) -> None:
    assert decode(encode(message)) == message


@pytest.mark.slow
def test_torchrun_gives_a_process_its_place() -> None:
    given = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    assert Place.of_environment(given) == Place(rank=3, size=4, local_rank=1)
    assert Place.of_environment({"RANK": "3"}) is None


@pytest.mark.slow
def test_one_process_computes_the_whole_network_as_before() -> None:
    model = build(CONFIGS["llama"])
    assert model.share is model.config
    weights = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    served, ids = prepare_model(model.config, weights, kernels="torch"), random_ids(67, 9)
    assert torch.equal(served(ids), model(ids))
    assert new_engine(served).keep_alive_seconds is None


@pytest.mark.slow
def test_ranks_may_be_idle_for_longer_than_their_timeout() -> None:
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.engine.other_rank", "idle"]
    both = [subprocess.Popen(command, cwd=ROOT, env=os.environ | place | {"RANK": rank}) for rank in ("0", "1")]
    try:
        assert [process.wait(TIMEOUT.total_seconds()) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
            process.wait()
