"""The manifests of `deploy/kubernetes/`: read, checked against their schemas, and built with kustomize."""

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.kubernetes.fields import FIELDS
from tests.service.running import ROOT

KUBERNETES = ROOT / "deploy" / "kubernetes"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
OLDEST, NEWEST = "1.31", "1.37"  # the versions of Kubernetes that the manifests are checked against
FILES = sorted(path.relative_to(KUBERNETES).as_posix() for path in KUBERNETES.rglob("*.yaml"))
DIRECTORIES = sorted(path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml"))
PATCHES = {"cpu/resources.yaml", "gpu/resources.yaml"}  # parts of base/deployment.yaml

Document = dict[str, Any]


def read(path: str) -> list[Document]:
    return list(yaml.safe_load_all((KUBERNETES / path).read_text(encoding="utf-8")))


def merge(whole: Any, part: Any) -> Any:
    """Apply a strategic merge patch, in which the items of lists are known by their names."""
    if isinstance(whole, dict) and isinstance(part, dict):
        return whole | {key: merge(whole.get(key), value) for key, value in part.items()}
    if isinstance(whole, list) and isinstance(part, list):
        patches = {item["name"]: item for item in part}
        return [merge(item, patches.get(item["name"], {})) for item in whole]
    return part


def documents(path: str) -> list[Document]:
    """The documents of a file; of a patch, the Deployment with this patch."""
    return [merge(read("base/deployment.yaml")[0], read(path)[0])] if path in PATCHES else read(path)


def check(document: Document) -> None:
    """Raise `jsonschema.ValidationError` for an unknown field, a missing one, or one with a wrong type."""
    fields = FIELDS.get((document["apiVersion"], document["kind"]))
    if fields is not None:
        jsonschema.validate(document, fields)
    else:
        for version in (OLDEST, NEWEST):
            kubernetes_validate.validate(document, version, strict=True)


def find_kustomize() -> list[str] | None:
    if program := shutil.which("kustomize"):
        return [program, "build"]
    return [program, "kustomize"] if (program := shutil.which("kubectl")) else None


@cache
def build(directory: str) -> list[Document]:
    command = find_kustomize()
    if command is None:
        pytest.skip("needs kustomize or kubectl")
    result = subprocess.run([*command, str(KUBERNETES / directory)], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


def only(found: list[Document], kind: str, name: str = "forwardscope") -> Document:
    (document,) = (each for each in found if each["kind"] == kind and each["metadata"]["name"] == name)
    return document


DEPLOYMENT = read("base/deployment.yaml")[0]
POD: Document = DEPLOYMENT["spec"]["template"]["spec"]
CONTAINER: Document = POD["containers"][0]
JOB_POD: Document = read("model/job.yaml")[0]["spec"]["template"]["spec"]
MONITOR = read("autoscaling/servicemonitor.yaml")[0]
SCALER: Document = read("autoscaling/scaledobject.yaml")[0]["spec"]
POOL: Document = read("inference-gateway/inferencepool.yaml")[0]["spec"]
PICKER = read("inference-gateway/config.yaml")[0]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def literals() -> Iterator[tuple[str, str, str]]:
    """All settings of the generated maps: directory, variable, value."""
    for directory in DIRECTORIES:
        for generator in read(f"{directory}/kustomization.yaml")[0].get("configMapGenerator", []):
            for line in generator.get("literals", []):
                yield directory, *line.split("=", 1)
