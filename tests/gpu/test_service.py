"""A service on a GPU: every kind of answer, and a request that needs too much memory fails alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # torch does not list it

from model.engine.tensor_parallel.leading_network import LeadingNetwork
from model.network.ranks import Place, Ranks
from model.network.tensor_parallel import prepare_share
from tests.engine.driving import ask, new_engine, prompt, run
from tests.gpu.test_engine import assert_tokens_of_one_pass
from tests.service.running import Running, running
from tests.tiny import CONFIGS, build

pytestmark = [pytest.mark.gpu, pytest.mark.slow]
STORY = "Once upon a time, there was a little"


@pytest.fixture(scope="module")
def service(device: torch.device) -> Iterator[Running]:
    with running(device=str(device), cache_bytes=1 << 28, max_num_seqs=8) as service:
        yield service


@pytest.fixture(scope="module")
def on_cpu(device: torch.device) -> Iterator[Running]:
    with running(device="cpu", dtype="bfloat16", kernels="torch") as service:
        yield service


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "stages": ("/forward", {"prompt": STORY, "stages": ["*.resid_post", "*.pattern"], "detail": "summary"}),
    "logits": ("/logits", {"prompt": STORY, "top_k": 3}),
    "lens": ("/attribute", {"prompt": STORY, "method": "logit_lens"}),
    "gradients": ("/attribute", {"prompt": STORY, "method": "integrated_gradients", "token": 259}),
    "patterns": ("/patterns", {"prompt": STORY}),
    "comparison": ("/compare", {"prompt": STORY, "b": {"setting": {"quantize": "int8"}}}),
    "edits": (
        "/forward",
        {"prompt": STORY, "stages": ["logits"], "edits": [{"stage": "blocks.1.mlp_out", "op": "zero"}]},
    ),
    "trace": ("/generate", {"prompt": STORY, "max_tokens": 5, "trace": {"stages": ["*"], "logit_lens": True}}),
    "choices": ("/generate", {"prompt": STORY, "max_tokens": 5, "n": 3, "seed": 1, "logprobs": 2}),
    "schema": ("/generate", {"prompt": STORY, "max_tokens": 9, "structured_outputs": {"regex": " (cat|dog)"}}),
    "chat": ("/v1/completions", {"prompt": STORY, "max_tokens": 5}),
    "embeddings": ("/v1/embeddings", {"input": [STORY, "The end."]}),
    "scores": ("/score", {"prompt": STORY, "continuations": [" cat", " dog"]}),
}


@pytest.mark.parametrize("name", BODIES)
def test_every_kind_of_answer(name: str, service: Running) -> None:
    path, body = BODIES[name]
    assert service.answer(path, **body)


def test_the_tokens_are_those_of_a_cpu(service: Running, on_cpu: Running) -> None:
    body = {"prompt": STORY, "top_k": 5}
    found, expected = (each.answer("/logits", **body)["positions"][-1] for each in (service, on_cpu))
    assert found["ids"][0] == expected["ids"][0]
    assert found["logits"] == pytest.approx(expected["logits"], abs=0.3)  # bfloat16


def test_a_request_that_needs_too_much_memory_fails_alone(service: Running, device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("a CPU has no such limit")
    body = {"prompt": STORY, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
    expected = service.answer("/generate", **body)["tokens"]
    _, total = torch.cuda.mem_get_info()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (1 << 21)) / total)
    try:
        with ThreadPoolExecutor() as threads:
            stream = threads.submit(service.answer, "/generate", **body)
            ids = [5 + i % 900 for i in range(500)]
            refused = service.post("/forward", {"prompt": ids, "stages": ["*"]})
            assert refused.status_code == 503, refused.text
            assert refused.json()["error"]["code"] == "out_of_memory"
            assert stream.result()["tokens"] == expected
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert service.answer("/generate", **body)["tokens"] == expected


def test_tensor_parallelism_of_one_rank(device: torch.device) -> None:
    exact = build(CONFIGS["llama"], dtype=torch.float64)
    weights = {name: x.to(device) for name, x in build(CONFIGS["llama"]).state_dict().items() if name != "head.weight"}
    ranks = Ranks(Place(0, 1), device.type, store=HashStore())
    try:
        model = prepare_share(
            exact.config, weights, ranks, network=lambda *a, **k: LeadingNetwork(*a, ranks=ranks, **k)
        )
        request = ask("0", prompt(9), temperature=0.0)
        assert_tokens_of_one_pass(exact, request, run(new_engine(model), request)["0", 0])
    finally:
        ranks.disconnect()
