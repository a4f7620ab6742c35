"""The files in `deploy/` fit together and fit the service: alerts and dashboard query metrics that the service exposes.

promtool, which comes with Prometheus, checks its files if it is installed. No container is started.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from model.ops.cpu.build import SHIPPED
from service.settings import Settings
from tests.conftest import source_tree
from tests.service.running import running

DEPLOY = Path(__file__).parents[1] / "deploy"
SUFFIXES = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
PROMETHEUS_METRICS = {"up", "ALERTS"}
NOT_ON_BOARD = {
    "process_virtual_memory_bytes": "says nothing of the memory in use",
    "process_start_time_seconds": "a restart shows in the panel Ready",
    "process_open_fds": "follows the number of connections",
    "process_max_fds": "never changes",
    "forwardscope_cache_config_info": "never changes; it is for endpoint pickers",
    "forwardscope_kernels_info": "never changes",
    "forwardscope_ignored_fields_total": "belongs to clients, and is in the log and in headers",
    "forwardscope_lora_requests_info": "never changes; it is for endpoint pickers",
    "forwardscope_prefix_cache_blocks_read_total": "is 0 unless prefixes are stored; hits are on the board",
    "forwardscope_prefix_cache_blocks_written_total": "is 0 unless prefixes are stored",
    "forwardscope_prefix_cache_blocks_skipped_total": "is 0 unless prefixes are stored",
    "forwardscope_stored_response_bytes": "is 0 unless responses are stored, and has a limit of its own",
}
PROMETHEUS_LABELS = {"job", "instance", "alertname", "alertstate"}


def read(path: str) -> Any:
    text = (DEPLOY / path).read_text(encoding="utf-8")
    return json.loads(text) if path.endswith(".json") else yaml.safe_load(text)


COMPOSE = read("compose.yaml")
SERVICES: dict[str, Any] = COMPOSE["services"]
SCRAPES: list[dict[str, Any]] = read("prometheus/prometheus.yaml")["scrape_configs"]
RULES: list[dict[str, Any]] = [rule for group in read("prometheus/alerts.yaml")["groups"] for rule in group["rules"]]
RULE_TESTS: list[dict[str, Any]] = read("prometheus/alerts_test.yaml")["tests"]
SOURCES: list[dict[str, Any]] = read("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
PROVIDER: dict[str, Any] = read("grafana/provisioning/dashboards/forwardscope.yaml")["providers"][0]
DASHBOARD = read("grafana/dashboards/forwardscope.json")
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
TARGETS = [(panel["title"], target) for panel in PANELS for target in panel.get("targets", [])]
QUERIES = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{title}: {target['legendFormat']}": target["expr"] for title, target in TARGETS
}


@pytest.fixture(scope="module")
def exposed() -> dict[str, set[str]]:
    """The labels of each sample name, from a service that has answered each kind of request once."""
    with running(model="bundled") as service:
        service.post("/generate", {"prompt": "the cat", "max_tokens": 2, "trace": {"stages": ["embed"]}})
        edits = [{"stage": "embed", "op": "scale", "factor": 2}]
        service.answer("/forward", prompt="the cat", edits=edits)
        service.answer("/attribute", prompt="the cat", method="direct", token=3)
        text = service.get("/metrics").text
    names: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for suffix in SUFFIXES[family.type]:
            names[family.name + suffix] = {label for sample in family.samples for label in sample.labels}
    return names


def names_in(query: str) -> set[str]:
    """The metrics in a query: the words that are not functions, operators, labels, ranges or strings."""
    query = re.sub(r'"[^"]*"', "", query)
    query = re.sub(r"\b(by|without|on|ignoring)\s*\([^)]*\)", "", query)
    query = re.sub(r"\{[^}]*\}|\[[^]]*\]", "", query)
    words = re.findall(r"[A-Za-z_:][\w:]*\b(?!\s*\()", query)
    return set(words) - {"or", "and", "unless", "bool"}


def labels_in(query: str) -> set[str]:
    """The labels by which a query selects or groups."""
    query = re.sub(r'"[^"]*"', '""', query)
    grouped = re.findall(r"\bby\s*\(([^)]*)\)", query)
    return set(re.findall(r"(\w+)\s*[=!]~?", query)) | {
        label.strip() for group in grouped for label in group.split(",")
    }


@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
def test_every_metric_and_label_in_a_query_is_exposed_by_the_service(query: str, exposed: dict[str, set[str]]) -> None:
    names = names_in(query)
    assert names
    if any(name.startswith("process_") for name in names) and not Path("/proc/self").exists():
        pytest.skip("needs /proc, the source of the metrics of the process")
    assert names <= exposed.keys() | PROMETHEUS_METRICS
    assert labels_in(query) <= PROMETHEUS_LABELS.union(*(exposed.get(name, set()) for name in names))


def test_every_metric_is_on_the_board_or_has_a_reason_not_to_be(exposed: dict[str, set[str]]) -> None:
    # The parser takes the times at which metrics were created for metrics of their own.
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exposed if not name.endswith("_created")}
    shown = set[str]().union(*(names_in(target["expr"]) for _, target in TARGETS))
    on_board = {re.sub(r"_(bucket|sum|count)$", "", name) for name in shown}
    assert families - on_board - NOT_ON_BOARD.keys() == set()
    assert not on_board & NOT_ON_BOARD.keys()


def test_misspelled_metrics_and_labels_are_found_in_a_query() -> None:
    query = 'sum by (le, rout) (rate(forwardscop_x_total{a="b", status!~"5.."}[5m])) / up > 0 or vector(0)'
    assert names_in(query) == {"forwardscop_x_total", "up"}
    assert labels_in(query) == {"le", "rout", "a", "status"}


def test_prometheus_scrapes_the_published_port_of_the_service() -> None:
    assert [scrape["static_configs"][0]["targets"] for scrape in SCRAPES] == [["service:8000"]]
    assert SERVICES["service"]["ports"] == ["8000:8000"]


def test_one_of_two_services_runs_on_a_cpu_by_default_and_on_a_gpu_with_the_profile_gpu() -> None:
    assert SERVICES["service"]["profiles"] == ["cpu"]
    assert SERVICES["service-gpu"]["profiles"] == ["gpu"]
    assert all("profiles" not in service for name, service in SERVICES.items() if not name.startswith("service"))
    assert "\nCOMPOSE_PROFILES=cpu\n" in (DEPLOY / ".env").read_text(encoding="utf-8")
    (device,) = SERVICES["service-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert SERVICES["service-gpu"]["networks"]["default"]["aliases"] == ["service"]  # Prometheus scrapes this name


def test_both_services_differ_only_in_what_a_gpu_needs() -> None:
    def rest(name: str) -> dict[str, Any]:
        service = {key: value for key, value in SERVICES[name].items() if key not in ("profiles", "build", "image")}
        environment = service["environment"]
        assert environment.keys() >= {"FORWARDSCOPE_MODEL", "FORWARDSCOPE_API_KEY", "HF_TOKEN"}
        assert environment["HF_TOKEN"] is environment["FORWARDSCOPE_API_KEY"] is None  # from the shell
        assert service["mem_limit"] == "${MEMORY_LIMIT:-4g}"
        return service

    cpu, gpu = rest("service"), rest("service-gpu")
    assert gpu.keys() - cpu.keys() == {"networks", "deploy"}
    assert {key for key in cpu if cpu[key] != gpu[key]} == {"environment"}
    assert cpu["environment"].keys() - gpu["environment"].keys() == {"FORWARDSCOPE_CACHE_BYTES"}


def test_the_readme_names_every_variable_that_compose_reads() -> None:
    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    variables = set(re.findall(r"\$\{(\w+)", text)) | {"FORWARDSCOPE_API_KEY", "HF_TOKEN"}
    assert set(re.findall(r"^- `([A-Z_]+)`:", (DEPLOY / "README.md").read_text(encoding="utf-8"), re.M)) == variables


def test_queries_select_the_job_that_is_scraped() -> None:
    jobs = {job for query in QUERIES.values() for job in re.findall(r'job="([^"]*)"', query)}
    assert jobs == {scrape["job_name"] for scrape in SCRAPES}


def test_metrics_are_scraped_from_the_default_path_without_a_key() -> None:
    assert all("metrics_path" not in scrape and "authorization" not in scrape for scrape in SCRAPES)
    with running(model="none", api_key="secret") as service:
        assert service.get("/metrics").status_code == 200


@pytest.mark.parametrize("rule", RULES, ids=[rule["alert"] for rule in RULES])
def test_every_alert_says_what_happens_and_which_setting_to_change(rule: dict[str, Any]) -> None:
    assert rule["annotations"].keys() == {"summary", "description"}
    assert "$labels.instance" in rule["annotations"]["summary"]
    description = rule["annotations"]["description"]
    assert re.search(r"FORWARDSCOPE_\w+", description) or any(
        f"{other['alert']} says" in description for other in RULES
    )
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert "for" in rule


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    firing: set[str] = set()
    silent: set[str] = set()
    for case in (case for test in RULE_TESTS for case in test.get("alert_rule_test", [])):
        (firing if case["exp_alerts"] else silent).add(case["alertname"])
    assert firing == silent == {rule["alert"] for rule in RULES}


def test_the_readme_of_deploy_lists_the_alerts_in_order() -> None:
    listed = re.findall(r"^\| `(Forwardscope\w+)` \|", (DEPLOY / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed == [rule["alert"] for rule in RULES]


def test_every_setting_that_a_file_names_exists() -> None:
    settings = {f"FORWARDSCOPE_{name.upper()}" for name in Settings.model_fields}
    files = [path for path in DEPLOY.rglob("*") if path.suffix in (".yaml", ".json", ".md")]
    named = {name for path in files for name in re.findall(r"FORWARDSCOPE_[A-Z_]+", path.read_text(encoding="utf-8"))}
    assert named
    assert named <= settings


def mounts() -> Iterator[tuple[str, str, str]]:
    """Yield (service, source, target) of everything that is mounted from the checkout."""
    for name, service in SERVICES.items():
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            if source.startswith("."):
                yield name, source, target


def test_mounted_files_exist_and_are_mounted_read_only() -> None:
    assert {name for name, _, _ in mounts()} == {"prometheus", "grafana"}
    for name, source, _ in mounts():
        assert any((DEPLOY / source).iterdir()), (name, source)
    for service in SERVICES.values():
        assert all(volume.endswith(":ro") for volume in service["volumes"] if volume.startswith("."))


def test_every_named_volume_is_declared() -> None:
    volumes = {volume.split(":")[0] for service in SERVICES.values() for volume in service["volumes"]}
    assert {volume for volume in volumes if not volume.startswith(".")} == COMPOSE["volumes"].keys()


def in_checkout(service: str, path: str) -> Path:
    """The file or folder of the checkout that is mounted at a path in a container."""
    for name, source, target in mounts():
        if name == service and path.startswith(target):
            return DEPLOY / source / path.removeprefix(target).lstrip("/")
    raise AssertionError(f"nothing is mounted at {path} in {service}")


def test_the_paths_in_the_configuration_of_a_container_are_mounted() -> None:
    (config,) = (argument for argument in SERVICES["prometheus"]["command"] if "config.file" in argument)
    assert in_checkout("prometheus", config.partition("=")[2]) == DEPLOY / "prometheus" / "prometheus.yaml"
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    dashboard = DEPLOY / "grafana" / "dashboards" / "forwardscope.json"
    assert in_checkout("grafana", home) == dashboard
    assert in_checkout("grafana", PROVIDER["options"]["path"]) == dashboard.parent
    for kind in ("datasources", "dashboards"):
        assert in_checkout("grafana", f"/etc/grafana/provisioning/{kind}").is_dir()


def test_images_are_pinned_and_only_the_service_is_reachable_from_other_machines() -> None:
    for name, service in SERVICES.items():
        if not name.startswith("service"):
            assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
            assert all(port.startswith("127.0.0.1:") for port in service["ports"])


def test_a_container_is_not_killed_before_the_grace_period_of_its_requests_is_over() -> None:
    grace = Settings.model_fields["shutdown_grace_seconds"].default
    assert int(SERVICES["service"]["stop_grace_period"].removesuffix("s")) > grace + 10  # for the last events


def test_the_dashboard_reads_the_provisioned_data_source() -> None:
    (source,) = SOURCES
    assert source["url"] == "http://prometheus:9090"
    used = [target["datasource"] for _, target in TARGETS]
    used += [panel["datasource"] for panel in PANELS if panel["type"] != "row"]
    assert all(used_source == {"type": source["type"], "uid": source["uid"]} for used_source in used)


def test_the_data_source_has_the_scrape_interval_of_prometheus() -> None:
    interval = read("prometheus/prometheus.yaml")["global"]["scrape_interval"]
    assert SOURCES[0]["jsonData"]["timeInterval"] == interval


def test_panels_do_not_overlap_and_leave_no_gap() -> None:
    places = [panel["gridPos"] for panel in PANELS]
    for a, b in combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert sum(place["w"] * place["h"] for place in places) == 24 * max(place["y"] + place["h"] for place in places)


def test_every_panel_has_its_own_id_a_title_a_description_and_a_unit() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        if panel["type"] != "row":
            assert panel["description"]
            assert panel["fieldConfig"]["defaults"]["unit"]
            legends = [target["legendFormat"] for target in panel["targets"]]
            assert all(legends)
            assert len(set(legends)) == len(legends)


def test_every_color_override_matches_a_series_of_its_panel() -> None:
    for panel in PANELS:
        legends = {target["legendFormat"] for target in panel.get("targets", [])}
        overrides = panel.get("fieldConfig", {}).get("overrides", [])
        for matcher in (override["matcher"] for override in overrides):
            assert matcher["options"] in legends or "{{status}}" in "".join(legends), panel["title"]


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    result = subprocess.run(
        [program, *arguments], capture_output=True, text=True, cwd=DEPLOY / "prometheus", timeout=60
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_its_configuration() -> None:
    promtool("check", "config", "prometheus.yaml")


def test_every_query_of_the_dashboard_parses(tmp_path: Path) -> None:
    queries = [target["expr"].replace("$__rate_interval", "1m") for _, target in TARGETS]
    rules = [{"record": f"query_{index}", "expr": query} for index, query in enumerate(queries)]
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    promtool("check", "rules", str(path))


def test_alerts_fire_when_they_should_and_not_otherwise() -> None:
    promtool("test", "rules", "alerts_test.yaml")


def stages() -> dict[str, str]:
    """The stages of the Dockerfile by name. The last one has none."""
    texts = re.split(r"^FROM ", (DEPLOY.parent / "Dockerfile").read_text(encoding="utf-8"), flags=re.M)[1:]
    return {text.split("\n")[0].partition(" AS ")[2]: text for text in texts}


def test_only_the_files_that_decide_what_is_compiled_are_copied_before_the_kernels(tmp_path: Path) -> None:
    """The kernels of all levels are compiled again only if a file that was copied before has changed."""
    root = source_tree()
    before = stages()["wheel"].partition("RUN python -m model.ops.cpu.build")[0]
    copied = [words[:-1] for words in map(str.split, re.findall(r"^COPY (.+)$", before, re.M))]
    names = {name for group in copied for name in group}
    assert names == {f"model/ops/cpu/{name}" for name in ("build.py", "instruction_levels.py", "csrc")}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (root / name).is_dir() else shutil.copy
        copy(root / name, tmp_path / name)
    code = (
        "import sys; sys.path[:0] = ['.']; from model.ops.cpu.build import CSRC; print(len(list(CSRC.glob('*.cpp'))))"
    )
    command = [sys.executable, "-I", "-S", "-c", code]  # without the installed package
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=True)
    num_files = len(list((root / "model/ops/cpu/csrc").glob("*.cpp")))
    assert found.stdout == f"{num_files}\n"


@pytest.mark.parametrize(("index", "installs"), [("https://x/whl/cpu", False), ("https://x/whl/cu130", True)])
def test_only_an_image_for_cuda_has_a_compiler(index: str, installs: bool, tmp_path: Path) -> None:
    (command,) = re.findall(r"RUN (case .*? esac)", stages()[""].replace("\\\n", " "))
    fake = tmp_path / "apt-get"
    fake.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    fake.chmod(0o755)
    command = command.replace("/var/lib/apt/lists", str(tmp_path / "lists"))
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "list").touch()
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_INDEX": index}
    subprocess.run(["sh", "-c", command], check=True, env=environment)
    called = (tmp_path / "called").read_text() if (tmp_path / "called").exists() else ""
    assert ("gcc" in called) == installs


def test_the_wheel_takes_the_kernels_that_were_compiled_before_and_no_other_stage_compiles() -> None:
    root = source_tree()
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    (directory,) = re.findall(r"python -m model\.ops\.cpu\.build --all (\S+)", stages()["wheel"])
    libraries = SHIPPED.relative_to(root)
    assert directory == f"{project['tool']['distutils']['build']['build-lib']}/{libraries}"
    assert {name for name, text in stages().items() if re.search(r"g\+\+|ZIG", text)} == {"wheel"}
    assert stages()[""].startswith("dependencies\n")
    assert re.findall(r"--from=(\w+)", stages()[""]) == ["package"]


def test_systemd_accepts_the_unit_and_its_command_is_ours(tmp_path: Path) -> None:
    """`verify` only warns of unknown keys, so nothing may be written about the unit."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: apt-get install systemd)")
    unit = (DEPLOY / "systemd" / "forwardscope.service").read_text(encoding="utf-8")
    assert "ExecStart=/opt/forwardscope/bin/forwardscope serve\n" in unit
    command = tmp_path / "forwardscope"  # the program must exist
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    copy = tmp_path / "forwardscope.service"
    copy.write_text(unit.replace("/opt/forwardscope/bin/forwardscope", str(command)))
    found = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert "forwardscope" not in found.stderr
