"""The memory in which threads share the keys of a sequence: one buffer for all steps, and only where it helps."""

from dataclasses import replace

import pytest
import torch

from model.engine.attention.paged import PagedStep
from model.network.transformer import Transformer
from model.ops.cpu.constants import KEYS_PER_CHUNK
from model.ops.cpu.paged_attention import MAX_PARTIAL_BYTES, MAX_SPLIT_TOKENS, empty_partials, partials_memory
from tests.engine.driving import ask, new_engine, prompt, run
from tests.ops.cpu.common import by_kernels
from tests.tiny import CONFIGS


def test_all_recorded_steps_share_the_memory_for_partial_sums_and_it_is_limited() -> None:
    model = Transformer(replace(CONFIGS["llama"], d_head=16, rotary_dim=16, max_positions=600))
    model.initialize(torch.Generator().manual_seed(0), std=0.2)
    model = by_kernels(model.requires_grad_(False))
    engine = new_engine(model, num_blocks=400)
    requests = [ask(f"{i}", prompt(3, seed=i), max_tokens=24 + 3 * i) for i in range(1, 4)]
    requests.append(ask("0", prompt(303), max_tokens=60))  # beside three of them, then two, one and none
    results = run(engine, *requests)
    graphs = engine._runner._step_graphs._graphs
    steps = [graph._step for shape, graph in graphs.items() if not shape.has_prompts]
    reads = [step._read for step in steps if isinstance(step, PagedStep)]
    partials = [read.partials for read in reads if read.partials is not None]
    assert len(partials) == len(steps) > 3
    memories = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in partials}
    assert len(memories) == 1
    assert sum(memories.values()) <= MAX_PARTIAL_BYTES
    alone = run(new_engine(model, num_blocks=400), requests[-1])
    assert (alone["0", 0].ids, alone["0", 0].logprobs) == (results["0", 0].ids, results["0", 0].logprobs)


def test_keys_are_shared_only_by_few_tokens_with_several_chunks_and_within_the_limit_of_memory() -> None:
    for num_tokens, max_keys in ((1, KEYS_PER_CHUNK + 1), (MAX_SPLIT_TOKENS, KEYS_PER_CHUNK + 1), (1, 1 << 16)):
        assert empty_partials(num_tokens, 4, 16, max_keys) is not None
    assert empty_partials(MAX_SPLIT_TOKENS + 1, 4, 16, KEYS_PER_CHUNK + 1) is None
    assert empty_partials(1, 4, 16, KEYS_PER_CHUNK) is None
    bytes_per_chunk = 4 * (16 + 16) * torch.float32.itemsize
    most_keys = (MAX_PARTIAL_BYTES // bytes_per_chunk - 1) * KEYS_PER_CHUNK
    largest = empty_partials(1, 4, 16, most_keys)
    assert largest is not None
    assert largest.nbytes == MAX_PARTIAL_BYTES
    assert empty_partials(1, 4, 16, most_keys + 1) is None


@pytest.mark.parametrize("max_keys", [100, 5000, 1 << 22])
def test_the_shared_memory_has_room_for_every_step_that_may_use_it(max_keys: int) -> None:
    memory = partials_memory(4, 16, max_keys)
    assert memory.nbytes <= MAX_PARTIAL_BYTES
    for num_tokens in range(1, MAX_SPLIT_TOKENS + 1):
        for num_keys in (max_keys, max_keys // 2):
            alone = empty_partials(num_tokens, 4, 16, num_keys)
            shared = empty_partials(num_tokens, 4, 16, num_keys, memory)
            assert (alone is None) == (shared is None)
            if alone is not None and shared is not None:
                assert (shared.shape, shared.data_ptr()) == (alone.shape, memory.data_ptr())
