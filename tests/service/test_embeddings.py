"""POST /v1/embeddings: OpenAI's SDK reads it, edits change it, and stages without vectors are refused."""

import openai
import pytest
import torch

from tests.service.running import Running
from tests.service.test_bad_input import check_error

TEXTS = ["the cat sat on the mat", "the dogs", "that log was there and the cats ran on"]
STEER = {"stage": "blocks.0.resid_post", "op": "add", "vector": [0.5] * 24, "scale": 2}


def vectors(service: Running, **body: object) -> torch.Tensor:
    answer = service.answer("/v1/embeddings", **{"input": TEXTS} | body)
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return torch.tensor([each["embedding"] for each in answer["data"]])


def test_the_sdk_reads_the_same_vectors_that_json_has(tiny: Running) -> None:
    with openai.OpenAI(base_url=f"{tiny.client.base_url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=tiny.checkpoint.name, input=TEXTS)  # as base64
    expected = vectors(tiny)
    assert found.model == tiny.checkpoint.name
    torch.testing.assert_close(torch.tensor([each.embedding for each in found.data]), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(expected.norm(dim=-1), torch.ones(3))


def test_a_text_has_the_vector_of_its_ids_alone_or_in_a_list(tiny: Running) -> None:
    ids = [[token["id"] for token in tiny.answer("/tokenize", text=text)["tokens"]] for text in TEXTS]
    expected = vectors(tiny)
    torch.testing.assert_close(vectors(tiny, input=ids), expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(vectors(tiny, input=TEXTS[2]), expected[2:], atol=1e-6, rtol=0)
    torch.testing.assert_close(vectors(tiny, input=ids[1]), expected[1:2], atol=1e-6, rtol=0)


@pytest.mark.parametrize("stage", ["ln_final.out", "blocks.1.attn.z", "logits"])
def test_the_vector_of_an_edited_text_is_the_mean_of_the_edited_stage(tiny: Running, stage: str) -> None:
    ids = [5, 9, 77, 200, 31, 8]
    body = {"edits": [STEER], "stages": [stage], "detail": "values"}
    (expected,) = tiny.answer("/forward", prompt=ids, **body)["stages"]
    mean = torch.tensor(expected["values"])[0].mean(0).flatten()
    answer = tiny.answer("/v1/embeddings", input=ids, stage=stage, edits=[STEER], normalize=False)["data"][0]
    torch.testing.assert_close(torch.tensor(answer["embedding"]), mean, atol=1e-5, rtol=1e-5)
    assert answer["edits"] == [{"stages": ["blocks.0.resid_post"], "positions": [[0, 5]]}]
    assert vectors(tiny, input=ids, stage=stage, normalize=False)[0] != pytest.approx(mean, abs=1e-3)


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": ""}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": ["a", ""]}, 400, "input.1"),
        ({"input": [[1], [999]]}, 400, "input.1.0"),
        ({"input": [1] * 65}, 400, "input"),
        ({"input": ["a"] * 2049}, 422, "input"),
        ({"input": [[1]] * 1100}, 400, "input"),
        ({"stage": "blocks.*.resid_post"}, 400, "stage"),
        ({"stage": "blocks.0.attn.pattern"}, 400, "stage"),
        ({"stage": "loss"}, 400, "stage"),
        ({"stage": "embedd"}, 400, "stage.0"),
        ({"dimensions": 25}, 400, "dimensions"),
        ({"dimensions": 0}, 422, "dimensions"),
        ({"pooling": "max"}, 422, "pooling"),
        ({"encoding_format": "hex"}, 422, "encoding_format"),
        ({"truncate_prompt_tokens": 5}, 400, "truncate_prompt_tokens"),
    ],
)
def test_a_wrong_field_is_named(tiny: Running, body: dict[str, object], status: int, param: str) -> None:
    check_error(tiny.post("/v1/embeddings", {"input": "a"} | body), status, param)
