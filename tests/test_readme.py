"""The documentation compared with the program: every example runs, and every table, name and link is right.

`.ci/run` runs the two lines of the quick start, in fresh environments. To rewrite the tables of settings and metrics
in docs/operations.md after a change:

    python -m tests.test_readme
"""

import ast
import builtins
import gc
import importlib.util
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from forwardscope.results.attributions import SweepCells, SweepEnd, SweepStart
from forwardscope.results.generations import FinishEvent, TokenEvent
from forwardscope.results.records import Record
from model.checkpoints.load import BUNDLED
from model.text.corpus import END_OF_TEXT
from model.tracing.stages import stages_of
from model.worked_examples import WORKED_EXAMPLES
from service.app import create_app
from service.commands.options import read_settings
from service.http import (
    compare_schemas,
    forward_schemas,
    generate_schemas,
    logits_schemas,
    pattern_schemas,
    score_schemas,
    tokenize_schemas,
)
from service.http.edit_schemas import EditRequest
from service.settings import Settings
from tests import published_models
from tests.conftest import source_tree
from tests.service.running import Running, process, run_command, running
from tests.service.test_described_once import answer_kinds, routes_of
from tests.tiny import CONFIGS

ROOT = source_tree()
OPERATIONS = ROOT / "docs" / "operations.md"
PATHS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "deploy/README.md", "deploy/kubernetes/README.md")),
    ROOT / "tests" / "benchmarks" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    BUNDLED / "README.md",
]
PAGES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PATHS}
README = PAGES["README.md"]
GUIDES = ("CONTRIBUTING.md", "docs/architecture.md")  # the pages for developers, which name parts of the code
MAX_WORDS = 900
SETTINGS_HEADER = "| option | environment | default | what |\n|---|---|---|---|\n"
METRICS_HEADER = "| metric | type | what |\n|---|---|---|\n"
ANSWERS_HEADER = "| answer | fields |\n|---|---|\n"


@dataclass(frozen=True)
class Example:
    """A block of code on a page, and the block of output that follows it, if there is one."""

    page: str
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}: {self.code.strip().splitlines()[0][:60]}"


def find_examples(language: str) -> list[Example]:
    block = re.compile(rf"^```{language}\n(.*?)^```\n(?:\n```text\n(.*?)^```$)?", re.M | re.S)
    return [Example(page, *found) for page, text in PAGES.items() for found in block.findall(text)]


EXAMPLES = find_examples("sh")
PROGRAMS = find_examples("python")
REQUESTS = [example for example in EXAMPLES if "curl " in example.code]
NEEDS_SMOLLM2 = "When Mary and John"  # examples with this text show the numbers of SmolLM2-135M-Instruct
KEY = "secret"  # that of the examples which need one
COMPARISONS = [example for example in EXAMPLES if example.code.startswith(".venv/bin/forwardscope compare")]
SERVERS = [
    example for example in EXAMPLES if example.code.startswith(".venv/bin/forwardscope") and example not in COMPARISONS
]
DOWNLOADS = [example for example in SERVERS if re.search(r"--model \w+/\w", example.code)]
COMMANDS = [example for example in SERVERS if example not in DOWNLOADS]
INSTALLATIONS = [example for example in EXAMPLES if "pip install" in example.code]
QUICK_START = [
    example for example in INSTALLATIONS if re.search(r"&& \S+/(forwardscope|python -m pytest)$", example.code)
]
REPORTS = [example for example in EXAMPLES if example.code.startswith(".venv/bin/python -m model.analysis.")]
CHECKS = [example for example in EXAMPLES if example.code.startswith(".venv/bin/python -m pytest")]  # as .ci/run does
EVALUATIONS = [
    example for example in EXAMPLES if example.code.startswith(".venv/bin/lm_eval")
]  # clients/test_lm_eval.py
STORIES = [example for example in EXAMPLES if example.code.startswith(".venv/bin/python -m model.training.stories ")]
MAKE = [example for example in EXAMPLES if example.code.startswith("make ")]
LAUNCHES = [example for example in EXAMPLES if example.code.startswith(".venv/bin/torchrun ")]
DOCKER = [example for example in EXAMPLES if example.code.startswith("docker ")]
PROMTOOL = [example for example in EXAMPLES if example.code.startswith("promtool ")]  # tests/test_deploy.py runs it
KUBECTL = [
    example for example in EXAMPLES if example.code.startswith("kubectl ")
]  # tests/kubernetes/ builds what they apply


@pytest.fixture(scope="module")
def bundled() -> Iterator[Running]:
    with running(model="bundled") as service:
        yield service


@pytest.fixture(scope="module")
def keyed() -> Iterator[Running]:
    with running(model="bundled", api_key=KEY) as service:
        yield service


@pytest.fixture(scope="module")
def smollm2() -> Iterator[Running]:
    with running(model=str(published_models.smollm2()), dtype="float32") as service:
        yield service


def service_for(request: pytest.FixtureRequest, example: Example) -> Running:
    """The service that an example is written for."""
    needs_key, needs_smollm2 = f"Bearer {KEY}" in example.code, NEEDS_SMOLLM2 in example.code
    service: Running = request.getfixturevalue("keyed" if needs_key else "smollm2" if needs_smollm2 else "bundled")
    return service


def at_service(code: str, service: Running) -> str:
    """The code with the address of a service that the test has started."""
    return code.replace("http://localhost:8000", f"http://{service.address[0]}:{service.address[1]}")


def paste(service: Running, example: Example, directory: Path) -> subprocess.CompletedProcess[str]:
    pasted = at_service(example.code, service).replace("curl ", "curl --fail-with-body ")
    return subprocess.run(["bash", "-e", "-c", pasted], capture_output=True, text=True, cwd=directory, timeout=300)


# Examples


def with_marks(examples: list[Example]) -> list[Any]:
    """Examples for SmolLM2, with transformers, of training and of many prompts are slow."""
    slow = (NEEDS_SMOLLM2, "import transformers", "from transformers", "torch.optim", "Random(0)")
    return [
        pytest.param(example, marks=[pytest.mark.slow] if any(word in example.code for word in slow) else [])
        for example in examples
    ]


@pytest.mark.parametrize("example", with_marks(REQUESTS), ids=str)
def test_every_curl_example_works_as_pasted(request: pytest.FixtureRequest, example: Example, tmp_path: Path) -> None:
    result = paste(service_for(request, example), example, tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "event: error" not in result.stdout


@pytest.mark.parametrize("example", with_marks(PROGRAMS), ids=str)
def test_every_python_example_prints_what_the_page_shows(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], example: Example
) -> None:
    code = compile(at_service(example.code, service_for(request, example)), example.page, "exec")
    variables = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # an example may leave its client open, as a program may
        exec(code, variables)
        variables.clear()
        gc.collect()
    assert example.output is not None, "show what it prints"
    is_exact = 'dtype="float32"' in example.code
    assert_alike(capsys.readouterr().out, example.output, EXACT if is_exact else ROUNDED)


ROUNDED = {"abs": 0.03, "rel": 0.05}  # CPUs round bfloat16 differently
EXACT = {"abs": 0.0101, "rel": 0.002}  # in float32, the last printed digit may differ


def assert_alike(printed: str, shown: str, tolerance: dict[str, float] = ROUNDED) -> None:
    """The same words and integers. Other numbers may differ a little, also in their width."""
    number = r" *-?\d+\.\d+|(?<=perplexity: )\d+"
    assert re.sub(number, "0", printed) == re.sub(number, "0", shown), printed
    for found, expected in zip(re.findall(number, printed), re.findall(number, shown), strict=True):
        assert float(found) == pytest.approx(float(expected), abs=tolerance["abs"], rel=tolerance["rel"]), printed


def test_the_quick_start_streams_what_the_readme_shows(bundled: Running, tmp_path: Path) -> None:
    """Ids and texts of the streamed example."""
    shown = re.findall(r'"token":\{"id":(\d+),.*?\},"text":"(.*?)"\}', README)
    streamed = [event for event in stream_of_the_readme(bundled, tmp_path) if "token" in event]
    assert len(shown) >= 3
    assert [(int(token_id), json.loads(f'"{text}"')) for token_id, text in shown] == [
        (event["token"]["id"], event["text"]) for event in streamed[: len(shown)]
    ]


def test_the_quick_start_reads_the_pattern_that_the_readme_shows(bundled: Running, tmp_path: Path) -> None:
    request = next(example for example in REQUESTS if example.page == "README.md" and "/forward" in example.code)
    answer = json.loads(paste(bundled, request, tmp_path).stdout)
    assert request.output is not None
    rows = re.findall(r"\[(\d[\d., ]*)\]", request.output.partition('"values":')[2])
    assert len(rows) == 2
    for shown, found in zip(rows, answer["stages"][0]["values"][0][0], strict=False):
        assert found == pytest.approx([float(number) for number in shown.split(",")], abs=0.03)


def stream_of_the_readme(service: Running, directory: Path) -> list[dict[str, Any]]:
    lines = paste(service, REQUESTS[0], directory).stdout.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.slow
@pytest.mark.parametrize("example", COMMANDS, ids=str)
def test_every_command_that_serves_a_checkpoint_serves_it(example: Example) -> None:
    options = example.code.replace("/path/to/checkpoint", str(BUNDLED)).split()[1:]
    with process(*options) as service:
        assert service.stderr is not None
        log = []
        for line in service.stderr:
            log.append(line)
            if "ready: http://" in line:
                break
        assert any("serving bundled" in line and "bfloat16" in line for line in log), log


@pytest.mark.slow
@pytest.mark.parametrize("example", LAUNCHES, ids=str)
def test_every_command_that_launches_several_processes_serves_with_them(example: Example) -> None:
    options = example.code.split()[1:]
    assert options[4:7] == ["service", "serve", "bundled"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment) as launcher:
        assert launcher.stderr is not None
        log = []
        for line in launcher.stderr:
            log.append(line)
            if "ready: http://" in line:
                break
        launcher.terminate()
        launcher.stderr.read()
    assert sum("of 2 computes 4 of 8 heads" in line for line in log) == 2, log


@pytest.mark.parametrize("example", DOWNLOADS, ids=str)
def test_every_command_that_downloads_a_checkpoint_has_valid_settings(example: Example) -> None:
    settings = read_settings(example.code.split()[1:])
    assert re.fullmatch(r"[\w-]+/[\w.-]+", settings.model)


@pytest.mark.slow
@pytest.mark.parametrize("example", DOCKER[:1], ids=str)
def test_the_image_is_built_and_serves(example: Example) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "info"], capture_output=True).returncode != 0:
        pytest.skip("no Docker engine runs here")
    build, run = example.code.splitlines()
    subprocess.run(build.split(), cwd=ROOT, check=True)
    command = run.replace("--rm", "--rm --detach --read-only").replace("8000:8000", "127.0.0.1::8000")
    container = subprocess.run(command.split(), capture_output=True, text=True, check=True).stdout.strip()
    try:
        port = subprocess.run([docker, "port", container, "8000"], capture_output=True, text=True, check=True)
        address = port.stdout.strip()
        ready = f"curl --silent --fail --retry 60 --retry-all-errors --retry-delay 1 http://{address}/ready"
        subprocess.run(ready.split(), check=True)
    finally:
        subprocess.run([docker, "stop", container], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("example", REPORTS, ids=str)
def test_every_report_is_printed(example: Example) -> None:
    options = example.code.split()[1:]
    result = subprocess.run([sys.executable, *options], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert example.output is not None
    stages = re.findall(r"^(\S+) +(\d\.\d\de[-+]\d\d)", example.output, re.M)
    assert len(stages) > 3
    assert all(re.search(f"^{re.escape(name)} ", result.stdout, re.M) for name, _ in stages)


@pytest.mark.parametrize("example", COMPARISONS, ids=str)
def test_every_comparison_prints_what_the_page_shows(
    example: Example, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, *example.code.split()[1:]) == 3
    output = capsys.readouterr().out
    assert example.output is not None
    first = "verdict: the first stage that differs is "
    shown, printed = (
        next(line for line in text.splitlines() if line.startswith(first)) for text in (example.output, output)
    )
    assert shown.partition(": it adds")[0] == printed.partition(": it adds")[0]
    assert [line.partition(" ")[0] for line in output.splitlines()] == [
        line.partition(" ")[0] for line in example.output.splitlines()
    ]


@pytest.mark.parametrize("example", INSTALLATIONS, ids=str)
def test_every_installation_names_an_extra_that_exists(example: Example) -> None:
    extras = re.findall(r"'\.\[(\w+)\]'", example.code)
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(re.search(rf"^{extra} = \[$", project, re.M) for extra in extras)


def test_every_example_is_run_by_some_test() -> None:
    covered = {
        *MAKE,
        *LAUNCHES,
        *REQUESTS,
        *SERVERS,
        *COMPARISONS,
        *INSTALLATIONS,
        *REPORTS,
        *CHECKS,
        *EVALUATIONS,
        *STORIES,
        *DOCKER,
        *PROMTOOL,
        *KUBECTL,
    }
    assert set(EXAMPLES) == covered
    assert len(QUICK_START) == 2
    assert all(example.page == "README.md" for example in QUICK_START)
    assert DOWNLOADS
    assert REPORTS
    assert PROGRAMS[0].page == "README.md"
    routes = {route for route in ("/forward", "/logits", "/generate") if any(route in e.code for e in REQUESTS)}
    assert routes == {"/forward", "/logits", "/generate"}


def test_every_target_of_make_that_a_page_names_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)(?=`|$)", "\n".join(PAGES.values()), re.M))
    assert named == targets == {"setup", "test", "check", "serve"}


@pytest.mark.parametrize("example", STORIES, ids=str)
def test_the_stories_of_an_example_are_written(
    example: Example, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, module, *arguments = shlex.split(example.code.replace(" 100000 ", " 20 "))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)  # other tests have imported it
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert (tmp_path / "stories.txt").read_text(encoding="utf-8").count(END_OF_TEXT) == 20


def test_every_module_that_is_run_exists_and_has_the_options_that_are_named() -> None:
    """`python -m a.b --option`, wherever a page says it."""
    commands = re.findall(r"python -m ([\w.]+)((?: [^`\n;]*)?)", "\n".join(PAGES.values()))
    assert len({name for name, _ in commands}) > 9
    for name, arguments in commands:
        specification = importlib.util.find_spec(name)
        assert specification is not None, name
        if name.startswith(("model.", "tests.benchmarks.")):
            if specification.submodule_search_locations is not None:
                specification = importlib.util.find_spec(f"{name}.__main__")
            assert specification is not None, name
            assert specification.origin is not None
            source = Path(specification.origin).read_text(encoding="utf-8")
            settings = Settings.model_fields if "parse_known_args" in source else ()  # it passes them to the service
            for option in re.findall(r"--[a-z-]+", arguments):
                field = option[2:].replace("-", "_")
                assert f'"{option}"' in source or field in source or field in settings, f"{name} {option}"


# Tables


def settings_table() -> str:
    rows = []
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f"`{field.default}`"
        rows.append(
            f"| `--{name.replace('_', '-')}` | `FORWARDSCOPE_{name.upper()}` | {default} | {field.description} |\n"
        )
    return SETTINGS_HEADER + "".join(rows)


def metrics_table(service: Running) -> str:
    rows = []
    for metric in text_string_to_metric_families(service.state.metrics.text().decode()):
        if metric.name.startswith("forwardscope_"):
            name = metric.name + ("_total" if metric.type == "counter" else "")
            rows.append(f"| `{name}` | {metric.type} | {metric.documentation} |\n")
    assert len(rows) > 20
    return METRICS_HEADER + "".join(rows)


def answers_table() -> str:
    """The fields of the answers of each endpoint, from the classes that describe them."""
    rows: dict[str, list[str]] = {}
    for route in routes_of(create_app(Settings(model="none"))):
        for kind in answer_kinds(route):
            if isinstance(kind, type) and issubclass(kind, Record):
                rows.setdefault(fields_of(kind), []).append(f"`{min(route.methods or ())} {route.path}`")
    for event in (TokenEvent, FinishEvent, SweepStart, SweepCells, SweepEnd):
        rows[fields_of(event)] = [f"event `{event.__name__}`"]
    return ANSWERS_HEADER + "".join(
        f"| {', '.join(dict.fromkeys(places))} | {names} |\n" for names, places in rows.items()
    )


def fields_of(kind: Any) -> str:
    """The fields of a class, in brackets if they may be left out."""
    names = [f"`{each.name}`" if each.default is MISSING else f"[`{each.name}`]" for each in fields(kind)]
    return ", ".join(names)


def tables_with(first_cell: str) -> list[list[list[str]]]:
    """The rows of all tables, cell by cell, whose header begins with this cell."""
    tables = re.findall(rf"^\| {re.escape(first_cell)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", "\n".join(PAGES.values()), re.M)
    return [[[cell.strip() for cell in row.strip("|").split("|")] for row in rows.splitlines()] for rows in tables]


def test_the_settings_table_is_the_settings() -> None:
    """A row more, or one less, is another table."""
    assert len(tables_with("option")) == 1
    assert settings_table() + "\n" in PAGES["docs/operations.md"], "run: python -m tests.test_readme"


def test_the_metrics_table_is_the_metrics(bundled: Running) -> None:
    assert len(tables_with("metric")) == 1
    assert metrics_table(bundled) + "\n" in PAGES["docs/operations.md"], "run: python -m tests.test_readme"


def test_the_table_of_answers_has_every_field() -> None:
    assert len(tables_with("answer")) == 1
    assert answers_table() + "\n" in PAGES["docs/api.md"], "run: python -m tests.test_readme"


@pytest.mark.parametrize(
    ("field", "model"),
    [
        ("`POST /generate` field", generate_schemas.GenerateRequest),
        ("`trace` field", generate_schemas.TraceRequest),
        ("`structured_outputs` field", generate_schemas.StructuredOutputs),
        ("`POST /forward` field", forward_schemas.ForwardRequest),
        ("`POST /logits` field", logits_schemas.LogitsRequest),
        ("`POST /score` field", score_schemas.ScoreRequest),
        ("`POST /patterns` field", pattern_schemas.PatternsRequest),
        ("`POST /compare` field", compare_schemas.CompareRequest),
        ("`POST /tokenize` field", tokenize_schemas.TokenizeRequest),
        ("`POST /detokenize` field", tokenize_schemas.DetokenizeRequest),
    ],
)
def test_the_table_of_an_endpoint_has_its_fields_and_their_defaults(field: str, model: type[BaseModel]) -> None:
    (table,) = tables_with(field)
    fields = model.model_fields
    assert len(table) == len(fields)
    assert {row[0]: row[1] for row in table} == {
        f"`{fields[name].alias or name}`": default_of(model, name) for name in fields
    }


def test_the_table_of_operations_has_each_with_its_own_fields() -> None:
    (table,) = tables_with("`op`")
    ops = {get_args(model.model_fields["op"].annotation)[0]: model for model in EditRequest.__subclasses__()}
    assert [row[0].strip("`") for row in table] == list(ops)
    for row in table:
        own = ops[row[0].strip("`")].model_fields.keys() - EditRequest.model_fields.keys() - {"op"}
        assert set(re.findall(r"`(\w+)`", row[1])) == own, row


def default_of(model: type[BaseModel], name: str) -> str:
    default = model.model_fields[name].default
    if default is PydanticUndefined:
        return "required"
    return "" if default is None else f"`{json.dumps(default)}`"


def test_the_table_of_endpoints_is_the_api(bundled: Running) -> None:
    (table,) = tables_with("endpoint")
    listed = {name for row in table for name in re.findall(r"`((?:GET|POST|PUT|DELETE) /[\w/{}]+)`", row[0])}
    paths = bundled.get("/openapi.json").json()["paths"]
    assert listed == {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_the_table_of_stages_has_every_stage_and_its_dims() -> None:
    (table,) = tables_with("stage")
    found = {
        (re.sub(r"^blocks\.\d+\.", "blocks.i.", stage.name), ", ".join(stage.dims))
        for config in CONFIGS.values()
        for stage in stages_of(config, adapters=True)
    }
    assert {(row[0].strip("`"), row[1]) for row in table} == found


def test_the_table_of_worked_examples_has_each_with_its_prompt() -> None:
    (table,) = tables_with("`model`")
    prompts = {
        name: " ".join(example.vocabulary[token_id] for token_id in example.prompt_ids)
        for name, example in WORKED_EXAMPLES.items()
    }
    assert {row[0].strip("`"): row[1].strip("`") for row in table} == prompts
    assert [row[2].rpartition("`articles/")[2].strip("`") for row in table] == [
        example.source.removeprefix("articles/") for example in WORKED_EXAMPLES.values()
    ]


# Names and links


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= MAX_WORDS


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_a_file_and_to_a_heading_in_it(page: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        if not link.startswith("http"):
            path, _, heading = link.partition("#")
            target = (ROOT / page).parent / path if path else ROOT / page
            assert target.exists(), link
            assert not heading or heading in anchors(target), link


@cache
def anchors(path: Path) -> frozenset[str]:
    """The headings of a page as links name them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.M)
    return frozenset(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_folder_that_is_named_exists(page: str) -> None:
    """A path may begin at the root of the checkout or in any folder of it. NAME stands for a name of the reader's."""
    text = re.sub(r"\]\([^)]*\)", "", PAGES[page])  # links are tested above
    named = set(re.findall(r"(?<![\w/.-])((?:[\w-]+/)*[\w-]+\.(?:py|cpp|h|yaml))\b", text))
    named |= set(re.findall(r"`((?:[a-z_]+/)+)`", text))
    known = paths_of_the_checkout()
    missing = {path for path in named if not any(each.endswith(f"/{path.rstrip('/')}") for each in known)}
    assert {path for path in missing if "NAME" not in path} <= {"llama.cpp", "ik_llama.cpp"}  # these are peers


@cache
def paths_of_the_checkout() -> frozenset[str]:
    places = [ROOT / place for place in ("forwardscope", "model", "service", "tests", "deploy", "docs")]
    paths = [*places, *(path for place in places for path in place.rglob("*"))]
    return frozenset(f"/{path.relative_to(ROOT).as_posix()}" for path in paths)


@pytest.mark.parametrize("page", GUIDES)
def test_every_class_and_function_that_a_guide_names_exists(page: str, defined_names: frozenset[str]) -> None:
    """`CamelCase` and `snake_case`, alone, of an object, or called."""
    code = set(
        re.findall(r"`((?:[A-Za-z_]+\.)*(?:[A-Z][a-z]\w+|[a-z]+_[a-z_]+|[A-Z][A-Z_]{3,}))(?:\([^`]*\))?`", PAGES[page])
    )
    assert len(code) > 5
    missing = {name for name in code if name.rpartition(".")[2] not in defined_names}
    assert not missing


@pytest.fixture(scope="module")
def defined_names() -> frozenset[str]:
    """Every class, function, method, argument, constant and field of the code, the macros of C++, and the stages."""
    names = set()
    for path in (
        path for place in ("forwardscope", "model", "service", "tests") for path in (ROOT / place).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.arg):
                names.add(node.arg)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.id if isinstance(node, ast.Name) else node.attr)
    for path in (ROOT / "model").rglob("*.h"):
        names |= set(re.findall(r"#define (\w+)", path.read_text(encoding="utf-8")))
    names |= set(dir(builtins))
    return frozenset(names | {stage.name.rpartition(".")[2] for stage in stages_of(CONFIGS["qwen3"], adapters=True)})


def test_every_test_that_the_security_page_names_is_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGES["docs/security.md"]))
    found = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))))
    assert len(named) > 25
    assert named <= found, named - found


def test_the_model_page_answers_for_the_bundled_model(bundled: Running) -> None:
    answer = bundled.get("/model").json()
    assert answer["name"] == "bundled"
    assert answer["parameters"]["total"] == sum(answer["parameters"]["components"].values())


def write_tables() -> None:
    """Replace the tables of settings, metrics and answers in docs/ by those of the program."""
    text = OPERATIONS.read_text(encoding="utf-8")
    with running(model="bundled") as service:
        tables = {SETTINGS_HEADER: settings_table(), METRICS_HEADER: metrics_table(service)}
    for header, table in tables.items():
        text = with_table(text, header, table)
    OPERATIONS.write_text(text, encoding="utf-8")
    api = ROOT / "docs" / "api.md"
    api.write_text(with_table(api.read_text(encoding="utf-8"), ANSWERS_HEADER, answers_table()), encoding="utf-8")


def with_table(text: str, header: str, table: str) -> str:
    """Replace the table with this header."""
    before, found, after = text.partition(header)
    assert found, f"no table begins with {header}"
    return before + table + re.sub(r"\A(\|.*\n)*", "", after)


if __name__ == "__main__":
    write_tables()
