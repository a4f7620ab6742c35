"""Every kind of request over a real Ray cluster: pages, passes, chats, adapters."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch

from model.checkpoints.adapters import load_adapter
from model.checkpoints.load import BUNDLED, load_checkpoint
from model.network.joint_passes import AdaptedNetwork
from tests.ray_serve.clients import metric, prompts
from tests.ray_serve.cluster import PATIENCE_SECONDS
from tests.ray_serve.conftest import KEY

pytestmark = pytest.mark.slow
PROMPT = "Lucy had a"
CHAT: list[Any] = [
    {"role": "system", "content": "Tell a story of the sea. " * 10},
    {"role": "user", "content": PROMPT},
]


@pytest.mark.parametrize(
    "path",
    ["/", "/page/page.js", "/docs", "/openapi.json", "/model", "/models", "/v1/models", "/status", "/vectors"],
)
def test_pages_and_answers_of_a_replica_are_served(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompt": PROMPT, "max_tokens": 4}),
        ("/forward", {"prompt": PROMPT, "stages": ["blocks.0.attn.pattern"]}),
        ("/logits", {"prompt": PROMPT}),
        ("/patterns", {"prompt": PROMPT}),
        ("/attribute", {"method": "direct", "prompt": PROMPT, "token": " was"}),
        ("/compare", {"prompt": PROMPT, "b": {"setting": {"dtype": "float32"}}}),
        ("/tokenize", {"prompt": PROMPT}),
        ("/detokenize", {"tokens": [445, 77]}),
        ("/v1/completions", {"prompt": PROMPT, "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 4}),
    ],
)
def test_every_kind_of_request_is_answered(client: httpx.Client, path: str, body: dict[str, object]) -> None:
    response = client.post(path, json=body, headers={"X-Request-Id": "my-id"})
    assert response.status_code == 200, response.text
    assert response.headers.get_list("x-request-id") == ["my-id"]


def test_a_patching_sweep_is_streamed(client: httpx.Client) -> None:
    body = {
        "method": "patching",
        "prompt": [445, 1000, 77, 300],
        "corrupted": [445, 2000, 77, 300],
        "token": 342,
        "stages": ["blocks.0.resid_post"],
        "by": ["position"],
        "stream": True,
    }
    with client.stream("POST", "/attribute", json=body) as response:
        lines = [line for line in response.iter_lines() if line]
    assert response.status_code == 200, lines
    assert len(lines) > 2
    assert lines[-1] == "data: [DONE]"
    assert "event: error" not in lines


def test_health_is_public_and_other_routes_need_the_key(client: httpx.Client) -> None:
    for path, status in (("/health", 200), ("/ready", 200), ("/metrics", 200), ("/model", 401), ("/generate", 401)):
        response = httpx.get(f"{client.base_url}{path}", timeout=PATIENCE_SECONDS, trust_env=False)
        assert response.status_code == status


def test_requests_are_checked_before_they_reach_a_replica(client: httpx.Client) -> None:
    answers = [
        client.get("/model", headers={"Host": "rebound.example"}),
        client.post("/generate", content=b"x" * (5 << 20), headers={"Content-Type": "application/json"}),
        client.post("/generate", json={"prompt": PROMPT, "max_tokns": 4}),
        client.get("/nothing"),
    ]
    codes = [answer.json()["error"]["code"] for answer in answers]
    assert [answer.status_code for answer in answers] == [400, 413, 422, 404], codes


@pytest.fixture
def sdk(client: httpx.Client) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key=KEY, timeout=PATIENCE_SECONDS) as opened:
        yield opened


def test_the_sdk_of_openai_streams(sdk: openai.OpenAI) -> None:
    whole = sdk.completions.create(model="bundled", prompt=PROMPT, max_tokens=16, temperature=0)
    stream = sdk.completions.create(model="bundled", prompt=PROMPT, max_tokens=16, temperature=0, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
    assert len(pieces) > 1
    assert "".join(pieces) == whole.choices[0].text


@pytest.mark.parametrize("model", ["bundled", "first"])
def test_the_sdk_of_openai_chats_and_a_streamed_chat_has_the_text_of_a_whole_one(
    sdk: openai.OpenAI, model: str
) -> None:
    whole = sdk.chat.completions.create(model=model, messages=CHAT, max_tokens=16, temperature=0)
    stream = sdk.chat.completions.create(model=model, messages=CHAT, max_tokens=16, temperature=0, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert len([piece for piece in pieces if piece]) > 1
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.model == model


@pytest.fixture(scope="module")
def adapted(settings: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The logits after `PROMPT` of the model (`bundled`) and of each adapter, computed in this process."""
    checkpoint = load_checkpoint(str(BUNDLED))
    paths = dict(adapter.split("=", 1) for adapter in settings["adapter"])
    adapters = {name: load_adapter(checkpoint, path) for name, path in paths.items()}
    assert checkpoint.tokenizer is not None
    ids = torch.tensor([checkpoint.tokenizer.encode(PROMPT)])
    return {
        name: AdaptedNetwork(checkpoint.model, adapters.get(name))(ids)[0, -1].float() for name in ("bundled", *paths)
    }


def test_every_replica_answers_with_the_adapter_that_a_request_names_as_its_model(
    client: httpx.Client, adapted: dict[str, torch.Tensor]
) -> None:
    before = metric(client, "http_requests_total", route="/generate")
    names = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert sorted(names) == sorted(adapted)
    for name, logits in adapted.items():
        expected = int(logits.argmax())
        for ending in prompts(8, seed=7):  # different bodies, so that no replica gets all of them
            body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "model": name, "seed": ending[0]}
            answer = client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["tokens"] == [expected], name
    after = metric(client, "http_requests_total", route="/generate")
    assert all(after[replica] > count for replica, count in before.items())
    assert len({int(logits.argmax()) for logits in adapted.values()}) == len(adapted), (
        "each of them has an answer of its own"
    )


def test_an_unknown_model_is_an_error_that_names_those_there_are(client: httpx.Client) -> None:
    for path, field in (("/generate", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": CHAT})):
        answer = client.post(path, json={"model": "third", "max_tokens": 1} | field)
        assert answer.status_code == 404
        assert "send bundled, first, second" in answer.json()["error"]["message"]
