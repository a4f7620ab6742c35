"""The layout of the code: imports point downwards, lines stay short, and docstrings begin with what they describe."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import source_tree

ROOT = source_tree()
# From top to bottom. A package may import packages of lower levels, and itself; not another package of its own level.
LEVELS = (
    ("forwardscope.local",),
    ("service",),
    ("forwardscope",),
    ("model.training",),
    ("model.analysis",),
    ("model.engine", "model.worked_examples"),
    ("model.checkpoints",),
    ("model.network",),
    ("model.tracing", "model.text"),
    ("model.ops",),
    ("model.files", "model.progress", "model.memory", "model.device"),
    ("model.config",),
    ("model.command_line",),
    ("model.errors", "model.choices", "model.server_address", "model.control_groups"),
)
SERVICE_LEVELS = (
    ("service.__main__",),
    ("service.commands",),
    ("service.in_process",),
    ("service.app",),
    ("service.loading",),
    ("service.routes",),
    ("service.answers",),
    ("service.state",),
    ("service.vectors", "service.stored_responses", "service.span_export"),
    ("service.worker", "service.stored_prefixes"),
    ("service.executors", "service.network_thread"),
    ("service.network_jobs",),
    ("service.request_stream",),
    ("service.http",),
    ("service.otel",),
    ("service.metrics", "service.token_rates", "service.memory", "service.drafts"),
    ("service.request_notes",),
    ("service.spans",),
    ("service.settings",),
    ("service.log_format",),
)
# Docstrings begin with an imperative ("Estimate ...") or a noun phrase ("The cost of ..."), not with a question word.
DOCUMENTED = ("model", "service", "forwardscope", "tests", "deploy")
QUESTION_WORD = re.compile(r"(What|Which|Where)\b")
FORBIDDEN_IN_MODEL = {"fastapi", "starlette", "uvicorn", "asyncio", "threading"}
THREADS = {
    "service.executors",
    "service.in_process",
    "service.network_jobs",
    "service.network_thread",
    "service.stored_prefixes",
    "service.worker",
}
POLICY = (
    *("scheduler", "sequence", "block_pool", "step_plan", "step_budget", "extra_time", "prompt_lookup"),
    *("draft_planner", "prefix_store"),
)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


MODULES = [*modules("forwardscope"), *modules("model"), *modules("service")]


@cache
def imports_of(path: Path) -> frozenset[str]:
    """The full names of everything that a module imports, also inside functions; not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return frozenset(names)


def level_of(name: str, levels: tuple[tuple[str, ...], ...]) -> tuple[int, str] | None:
    """The level of the package that a module or a name belongs to, and the package."""
    for level, packages in enumerate(levels):
        for package in packages:
            if name == package or name.startswith(f"{package}."):
                return level, package
    return None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_imports_point_downwards() -> None:
    for path in MODULES:
        for levels in (LEVELS, SERVICE_LEVELS):
            own = level_of(name_of(path), levels)
            for imported in imports_of(path):
                other = level_of(imported, levels)
                if own is None or other is None or other[1] == own[1]:
                    continue
                assert other[0] > own[0], f"{name_of(path)} imports {imported}"


def test_every_module_of_the_library_has_a_level_and_knows_nothing_of_http_and_threads() -> None:
    for path in modules("model"):
        name = name_of(path)
        assert name == "model" or level_of(name, LEVELS) is not None, name
        assert not {each.partition(".")[0] for each in imports_of(path)} & {"service", *FORBIDDEN_IN_MODEL}, name


def test_every_module_of_the_service_has_a_level() -> None:
    for name in map(name_of, modules("service")):
        assert name == "service" or level_of(name, SERVICE_LEVELS) is not None, name


def test_the_clients_import_neither_torch_nor_the_network() -> None:
    """Only `load` and harvests do, in the modules `local*`. Importing the version from `model` imports nothing else."""
    allowed = {"model.__version__", "model.choices.Quantization"}
    for path in modules("forwardscope"):
        if not path.stem.startswith("local"):
            found = {name for name in imports_of(path) if name.partition(".")[0] in ("torch", "model")}
            assert not found - allowed, name_of(path)


def test_scheduling_policy_imports_no_torch() -> None:
    for name in POLICY:
        imported = imports_of(ROOT / "model" / "engine" / f"{name}.py")
        assert not [each for each in imported if each.partition(".")[0] == "torch"], name


def test_only_the_modules_of_the_worker_use_threads() -> None:
    for path in modules("service"):
        uses = [name for name in imports_of(path) if name.startswith(("threading", "concurrent.futures", "queue"))]
        assert not uses or name_of(path) in THREADS, f"{name_of(path)}: {uses}"


def test_modules_import_each_other_in_no_circle() -> None:
    names = {name_of(path): path for path in MODULES}
    graph = {
        name: {
            target
            for imported in imports_of(path)
            if (target := imported if imported in names else imported.rpartition(".")[0]) in names and target != name
        }
        for name, path in names.items()
    }
    while free := {name for name, targets in graph.items() if not targets & graph.keys()}:
        graph = {name: targets for name, targets in graph.items() if name not in free}
    assert not graph, f"a circle among {', '.join(graph)}"


@pytest.mark.parametrize("package", DOCUMENTED)
def test_no_docstring_begins_with_a_question_word(package: str) -> None:
    paths = modules(package)
    found = [
        f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and QUESTION_WORD.match(ast.get_docstring(node) or "")
    ]
    assert paths
    assert not found, f"begin with an imperative or a noun phrase: {', '.join(found)}"


def test_no_line_of_the_page_is_longer_than_120_characters() -> None:
    files = [path for path in (ROOT / "service" / "web").rglob("*") if path.suffix in (".js", ".css", ".html")]
    assert {path.suffix for path in files} == {".js", ".css", ".html"}
    for path in sorted(files):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path.relative_to(ROOT)}:{number} has {len(line)} characters"


def page_imports(module: Path) -> set[Path]:
    """A module of the page, and all that the browser loads before it runs: what it imports, and so on."""
    found, left = {module}, [module]
    while left:
        current = left.pop()
        code = re.sub(r"/\*.*?\*/", "", current.read_text(), flags=re.DOTALL)
        imported = {
            (current.parent / name).resolve()
            for name in re.findall(r'^(?:import|export|\}).*?"(\.[^"]+)";$', code, re.MULTILINE)
        }
        left += imported - found
        found |= imported
    return found


def test_the_page_preloads_what_its_first_view_needs() -> None:
    """Otherwise the browser learns of each module only when it has read the one that imports it."""
    web = ROOT / "service" / "web"
    needed = page_imports(web / "page.js") | page_imports(web / "views" / "network.js")
    expected = sorted(f"page/{module.relative_to(web).as_posix()}" for module in needed - {web / "page.js"})
    found = re.findall(r'<link rel="modulepreload" href="([^"]+)" />', (web / "index.html").read_text())
    assert sorted(found) == expected
