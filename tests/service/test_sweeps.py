"""POST /attribute with the method `patching`: the cells of sweeps and paths, and how they run beside others."""

import asyncio
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fastapi import Request

from forwardscope.results.attributions import (
    Patching,
    SweepCells,
    SweepEnd,
    SweepStart,
)
from model.analysis.attribution.gradients import run_target
from model.tracing.stages import select, stages_of
from model.tracing.tap import Chain
from service.answers import call
from service.answers.call import RouteCall
from service.http.errors import queue_full
from service.worker import Worker
from tests.editor import Editor
from tests.service.running import Running, Start, read_events, validate, wait_until
from tests.service.test_attribute import CORRUPTED, HALVE, PATCH, PROMPT, TARGET, attribute, halve, refuse


class TestSweeps:
    STAGES = ("blocks.1.resid_pre", "blocks.0.attn.z", "blocks.1.attn.v", "blocks.0.attn.pattern")

    @pytest.mark.parametrize(
        "stage", ["blocks.1.resid_pre", "blocks.0.attn.z", "blocks.1.attn.v", "blocks.0.attn.pattern"]
    )
    @pytest.mark.parametrize("by", [["position"], ["head"], ["position", "head"]], ids="-".join)
    def test_each_cell_is_the_pass_with_this_part_of_the_clean_pass(
        self, tiny: Running, stage: str, by: list[str]
    ) -> None:
        answer = attribute(tiny, "patching", **PATCH, stages=[stage], by=by, positions=[1, 2, 6])
        validate(Patching, answer)
        model = tiny.checkpoint.model
        clean: dict[str, torch.Tensor] = {}
        model(torch.tensor([PROMPT]), tap=Editor({stage: lambda x: clean.setdefault(stage, x)}))
        (found,) = answer["stages"]
        values = torch.tensor(found["values"]).reshape(-1).tolist()
        dims = dict(zip(found["dims"], found["shape"], strict=True))
        places: dict[str, Sequence[int]] = {
            "position": [1, 2, 6],
            "query": [1, 2, 6],
            "head": range(6),
            "kv_head": range(2),
        }
        cells: list[dict[str, int]] = [{}]
        for dim in found["dims"]:
            assert dims[dim] == len(places[dim])
            cells = [cell | {dim: index} for cell in cells for index in places[dim]]
        axes = dict(zip(["batch", "position", "head", "d_head"], range(4), strict=True))
        if "pattern" in stage:
            axes = {"batch": 0, "head": 1, "query": 2}
        axes |= {"kv_head": 2}

        def patched(x: torch.Tensor, cell: dict[str, int]) -> torch.Tensor:
            mask = torch.ones(x.shape, dtype=torch.bool)
            row = "query" if "pattern" in stage else "position"
            for dim, wanted in {row: [1, 2, 6], **{dim: [index] for dim, index in cell.items()}}.items():
                along = torch.zeros(x.shape[axes[dim]], dtype=torch.bool)
                along[wanted] = True
                mask &= along.view([-1 if axis == axes[dim] else 1 for axis in range(x.dim())])
            return torch.where(mask, clean[stage], x)

        expected = [
            float(run_target(model, CORRUPTED, TARGET, Editor({stage: partial(patched, cell=cell)}))) for cell in cells
        ]
        assert values == pytest.approx(expected, abs=1e-4)
        assert answer["corrupted_value"] == pytest.approx(float(run_target(model, CORRUPTED, TARGET)), abs=1e-4)
        assert answer["clean_value"] == pytest.approx(float(run_target(model, PROMPT, TARGET)), abs=1e-4)
        assert answer["num_cells"] == len(cells)

    def test_a_sweep_gives_way_to_others_after_each_group(self, tiny: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        given: list[tuple[float, int]] = []

        async def give_way(call: RouteCall, seconds: float, num_own: int) -> None:
            given.append((seconds, num_own))

        monkeypatch.setattr(RouteCall, "give_way", give_way)
        events = read_events(
            tiny.post(
                "/attribute", {"method": "patching", **PATCH, "stages": ["*.resid_pre", "*.attn.z"], "stream": True}
            ).content
        )
        assert len(given) == sum("cells" in event for event in events) > 0
        assert all(seconds > 0 and num_own == 0 for seconds, num_own in given)

    def test_others_get_three_times_the_time_of_work_that_delays_them(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        slept: list[float] = []

        async def sleep(seconds: float) -> None:
            slept.append(seconds)

        monkeypatch.setattr(call, "asyncio", SimpleNamespace(sleep=sleep))
        for num_owners in (1, 2):
            monkeypatch.setattr(call, "get_engine", lambda _, num=num_owners: SimpleNamespace(num_owners=num))
            request = call.RouteCall(Request({"type": "http"}), tiny.state, tiny.state.vectors)
            asyncio.run(request.give_way(0.02, num_own=1))
        assert slept == pytest.approx([0.06])

    def test_a_streamed_sweep_has_the_cells_of_a_whole_one(self, tiny: Running) -> None:
        body = {"method": "patching", **PATCH, "stages": ["*.resid_pre", "*.attn.z"]}
        whole = tiny.answer("/attribute", **body)
        begin, *groups, end = read_events(tiny.post("/attribute", body | {"stream": True}).content)
        validate(SweepStart, begin)
        validate(SweepEnd, end)
        cells = [cell for group in groups for cell in validate(SweepCells, group).cells]
        assert len(groups) > 1
        assert len(cells) == begin["num_cells"] == end["num_cells"] == whole["num_cells"] == 2 * 7 + 2 * 7 * 6
        values = [value for stage in whole["stages"] for value in torch.tensor(stage["values"]).flatten().tolist()]
        assert [cell.value for cell in cells] == pytest.approx(values)
        assert (cells[0].stage, cells[0].position, cells[0].head) == ("blocks.0.resid_pre", 0, None)
        assert (cells[-1].stage, cells[-1].position, cells[-1].head) == ("blocks.1.attn.z", 6, 5)

    @pytest.mark.parametrize(
        "receivers",
        [
            ["blocks.1.attn.q"],
            ["blocks.1.attn.[kv]", "blocks.1.mlp_out"],
            ["blocks.1.attn.z"],
            ["blocks.1.attn.pattern"],
            ["blocks.1.resid_post"],
        ],
        ids="-".join,
    )
    @pytest.mark.parametrize("sender", ["blocks.0.attn.z", "blocks.0.mlp_out"])
    @pytest.mark.parametrize("edits", [[], [HALVE]], ids=["plain", "edited"])
    def test_a_patch_acts_through_the_receivers_only(
        self, tiny: Running, edits: list[Any], sender: str, receivers: list[str]
    ) -> None:
        fields = PATCH | {"stages": [sender], "by": ["head"], "edits": edits}
        answer = attribute(tiny, "patching", **fields, receivers=receivers)
        validate(Patching, answer)
        own = Editor({HALVE["stage"]: halve} if edits else {})
        model = tiny.checkpoint.model
        names = [stage.name for stage in select(stages_of(model.config), receivers)]
        frozen = [f"blocks.{layer}.{stage}" for layer in range(2) for stage in ("attn.z", "mlp_out")]
        clean, corrupted = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        model(torch.tensor([PROMPT]), tap=Chain(own, Editor({sender: lambda x: clean.setdefault(sender, x)})))
        reading = {name: partial(corrupted.setdefault, name) for name in {*frozen, sender}}
        model(torch.tensor([CORRUPTED]), tap=Chain(own, Editor(reading)))
        expected = []
        for head in range(6) if sender.endswith(".z") else [None]:
            found = dict[str, torch.Tensor]()
            patched = clean[sender] if head is None else corrupted[sender].clone()
            if head is not None:
                patched[:, :, head] = clean[sender][:, :, head]
            values = {name: corrupted[name] for name in frozen if name not in names} | {sender: patched}
            replaced = {name: partial(lambda value, x: value, value) for name, value in values.items()}
            reading = {name: partial(found.setdefault, name) for name in names}
            model(torch.tensor([CORRUPTED]), tap=Chain(own, Editor(replaced), Editor(reading)))
            replaced = {name: partial(lambda value, x: value, value) for name, value in found.items()}
            expected.append(float(run_target(model, CORRUPTED, TARGET, Chain(own, Editor(replaced)))))
        (stage,) = answer["stages"]
        assert torch.tensor(stage["values"]).flatten().tolist() == pytest.approx(expected, abs=1e-4)
        whole = attribute(tiny, "patching", **fields)
        assert stage["values"] != pytest.approx(whole["stages"][0]["values"], abs=1e-4), "other paths count, too"
        assert max(abs(value - answer["corrupted_value"]) for value in expected) > 1e-4

    def test_a_streamed_sweep_with_receivers_has_the_cells_of_a_whole_one(self, tiny: Running) -> None:
        body = {"method": "patching", **PATCH, "stages": ["blocks.0.attn.z"], "receivers": ["blocks.1.attn.q"]}
        whole = tiny.answer("/attribute", **body)
        _, *groups, _ = read_events(tiny.post("/attribute", body | {"stream": True}).content)
        values = [cell["value"] for group in groups for cell in group["cells"]]
        assert values == pytest.approx(torch.tensor(whole["stages"][0]["values"]).flatten().tolist())

    def test_a_sweep_with_too_many_cells_is_refused_with_its_cost(self, start: Start, tiny_directory: Path) -> None:
        service = start(model=str(tiny_directory), max_sweep_cells=83)
        message = refuse(service, 413, "stages", "patching", **PATCH, stages=["*.attn.z"])
        assert re.search(r"84 cells.* 588 tokens.* 83 cells", message)
        assert attribute(service, "patching", **PATCH, stages=["*.attn.z"], positions=[1, 2, 3, 4, 5, 6])

    @pytest.mark.parametrize("stream", [True, False])
    def test_nothing_remains_of_a_sweep_whose_client_disconnects(
        self, start: Start, tiny_directory: Path, stream: bool
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=2)
        body = {"method": "patching", **PATCH, "stages": ["*.attn.*", "*.resid_*", "*.mlp.*"], "stream": stream}
        connection = service.send("/attribute", body)
        wait_until(lambda: service.metric("sweep_cells_total") > 3, "cells are computed")
        connection.close()
        status = 'http_requests_total{method="POST",route="/attribute",status="%s"}'
        wait_until(lambda: service.metric(status % (200 if stream else 499)) == 1, "the request has ended")
        wait_until(lambda: service.state.worker.num_running + service.state.worker.num_waiting == 0, "idle again")
        num_cells = service.metric("sweep_cells_total")
        assert num_cells < 700
        time.sleep(0.05)
        assert service.metric("sweep_cells_total") == num_cells
        engine = service.state.engine
        assert engine is not None
        service.on_network(engine.check_integrity).result(10)
        assert not engine.has_work
        assert service.metric("buffered_bytes") == 0
        assert service.answer("/attribute", **body | {"stages": ["embed"], "stream": False})["num_cells"] == 7

    @pytest.mark.parametrize("grace_seconds", [pytest.param(100.0, marks=pytest.mark.slow), 0.0])
    def test_a_sweep_that_has_begun_finishes_in_the_grace_period_after_sigterm(
        self, start: Start, tiny_directory: Path, grace_seconds: float
    ) -> None:
        service = start(model=str(tiny_directory), max_num_seqs=2)
        body = {"method": "patching", **PATCH, "stages": ["*.attn.*", "*.resid_*"]}
        with ThreadPoolExecutor(1) as pool:
            sweep = pool.submit(service.post, "/attribute", body)
            wait_until(lambda: service.metric("sweep_cells_total") > 3, "cells are computed")
            assert not sweep.done()
            service.on_loop(service.state.worker.drain(grace_seconds)).result(60)
            response = sweep.result(60)
        if grace_seconds:
            assert response.json()["num_cells"] == service.metric("sweep_cells_total")
        else:
            assert (response.status_code, response.json()["error"]["code"]) == (503, "draining")

    def test_other_streams_go_on_and_keep_their_tokens_during_a_sweep(self, tiny: Running) -> None:
        body = {"prompt": PROMPT, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        alone = tiny.answer("/generate", **body)["tokens"]
        stages = ["*.attn.z", "*.resid_pre"]
        with ThreadPoolExecutor(4) as threads:
            sweep = threads.submit(lambda: attribute(tiny, "patching", **PATCH, stages=stages))
            streams = [threads.submit(lambda: tiny.answer("/generate", **body)["tokens"]) for _ in range(3)]
        assert [stream.result() for stream in streams] == [alone] * 3
        found, again = sweep.result(), attribute(tiny, "patching", **PATCH, stages=stages)
        assert found | {"timings": None, "stages": None} == again | {"timings": None, "stages": None}
        for stage, expected in zip(found["stages"], again["stages"], strict=True):
            assert stage | {"values": None} == expected | {"values": None}
            # PyTorch computes attention here, so the last bits depend on the sequences that share a step.
            np.testing.assert_allclose(stage["values"], expected["values"], rtol=1e-5, err_msg=stage["name"])

    @pytest.mark.parametrize("stream", [True, False])
    def test_a_sweep_that_has_begun_waits_while_others_fill_the_queue(
        self, tiny: Running, monkeypatch: pytest.MonkeyPatch, stream: bool
    ) -> None:
        body = {"method": "patching", **PATCH, "stages": ["embed"], "stream": stream}
        expected = tiny.post("/attribute", body)
        refusals = {2: 3, 3: 1}  # of the second group and the third
        admitted: list[int] = []
        admit = Worker.admit

        def full(worker: Worker, *arguments: Any, **options: Any) -> Any:
            if refusals.get(len(admitted)):
                refusals[len(admitted)] -= 1
                raise queue_full("64 requests are waiting already")
            admitted.append(len(arguments[0]))
            return admit(worker, *arguments, **options)

        monkeypatch.setattr(Worker, "admit", full)
        monkeypatch.setattr("service.answers.attribution.sweep.MAX_GROUP", 2)
        found = tiny.post("/attribute", body)
        assert found.status_code == 200, found.text
        assert admitted == [2, 2, 2, 2, 1]
        assert not any(refusals.values())
        if not stream:
            assert found.json() | {"timings": None} == expected.json() | {"timings": None}
        assert found.content.count(b'"error"') == 0

    def test_a_sweep_that_finds_no_room_ends_with_429_at_first_and_later_at_its_deadline(
        self, start: Start, tiny_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        service = start(model=str(tiny_directory), request_timeout_seconds=1)
        admit, room = Worker.admit, [0]

        def full(worker: Worker, *arguments: Any, **options: Any) -> Any:
            if not room[0]:
                raise queue_full("64 requests are waiting already")
            room[0] -= 1
            return admit(worker, *arguments, **options)

        monkeypatch.setattr(Worker, "admit", full)
        refuse(service, 429, None, "patching", **PATCH, stages=["embed"])
        room[0] = 1
        assert "1 s" in refuse(service, 503, None, "patching", **PATCH, stages=["embed"])
        assert service.state.worker.num_running + service.state.worker.num_waiting == 0
