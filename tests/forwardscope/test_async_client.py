"""`AsyncClient`: the same results as `Client`, for many requests at once."""

import asyncio
import inspect

import numpy as np
import pytest

from forwardscope import ApiError, AsyncClient, Client
from tests.forwardscope.canned_server import answer, canned, error
from tests.forwardscope.conftest import url_of
from tests.service.running import Running

NUM_REQUESTS = 50


@pytest.mark.slow
def test_fifty_concurrent_requests_get_the_answers_of_single_ones(client: Client, service: Running) -> None:
    prompts = [f"chapter {number} of the book" for number in range(NUM_REQUESTS)]

    async def ask() -> list[str]:
        async with AsyncClient(url_of(service)) as many:
            found = await asyncio.gather(*(many.generate(each, max_tokens=12, temperature=0) for each in prompts))
            return [each.text for each in found]

    assert asyncio.run(ask()) == [client.generate(each, max_tokens=12, temperature=0).text for each in prompts]


@pytest.mark.slow
def test_fifty_concurrent_streams_and_traces_are_complete(client: Client, service: Running) -> None:
    async def read(many: AsyncClient, seed: int) -> str:
        return "".join([event.text async for event in many.stream("Emma", max_tokens=6, seed=seed)])

    async def ask() -> tuple[list[str], list[float]]:
        async with AsyncClient(url_of(service)) as many:
            texts = asyncio.gather(*(read(many, seed) for seed in range(NUM_REQUESTS)))
            traces = asyncio.gather(*(many.run([seed + 1, 7], "embed") for seed in range(NUM_REQUESTS)))
            return await texts, [float(trace["embed"].sum()) for trace in await traces]

    texts, sums = asyncio.run(ask())
    assert texts == [client.generate("Emma", max_tokens=6, seed=seed).text for seed in range(NUM_REQUESTS)]
    assert sums == [float(client.run([seed + 1, 7], "embed")["embed"].sum()) for seed in range(NUM_REQUESTS)]


def test_it_has_the_methods_of_the_client_with_the_same_arguments() -> None:
    names = {name for name in vars(Client) if not name.startswith("_")} - {"close"}
    assert names == {name for name in vars(AsyncClient) if not name.startswith("_")} - {"aclose"}
    for name in names:
        assert inspect.signature(getattr(Client, name)) == inspect.signature(getattr(AsyncClient, name))
        assert getattr(Client, name).__doc__ == getattr(AsyncClient, name).__doc__
    assert inspect.iscoroutinefunction(AsyncClient.run)


def test_results_and_errors_are_those_of_the_client(client: Client, service: Running) -> None:
    async def ask() -> None:
        async with AsyncClient(url_of(service)) as other:
            trace = await other.run("the cat sat on", "blocks.0.*")
            assert np.array_equal(trace["blocks.0.attn.z"], client.run("the cat sat on")["blocks.0.attn.z"])
            assert await other.model() == client.model()
            texts = ["the cat", "sat", "on"]
            assert await other.batch(other.to_tokens, texts) == [client.to_tokens(text) for text in texts]
            text = "the cat sat on the mat. " * 200  # longer than the context
            assert await other.score_text(text) == client.score_text(text)
            with pytest.raises(ApiError, match="max_tokens"):
                await other.generate(texts, max_tokens=100_000)
            with pytest.raises(ApiError) as raised:
                await other.run("the cat sat on", "blocks.77.*")
            assert raised.value.code == "unknown_stage"

    asyncio.run(ask())


def test_a_busy_server_is_asked_again() -> None:
    async def ask(url: str) -> str:
        async with AsyncClient(url) as client:
            return await client.health()

    with canned(error(429, "full", "0"), answer({"status": "ok"})) as server:
        assert asyncio.run(ask(server.url)) == "ok"
        assert len(server.requests) == 2
