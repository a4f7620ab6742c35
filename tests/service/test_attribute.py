"""POST /attribute: every method says what the library says, costs are bounded, and a sweep leaves nothing behind."""

import gc
import json
import os
import re
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file

from forwardscope import ApiError, Client, InvalidArgument
from forwardscope.results.attributions import (
    AttributionPatching,
    DirectAttribution,
    Gradients,
    IntegratedGradients,
    LogitLens,
)
from model.analysis.attribution.attribution_patching import attribution_patching
from model.analysis.attribution.direct import direct_attribution
from model.analysis.attribution.gradients import compute_gradients, run_target
from model.analysis.attribution.integrated_gradients import IntegratedGradientsRun, mean_embedding
from model.analysis.attribution.logit_lens import LensPart, LensResult, LensRun
from model.analysis.attribution.target import LogitTarget, LossTarget
from model.checkpoints.translators import load_translators
from model.errors import CheckpointError
from model.network.float_copy import float_copy
from model.network.joint_passes import AdaptedNetwork
from model.network.transformer import Transformer
from model.tracing.pauses import pause
from model.tracing.stages import select, stages_of
from service.executors import Executors
from service.http.errors import ApiError as HttpError
from service.http.errors import ClientGone
from service.settings import Settings
from service.worker import Worker
from tests.editor import Editor
from tests.service.checkpoints import VOCAB_SIZE
from tests.service.running import Running, Start, validate, wait_until

PROMPT = [257, 69, 270, 273, 264, 40, 41]
CORRUPTED = [257, 69, 99, 273, 264, 40, 41]
TARGET = LogitTarget(5, 6, minus=17)
LOGIT: dict[str, Any] = {"prompt": PROMPT, "token": 5, "minus": 17}
PATCH: dict[str, Any] = LOGIT | {"corrupted": CORRUPTED}


def attribute(service: Running, method: str, **fields: Any) -> dict[str, Any]:
    return service.answer("/attribute", method=method, **fields)


def refuse(service: Running, status: int, param: str | None, method: str, **fields: Any) -> str:
    """The message of an error that must have this status and name this field."""
    response = service.post("/attribute", {"method": method, **fields})
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    message: str = error["message"]
    return message


class TestAnswers:
    """The tiny checkpoint is served in float32, so that the numbers of the copy are those of the served network."""

    def test_direct(self, tiny: Running) -> None:
        answer = attribute(tiny, "direct", **LOGIT)
        validate(DirectAttribution, answer)
        found = direct_attribution(AdaptedNetwork(tiny.checkpoint.model, None), PROMPT, TARGET)
        assert answer["logit"] == pytest.approx(found.logit, abs=1e-4)
        assert abs(answer["remainder"]) < 1e-4 * abs(answer["logit"])
        assert answer["total"] + answer["remainder"] == pytest.approx(answer["logit"])
        assert answer["embed"] == pytest.approx(found.embed, abs=1e-4)
        for layer, expected in zip(answer["layers"], found.layers, strict=True):
            assert layer["heads"] == pytest.approx(expected.heads, abs=1e-4)
            assert layer["mlp"] == pytest.approx(expected.mlp, abs=1e-4)
        assert answer["target"]["token"]["id"] == 5
        assert answer["target"]["minus"]["id"] == 17
        assert answer["target"]["position"] == 6

    @pytest.mark.parametrize("detail", ["values", "summary", "none"])
    def test_gradient(self, tiny: Running, detail: str) -> None:
        stages = ["embed", "*.attn.z", "ln_final.out", "logits"]
        answer = attribute(tiny, "gradient", **LOGIT, stages=stages, detail=detail, heads=[1, 3], positions=[-1, 2])
        validate(Gradients, answer)
        model = tiny.checkpoint.model
        target = LogitTarget(5, 6, minus=17, has_all_rows=True)
        expected = compute_gradients(
            float_copy(model, torch.float32), PROMPT, target, select(stages_of(model.config), stages)
        )
        assert answer["value"] == pytest.approx(expected.value, abs=1e-4)
        for stage in answer["stages"]:
            gradient = expected.gradients[stage["name"]][:, [6, 2]]
            gradient = gradient[:, :, [1, 3]] if "head" in stage["dims"] else gradient
            assert stage["shape"] == list(gradient.shape)
            if detail == "values":
                torch.testing.assert_close(torch.tensor(stage["values"]), gradient, atol=1e-5, rtol=1e-4)
            if detail != "none":
                assert stage["summary"]["l2"] == pytest.approx(float(gradient.norm()), rel=1e-3)

    def test_gradient_of_the_loss(self, tiny: Running) -> None:
        targets = [None, 3, None, None, 9, None, 1]
        answer = attribute(tiny, "gradient", prompt=PROMPT, of="loss", targets=targets)
        assert answer["target"] == {"token": None, "minus": None, "position": None}
        expected = float(run_target(tiny.checkpoint.model, PROMPT, LossTarget(targets)))
        assert answer["value"] == pytest.approx(expected, rel=1e-4)
        by_default = attribute(tiny, "gradient", prompt=PROMPT, of="loss")
        expected = float(run_target(tiny.checkpoint.model, PROMPT, LossTarget([*PROMPT[1:], None])))
        assert by_default["value"] == pytest.approx(expected, rel=1e-4)

    def test_gradients_of_a_number_of_a_stage(self, tiny: Running) -> None:
        """A neuron, by every method with gradients; and a stage on which it does not depend has none."""
        stage, vector = "blocks.1.mlp.pre", [0.0] * 40
        vector[7] = 2.0
        field = {"prompt": PROMPT, "of": "stage", "stage": stage, "vector": vector, "position": 4}
        answer = attribute(tiny, "gradient", **field, stages=["blocks.1.mlp.pre", "blocks.1.mlp_out"], detail="values")
        assert answer["target"] == {"token": None, "minus": None, "position": 4, "stage": stage}
        [own, later] = [torch.tensor(each["values"])[0] for each in answer["stages"]]
        assert own[4].tolist() == vector
        assert own.abs().sum() == 2.0
        assert (later == 0).all()
        traced = tiny.answer("/forward", prompt=PROMPT, stages=[stage], detail="values", positions=[4])
        assert answer["value"] == pytest.approx(2 * traced["stages"][0]["values"][0][0][7], abs=1e-4)
        summed = attribute(tiny, "integrated_gradients", **field, steps=24)
        assert sum(summed["attributions"]) == pytest.approx(summed["value"] - summed["baseline_value"], abs=0.05)
        assert summed["attributions"][5:] == [0.0] * (len(PROMPT) - 5)
        patched = attribute(tiny, "attribution_patching", **field, corrupted=PROMPT[::-1], stages=["blocks.1.ln2.out"])
        assert patched["clean_value"] == pytest.approx(answer["value"], abs=1e-4)
        total = float(torch.tensor(patched["stages"][0]["values"]).sum())
        assert patched["corrupted_value"] + total == pytest.approx(patched["clean_value"], abs=1e-3)  # it is linear

    @pytest.mark.parametrize(
        ("wrong", "param"),
        [
            ({"stage": None}, "stage"),
            ({"vector": None}, "vector"),
            ({"vector": [1.0]}, "vector"),
            ({"vector": "happy"}, "vector"),
            ({"stage": "blocks.*.mlp.pre"}, "stage"),
            ({"stage": "blocks.1.attn.pattern"}, "stage"),
            ({"token": 5}, "token"),
            ({"position": 99}, "position"),
            ({"of": "logit", "token": 5}, "stage"),
        ],
    )
    def test_a_wrong_number_of_a_stage_is_refused(self, tiny: Running, wrong: dict[str, Any], param: str) -> None:
        body = {"method": "gradient", "prompt": PROMPT, "of": "stage", "stage": "embed", "vector": [1.0] * 24}
        response = tiny.post("/attribute", body | wrong)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)

    def test_integrated_gradients(self, tiny: Running) -> None:
        answer = attribute(tiny, "integrated_gradients", **LOGIT, steps=24)
        validate(IntegratedGradients, answer)
        change = answer["value"] - answer["baseline_value"]
        assert sum(answer["attributions"]) == pytest.approx(change + answer["error"], abs=1e-4)
        assert len(answer["attributions"]) == len(PROMPT)
        model = float_copy(tiny.checkpoint.model, torch.float32)
        run = IntegratedGradientsRun(AdaptedNetwork(model, None), PROMPT, TARGET, mean_embedding(model), 24)
        for step in range(24):
            run.step(step)
        assert answer["attributions"] == pytest.approx(run.finish().attributions.sum(-1).tolist(), abs=1e-4)
        zero = attribute(tiny, "integrated_gradients", **LOGIT, steps=2, baseline="zero")
        other = attribute(tiny, "integrated_gradients", **LOGIT, steps=2, baseline_prompt=CORRUPTED)
        assert len({each["baseline_value"] for each in (answer, zero, other)}) == 3
        assert other["baseline_value"] == pytest.approx(float(run_target(model, CORRUPTED, TARGET)), abs=1e-4)
        assert [value == 0 for value in other["attributions"]] == [True, True, False, True, True, True, True]

    def test_attribution_patching(self, tiny: Running) -> None:
        stages = ["*.resid_pre", "*.attn.k", "*.attn.pattern"]
        answer = attribute(tiny, "attribution_patching", **PATCH, stages=stages, heads=[0, 5], positions=[2, 6])
        validate(AttributionPatching, answer)
        model = float_copy(tiny.checkpoint.model, torch.float32)
        expected = attribution_patching(model, PROMPT, CORRUPTED, TARGET, select(stages_of(model.config), stages))
        assert answer["clean_value"] == pytest.approx(expected.clean_value, abs=1e-4)
        assert answer["corrupted_value"] == pytest.approx(expected.corrupted_value, abs=1e-4)
        for stage in answer["stages"]:
            effects = expected.effects[stage["name"]][0]
            effects = effects[[0, 5]][:, [2, 6]] if stage["name"].endswith("pattern") else effects[[2, 6]]
            torch.testing.assert_close(torch.tensor(stage["values"]), effects, atol=1e-4, rtol=1e-3)

    def test_logit_lens(self, tiny: Running) -> None:
        answer = attribute(tiny, "logit_lens", prompt=PROMPT, token=5, positions=[-1, 0], top_k=3)
        validate(LogitLens, answer)
        logits = tiny.checkpoint.model(torch.tensor([PROMPT]))[0, [6, 0]]
        last = answer["layers"][-1]
        assert [layer["stage"] for layer in answer["layers"]] == [
            "blocks.0.resid_pre",
            "blocks.1.resid_pre",
            "blocks.1.resid_post",
        ]
        for row, predictions, followed in zip(logits, last["positions"], last["token"], strict=True):
            assert [each["id"] for each in predictions["top"]] == row.topk(3).indices.tolist()
            assert followed["logit"] == pytest.approx(float(row[5]), abs=1e-4)
            assert followed["rank"] == int((row > row[5]).sum())
            assert followed["probability"] == pytest.approx(float(row.softmax(-1)[5]), rel=1e-3)
        assert [each["position"] for each in last["positions"]] == [6, 0]
        assert not any(layer["translated"] for layer in answer["layers"])

    def test_logit_lens_follows_the_final_token_of_each_position(self, tiny: Running) -> None:
        answer = attribute(tiny, "logit_lens", prompt=PROMPT, positions=[-1, 0, 3], top_k=2)
        last = answer["layers"][-1]
        assert [each["id"] for each in answer["final"]] == [each["top"][0]["id"] for each in last["positions"]]
        assert [each["rank"] for each in last["final"]] == [0, 0, 0]
        for row, (position, token) in enumerate(zip((-1, 0, 3), answer["final"], strict=True)):
            alone = attribute(tiny, "logit_lens", prompt=PROMPT, positions=[position], token=token["id"])
            for layer, expected in zip(answer["layers"], alone["layers"], strict=True):
                assert layer["final"][row] == pytest.approx(expected["token"][0], rel=1e-4, abs=1e-6)

    def test_the_logit_lens_of_an_edited_pass_decodes_the_edited_residuals(self, tiny: Running) -> None:
        edits: list[dict[str, Any]] = [
            {"stage": "blocks.0.attn.z", "op": "zero", "heads": [1]},
            {"stage": "blocks.1.resid_pre", "op": "patch", "source": {"prompt": PROMPT[::-1]}, "positions": [2]},
        ]
        fields: dict[str, Any] = {"prompt": PROMPT, "token": 5, "positions": [-1, 2], "top_k": 3}
        answer = attribute(tiny, "logit_lens", **fields, edits=edits)
        validate(LogitLens, answer)
        assert [each["stages"] for each in answer["edits"]] == [["blocks.0.attn.z"], ["blocks.1.resid_pre"]]
        stages = ["blocks.*.resid_pre", "blocks.1.resid_post"]
        found = tiny.answer("/forward", prompt=PROMPT, edits=edits, stages=stages, detail="values")["stages"]
        plain = attribute(tiny, "logit_lens", **fields)
        assert "edits" not in plain
        for layer, before in zip(answer["layers"], plain["layers"], strict=True):
            (values,) = (stage["values"] for stage in found if stage["name"] == layer["stage"])
            logits = tiny.checkpoint.model.compute_logits(torch.tensor(values)[0, [6, 2]])
            for row, followed in zip(logits, layer["token"], strict=True):
                assert followed["logit"] == pytest.approx(float(row[5]), abs=1e-4)
            assert (layer["token"] == before["token"]) == (layer["stage"] == "blocks.0.resid_pre")
        assert "behind" in refuse(
            tiny, 400, "edits.1.stage", "logit_lens", prompt=PROMPT, edits=[edits[0], {"stage": "logits", "op": "zero"}]
        )
        refuse(tiny, 400, "edits.0.heads", "logit_lens", prompt=PROMPT, edits=[edits[0] | {"heads": [9]}])
        with Client(str(tiny.client.base_url)) as client:
            lens = client.attribute("logit_lens", PROMPT, token=5, positions=[-1, 2], top_k=3, edits=edits)
        assert lens.answer["layers"][-1].token[0].logit == answer["layers"][-1]["token"][0]["logit"]

    def test_a_text_that_is_one_token_is_that_token(self, tiny: Running) -> None:
        text = tiny.checkpoint.tokenizer.token_text(270)  # type: ignore[union-attr]
        answer = attribute(tiny, "direct", prompt=PROMPT, token=text)
        assert answer["target"]["token"] == {"id": 270, "text": text}

    def test_the_position_is_that_of_the_request(self, tiny: Running) -> None:
        answer = attribute(tiny, "direct", **LOGIT, position=2)
        alone = attribute(tiny, "direct", **LOGIT | {"prompt": PROMPT[:3]})
        assert answer["logit"] == pytest.approx(alone["logit"], abs=1e-4)
        assert attribute(tiny, "direct", **LOGIT, position=-5)["logit"] == answer["logit"]


HALVE: dict[str, Any] = {"stage": "blocks.0.attn.z", "op": "scale", "factor": 0.5, "heads": [1]}


def halve(z: torch.Tensor) -> torch.Tensor:
    """Apply `HALVE`."""
    factors = torch.ones(z.shape[2], 1)
    factors[1] = 0.5
    return z * factors


class TestEdits:
    """Every method explains the edited pass."""

    EDITS = (HALVE, {"stage": "blocks.0.mlp_out", "op": "add", "vector": [0.3] * 24, "positions": [2, 6]})

    def value(self, service: Running, ids: Sequence[int], *more: dict[str, Any]) -> float:
        row = service.answer("/logits", prompt=list(ids), edits=[*self.EDITS, *more])["positions"][0]["logits"]
        return float(row[5] - row[17])

    @pytest.mark.parametrize(
        ("method", "fields"),
        [
            ("direct", LOGIT),
            ("gradient", LOGIT),
            ("integrated_gradients", LOGIT),
            ("attribution_patching", PATCH),
            ("patching", PATCH),
        ],
    )
    def test_the_explained_number_is_that_of_the_edited_pass(
        self, tiny: Running, method: str, fields: dict[str, Any]
    ) -> None:
        answer = attribute(tiny, method, **fields, edits=self.EDITS)
        assert [each["stages"] for each in answer["edits"]] == [["blocks.0.attn.z"], ["blocks.0.mlp_out"]]
        name = "clean_value" if "corrupted" in fields else "logit" if method == "direct" else "value"
        assert answer[name] == pytest.approx(self.value(tiny, PROMPT), abs=1e-4)
        if "corrupted" in fields:
            assert answer["corrupted_value"] == pytest.approx(self.value(tiny, CORRUPTED), abs=1e-4)
        plain = attribute(tiny, method, **fields)
        assert "edits" not in plain
        assert abs(plain[name] - answer[name]) > 1e-3
        wrong = [*self.EDITS, {"stage": "nothing", "op": "zero"}]
        refuse(tiny, 400, "edits.2.stage", method, **fields, edits=wrong)

    def test_gradients_are_those_of_the_edited_pass(self, tiny: Running) -> None:
        stage, step = "blocks.0.resid_pre", 0.02
        fields = LOGIT | {"stages": [stage], "edits": self.EDITS, "detail": "values"}
        gradient = torch.tensor(attribute(tiny, "gradient", **fields)["stages"][0]["values"])[0, 2]
        direction = torch.randn(24, generator=torch.Generator().manual_seed(1))

        def moved(by: float) -> float:
            move = {"stage": stage, "op": "add", "vector": (by * direction).tolist(), "positions": [2]}
            return self.value(tiny, PROMPT, move)

        slope = (moved(step) - moved(-step)) / (2 * step)
        assert float(gradient @ direction) == pytest.approx(slope, rel=0.03, abs=1e-3)

    def test_the_shares_of_an_edited_pass_add_up_and_a_silent_head_has_none(self, tiny: Running) -> None:
        silent = {"stage": "blocks.1.attn.z", "op": "zero", "heads": [3]}
        answer = attribute(tiny, "direct", **LOGIT, edits=[silent])
        assert answer["layers"][1]["heads"][3] == 0.0
        assert answer["remainder"] == pytest.approx(0.0, abs=1e-4)
        added = {"stage": "blocks.1.resid_post", "op": "add", "vector": [0.1 * (index % 3) for index in range(24)]}
        assert abs(attribute(tiny, "direct", **LOGIT, edits=[added])["remainder"]) > 1e-3

    def test_integrated_gradients_go_through_edits_of_the_embeddings(self, tiny: Running) -> None:
        edits = [{"stage": "embed", "op": "scale", "factor": 0.0, "positions": [3]}]
        answer = attribute(tiny, "integrated_gradients", **LOGIT, edits=edits, steps=64)
        assert answer["attributions"][3] == 0.0
        assert any(answer["attributions"][:3])
        assert abs(answer["error"]) < 0.05

    def test_a_patch_of_everything_gives_the_edited_clean_pass(self, tiny: Running) -> None:
        fields = PATCH | {"stages": ["blocks.1.resid_pre"], "by": ["head"], "edits": self.EDITS}
        answer = attribute(tiny, "patching", **fields)
        assert answer["stages"][0]["values"] == pytest.approx(answer["clean_value"], abs=1e-4)
        early = attribute(tiny, "patching", **fields | {"stages": ["blocks.0.resid_pre"]})
        assert early["stages"][0]["values"] == pytest.approx(answer["clean_value"], abs=1e-4), "edits follow the patch"


class TestErrors:
    def test_wrong_tokens_and_positions(self, tiny: Running) -> None:
        message = refuse(tiny, 400, "token", "direct", prompt=PROMPT, token="the cat")
        assert re.search(r"is \d tokens: .*\(\d+\).*an id", message)
        assert "no token" in refuse(tiny, 400, "token", "direct", prompt=PROMPT, token="")
        assert f"vocabulary has {VOCAB_SIZE}" in refuse(tiny, 400, "token", "direct", prompt=PROMPT, token=VOCAB_SIZE)
        assert "same token" in refuse(tiny, 400, "minus", "direct", prompt=PROMPT, token=5, minus=5)
        for position in (7, -8, 10**40):
            assert "there are 7 tokens" in refuse(tiny, 400, "position", "direct", **LOGIT, position=position)
        refuse(tiny, 422, "token", "direct", prompt=PROMPT)
        refuse(tiny, 422, "token", "direct", prompt=PROMPT, token=True)
        refuse(tiny, 422, "stages", "direct", **LOGIT, stages=["embed"])

    def test_fields_that_do_not_belong_to_what_is_explained(self, tiny: Running) -> None:
        assert "explain the loss" in refuse(tiny, 400, "token", "gradient", prompt=PROMPT)
        assert "of: logit" in refuse(tiny, 400, "token", "gradient", prompt=PROMPT, of="loss", token=3)
        assert "of: loss" in refuse(tiny, 400, "targets", "gradient", **LOGIT, targets=[1] * 7)
        refuse(tiny, 400, "targets", "gradient", prompt=PROMPT, of="loss", targets=[1])
        refuse(tiny, 400, "targets", "gradient", prompt=PROMPT, of="loss", targets=[None] * 7)
        refuse(tiny, 400, "targets.1", "gradient", prompt=[1, 2], of="loss", targets=[1, VOCAB_SIZE])
        refuse(tiny, 400, "prompt", "gradient", prompt=[1], of="loss")
        refuse(tiny, 400, "baseline_prompt", "integrated_gradients", **LOGIT, baseline="zero", baseline_prompt=PROMPT)

    def test_stages_without_gradients_and_prompts_that_do_not_fit(self, tiny: Running) -> None:
        assert "stage" in refuse(tiny, 400, "stages.0", "gradient", **LOGIT, stages=["loss"])
        refuse(tiny, 400, "stages.1", "gradient", **LOGIT, stages=["embed", "blocks.9.resid_pre"])
        assert "7" in refuse(tiny, 400, "corrupted", "attribution_patching", **PATCH | {"corrupted": [1, 2]})
        assert "7" in refuse(tiny, 400, "corrupted", "patching", **PATCH | {"corrupted": [1, 2]})
        refuse(tiny, 400, "baseline_prompt", "integrated_gradients", **LOGIT, baseline_prompt=[1])
        refuse(tiny, 400, "stages", "patching", **PATCH, stages=["ln_final.out"])
        refuse(tiny, 400, "position", "patching", **PATCH, position=2)
        refuse(tiny, 400, "by", "patching", **PATCH, by=["head", "head"])
        refuse(tiny, 400, "heads.0", "patching", **PATCH, heads=[6])
        refuse(tiny, 400, "positions.0", "patching", **PATCH, positions=[7])
        refuse(tiny, 400, "receivers.0", "patching", **PATCH, receivers=["blocks.9.attn.q"])
        refuse(tiny, 400, "receivers", "patching", **PATCH, stages=["embed"], receivers=["logits"])
        late = refuse(tiny, 400, "stages", "patching", **PATCH, receivers=["blocks.0.attn.q"])
        assert "blocks.1.resid_pre is not before blocks.0.attn.q, the last of the receivers" in late
        refuse(tiny, 400, "lens", "logit_lens", prompt=PROMPT, lens="tuned")
        refuse(tiny, 400, "top_k", "logit_lens", prompt=PROMPT, top_k=VOCAB_SIZE + 1)
        refuse(tiny, 422, "steps", "integrated_gradients", **LOGIT, steps=513)

    def test_jobs_over_a_limit_are_refused_before_they_run(self, start: Start, tiny_directory: Path) -> None:
        service = start(model=str(tiny_directory), max_gradient_tokens=70, max_pass_tokens=7, max_pass_bytes=1 << 20)
        message = refuse(service, 413, "prompt", "integrated_gradients", **LOGIT, steps=9)
        assert re.search(r"11 passes over 7 tokens are 77 tokens.* 70", message)
        assert "at most 7" in refuse(service, 413, "prompt", "gradient", **LOGIT | {"prompt": [*PROMPT, 1]})
        assert "at most 7" in refuse(
            service, 413, "prompt", "patching", **PATCH | {"prompt": [1] * 8, "corrupted": [2] * 8}
        )
        assert service.state.float_network is not None
        assert "copy" not in vars(service.state.float_network)
        attribute(service, "integrated_gradients", **LOGIT, steps=8)
        assert "copy" in vars(service.state.float_network), "the copy is made when it is first needed"

    def test_a_pass_that_would_take_too_much_memory_is_refused(self, start: Start, tiny_directory: Path) -> None:
        service = start(model=str(tiny_directory), max_pass_bytes=100_000)
        assert "the limit is 100000" in refuse(service, 413, None, "gradient", **LOGIT)

    def test_without_gradients_only_the_methods_that_need_none_are_answered(
        self, start: Start, tiny_directory: Path
    ) -> None:
        service = start(model=str(tiny_directory), gradients="off")
        for method, fields in (("gradient", LOGIT), ("integrated_gradients", LOGIT), ("attribution_patching", PATCH)):
            assert "--gradients" in refuse(service, 400, "method", method, **fields)
        answer = attribute(service, "direct", **LOGIT)
        assert abs(answer["remainder"]) < 1e-4 * abs(answer["logit"])
        assert attribute(service, "logit_lens", prompt=PROMPT)
        assert attribute(service, "patching", **PATCH, stages=["embed"])


class TestLensJobs:
    BODY: ClassVar = {"prompt": PROMPT, "token": 5, "positions": list(range(7)), "top_k": 2}

    def test_no_job_of_the_network_decodes_more_than_a_few_rows(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = attribute(tiny, "logit_lens", **self.BODY)
        jobs: list[int] = []  # the rows that each job decodes
        run, decode = Worker.run, Transformer.compute_logits

        def counted(worker: Worker, job: Any) -> Any:
            name = "prepare_passes" if hasattr(job, "prepare_passes") else "__call__"
            method = getattr(job, name)

            def counted_method() -> Any:
                jobs.append(0)
                return method()

            if name == "__call__":
                return run(worker, counted_method)
            job.prepare_passes = counted_method
            return run(worker, job)

        def noted(model: Transformer, residual: torch.Tensor, *rest: Any) -> torch.Tensor:
            jobs[-1] += residual.shape[1]
            return decode(model, residual, *rest)

        monkeypatch.setattr("model.analysis.attribution.logit_lens.LOGITS_PER_PART", 2 * VOCAB_SIZE)
        monkeypatch.setattr(Worker, "run", counted)
        monkeypatch.setattr(Transformer, "compute_logits", noted)
        parts = attribute(tiny, "logit_lens", **self.BODY)
        assert jobs == [1, *[2, 2, 2, 1] * 3, 0]  # a row of the pass, those of each layer, and the answer's
        assert parts | {"timings": None} == whole | {"timings": None}

    def test_steps_of_other_requests_run_between_two_parts(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, told = threading.Event(), threading.Event()
        decode = LensRun.decode

        def slow(run: LensRun, part: LensPart) -> LensResult:
            begun.set()
            time.sleep(0.0 if told.is_set() else 0.05)
            return decode(run, part)

        monkeypatch.setattr("model.analysis.attribution.logit_lens.LOGITS_PER_PART", VOCAB_SIZE)
        monkeypatch.setattr(LensRun, "decode", slow)
        with ThreadPoolExecutor(1) as threads:
            lens = threads.submit(lambda: attribute(tiny, "logit_lens", **self.BODY))
            assert begun.wait(10)
            assert tiny.answer("/generate", prompt=PROMPT, max_tokens=1)
            assert not lens.done()
            told.set()
            assert lens.result()

    def test_a_lens_with_too_many_logits_is_refused_with_its_cost(self, start: Start, tiny_directory: Path) -> None:
        service = start(model=str(tiny_directory), max_lens_logits=3 * 6 * VOCAB_SIZE)
        message = refuse(service, 413, "positions", "logit_lens", **self.BODY)
        assert f"3 residuals of 7 positions have {21 * VOCAB_SIZE} logits" in message
        assert attribute(service, "logit_lens", **self.BODY | {"positions": list(range(6))})


class TestTunedLens:
    PARTS: ClassVar = {"weight": (24, 24), "bias": (24,)}

    def write(self, path: Path, tiny: Running, prefix: str = "", **replaced: torch.Tensor) -> Path:
        generator = torch.Generator().manual_seed(2)
        shapes = {
            f"{layer}.{part}": ((24, 24) if part == "weight" else (24,))
            for layer in range(2)
            for part in ("weight", "bias")
        }
        tensors = {name: 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        save_file({f"{prefix}{name}": tensor for name, tensor in (tensors | replaced).items()}, path)
        return path

    @pytest.mark.parametrize("prefix", ["", "layer_translators."])
    def test_each_residual_is_translated_before_it_is_decoded(
        self, start: Start, tiny: Running, tiny_directory: Path, tmp_path: Path, prefix: str
    ) -> None:
        path = self.write(tmp_path / "lens.safetensors", tiny, prefix)
        service = start(model=str(tiny_directory), lens=path)
        answer = attribute(service, "logit_lens", prompt=PROMPT, token=9, top_k=1)
        plain = attribute(service, "logit_lens", prompt=PROMPT, token=9, top_k=1, lens="plain")
        assert plain["layers"] == attribute(tiny, "logit_lens", prompt=PROMPT, token=9, top_k=1)["layers"]
        assert [layer["translated"] for layer in answer["layers"]] == [True, True, False]
        model = service.checkpoint.model
        translators = load_translators(path, model)
        residuals: dict[str, torch.Tensor] = {}
        for layer in range(2):
            name = f"blocks.{layer}.resid_pre"
            model(torch.tensor([PROMPT]), tap=Editor({name: partial(residuals.setdefault, name)}))
            h = residuals[name][0, -1:]
            expected = model.compute_logits(h + h @ translators.weights[layer].T + translators.biases[layer])[0, 9]
            assert answer["layers"][layer]["token"][0]["logit"] == pytest.approx(float(expected), abs=1e-4)
            assert plain["layers"][layer]["token"][0]["logit"] != pytest.approx(float(expected), abs=1e-2)
        assert answer["layers"][2]["token"] == plain["layers"][2]["token"]

    def test_a_file_that_does_not_fit_is_refused(self, tiny: Running, tmp_path: Path) -> None:
        model = tiny.checkpoint.model
        wrong: dict[str, dict[str, Any]] = {
            "shape": {"1.weight": torch.zeros(24, 23)},
            "have": {"2.weight": torch.zeros(24, 24)},
            "not finite": {"0.bias": torch.full((24,), torch.nan)},
        }
        for reason, tensors in wrong.items():
            path = self.write(tmp_path / "wrong.safetensors", tiny, **tensors)
            with pytest.raises(CheckpointError, match=reason):
                load_translators(path, model)
        save_file({"0.weight": torch.zeros(24, 24)}, tmp_path / "short.safetensors")
        with pytest.raises(CheckpointError, match=r"lacks 0\.bias, 1\.weight, 1\.bias"):
            load_translators(tmp_path / "short.safetensors", model)
        with pytest.raises(CheckpointError, match="pickle"):
            load_translators(tmp_path / "params.pt", model)
        with pytest.raises(CheckpointError, match="no such file"):
            load_translators(tmp_path / "other.safetensors", model)


class TestClient:
    def test_the_client_returns_arrays_and_heads(self, tiny: Running) -> None:
        with Client(str(tiny.client.base_url)) as client:
            direct = client.attribute("direct", PROMPT, token=5, minus=17)
            shares = [(each.layer, each.head) for each in direct.top_heads(3)]
            heads = torch.tensor([layer["heads"] for layer in direct.answer["layers"]])
            assert shares == [divmod(index, 6) for index in heads.abs().flatten().topk(3).indices.tolist()]
            gradient = client.attribute("gradient", PROMPT, token=5, stages="*.attn.z")
            with pytest.raises(InvalidArgument, match="method: 'direct' has shares of heads, but 'gradient' has none"):
                gradient.top_heads(3)
            assert gradient["blocks.1.attn.z"].shape == (1, 7, 6, 4)
            assert gradient.dims("blocks.1.attn.z") == ("batch", "position", "head", "d_head")
            sweep = client.attribute("patching", PROMPT, token=5, minus=17, corrupted=CORRUPTED, stages="*.attn.z")
            cells = list(client.stream_sweep(PROMPT, CORRUPTED, token=5, minus=17, stages="*.attn.z"))
            assert sweep["blocks.0.attn.z"].shape == (7, 6)
            assert cells[8].value == pytest.approx(sweep["blocks.0.attn.z"][1, 2])
            with pytest.raises(ApiError, match="token"):
                client.attribute("direct", PROMPT)


def test_the_settings_refuse_unknown_dtypes_for_gradients() -> None:
    with pytest.raises(ValueError, match="gradients"):
        Settings(gradients="float16")


def test_metrics_count_the_answers_of_each_method(start: Start, tiny_directory: Path) -> None:
    service = start(model=str(tiny_directory))
    attribute(service, "direct", **LOGIT)
    attribute(service, "gradient", **LOGIT)
    attribute(service, "patching", **PATCH, stages=["embed"])
    for method in ("direct", "gradient", "patching"):
        assert service.metric(f'attributions_total{{method="{method}"}}') == 1
    assert service.metric("gradient_seconds_count") == 2
    assert service.metric("sweep_cells_total") == 7
    assert service.metric("buffered_bytes") == 0


def test_an_answer_is_never_larger_than_its_estimate(tiny: Running) -> None:
    """The reservation of a response is its estimate."""
    for method, fields in (
        ("direct", LOGIT),
        ("gradient", LOGIT | {"stages": ["*"], "detail": "values"}),
        ("integrated_gradients", LOGIT),
        ("attribution_patching", PATCH | {"stages": ["*"]}),
        ("logit_lens", {"prompt": PROMPT, "top_k": VOCAB_SIZE, "token": 1, "positions": list(range(7))}),
        ("patching", PATCH),
    ):
        limits = re.compile(r"up to (\d+) bytes")
        size = len(json.dumps(attribute(tiny, method, **fields), separators=(",", ":"), ensure_ascii=False).encode())
        settings = tiny.state.settings
        object.__setattr__(settings, "max_response_bytes", 1)
        try:
            message = tiny.post("/attribute", {"method": method, **fields}).json()["error"]["message"]
        finally:
            object.__setattr__(settings, "max_response_bytes", Settings().max_response_bytes)
        found = limits.search(message)
        assert found is not None, message
        assert size <= int(found[1]), method


def test_a_body_without_a_method_is_told_which_there_are(tiny: Running) -> None:
    def error(**body: Any) -> dict[str, Any]:
        response = tiny.post("/attribute", body)
        assert response.status_code == 422
        found: dict[str, Any] = response.json()["error"]
        return found

    assert "did you mean 'method'" in error(metod="direct", **LOGIT)["message"]
    assert error(**LOGIT) | {"message": None} == error(**LOGIT, method="best") | {"message": None, "code": "missing"}
    assert "one of direct, gradient, " in error(**LOGIT)["message"]
    assert "one of direct, gradient, " in error(**LOGIT, method=["direct"])["message"]
    assert "did you mean 'minus'" in error(**LOGIT | {"method": "direct", "minux": 3})["message"]


class TestThread:
    def test_a_job_ends_between_two_passes_when_its_client_has_gone(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[int] = []
        step = IntegratedGradientsRun.step

        def counted(run: IntegratedGradientsRun, index: int) -> None:
            steps.append(index)
            step(run, index)

        monkeypatch.setattr(IntegratedGradientsRun, "step", counted)
        connection = tiny.send("/attribute", {"method": "integrated_gradients", **LOGIT, "steps": 512})
        wait_until(lambda: len(steps) > 2, "the job computes")
        connection.close()
        wait_until(lambda: tiny.state.worker.num_running + tiny.state.worker.num_waiting == 0, "idle again")
        assert len(steps) < 512
        assert attribute(tiny, "gradient", **LOGIT)

    def test_jobs_have_one_thread_of_the_lowest_priority_and_the_network_keeps_its_threads(
        self, start: Start, tiny_directory: Path
    ) -> None:
        service = start(model=str(tiny_directory), threads=2)

        def look() -> tuple[int, int]:
            return torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

        executors = service.state.worker.executors
        assert service.on_loop(executors.run_long("gradients", look)).result(10) == (1, 19)
        assert service.on_network(look).result(10) == (2, os.getpriority(os.PRIO_PROCESS, 0))

    def test_a_shutdown_ends_a_running_job_and_answers_those_that_wait(
        self, start: Start, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = start(model=str(tiny_directory))
        worker, begun, ended = service.state.worker, threading.Event(), threading.Event()

        def run_block() -> bool:
            pause()
            return False

        def job() -> None:
            begun.set()
            with pytest.raises(ClientGone):
                wait_until(run_block, "the job is told that nobody waits")
            time.sleep(0.2)  # the rest of the pass
            ended.set()

        jobs = [service.on_loop(worker.executors.run_long("gradients", job)) for _ in range(2)]
        assert begun.wait(10)
        service.on_loop(worker.drain(0)).result(10)
        for each in jobs:
            with pytest.raises(HttpError) as found:
                each.result(10)
            assert (found.value.status, found.value.code) == (503, "draining")
        assert not ended.is_set()
        service.stop()
        assert ended.is_set()

    def test_a_job_that_is_given_up_holds_nothing_afterwards(self, tiny: Running) -> None:
        executors, begun = tiny.state.worker.executors, threading.Event()
        held: list[weakref.ref[set[int]]] = []

        def job() -> None:
            stages = set[int]()  # stands for the tensors of a pass
            held.append(weakref.ref(stages))
            begun.set()
            while True:
                pause()

        gc.disable()  # exceptions and their frames refer to each other, and a server seldom looks for such cycles
        try:
            waiting = tiny.on_loop(executors.run_long("gradients", job))
            assert begun.wait(10)
            waiting.cancel()
            wait_until(lambda: executors.num_running == 0, "the job is given up")
            wait_until(lambda: held[0]() is None, "its stages are freed")
        finally:
            gc.enable()

    def test_running_jobs_are_counted_while_others_are_added(self) -> None:
        """`GET /metrics` counts them on another thread than the one that adds them."""
        executors = Executors(Settings(), note_change=lambda: None, has_steps=lambda: False)

        class Job(Future[None]):
            def running(self) -> bool:
                executors._jobs.add(Future())
                return True

        executors._jobs.add(Job())
        assert executors.num_running == 1

    def test_jobs_that_may_not_wait_are_refused_while_others_are_answered(self, tiny: Running) -> None:
        released = threading.Event()
        worker = tiny.state.worker
        wait_until(lambda: worker.num_running + worker.num_waiting == 0, "the jobs of earlier tests have ended")
        jobs = [tiny.on_loop(worker.executors.run_long("gradients", lambda: released.wait(20))) for _ in range(9)]
        try:
            wait_until(lambda: worker.num_running + worker.num_waiting == 9, "one job runs and eight wait")
            response = tiny.post("/attribute", {"method": "gradient", **LOGIT})
            assert response.status_code == 429
            assert "8 attributions" in response.json()["error"]["message"]
            assert attribute(tiny, "logit_lens", prompt=PROMPT)
            assert tiny.answer("/generate", prompt=PROMPT, max_tokens=2)
        finally:
            released.set()
            assert all(job.result(20) for job in jobs)
        assert attribute(tiny, "gradient", **LOGIT)
