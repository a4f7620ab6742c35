"""POST /forward answers with the numbers of a direct pass, in every encoding."""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import Tensor

from forwardscope.results.passes import Trace
from model.checkpoints.load import load_checkpoint
from model.network.parameters import count_parameters
from model.tracing.predictions import compute_loss
from model.tracing.stages import sizes_of, stages_of
from model.tracing.tap import Recorder
from service.answers.passes import SAFETENSORS_MEDIA_TYPE
from tests.service.checkpoints import NUM_TOKENS, VOCAB_SIZE
from tests.service.running import Running, validate

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPT = [257, 69, 270, 273, 264]
AS_SAFETENSORS = {"Accept": SAFETENSORS_MEDIA_TYPE}
# The service and the direct pass below perform the same operations on the same numbers, but with another number of
# threads sums may be computed in another order. Values are of the order of 1.
ROUNDING = 1e-5


@pytest.fixture
def direct(tiny: Running) -> dict[str, Tensor]:
    """All stages of a pass over `PROMPT`, without the service."""
    return record(tiny, PROMPT, [*PROMPT[1:], None])


def record(service: Running, ids: Sequence[int], targets: Sequence[int | None]) -> dict[str, Tensor]:
    network = service.checkpoint.model
    recorder = Recorder(stages_of(network.config))
    with torch.inference_mode():
        compute_loss(network(torch.tensor([list(ids)]), tap=recorder), targets, recorder)
    return recorder.kept


def stages_by_name(answer: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {stage["name"]: stage for stage in answer["stages"]}


def as_tensor(values: Any) -> Tensor:
    """Convert nested lists; null becomes NaN."""
    return torch.from_numpy(np.array(values, dtype=float))


def finite_or_nan(tensor: Tensor) -> Tensor:
    return torch.where(tensor.isfinite(), tensor, torch.nan).double()


def from_base64(stage: Mapping[str, Any]) -> Tensor:
    raw = bytearray(base64.b64decode(stage["values"], validate=True))
    return torch.frombuffer(raw, dtype=DTYPES[stage["dtype"]]).reshape(stage["shape"])


def from_safetensors(content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors of a safetensors file, and the JSON in its metadata."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    return safetensors.torch.load(content), json.loads(header["__metadata__"]["forwardscope"])


class TestStages:
    def test_the_answer_has_all_stages_of_the_catalogue_in_the_same_order_and_shape(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=PROMPT, detail="values")
        validate(Trace, answer)
        catalogue = tiny.get("/model").json()
        sizes = {dim: len(PROMPT) if size == "T" else size for dim, size in catalogue["sizes"].items()}
        assert [(stage["name"], stage["dims"], stage["shape"]) for stage in answer["stages"]] == [
            (stage["name"], stage["dims"], [sizes[dim] for dim in stage["dims"]]) for stage in catalogue["stages"]
        ]
        for stage in answer["stages"]:
            assert list(np.shape(stage["values"])) == stage["shape"]

    def test_values_equal_those_of_a_direct_pass(self, tiny: Running, direct: dict[str, Tensor]) -> None:
        stages = stages_by_name(tiny.answer("/forward", prompt=PROMPT, detail="values"))
        assert list(stages) == list(direct)
        for name, tensor in direct.items():
            torch.testing.assert_close(
                as_tensor(stages[name]["values"]),
                finite_or_nan(tensor),
                atol=ROUNDING,
                rtol=0,
                equal_nan=True,
                msg=partial("{}: {}".format, name),
            )

    def test_a_summary_covers_the_finite_values(self, tiny: Running) -> None:
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
            # The service sums float32 numbers in float32, numpy in float64.
            assert summary == pytest.approx(expected, rel=1e-5, abs=1e-6), stage["name"]

    def test_a_prompt_of_one_token_has_a_loss_stage_without_a_finite_number(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=[5], stages=["loss"])
        (stage,) = answer["stages"]
        assert stage["summary"] == dict.fromkeys(("min", "max", "mean", "std", "l2")) | {"non_finite": 1}
        assert answer["loss"] == {"per_token": [None], "mean": None, "perplexity": None}

    def test_detail_decides_whether_summaries_and_values_are_sent(self, tiny: Running) -> None:
        def parts(**detail: str) -> set[str]:
            answer = tiny.answer("/forward", prompt=PROMPT, stages=["embed"], **detail)
            validate(Trace, answer)
            return set(answer["stages"][0]) - {"name", "shape", "dims", "dtype"}

        assert parts(detail="none") == set()
        assert parts() == parts(detail="summary") == {"summary"}
        assert parts(detail="values") == {"summary", "values"}

    def test_only_the_requested_stages_are_sent_each_once(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=PROMPT, stages=["*.resid_post", "embed", "*.attn.pattern", "embed"])
        assert [stage["name"] for stage in answer["stages"]] == [
            "embed",
            "blocks.0.attn.pattern",
            "blocks.0.resid_post",
            "blocks.1.attn.pattern",
            "blocks.1.resid_post",
        ]

    def test_names_in_the_spelling_of_transformer_lens_select_the_same_stages(self, tiny: Running) -> None:
        lens = ["hook_embed", "blocks.*.attn.hook_pattern", "blocks.1.hook_resid_post", "ln_final.hook_normalized"]
        plain = [pattern.replace("hook_", "") for pattern in lens]
        with_hooks = tiny.answer("/forward", prompt=PROMPT, stages=lens, detail="values")["stages"]
        assert len(with_hooks) == 5
        assert with_hooks == tiny.answer("/forward", prompt=PROMPT, stages=plain, detail="values")["stages"]

    def test_a_text_and_its_token_ids_give_the_same_stages(self, tiny: Running) -> None:
        text = tiny.answer("/forward", prompt="the cat sat on", detail="values")
        ids = tiny.answer("/forward", prompt=[token["id"] for token in text["tokens"]], detail="values")
        assert text["stages"] == ids["stages"]
        assert "".join(token["text"] for token in text["tokens"]) == "the cat sat on"
        assert [token["position"] for token in text["tokens"]] == list(range(len(PROMPT)))

    def test_an_id_without_a_token_in_the_tokenizer_is_accepted_and_has_no_text(self, tiny: Running) -> None:
        answer = tiny.answer("/forward", prompt=[NUM_TOKENS, VOCAB_SIZE - 1], stages=["embed"])
        assert [token["text"] for token in answer["tokens"]] == [None, None]


class TestEncodings:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_base64_and_safetensors_have_the_same_numbers_as_json(self, tiny: Running, dtype: str) -> None:
        body = {"prompt": PROMPT, "detail": "values", "dtype": dtype}
        plain = stages_by_name(tiny.answer("/forward", **body))
        encoded = stages_by_name(tiny.answer("/forward", **body, encoding="base64"))
        response = tiny.post("/forward", body, headers=AS_SAFETENSORS)
        assert response.headers["content-type"] == SAFETENSORS_MEDIA_TYPE
        tensors, _ = from_safetensors(response.content)
        computed, _ = from_safetensors(tiny.post("/forward", {"prompt": PROMPT}, headers=AS_SAFETENSORS).content)
        assert set(plain) == set(encoded) == set(tensors) == set(computed)
        for name, stage in plain.items():
            tensor = tensors[name]
            torch.testing.assert_close(tensor, computed[name].to(DTYPES[dtype]), rtol=0, atol=0, equal_nan=True)
            assert (stage["dtype"], encoded[name]["dtype"], tensor.dtype) == (dtype, dtype, DTYPES[dtype])
            assert torch.equal(from_base64(encoded[name]).nan_to_num(nan=7.0), tensor.nan_to_num(nan=7.0)), (
                name
            )  # positions without a target have the loss NaN
            # The shortest decimal of a float32 converts back to exactly that float32.
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

    def test_the_metadata_of_a_safetensors_answer_is_the_json_answer_without_values(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "stages": ["*.resid_post", "loss"]}
        expected = tiny.answer("/forward", **body)
        tensors, found = from_safetensors(tiny.post("/forward", body, headers=AS_SAFETENSORS).content)
        validate(Trace, found)
        assert list(tensors) != []  # the default detail of a safetensors answer is "values"
        assert set(tensors) == {stage["name"] for stage in expected["stages"]}
        for answer in (expected, found):
            del answer["timings"]
        assert found == expected

    def test_a_number_too_large_for_float16_is_an_error_that_names_dtype(self, tiny: Running) -> None:
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
    def test_selected_positions_and_heads_have_the_same_values_as_in_the_whole_answer(
        self, tiny: Running, positions: list[int] | None, heads: list[int] | None
    ) -> None:
        body = {"prompt": PROMPT, "detail": "values", "top_k": 3}
        whole = tiny.answer("/forward", **body)
        part = tiny.answer("/forward", **body, positions=positions, heads=heads)
        kept: dict[str, list[int] | None] = {
            "position": positions,
            "query": positions,
            "head": heads,
            # Each of the two key-value heads is read by three query heads.
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

    @pytest.mark.parametrize(
        ("path", "param", "fields"),
        [
            ("/forward", "heads", {"stages": "*.resid_post", "heads": [0]}),
            ("/generate", "trace.heads", {"trace": {"stages": ["embed"], "heads": [0]}}),
            ("/generate", "trace.heads", {"trace": {"logit_lens": True, "heads": [0]}}),
            ("/attribute", "heads", {"method": "gradient", "stages": ["*.mlp_out"], "heads": [0]}),
            (
                "/attribute",
                "heads",
                {"method": "patching", "stages": "*.resid_post", "heads": [0], "corrupted": PROMPT, "token": 1},
            ),
        ],
    )
    def test_heads_that_no_selected_stage_has_are_refused(
        self, tiny: Running, path: str, param: str, fields: dict[str, Any]
    ) -> None:
        response = tiny.post(path, {"prompt": PROMPT} | fields)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, param), error
        assert "none of the selected stages has heads; leave it out" in error["message"]


class TestPredictionsAndLoss:
    def test_predictions_are_the_most_likely_tokens_of_a_softmax_over_the_vocabulary(
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

    def test_the_default_is_ten_predictions_and_top_k_0_gives_none(self, tiny: Running) -> None:
        def lengths(**top_k: int) -> list[int]:
            answer = tiny.answer("/forward", prompt=PROMPT, stages=["embed"], **top_k)
            return [len(row["top"]) for row in answer["predictions"]]

        assert lengths() == [10] * len(PROMPT)
        assert lengths(top_k=2) == [2] * len(PROMPT)
        assert sum(lengths(top_k=0)) == 0

    def test_the_default_targets_of_the_loss_are_the_next_tokens_of_the_prompt(
        self, tiny: Running, direct: dict[str, Tensor]
    ) -> None:
        loss = tiny.answer("/forward", prompt=PROMPT, stages=["embed"])["loss"]
        logprobs = direct["logits"][0].log_softmax(-1)
        expected = [-logprobs[i, target].item() for i, target in enumerate(PROMPT[1:])]
        assert loss["per_token"][-1] is None
        assert loss["per_token"][:-1] == pytest.approx(expected, abs=ROUNDING)
        assert loss["mean"] == pytest.approx(np.mean(expected), abs=ROUNDING)
        assert loss["perplexity"] == pytest.approx(np.exp(np.mean(expected)), rel=ROUNDING)

    def test_the_loss_is_that_of_given_targets_and_null_targets_do_not_count(
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

    def test_the_mean_loss_is_null_if_all_targets_are_null(self, tiny: Running) -> None:
        loss = tiny.answer("/forward", prompt=[1, 2], targets=[None, None], stages=["embed"])["loss"]
        assert loss == {"per_token": [None, None], "mean": None, "perplexity": None}


def test_the_catalogue_has_the_sizes_and_the_parameter_count_of_the_network(
    tiny: Running, tiny_directory: Path
) -> None:
    config = tiny.checkpoint.model.config
    sizes = tiny.get("/model").json()["sizes"]
    assert {dim: size for dim, size in sizes.items() if size != "T"} == {
        dim: size for dim, size in sizes_of(config, 0).items() if dim not in ("position", "query", "key")
    }
    total = tiny.get("/model").json()["parameters"]["total"]
    assert total == count_parameters(load_checkpoint(str(tiny_directory)).model.config).total
