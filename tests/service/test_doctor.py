"""`forwardscope doctor`: a line for each check, exit code 1 only for what stops the service."""

import resource
import socket
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from model import device, memory
from model.ops.cpu import libraries
from model.ops.cpu.libraries import KernelStatus
from service.commands import doctor
from tests.service.running import run_command

Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


def diagnose(patch: Patch, capsys: Capture, *arguments: str) -> tuple[int, dict[str, str]]:
    """The exit code of `forwardscope doctor`, and the line of each check without its name: name -> kind and text."""
    status = run_command(patch, "doctor", *arguments)
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == ("the service cannot start" if status else "the service can start")
    found = {line[9:22].strip(): f"{line[:8].strip()} {line[23:]}" for line in lines}
    assert found.keys() == doctor.CHECKS.keys()
    return status, found


def test_where_nothing_is_wrong_the_exit_code_is_0(monkeypatch: Patch, capsys: Capture) -> None:
    status, found = diagnose(monkeypatch, capsys, "--port", "0")
    assert status == 0
    assert not any(line.startswith("error") for line in found.values())


def test_a_port_that_is_taken_is_an_error(monkeypatch: Patch, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, found = diagnose(monkeypatch, capsys, "--port", str(port))
    assert status == 1
    assert found["port"].startswith(f"error cannot listen on 127.0.0.1, port {port}: ")
    assert "give another --host or --port" in found["port"]


def test_a_check_that_fails_is_an_error_and_the_others_still_run(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("KERNEL_INSTRUCTIONS", "sse")
    monkeypatch.setattr(memory, "memory_of", Mock(side_effect=RuntimeError("a broken library")))
    status, found = diagnose(monkeypatch, capsys, "--port", "0", "--device", "cuda:99")
    assert status == 1
    assert found["CPU"].startswith("error KERNEL_INSTRUCTIONS is 'sse'")
    assert found["memory"] == "error a broken library"
    assert found["device"].startswith("error device 'cuda:99' cannot be used here")
    assert found["port"].startswith("ok")


def test_what_costs_speed_or_room_is_a_warning_that_says_what_to_do(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nothing")
    monkeypatch.setenv("FORWARDSCOPE_PROT", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "/proc/nothing/hub")
    small = memory.Memory("this machine", 4 * 10**9, 10**9, 10**9)
    monkeypatch.setattr(memory, "memory_of", lambda _: small)
    monkeypatch.setattr(doctor, "version", lambda name: "0.1" if name == "uvicorn" else "9999")
    monkeypatch.setattr(doctor, "requires", lambda _: ["uvicorn>=0.54,<0.55", "torch", "x>=2; extra == 'y'"])
    monkeypatch.setattr(device, "find_device", lambda _: "cpu")
    monkeypatch.setattr(doctor, "GPU_DRIVER", SimpleNamespace(exists=lambda: True))
    allowed = (128, 128)
    monkeypatch.setattr(resource, "getrlimit", lambda _: allowed)
    status, found = diagnose(monkeypatch, capsys, "--port", "0")
    assert status == 0
    for name, words in {
        "versions": "uvicorn is 0.1, but <0.55,>=0.54 is needed; install the package again",
        "memory": "1.0 of 4.0 GB of this machine are free; end other programs",
        "device": "does not find the GPU of this machine",
        "kernel cache": "let XDG_CACHE_HOME name a folder",
        "model cache": "let HF_HUB_CACHE name another",
        "open files": "there is room for 1 connections",
        "variables": "FORWARDSCOPE_PROT: no such setting",
    }.items():
        assert found[name].startswith("warning "), found[name]
        assert words in found[name]


def test_without_kernels_the_reason_is_a_warning(monkeypatch: Patch, capsys: Capture) -> None:
    missing = KernelStatus(None, None, "there is no C++ compiler; install g++")
    monkeypatch.setattr(libraries, "kernel_status", lambda: missing)
    _, found = diagnose(monkeypatch, capsys, "--port", "0")
    assert found["kernels"].startswith("warning there is no C++ compiler; install g++; until this is changed, PyTorch")
    _, found = diagnose(monkeypatch, capsys, "--port", "0", "--kernels", "torch")
    assert found["kernels"].startswith("ok PyTorch")
