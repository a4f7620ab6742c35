"""The service behaves as its OpenAPI page says: for the examples, for random requests and for wrong ones."""

import re
from collections import defaultdict
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import CheckFunction, GenerationMode
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import positive_data_acceptance
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.running import Running, Start
from tests.service.test_bad_input import GOOD, OPENAI_GOOD, TABLE

# A request that fits the schema may be answered with 400 or 422: a schema cannot say that an id is in the served
# vocabulary or that a prompt fits the context, and for JSON Schema 1.0 is an integer. All other checks are on.
EXCLUDED: list[CheckFunction] = [positive_data_acceptance]
GETS = (
    "/models",
    "/model",
    "/weights",
    "/weights/{name}",
    "/status",
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/{model}",
    "/tokenizer_info",
)
STORES = {
    "/vectors": {"get"},
    "/vectors/{name}": {"put", "delete"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/input_items": {"get"},
}
POSTS = (*GOOD, *OPENAI_GOOD)
INFILL = "/infill"  # needs a model that fills in the middle

API = schemathesis.openapi.from_dict(create_app(Settings(model="none")).openapi())
OPERATIONS = {}
for found in API.get_all_operations():
    assert isinstance(found, Ok), found
    OPERATIONS[found.ok().label] = found.ok()


@pytest.mark.parametrize(
    ("label", "mode"),
    [
        *((label, GenerationMode.POSITIVE) for label in OPERATIONS),
        *((f"POST {path}", GenerationMode.NEGATIVE) for path in POSTS),  # a GET has no body
    ],
)
@pytest.mark.parametrize("num_requests", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_random_requests_are_answered_as_documented(
    tiny: Running, label: str, mode: GenerationMode, num_requests: int
) -> None:
    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(max_examples=num_requests, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    def check(case: schemathesis.Case[Any]) -> None:
        case.call_and_validate(base_url=str(tiny.client.base_url), excluded_checks=EXCLUDED)

    check()


def test_the_page_lists_every_endpoint(tiny: Running) -> None:
    paths = tiny.get("/openapi.json").json()["paths"]
    assert set(paths) == {*POSTS, INFILL, *GETS, *STORES}
    assert all(set(paths[path]) == methods for path, methods in STORES.items())
    assert all(set(paths[path]) == {"post"} for path in POSTS)
    assert all(set(paths[path]) == {"get"} for path in GETS)
    assert all(operation["summary"] for methods in paths.values() for operation in methods.values())


@pytest.mark.parametrize("path", POSTS)
def test_the_example_of_an_endpoint_works_unchanged(tiny: Running, path: str) -> None:
    page = tiny.get("/openapi.json").json()
    body = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    name = body["$ref"].rpartition("/")[2]
    examples = page["components"]["schemas"][name]["examples"]
    assert len(examples) >= 1
    for example in examples:
        response = tiny.post(path, example)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize("path", GOOD)
def test_the_example_of_an_endpoint_works_with_stories260k(stories: Running, path: str) -> None:
    page = stories.get("/openapi.json").json()
    name = f"{path.strip('/').capitalize()}Request"
    assert stories.post(path, page["components"]["schemas"][name]["examples"][0]).status_code == 200


def test_the_page_has_an_authorize_button_for_the_routes_that_need_a_key_if_one_is_set(start: Start) -> None:
    without = create_app(Settings(model="none")).openapi()
    assert "securitySchemes" not in without["components"]
    service = start(model="none", api_key="secret")
    page = service.get("/openapi.json").json()
    (name,) = page["components"]["securitySchemes"]
    assert (
        page["components"]["securitySchemes"][name] | {"type": "http", "scheme": "bearer"}
        == page["components"]["securitySchemes"][name]
    )
    for path, methods in page["paths"].items():
        for method, operation in methods.items():
            needs_key = service.client.request(method, path).status_code == 401
            assert operation.get("security", []) == ([{name: []}] if needs_key else []), path


def test_every_endpoint_documents_the_statuses_of_bad_input(tiny: Running) -> None:
    paths = tiny.get("/openapi.json").json()["paths"]
    expected: dict[str, set[int]] = defaultdict(set)
    for bad in TABLE:
        expected[bad.path].add(bad.status)
    for path, statuses in expected.items():
        documented = set(paths[path]["post"]["responses"])
        assert {str(status) for status in statuses | {200, 401, 413, 429, 503} - {429}} <= documented, path


def test_all_error_answers_of_one_api_have_one_schema(tiny: Running) -> None:
    for path, methods in tiny.get("/openapi.json").json()["paths"].items():
        for operation in methods.values():
            for status, response in operation["responses"].items():
                if not status.startswith("2"):
                    reference = response["content"]["application/json"]["schema"]["$ref"]
                    name = "MessagesError" if path.startswith("/v1/messages") else "ErrorAnswer"
                    assert reference.endswith(f"/{name}"), (path, status)


def test_the_page_loads_nothing_from_other_servers(empty: Running) -> None:
    page = empty.get("/docs").text
    assert "swagger-ui-bundle.js" in page
    links = re.findall(r"(?:src|href)=\"([^\"]+)\"", page)
    assert len(links) >= 3
    for link in links:
        assert not re.match(r"/|\w+:", link), link  # relative, so that the page also works below a path
        assert empty.get(f"/{link}").status_code == 200, link


def test_the_schema_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody may ask for it, and encoding it stops all other clients for about 20 ms."""
    app = create_app(Settings(model="none"))
    monkeypatch.setattr("json.dumps", lambda *_, **__: pytest.fail("the schema was encoded again"))
    response = TestClient(app, base_url="http://localhost").get(
        "/openapi.json"
    )  # without its lifespan, in which the model is loaded
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert len(response.json()["paths"]) > 20
