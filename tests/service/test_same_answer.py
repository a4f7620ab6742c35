"""The same request has the same tokens, log-probabilities and trace through the routes of all APIs."""

from typing import Any

from tests.service.running import Running

NUM_TOP = 3
OWN: dict[str, Any] = {
    "temperature": 0.9,
    "top_k": 20,
    "seed": 7,
    "ignore_eos": True,
    "logit_bias": {"60": 2.0},
    "edits": [{"stage": "blocks.0.attn.z", "heads": [1], "op": "scale", "factor": 0.5}],
    "trace": {"stages": ["blocks.*.resid_post", "blocks.1.attn.pattern"], "detail": "values", "logit_lens": True},
}
QUESTION = {"messages": [{"role": "user", "content": "the cat"}]}
Answer = tuple[str, list[tuple[float, list[float]]], Any]
"""The text, the log-probability of each token with those of the most likely ones, and the trace."""


def in_own_form(answer: dict[str, Any], text: str) -> Answer:
    logprobs = [(token["logprob"], [each["logprob"] for each in token["top"]]) for token in answer["logprobs"]]
    return text, logprobs, answer["trace"]


def in_openai_form(tokens: Any, text: str, trace: Any) -> Answer:
    return text, [(token["logprob"], [each["logprob"] for each in token["top_logprobs"]]) for token in tokens], trace


def test_one_request_has_one_answer_through_all_routes(tiny: Running) -> None:
    chat = tiny.answer(
        "/v1/chat/completions",
        **QUESTION,
        **OWN,
        max_tokens=12,
        logprobs=True,
        top_logprobs=NUM_TOP,
        return_token_ids=True,
    )
    (choice,) = chat["choices"]
    expected = in_openai_form(choice["logprobs"]["content"], choice["message"]["content"], choice["trace"])
    prompt, limit = chat["prompt_token_ids"], {"max_tokens": 12, "logprobs": NUM_TOP}

    generated = tiny.answer("/generate", prompt=prompt, **OWN, **limit)
    assert in_own_form(generated, generated["text"]) == expected
    assert generated["tokens"] == choice["token_ids"]
    assert len(generated["trace"]) == len(generated["tokens"]) == 12

    message = tiny.answer("/v1/messages", **QUESTION, **OWN, **limit)
    assert in_own_form(message, message["content"][0]["text"]) == expected

    response = tiny.answer(
        "/v1/responses",
        input="the cat",
        **OWN,
        max_output_tokens=12,
        include=["message.output_text.logprobs"],
        top_logprobs=NUM_TOP,
    )
    (part,) = response["output"][0]["content"]
    assert in_openai_form(part["logprobs"], part["text"], response["trace"]) == expected

    (completion,) = tiny.answer("/v1/completions", prompt=prompt, **OWN, **limit)["choices"]
    logprobs = completion["logprobs"]
    tops = [sorted(top.values(), reverse=True)[:NUM_TOP] for top in logprobs["top_logprobs"]]
    found = completion["text"], list(zip(logprobs["token_logprobs"], tops, strict=True)), completion["trace"]
    assert found == expected
