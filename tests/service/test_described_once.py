"""Every answer has one description: routes declare it, and a field that is added to it appears everywhere."""

import json
import subprocess
import sys
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import pytest
from fastapi.routing import APIRoute
from starlette.responses import PlainTextResponse

from forwardscope.results.records import Record
from forwardscope.results.stages import Prediction, Stage, Summary
from service.answers.budget import json_bytes
from service.app import create_app
from service.http.encoding import to_json
from service.settings import Settings
from tests.service.running import ROOT

# Adds a field to the source of one class, as an editor would, and looks for it everywhere.
ADDED = """
import importlib.abc, importlib.machinery, json, sys, warnings
class Adding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        found = super().find_spec(name, path, target)
        if name == "forwardscope.results.passes":
            found.loader = Loader(name, found.origin)
        return found
class Loader(importlib.machinery.SourceFileLoader):
    def get_data(self, path):
        source = super().get_data(path)
        if not path.endswith(".py"):
            raise OSError  # not the bytecode
        old = b"    forward_seconds: float\\n"
        assert source.count(old) == 1
        return source.replace(old, old + b'    num_added: Annotated[int, Doc("the new field")] = 7\\n')
    def set_data(self, path, data, *, _mode=0o666):
        pass
sys.meta_path.insert(0, Adding)
from forwardscope import Client, load
from tests.service.running import running
from tests.test_readme import answers_table
with running(model="bundled", threads=1) as service:
    answer = service.answer("/forward", prompt=[5], stages=["embed"], detail="none")
    schema = service.get("/openapi.json").json()["components"]["schemas"]["PassTimings"]
    with Client(str(service.client.base_url)) as client:
        ours = [client.run([5]).timings, client.logits([5]).timings, client.patterns([5]).timings]
ours.append(load().run([5]).timings)
print(json.dumps([answer["timings"], schema["properties"]["num_added"], [each.num_added for each in ours]]))
"""


def routes_of(router: Any) -> Iterator[APIRoute]:
    """The routes of the OpenAPI page."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.include_in_schema:
            yield route
        elif hasattr(route, "original_router"):  # one that includes a router
            yield from routes_of(route.original_router)


def answer_kinds(route: APIRoute) -> Iterator[type]:
    """The classes of the answers of a route."""
    model = route.response_model
    yield from get_args(model) if get_origin(model) in (Union, UnionType) else (model,)


def test_every_route_declares_its_answer_by_the_one_description() -> None:
    routes = list(routes_of(create_app(Settings(model="none"))))
    assert len(routes) > 20
    for route in routes:
        if route.path == "/metrics":
            assert route.response_class is PlainTextResponse
        else:
            for kind in answer_kinds(route):
                assert issubclass(kind, Record), route.path


@pytest.mark.slow
def test_a_field_that_is_added_to_one_class_appears_in_http_openapi_load_and_client() -> None:
    found = subprocess.run([sys.executable, "-c", ADDED], cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    timings, schema, values = json.loads(found.stdout.splitlines()[-1])
    assert list(timings) == ["queue_seconds", "forward_seconds", "num_added"]
    assert timings["num_added"] == 7
    assert (schema["type"], schema["description"]) == ("integer", "the new field")
    assert values == [7] * 4


def test_the_size_of_a_record_is_bounded_by_the_types_of_its_fields() -> None:
    largest = Prediction(2**32, None, -1.7976931348623157e308, -2.2250738585072014e-308)
    assert len(to_json(largest)) + 1 <= json_bytes(Prediction)

    class Longer(Prediction):
        added: float

    assert json_bytes(Longer) == json_bytes(Prediction) + len('"added":') + json_bytes(float)
    number = largest.logit
    summary = Summary(number, number, number, number, number, 2**32)
    stage = Stage("", (), (), "", summary)
    assert len(to_json(stage)) + 1 <= json_bytes(Stage)
