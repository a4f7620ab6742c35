"""Every file in `deploy/kubernetes/` is valid, and every directory can be built.

Files are checked against the schemas of Kubernetes, or the field lists in `fields.py`. kustomize, alone or as a part of
kubectl, builds the directories if it is installed. Nothing is applied to a cluster.
"""

import copy
from typing import Any

import jsonschema
import pytest

from tests.kubernetes.manifests import (
    DIRECTORIES,
    FILES,
    KUBERNETES,
    build,
    check,
    documents,
    read,
)


@pytest.mark.parametrize("path", FILES)
def test_every_file_has_only_known_fields_with_the_right_types(path: str) -> None:
    assert documents(path)
    for document in documents(path):
        check(document)


@pytest.mark.parametrize("directory", sorted({*DIRECTORIES} - {"openshift-user"}))  # this is a part of others
def test_every_directory_is_built_and_what_is_built_is_valid(directory: str) -> None:
    for document in build(directory):
        check(document)
        assert document["metadata"]["namespace"] == "forwardscope"


@pytest.mark.parametrize(
    ("path", "at", "key", "value"),
    [
        ("base/deployment.yaml", ("spec", "template", "spec"), "terminationGracePeriodSecond", 60),
        ("base/deployment.yaml", ("spec", "template", "spec"), "terminationGracePeriodSeconds", "60"),
        ("base/deployment.yaml", ("spec", "template", "spec", "containers", 0, "readinessProbe"), "periodSecond", 5),
        ("base/deployment.yaml", ("spec",), "selector", None),
        ("base/service.yaml", ("spec", "ports", 0), "targetport", "http"),
        ("base/networkpolicy.yaml", ("spec",), "egress", {"ports": []}),
        ("base/poddisruptionbudget.yaml", ("spec",), "maxUnavailableReplicas", 1),
        ("gpu/resources.yaml", ("spec", "strategy", "rollingUpdate"), "maxsurge", 0),
        ("cpu/resources.yaml", ("spec", "template", "spec", "containers", 0), "resources", ["4"]),
        ("cpu/kustomization.yaml", (), "resource", ["../base"]),
        ("autoscaling/servicemonitor.yaml", ("spec", "endpoints", 0), "scrape_timeout", "10s"),
        ("autoscaling/servicemonitor.yaml", ("spec", "endpoints", 0), "interval", 15),
        ("autoscaling/servicemonitor.yaml", ("spec",), "selector", None),
        ("autoscaling/scaledobject.yaml", ("spec", "triggers", 0, "metadata"), "treshold", "8"),
        ("autoscaling/scaledobject.yaml", ("spec", "triggers", 0, "metadata"), "threshold", 8),
        ("autoscaling/scaledobject.yaml", ("spec",), "scaleTargetRef", None),
        ("inference-gateway/inferencepool.yaml", ("spec",), "targetPortNumber", 8000),
        ("inference-gateway/inferencepool.yaml", ("spec", "targetPorts", 0), "number", "8000"),
        ("inference-gateway/inferencepool.yaml", ("spec",), "selector", None),
        ("inference-gateway/httproute.yaml", ("spec", "rules", 0, "timeouts"), "request", 600),
        ("inference-gateway/config.yaml", ("plugins", 0, "parameters"), "paths", "/metrics"),
        ("inference-gateway/config.yaml", ("plugins", 1, "parameters", "engineConfigs", 0), "kvUsage", "x"),
        ("inference-gateway/config.yaml", ("schedulingProfiles", 0, "plugins", 0), "weight", "2"),
        ("inference-gateway/config.yaml", (), "plugins", None),
    ],
)
def test_a_misspelled_field_a_wrong_type_and_a_missing_field_are_found(
    path: str, at: tuple[str | int, ...], key: str, value: Any
) -> None:
    document = copy.deepcopy(documents(path)[0])
    check(document)
    part: Any = document
    for step in at:
        part = part[step]
    if value is None:
        del part[key]
    else:
        part[key] = value
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_every_file_belongs_to_a_kustomization_and_every_file_of_a_kustomization_exists() -> None:
    used = {f"{directory}/kustomization.yaml" for directory in DIRECTORIES}
    for directory in DIRECTORIES:
        kustomization = read(f"{directory}/kustomization.yaml")[0]
        names = [*kustomization.get("resources", []), *kustomization.get("components", [])]
        names += [patch["path"] for patch in kustomization.get("patches", []) if "path" in patch]
        names += [name for each in kustomization.get("configMapGenerator", []) for name in each.get("files", [])]
        for name in names:
            assert (KUBERNETES / directory / name).exists(), name
            used.add(f"{directory}/{name}")
    assert set(FILES) <= used
