"""The pods of `deploy/kubernetes/` fit the image, the settings of the service, and each other."""

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from model import __version__
from service import PREFIX
from service.http.server import LAST_EVENTS_SECONDS
from service.settings import Settings
from tests.kubernetes.manifests import (
    CONTAINER,
    DEPLOYMENT,
    DIRECTORIES,
    DOCKERFILE,
    JOB_POD,
    MONITOR,
    POD,
    POOL,
    PROBES,
    SCALER,
    Document,
    literals,
    read,
)
from tests.service.running import LOADING_SECONDS, ROOT


@pytest.mark.parametrize("pod", [POD, JOB_POD], ids=["service", "download"])
def test_pods_have_no_privileges_no_token_and_a_read_only_root(pod: Document) -> None:
    (uid,) = re.findall(r"useradd --uid (\d+)", DOCKERFILE)
    assert f"USER {uid}:0" in DOCKERFILE
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == int(uid)
    assert security["runAsGroup"] == 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"] if not mount.get("readOnly")}
    (home,) = re.findall(r"--home-dir (\S+)", DOCKERFILE)
    assert mounts - {"/model"} == {home, "/tmp"}


@pytest.mark.parametrize("pod", [POD, JOB_POD], ids=["service", "download"])
def test_a_service_named_forwardscope_sets_no_settings_of_its_pods(pod: Document) -> None:
    """Kubernetes would set FORWARDSCOPE_PORT to a URL."""
    assert f"{read('base/service.yaml')[0]['metadata']['name'].upper()}_" == PREFIX
    assert pod["enableServiceLinks"] is False


def test_images_have_the_version_of_the_program() -> None:
    tags = {
        directory: image["newTag"]
        for directory in DIRECTORIES
        for image in read(f"{directory}/kustomization.yaml")[0].get("images", [])
    }
    assert tags == {"model": __version__, "base": __version__, "gpu": f"{__version__}-cuda"}


def test_every_variable_is_a_setting_and_its_value_is_valid() -> None:
    found = list(literals())
    assert len(found) > 4
    assert CONTAINER["env"][0]["name"] == f"{PREFIX}API_KEY"
    for directory in ("cpu", "gpu"):
        names = {name: value for where, name, value in found if where in ("base", directory)}
        assert names.keys() <= {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
        settings: dict[str, Any] = {name.removeprefix(PREFIX).lower(): value for name, value in names.items()}
        Settings(**settings)


def test_ports_are_those_of_the_image() -> None:
    (port,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.M)
    (named,) = CONTAINER["ports"]
    assert named["containerPort"] == int(port) == POOL["targetPorts"][0]["number"]
    (service,) = read("base/service.yaml")[0]["spec"]["ports"]
    assert (service["port"], service["targetPort"], service["name"]) == (int(port), named["name"], named["name"])
    assert MONITOR["spec"]["endpoints"][0]["port"] == service["name"]
    (ingress,) = read("base/networkpolicy.yaml")[0]["spec"]["ingress"]
    assert [each["port"] for each in ingress["ports"]] == [named["name"]]
    assert {CONTAINER[probe]["httpGet"]["port"] for probe in PROBES} == {named["name"]}


def test_a_pod_has_time_to_drain_before_it_is_killed() -> None:
    values = {name: value for _, name, value in literals()}
    default = Settings.model_fields["shutdown_grace_seconds"].default
    grace = float(values.get(f"{PREFIX}SHUTDOWN_GRACE_SECONDS", default))
    pause = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    limit = POD["terminationGracePeriodSeconds"]
    assert limit > pause + grace + LAST_EVENTS_SECONDS
    scale_down = SCALER["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleDown"]
    assert all(policy["value"] == 1 and policy["periodSeconds"] >= limit for policy in scale_down["policies"])
    assert scale_down["stabilizationWindowSeconds"] >= limit
    picker = read("inference-gateway/endpoint-picker.yaml")[0]["spec"]["template"]["spec"]
    assert picker["terminationGracePeriodSeconds"] >= limit
    # Readiness is asked for often enough that a draining pod is known before its streams end.
    readiness = CONTAINER["readinessProbe"]
    assert readiness["periodSeconds"] * readiness["failureThreshold"] < grace


def test_a_start_may_take_as_long_as_the_rollout_waits_for_it() -> None:
    startup = CONTAINER["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] < DEPLOYMENT["spec"]["progressDeadlineSeconds"]


def test_requests_through_the_gateway_may_take_as_long_as_the_service_allows() -> None:
    rules = read("inference-gateway/httproute.yaml")[0]["spec"]["rules"]
    seconds = Settings.model_fields["request_timeout_seconds"].default
    assert [rule["timeouts"]["request"] for rule in rules] == [f"{seconds:g}s"] * len(rules)


def test_selectors_select_the_pods() -> None:
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert read("base/service.yaml")[0]["spec"]["selector"] == labels
    assert read("base/service.yaml")[0]["metadata"]["labels"] == MONITOR["spec"]["selector"]["matchLabels"]
    selectors = [
        DEPLOYMENT["spec"]["selector"],
        POD["topologySpreadConstraints"][0]["labelSelector"],
        read("base/poddisruptionbudget.yaml")[0]["spec"]["selector"],
        read("base/networkpolicy.yaml")[0]["spec"]["podSelector"],
        POOL["selector"],
    ]
    assert selectors == [{"matchLabels": labels}] * len(selectors)
    job = read("model/job.yaml")[0]["spec"]["template"]["metadata"]["labels"]
    assert read("model/networkpolicy.yaml")[0]["spec"]["podSelector"] == {"matchLabels": job}
    assert job != labels


def test_the_job_and_the_service_use_the_same_volume_and_model() -> None:
    claim = read("model/claim.yaml")[0]["metadata"]["name"]
    for pod in (POD, JOB_POD):
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "model")
        assert volume["persistentVolumeClaim"]["claimName"] == claim
    values = {name: value for _, name, value in literals()}
    hub_id = JOB_POD["containers"][0]["command"][-1]
    assert hub_id.partition("/")[2] == values["FORWARDSCOPE_MODEL_NAME"]
    (mount,) = (mount for mount in CONTAINER["volumeMounts"] if mount["name"] == "model")
    assert (mount["mountPath"], mount["readOnly"]) == (values["FORWARDSCOPE_MODEL"], True)
    assert f"--local-dir={mount['mountPath']}" in JOB_POD["containers"][0]["args"]


def test_the_download_command_has_these_options() -> None:
    program = Path(sys.executable).with_name("hf")
    text = subprocess.run([program, "download", "--help"], capture_output=True, text=True, check=True).stdout
    command = [*JOB_POD["containers"][0]["command"], *JOB_POD["containers"][0]["args"]]
    assert command[:2] == ["hf", "download"]
    for option in command[3:]:
        assert option.partition("=")[0] in text


def test_the_service_runs_as_another_user_without_a_directory_that_it_can_write() -> None:
    """PyTorch's kernels, because this machine's own ones may have to be compiled; the image contains ours."""
    program = shutil.which("bwrap")
    if program is None:
        pytest.skip("needs bwrap, of bubblewrap")
    sandbox = [program, "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc", "--unshare-user"]
    sandbox += ["--uid", str(POD["securityContext"]["runAsUser"]), "--cap-drop", "ALL", "--die-with-parent"]
    if subprocess.run([*sandbox, "true"], capture_output=True).returncode != 0:
        pytest.skip("bwrap may not make a sandbox here")
    command = [*sandbox, sys.executable, "-m", "service", "--port", "0", "--threads", "1", "--kernels", "torch"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        try:
            assert process.stderr is not None
            deadline, log = time.monotonic() + LOADING_SECONDS, ""
            while not (found := re.search(r"ready: (http://\S+)", log)):
                line = process.stderr.readline()
                assert line, log
                assert time.monotonic() < deadline, log
                log += line
            body = {"prompt": "the cat", "max_tokens": 2}
            answer = httpx.post(f"{found[1]}/generate", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["tokens"]) == 2
        finally:
            process.kill()
