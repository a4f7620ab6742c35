"""POST /forward over HTTP: the numbers of a direct pass, in every encoding, and never more bytes than promised."""

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from fastapi import Request
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from model.checkpoint import load_checkpoint
from model.stages import Recorder, sizes_of, stages_of
from model.transformer import read_out
from model.worked_examples import WORKED_EXAMPLES, WorkedExample, worked_example
from service.encoding import json_array, to_json, value_bytes
from service.passes import SAFETENSORS
from service.routes.forward import Plan, estimate_bytes, find_subject, make_plan, run
from service.schemas import ForwardAnswer, ForwardRequest
from service.state import State
from tests.service.checkpoints import CONTEXT, NUM_TOKENS, VOCAB_SIZE, write_checkpoint
from tests.service.running import Running, Start

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPT = [257, 69, 270, 273, 264]
AS_SAFETENSORS = {"Accept": SAFETENSORS}
# The service's pass and the direct one below are the same operations on the same numbers, but another number of threads
# may sum in another order; values are of the order of 1.
ROUNDING = 1e-5


@pytest.fixture
def direct(tiny: Running) -> dict[str, Tensor]:
    """Every stage of a pass over `PROMPT`, without the service."""
    return record(tiny, PROMPT, [*PROMPT[1:], None])


def record(service: Running, ids: Sequence[int], targets: Sequence[int | None]) -> dict[str, Tensor]:
    network = service.checkpoint.model
    recorder = Recorder(stages_of(network.config))
    with torch.inference_mode():
        read_out(network(torch.tensor([list(ids)]), tap=recorder), targets, recorder)
    return recorder.kept


def stages_by_name(answer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in answer["stages"]}


def as_tensor(values: Any) -> Tensor:
    """Nested lists; null becomes NaN."""
    return torch.from_numpy(np.array(values, dtype=float))


def finite_or_nan(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.nan).double()


def from_base64(stage: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(stage["values"], validate=True))
    return torch.frombuffer(raw, dtype=DTYPES[stage["dtype"]]).reshape(stage["shape"])


def from_safetensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, and what stands in the metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return safetensors.torch.load(content), json.loads(header["__metadata__"]["forwardscope"])


class TestStages:
    def test_the_answer_has_every_stage_of_the_catalogue_in_its_order_and_shape(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=PROMPT, detail="values")
        ForwardAnswer.model_validate(answer)
        catalogue = tiny.get("/model").json()
        sizes = {dim: len(PROMPT) if size == "T" else size for dim, size in catalogue["sizes"].items()}
        assert [(stage["name"], stage["dims"], stage["shape"]) for stage in answer["stages"]] == [
            (stage["name"], stage["dims"], [sizes[dim] for dim in stage["dims"]]) for stage in catalogue["stages"]
        ]
        for stage in answer["stages"]:
            assert list(np.shape(stage["values"])) == stage["shape"]

    def test_values_are_those_of_a_direct_pass(self, tiny: Running, direct: dict[str, Tensor]) -> None:
        stages = stages_by_name(tiny.answer("/forward", prompt=PROMPT, detail="values"))
        assert list(stages) == list(direct)
        for name, tensor in direct.items():
            torch.testing.assert_close(
                as_tensor(stages[name]["values"]),
                finite_or_nan(tensor),
                atol=ROUNDING,
                rtol=0,
                equal_nan=True,
                msg=lambda message, name=name: f"{name}: {message}",
            )

    def test_a_summary_is_that_of_the_finite_values(self, tiny: Running) -> None:
        for stage in tiny.answer("/forward", prompt=PROMPT, detail="values")["stages"]:
            values = np.array(stage["values"], dtype=float)
            finite = values[np.isfinite(values)]
            summary = stage["summary"]
            assert summary.pop("non_finite") == values.size - finite.size, stage["name"]
            expected = {
                "min": finite.min(),
                "max": finite.max(),
                "mean": finite.mean(),
                "std": finite.std(),
                "l2": np.linalg.norm(finite),
            }
            # Both are sums of float32 numbers, the service's in float32.
            assert summary == pytest.approx(expected, rel=1e-5, abs=1e-6), stage["name"]

    def test_a_prompt_of_one_token_has_a_loss_stage_without_a_finite_number(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=[5], stages=["loss"])
        (stage,) = answer["stages"]
        assert stage["summary"] == dict.fromkeys(("min", "max", "mean", "std", "l2")) | {"non_finite": 1}
        assert answer["loss"] == {"per_token": [None], "mean": None, "perplexity": None}

    def test_detail_says_whether_values_or_summaries_come(self, tiny: Running) -> None:
        def parts(**detail: str) -> set[str]:
            answer = tiny.answer("/forward", prompt=PROMPT, stages=["embed"], **detail)
            ForwardAnswer.model_validate(answer)
            return set(answer["stages"][0]) - {"name", "shape", "dims", "dtype"}

        assert parts(detail="none") == set()
        assert parts() == parts(detail="summary") == {"summary"}
        assert parts(detail="values") == {"summary", "values"}

    def test_nothing_comes_that_was_not_asked_for(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=PROMPT, stages=["*.resid_post", "embed", "*.attn.pattern", "embed"])
        assert [stage["name"] for stage in answer["stages"]] == [
            "embed",
            "blocks.0.attn.pattern",
            "blocks.0.resid_post",
            "blocks.1.attn.pattern",
            "blocks.1.resid_post",
        ]

    def test_the_spellings_of_transformer_lens_name_the_same_stages(self, tiny: Running) -> None:
        lens = ["hook_embed", "blocks.*.attn.hook_pattern", "blocks.1.hook_resid_post", "ln_final.hook_normalized"]
        plain = [pattern.replace("hook_", "") for pattern in lens]
        with_hooks = tiny.answer("/forward", prompt=PROMPT, stages=lens, detail="values")["stages"]
        assert len(with_hooks) == 5
        assert with_hooks == tiny.answer("/forward", prompt=PROMPT, stages=plain, detail="values")["stages"]

    def test_text_and_its_ids_are_the_same_prompt(self, tiny: Running) -> None:
        text = tiny.answer("/forward", prompt="the cat sat on", detail="values")
        ids = tiny.answer("/forward", prompt=[token["id"] for token in text["tokens"]], detail="values")
        assert text["stages"] == ids["stages"]
        assert "".join(token["text"] for token in text["tokens"]) == "the cat sat on"
        assert [token["position"] for token in text["tokens"]] == list(range(len(PROMPT)))

    def test_an_id_beyond_the_tokenizer_has_no_text_and_goes_through_all_the_same(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=[NUM_TOKENS, VOCAB_SIZE - 1], stages=["embed"])
        assert [token["text"] for token in answer["tokens"]] == [None, None]


class TestEncodings:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_base64_and_safetensors_hold_the_numbers_of_json(self, tiny: Running, dtype: str) -> None:
        body = {"prompt": PROMPT, "detail": "values", "dtype": dtype}
        plain = stages_by_name(tiny.answer("/forward", **body))
        encoded = stages_by_name(tiny.answer("/forward", **body, encoding="base64"))
        response = tiny.post("/forward", body, headers=AS_SAFETENSORS)
        assert response.headers["content-type"] == SAFETENSORS
        tensors, _ = from_safetensors(response.content)
        computed, _ = from_safetensors(tiny.post("/forward", {"prompt": PROMPT}, headers=AS_SAFETENSORS).content)
        assert set(plain) == set(encoded) == set(tensors) == set(computed)
        for name, stage in plain.items():
            tensor = tensors[name]
            torch.testing.assert_close(tensor, computed[name].to(DTYPES[dtype]), rtol=0, atol=0, equal_nan=True)
            assert (stage["dtype"], encoded[name]["dtype"], tensor.dtype) == (dtype, dtype, DTYPES[dtype])
            assert torch.equal(from_base64(encoded[name]).nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0)), (
                name
            )  # NaN stands where there is no target
            # A decimal that is the shortest for a float32 names that float32 and no other.
            exact = torch.promote_types(tensor.dtype, torch.float32)
            torch.testing.assert_close(
                as_tensor(stage["values"]).to(exact), finite_or_nan(tensor).to(exact), rtol=0, atol=0, equal_nan=True
            )

    def test_masked_scores_are_null_in_json_and_minus_infinity_in_binary(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "stages": ["blocks.0.attn.attn_scores"], "detail": "values"}
        (plain,) = tiny.answer("/forward", **body)["stages"]
        (encoded,) = tiny.answer("/forward", **body, encoding="base64")["stages"]
        tensors, _ = from_safetensors(tiny.post("/forward", body, headers=AS_SAFETENSORS).content)
        future = torch.ones(len(PROMPT), len(PROMPT)).triu(1).bool().expand(1, 6, -1, -1)
        assert torch.equal(as_tensor(plain["values"]).isnan(), future)
        assert torch.equal(from_base64(encoded) == -torch.inf, future)
        assert torch.equal(tensors["blocks.0.attn.attn_scores"] == -torch.inf, future)

    def test_the_metadata_of_safetensors_is_the_answer_without_values(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "stages": ["*.resid_post", "loss"]}
        expected = tiny.answer("/forward", **body)
        tensors, found = from_safetensors(tiny.post("/forward", body, headers=AS_SAFETENSORS).content)
        ForwardAnswer.model_validate(found)
        assert list(tensors) != []  # detail is "values" where nothing is said, since a file without tensors says little
        assert set(tensors) == {stage["name"] for stage in expected["stages"]}
        for answer in (expected, found):
            del answer["timings"]
        assert found == expected

    def test_a_number_beyond_float16_is_an_error_that_names_dtype(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "stages": ["embed"], "detail": "values", "dtype": "float16"}
        before = tiny.checkpoint.model.embed.weight[PROMPT[0], 0].item()
        assert tiny.post("/forward", body).status_code == 200
        weight = tiny.checkpoint.model.embed.weight
        try:
            weight[PROMPT[0], 0] = 1e5
            for headers in ({}, AS_SAFETENSORS):
                response = tiny.post("/forward", body, headers=headers)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "dtype"
            assert tiny.post("/forward", body | {"dtype": "bfloat16"}).status_code == 200
        finally:
            weight[PROMPT[0], 0] = before


class TestSelection:
    @pytest.mark.parametrize("positions", [[3, 1], [0], [4], None])
    @pytest.mark.parametrize("heads", [[4, 1], [5], [0, 1, 2], None])
    def test_chosen_positions_and_heads_are_those_entries_of_the_whole(
        self, tiny: Running, positions: list[int] | None, heads: list[int] | None
    ) -> None:
        body = {"prompt": PROMPT, "detail": "values", "top_k": 3}
        whole = tiny.answer("/forward", **body)
        part = tiny.answer("/forward", **body, positions=positions, heads=heads)
        kept: dict[str, list[int] | None] = {
            "position": positions,
            "query": positions,
            "head": heads,
            # Three query heads read each of the two key-value heads.
            "kv_head": None if heads is None else sorted({head // 3 for head in heads}),
        }
        for stage, cut in zip(whole["stages"], part["stages"], strict=True):
            expected = as_tensor(stage["values"])
            for axis, dim in enumerate(stage["dims"]):
                indices = kept.get(dim)
                if indices is not None:
                    expected = expected.index_select(axis, torch.tensor(indices))
            assert cut["shape"] == list(expected.shape), cut["name"]
            torch.testing.assert_close(as_tensor(cut["values"]), expected, rtol=0, atol=0, equal_nan=True)
        rows = {row["position"]: row for row in whole["predictions"]}
        assert part["predictions"] == [rows[position] for position in positions or range(len(PROMPT))]
        assert part["loss"] == whole["loss"]


class TestPredictionsAndLoss:
    def test_predictions_are_the_likeliest_of_a_softmax_over_the_vocabulary(
        self, tiny: Running, direct: dict[str, Tensor]
    ) -> None:
        answer = tiny.answer("/forward", prompt=PROMPT, stages=["embed"], detail="none", top_k=VOCAB_SIZE)
        for row, logits in zip(answer["predictions"], direct["logits"][0], strict=True):
            logit, ids = logits.sort(descending=True)
            assert [entry["id"] for entry in row["top"]] == ids.tolist()
            assert [entry["logit"] for entry in row["top"]] == pytest.approx(logit.tolist(), abs=ROUNDING)
            chances = [entry["probability"] for entry in row["top"]]
            assert chances == pytest.approx(logits.softmax(0)[ids].tolist(), abs=ROUNDING)
            assert sum(chances) == pytest.approx(1, abs=ROUNDING)

    def test_ten_predictions_come_where_nothing_is_said_and_none_for_zero(self, tiny: Running) -> None:
        def lengths(**top_k: int) -> list[int]:
            answer = tiny.answer("/forward", prompt=PROMPT, stages=["embed"], **top_k)
            return [len(row["top"]) for row in answer["predictions"]]

        assert lengths() == [10] * len(PROMPT)
        assert lengths(top_k=2) == [2] * len(PROMPT)
        assert sum(lengths(top_k=0)) == 0

    def test_the_loss_is_that_of_the_prompts_own_next_tokens(self, tiny: Running, direct: dict[str, Tensor]) -> None:
        loss = tiny.answer("/forward", prompt=PROMPT, stages=["embed"])["loss"]
        logprobs = direct["logits"][0].log_softmax(-1)
        expected = [-logprobs[i, target].item() for i, target in enumerate(PROMPT[1:])]
        assert loss["per_token"][-1] is None
        assert loss["per_token"][:-1] == pytest.approx(expected, abs=ROUNDING)
        assert loss["mean"] == pytest.approx(np.mean(expected), abs=ROUNDING)
        assert loss["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=ROUNDING)

    def test_given_targets_are_what_the_loss_is_of_and_null_counts_nothing(
        self, tiny: Running, direct: dict[str, Tensor]
    ) -> None:
        targets = [7, None, 0, None, VOCAB_SIZE - 1]
        answer = tiny.answer("/forward", prompt=PROMPT, targets=targets, stages=["loss"], detail="values")
        logprobs = direct["logits"][0].log_softmax(-1)
        expected = [None if t is None else -logprobs[i, t].item() for i, t in enumerate(targets)]
        assert answer["loss"]["per_token"] == [None if e is None else pytest.approx(e, abs=ROUNDING) for e in expected]
        (values,) = answer["stages"][0]["values"]
        assert [value is None for value in values] == [target is None for target in targets]
        counted = [e for e in expected if e is not None]
        assert answer["loss"]["mean"] == pytest.approx(sum(counted) / 3, abs=ROUNDING)

    def test_targets_that_are_all_null_have_no_mean(self, tiny: Running) -> None:
        loss = tiny.answer("/forward", prompt=[1, 2], targets=[None, None], stages=["embed"])["loss"]
        assert loss == {"per_token": [None, None], "mean": None, "perplexity": None}


def plan_of(body: ForwardRequest, state: State, as_safetensors: bool) -> Plan:
    """The plan of a request, made as the route makes it."""
    return make_plan(body, asyncio.run(find_subject(body, Request({"type": "http"}), state)), as_safetensors)


class TestBudget:
    @pytest.mark.parametrize(
        "worked", [None, *map(worked_example, WORKED_EXAMPLES)], ids=["checkpoint", *WORKED_EXAMPLES]
    )
    @given(data=st.data())
    @settings(max_examples=30, deadline=None, derandomize=True)
    def test_no_answer_is_larger_than_its_estimate(
        self, tiny: Running, worked: WorkedExample | None, data: st.DataObject
    ) -> None:
        longest, vocab_size, num_heads = CONTEXT, VOCAB_SIZE, 6
        if worked is not None:
            longest, vocab_size, num_heads = worked.max_positions, len(worked.vocabulary), worked.num_heads
        prompts = st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=longest)
        prompt = data.draw(prompts if worked is None else prompts | st.just(worked.prompt_ids))

        def some(size: int) -> st.SearchStrategy[list[int] | None]:
            return st.none() | st.lists(st.integers(0, size - 1), min_size=1, unique=True)

        as_safetensors = data.draw(st.booleans())
        body = ForwardRequest(
            prompt=prompt,
            model=None if worked is None else worked.name,
            stages=data.draw(
                st.sampled_from([["*"], ["*.pattern"], ["embed"], ["loss"], ["*.scale"], ["blocks.0.*", "logits"]])
            ),
            detail=data.draw(st.sampled_from(["none", "summary", "values"])),
            positions=data.draw(some(len(prompt))),
            heads=data.draw(some(num_heads)),
            top_k=data.draw(st.none() | st.integers(0, vocab_size)),
            dtype=data.draw(st.sampled_from([None, *DTYPES])),
            encoding="json" if as_safetensors else data.draw(st.sampled_from(["json", "base64"])),
        )
        plan = plan_of(body, tiny.state, as_safetensors)
        assert len(run(plan, 0.0)) <= estimate_bytes(plan)

    @pytest.mark.parametrize("encoding", ["json", "base64", "safetensors"])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_the_estimate_of_many_numbers_is_near_their_size_and_not_below(
        self, tiny: Running, dtype: str, encoding: str
    ) -> None:
        body = {"prompt": [1] * CONTEXT, "stages": ["logits"], "detail": "values", "top_k": 0, "dtype": dtype}
        body |= {"encoding": "base64"} if encoding == "base64" else {}
        plan = plan_of(ForwardRequest.model_validate(body), tiny.state, encoding == "safetensors")
        estimate, size = estimate_bytes(plan), len(run(plan, 0.0))
        assert size <= estimate <= 2 * size + 64 * CONTEXT * 3

    @pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
    def test_no_number_is_longer_in_json_than_the_estimate_says(self, dtype: torch.dtype) -> None:
        info = torch.finfo(dtype)
        generator = np.random.default_rng(1)
        bits = {8: np.int64, 4: np.int32, 2: np.int16}[info.bits // 8]
        any_bits = torch.from_numpy(generator.integers(np.iinfo(bits).min, np.iinfo(bits).max, 20_000, dtype=bits))
        edges = torch.tensor([info.min, info.max, -info.tiny, -info.smallest_normal / 2, -info.eps, -0.1, -1 / 3])
        for numbers in (any_bits.view(dtype), edges.to(dtype)):
            assert len(to_json(json_array(numbers))) <= value_bytes(len(numbers), dtype, "json") + 1

    @pytest.mark.parametrize("as_safetensors", [False, True])
    def test_the_estimate_knows_how_long_the_texts_of_tokens_are(
        self, tmp_path: Path, start: Start, as_safetensors: bool
    ) -> None:
        service = start(model=str(write_checkpoint(tmp_path, extra_token="-" * 4000)))
        body = ForwardRequest(prompt=[NUM_TOKENS] * CONTEXT, stages=["embed"], detail="none", top_k=0)
        plan = plan_of(body, service.state, as_safetensors)
        assert len(run(plan, 0.0)) <= estimate_bytes(plan)

    def test_an_answer_over_the_limit_is_refused_before_any_pass_and_says_what_to_narrow(
        self, tiny_directory: Path, start: Start
    ) -> None:
        service = start(model=str(tiny_directory), max_response_bytes=20_000)
        body = {"prompt": [1] * CONTEXT, "detail": "values", "top_k": 0}
        with service.blocked():
            responses = [
                service.post("/forward", body),
                service.post("/forward", body, headers=AS_SAFETENSORS),
                service.post("/logits", {"prompt": [1] * CONTEXT, "positions": "all"}),
            ]
        for response, hint in zip(responses, ("stages", "stages", "positions"), strict=True):
            assert response.status_code == 413
            error = response.json()["error"]
            assert (error["type"], error["code"]) == ("too_large_error", "response_too_large")
            assert "20000" in error["message"]
            assert hint in error["message"].partition("narrow")[2]
        plan = plan_of(ForwardRequest(**body), service.state, False)
        assert str(estimate_bytes(plan)) in responses[0].json()["error"]["message"]
        assert service.metric("trace_refused_total") == 3
        narrow = body | {"stages": ["blocks.0.attn.pattern"], "heads": [0], "positions": [0]}
        assert service.post("/forward", narrow).status_code == 200

    def test_the_limit_itself_is_allowed(self, tiny_directory: Path, start: Start, tiny: Running) -> None:
        body = {"prompt": PROMPT, "stages": ["embed"], "detail": "values"}
        estimate = estimate_bytes(plan_of(ForwardRequest(**body), tiny.state, False))
        at = start(model=str(tiny_directory), max_response_bytes=estimate)
        below = start(model=str(tiny_directory), max_response_bytes=estimate - 1)
        assert (at.post("/forward", body).status_code, below.post("/forward", body).status_code) == (200, 413)


class TestWorkedExamples:
    PROMPTS = {  # noqa: RUF012 (never changed)
        "ai-rocks": "AI rocks <EOS>",
        "a-tokens-journey": "the cat sat on",
        "i-like-transformers": "<BOS> I like transformers <EOS>",
    }

    @pytest.mark.parametrize("name", PROMPTS)
    def test_printed_numbers_stand_beside_the_computed_ones(self, empty: Running, name: str) -> None:
        body = {"model": name, "prompt": self.PROMPTS[name], "detail": "values"}
        answer = empty.answer("/forward", **body)
        ForwardAnswer.model_validate(answer)
        assert answer["model"] == name
        published = [stage for stage in answer["stages"] if stage.get("published") is not None]
        assert len(published) >= 4
        for stage in published:
            computed, printed = as_tensor(stage["values"]), as_tensor(stage["published"]["values"])
            assert printed.shape == computed.shape
            if stage["published"]["squared"]:
                computed = computed.square()
            difference = (computed - printed).abs()
            assert not difference.isnan().all()
            assert difference.nan_to_num().max().item() == pytest.approx(stage["published"]["max_difference"], abs=1e-9)

    @pytest.mark.parametrize("name", PROMPTS)
    def test_a_printed_stage_is_cut_as_its_values_are(self, empty: Running, name: str) -> None:
        body = {"model": name, "prompt": self.PROMPTS[name], "detail": "values", "positions": [2, 0], "heads": [0]}
        for stage in empty.answer("/forward", **body)["stages"]:
            if stage.get("published") is not None:
                assert as_tensor(stage["published"]["values"]).shape == tuple(stage["shape"])

    def test_ai_rocks_answers_with_slips_that_it_found(self, empty: Running) -> None:
        answer = empty.answer("/forward", model="ai-rocks", prompt=self.PROMPTS["ai-rocks"])
        slips = answer["worked_example"]["slips"]
        assert {"blocks.0.attn.v", "blocks.0.resid_pre"} <= {slip["stage"] for slip in slips}
        for slip in slips:
            assert abs(float(slip["printed"]) - slip["from_printed"]) > slip["allowed"]
        stages = stages_by_name(answer)
        assert stages["blocks.0.attn.v"]["published"]["from_previous"]["agrees"] is False
        assert stages["blocks.0.attn.q"]["published"]["from_previous"]["agrees"] is True
        assert stages["blocks.0.attn_out"]["published"]["from_previous"] is None

    def test_i_like_transformers_has_the_loss_and_the_perplexity_that_it_prints(self, empty: Running) -> None:
        answer = empty.answer("/forward", model="i-like-transformers", prompt=self.PROMPTS["i-like-transformers"])
        assert round(answer["loss"]["mean"], 4) == 1.8299
        assert round(answer["loss"]["perplexity"], 2) == 6.23
        results = {result["name"]: result for result in answer["worked_example"]["results"]}
        assert results["loss"]["published"] == results["loss"]["computed"] == "1.8299"
        assert results["perplexity"]["published"] == results["perplexity"]["computed"] == "6.23"
        published = [stage["published"] for stage in answer["stages"] if stage.get("published") is not None]
        assert all(stage["agrees"] for stage in published)
        assert answer["worked_example"]["slips"] == []

    def test_a_tokens_journey_predicts_cat_and_loses_as_it_prints(self, empty: Running) -> None:
        answer = empty.answer("/forward", model="a-tokens-journey", prompt=self.PROMPTS["a-tokens-journey"])
        assert answer["predictions"][-1]["top"][0]["text"] == "cat"
        assert answer["loss"]["per_token"][:3] == [None] * 3
        assert round(answer["loss"]["per_token"][3], 2) == round(answer["loss"]["mean"], 2) == 1.89

    def test_other_words_of_the_vocabulary_run_and_have_nothing_printed_beside_them(self, empty: Running) -> None:
        answer = empty.answer("/forward", model="a-tokens-journey", prompt="dog mat the")
        ForwardAnswer.model_validate(answer)
        assert [token["text"] for token in answer["tokens"]] == ["dog", "mat", "the"]
        assert "worked_example" not in answer
        assert all("published" not in stage for stage in answer["stages"])
        assert answer["loss"]["per_token"][2] is None  # the default targets are the prompt's own next words
        assert None not in answer["loss"]["per_token"][:2]

    def test_ids_are_the_words_they_stand_for(self, empty: Running) -> None:
        words = empty.answer("/forward", model="ai-rocks", prompt="AI rocks <EOS>", detail="values")
        ids = empty.answer("/forward", model="ai-rocks", prompt=[0, 1, 2], detail="values")
        assert {**words, "timings": None} == {**ids, "timings": None}

    @pytest.mark.parametrize(
        ("prompt", "param", "code"),
        [
            ("the elephant", "prompt", "unknown_word"),
            ("", "prompt", "empty"),
            ("  \n ", "prompt", "empty"),
            ("the the the the the", "prompt", "context_length"),
            ([6], "prompt.0", "token_id"),
        ],
    )
    def test_a_prompt_that_the_example_cannot_take_is_an_error(
        self, empty: Running, prompt: Any, param: str, code: str
    ) -> None:
        response = empty.post("/forward", {"model": "a-tokens-journey", "prompt": prompt})
        assert response.status_code == 400
        assert (response.json()["error"]["param"], response.json()["error"]["code"]) == (param, code)

    def test_a_checkpoint_and_the_examples_are_served_side_by_side(self, tiny: Running) -> None:
        names = [entry["name"] for entry in tiny.get("/models").json()["models"]]
        assert names == ["tiny", *self.PROMPTS]
        for name, prompt in {"tiny": "the cat", **self.PROMPTS}.items():
            assert tiny.answer("/forward", model=name, prompt=prompt)["model"] == name


def test_the_catalogue_has_the_shapes_of_the_network(tiny: Running, tiny_directory: Path) -> None:
    config = tiny.checkpoint.model.config
    sizes = tiny.get("/model").json()["sizes"]
    assert {dim: size for dim, size in sizes.items() if size != "T"} == {
        dim: size for dim, size in sizes_of(config, 0).items() if dim not in ("position", "query", "key")
    }
    assert (
        tiny.get("/model").json()["parameters"]["total"] == load_checkpoint(str(tiny_directory)).model.num_parameters()
    )
