"""The layout of the code: imports point downwards only, and files stay readable."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From top to bottom. A package may import packages of lower levels, and itself; not another package of its own level.
LEVELS = (
    ("service",),
    ("forwardscope",),
    ("model.training",),
    ("model.analysis",),
    ("model.engine", "model.worked_examples"),
    ("model.checkpoints",),
    ("model.network",),
    ("model.tracing", "model.text"),
    ("model.ops",),
    ("model.files", "model.progress"),
    ("model.config",),
    ("model.errors",),
)
SERVICE_LEVELS = (
    ("service.__main__",),
    ("service.commands",),
    ("service.app",),
    ("service.routes",),
    ("service.answers",),
    ("service.state",),
    (
        "service.comparison_queue",
        "service.vectors",
        "service.span_export",
    ),
    ("service.worker",),
    ("service.request_stream",),
    ("service.http",),
    ("service.otel",),
    ("service.spans", "service.metrics", "service.token_rates"),
    ("service.metric_types", "service.metrics_text", "service.process_metrics"),
    ("service.settings",),
    ("service.log_format",),
    ("service.request_ids",),
)
FORBIDDEN_IN_MODEL = {"fastapi", "starlette", "uvicorn", "asyncio", "threading"}
POLICY = ("scheduler", "sequence", "block_pool", "step_budget", "prompt_lookup")


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """The full names of everything that a module imports, also inside functions; not under TYPE_CHECKING."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def level_of(name: str, levels: tuple[tuple[str, ...], ...]) -> tuple[int, str] | None:
    """The level of the package that a module or a name belongs to, and the package."""
    for level, packages in enumerate(levels):
        for package in packages:
            if name == package or name.startswith(f"{package}."):
                return level, package
    return None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [*modules("forwardscope"), *modules("model"), *modules("service")], ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    for levels in (LEVELS, SERVICE_LEVELS):
        own = level_of(name_of(path), levels)
        for imported in imports_of(path):
            other = level_of(imported, levels)
            if own is None or other is None or other[1] == own[1]:
                continue
            assert other[0] > own[0], f"{name_of(path)} imports {imported}"


@pytest.mark.parametrize("path", modules("model"), ids=name_of)
def test_every_module_of_the_library_has_a_level_and_knows_nothing_of_http_and_threads(path: Path) -> None:
    assert name_of(path) == "model" or level_of(name_of(path), LEVELS) is not None
    assert not {name.partition(".")[0] for name in imports_of(path)} & {"service", *FORBIDDEN_IN_MODEL}


@pytest.mark.parametrize("path", modules("service"), ids=name_of)
def test_every_module_of_the_service_has_a_level(path: Path) -> None:
    assert name_of(path) == "service" or level_of(name_of(path), SERVICE_LEVELS) is not None


@pytest.mark.parametrize("path", modules("forwardscope"), ids=name_of)
def test_the_clients_import_neither_torch_nor_the_network(path: Path) -> None:
    """Only `load` does, in the modules `local*`. Importing the version from `model` imports nothing else."""
    if path.stem.startswith("local"):
        return
    allowed = {"model.__version__"}
    assert not {name for name in imports_of(path) if name.partition(".")[0] in ("torch", "model")} - allowed


@pytest.mark.parametrize("name", POLICY)
def test_scheduling_policy_imports_no_torch(name: str) -> None:
    imported = set(imports_of(ROOT / "model" / "engine" / f"{name}.py"))
    assert not {each for each in imported if each.partition(".")[0] == "torch"}


@pytest.mark.parametrize("path", modules("service"), ids=name_of)
def test_only_the_worker_uses_threads(path: Path) -> None:
    uses = {name for name in imports_of(path) if name.startswith(("threading", "concurrent.futures", "queue"))}
    assert not uses or name_of(path) == "service.worker", uses


def test_modules_import_each_other_in_no_circle() -> None:
    names = {name_of(path): path for path in [*modules("forwardscope"), *modules("model"), *modules("service")]}
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
