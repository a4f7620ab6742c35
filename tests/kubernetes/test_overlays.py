"""The overlays of `deploy/kubernetes/`: GPUs, autoscaling and the inference gateway, each beside a running service."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from model import __version__
from tests.kubernetes.manifests import (
    CONTAINER,
    DEPLOYMENT,
    DIRECTORIES,
    KUBERNETES,
    MONITOR,
    PICKER,
    POOL,
    PROBES,
    SCALER,
    build,
    documents,
    literals,
    only,
    read,
)
from tests.service.running import ROOT, Running, running
from tests.test_deploy import names_in


def test_a_gpu_is_asked_for_and_required() -> None:
    pod = documents("gpu/resources.yaml")[0]["spec"]["template"]["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
    assert ("gpu", "FORWARDSCOPE_DEVICE", "cuda") in set(literals())
    index = re.search(r"https://download\.pytorch\.org/whl/cu\d+", (ROOT / "deploy" / "compose.yaml").read_text())
    assert index is not None
    assert f"TORCH_INDEX={index[0]}" in (KUBERNETES / "gpu" / "kustomization.yaml").read_text()


def test_the_cache_and_the_passes_fit_into_the_memory_limit() -> None:
    values = {
        name: int(value) for directory, name, value in literals() if directory == "cpu" and name.endswith("_BYTES")
    }
    limits = documents("cpu/resources.yaml")[0]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert values.keys() == {"FORWARDSCOPE_CACHE_BYTES", "FORWARDSCOPE_MAX_PASS_BYTES"}
    assert sum(values.values()) + (3 << 30) < int(limits["memory"].removesuffix("Gi")) << 30


def test_autoscaling_leaves_the_number_of_replicas_to_keda() -> None:
    assert only(build("cpu"), "Deployment")["spec"]["replicas"] == SCALER["minReplicaCount"] == 2
    assert "replicas" not in only(build("autoscaling"), "Deployment")["spec"]
    assert SCALER["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]


def test_the_picker_reads_the_built_configuration_and_its_parts_fit_together() -> None:
    built = build("inference-gateway")
    (configuration,) = (each for each in built if "config.yaml" in each.get("data", {}))
    pod = only(built, "Deployment", "forwardscope-endpoint-picker")["spec"]["template"]["spec"]
    assert pod["volumes"][0]["configMap"]["name"] == configuration["metadata"]["name"]
    assert yaml.safe_load(configuration["data"]["config.yaml"]) == PICKER
    service = only(built, "Service", POOL["endpointPickerRef"]["name"])["spec"]
    assert service["ports"][0]["port"] == POOL["endpointPickerRef"]["port"]["number"]
    assert (
        service["selector"]
        == only(built, "Deployment", "forwardscope-endpoint-picker")["spec"]["selector"]["matchLabels"]
    )
    assert only(built, "RoleBinding", pod["serviceAccountName"])["subjects"][0]["name"] == pod["serviceAccountName"]
    assert f"--pool-name={only(built, 'InferencePool')['metadata']['name']}" in pod["containers"][0]["args"]
    plugins = {plugin["type"] for plugin in PICKER["plugins"]}
    profile = {plugin["pluginRef"] for plugin in PICKER["schedulingProfiles"][0]["plugins"]}
    assert plugins - profile == {"metrics-data-source", "core-metrics-extractor"}
    assert profile <= plugins


def test_openshift_changes_only_fields_that_exist_and_leaves_no_user() -> None:
    (component,) = read("openshift-user/kustomization.yaml")
    bases = [*(read(f"{name}.yaml")[0] for name in ("base/deployment", "base/networkpolicy", "model/job"))]
    removed: dict[str, set[str]] = {}
    for patch in component["patches"]:
        for base in (base for base in bases if re.fullmatch(patch["target"]["kind"], base["kind"])):
            for change in yaml.safe_load(patch["patch"]):
                *path, last = (step.replace("~1", "/") for step in change["path"].split("/")[1:])
                part: Any = base
                for step in path:
                    part = part[int(step) if isinstance(part, list) else step]
                assert last in part, (base["kind"], change["path"])
                if change["op"] == "remove":
                    removed.setdefault(base["kind"], set()).add(last)
    assert removed == {kind: {"runAsUser", "runAsGroup", "fsGroup"} for kind in ("Deployment", "Job")}


@pytest.fixture(scope="module")
def service() -> Iterator[Running]:
    with running(model="bundled", api_key="secret") as service:
        yield service


def test_probes_and_scrapes_ask_for_paths_that_answer_without_a_key(service: Running) -> None:
    paths = {CONTAINER[probe]["httpGet"]["path"] for probe in PROBES}
    paths |= {MONITOR["spec"]["endpoints"][0]["path"], PICKER["plugins"][0]["parameters"]["path"]}
    assert paths == {"/ready", "/health", "/metrics"}
    for path in paths:
        assert service.get(path).status_code == 200
    assert service.get("/model").status_code == 401


def test_the_metrics_that_the_manifests_name_are_those_of_the_service(service: Running) -> None:
    lines = [line for line in service.get("/metrics").text.splitlines() if not line.startswith("#")]
    exposed = {re.split(r"[ {]", line)[0] for line in lines}
    queries = [trigger["metadata"]["query"] for trigger in SCALER["triggers"]]
    assert all(names_in(query) <= exposed and names_in(query) for query in queries)
    assert any("num_requests_waiting" in query for query in queries)
    for query in queries:
        assert 'namespace="forwardscope",job="forwardscope"' in query  # the namespace, and the name of the Service
    (engine,) = PICKER["plugins"][1]["parameters"]["engineConfigs"]
    assert PICKER["plugins"][1]["parameters"]["defaultEngine"] == engine["name"]
    specs = {key: value for key, value in engine.items() if key.endswith("Spec")}
    assert len(specs) == 5
    assert set(specs.values()) <= exposed
    labels = {
        "loraSpec": "max_lora running_lora_adapters waiting_lora_adapters",
        "cacheInfoSpec": "block_size num_gpu_blocks",
    }
    for key, names in labels.items():
        (line,) = (line for line in lines if line.startswith(specs[key]))
        assert sorted(re.findall(r'(\w+)="', line)) == sorted(names.split())


def test_the_gateway_sends_routes_of_openai_to_the_picker_and_all_others_to_the_service(service: Running) -> None:
    picked, others = read("inference-gateway/httproute.yaml")[0]["spec"]["rules"]
    paths = {match["path"]["value"] for match in picked["matches"]}
    assert paths <= service.app.openapi()["paths"].keys()
    assert picked["backendRefs"][0]["kind"] == "InferencePool"
    assert others["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert others["backendRefs"] == [{"name": "forwardscope", "port": 8000}]


def test_every_directory_that_the_readme_applies_exists() -> None:
    readme = (KUBERNETES / "README.md").read_text(encoding="utf-8")
    applied = re.findall(r"--kustomize deploy/kubernetes/(\S+)", readme)
    assert applied == ["model", "cpu"]
    named = re.findall(r"^\| `([a-z-]+)/` \|", readme, re.M)
    assert sorted(named) == DIRECTORIES
    assert f"registry.example.com/forwardscope:{__version__}" in readme
    mapped = set(re.findall(r"\| `(forwardscope_\w+)`", readme))
    (engine,) = PICKER["plugins"][1]["parameters"]["engineConfigs"]
    assert mapped == {value for key, value in engine.items() if key.endswith("Spec")}
