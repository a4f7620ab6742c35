"""`forwardscope doctor [options of serve]`: check whether this machine can serve, and say what to do where it cannot.

Each check prints one line. The exit code is 1 if something would stop the service.
"""

import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Literal

from model import __version__
from model.command_line import Parser
from service.commands import options
from service.settings import Settings

DESCRIPTION = (
    "Check whether this machine can serve: run it as the user and with the options and variables of the service. The "
    "kernels are compiled if no start has done so. Exit code 1: something would stop the service."
)
LOW_MEMORY = 2 << 30  # the bundled model takes less than 1 GiB; most others take more
LOW_DISK = 5 << 30  # less than the files of a small model
GPU_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Finding:
    """The result of a check. An error stops the service, a warning costs speed or room; the text says what to do."""

    kind: Literal["ok", "warning", "error"]
    text: str


def check_versions(settings: Settings) -> Finding:
    found = f"forwardscope {__version__}, Python {platform.python_version()}, torch {version('torch')}"
    wrong = wrong_versions()
    if wrong:
        return Finding("warning", f"{', '.join(wrong)}; install the package again in a fresh virtual environment")
    return Finding("ok", f"{found}, {platform.platform(terse=True)}, {platform.machine()}")


def wrong_versions() -> list[str]:
    """The installed libraries that are not of the versions that the package asks for."""
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in requires("forwardscope") or []]
    except PackageNotFoundError:  # a checkout that is not installed
        return []
    wrong = []
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            try:
                installed = version(requirement.name)
            except PackageNotFoundError:
                installed = "not installed"
            if installed not in requirement.specifier:
                wrong.append(f"{requirement.name} is {installed}, but {requirement.specifier} is needed")
    return wrong


def check_cpu(settings: Settings) -> Finding:
    from model.ops.cpu.instruction_levels import chosen_level
    from service.loading import num_threads

    level = chosen_level()
    has_level = "no instructions of our kernels" if level is None else f"instruction level {level.name}"
    return Finding("ok", f"{os.cpu_count()} CPUs, of which the network uses {num_threads(settings)}; {has_level}")


def uses_gpu(settings: Settings) -> bool:
    """Whether the network runs on a GPU that PyTorch can use."""
    from model.device import find_device

    try:
        return find_device(settings.device).startswith("cuda")
    except ValueError:  # another check says so
        return False


def check_kernels(settings: Settings) -> Finding:
    from model.ops.cpu.libraries import kernel_status

    if settings.kernels == "torch":
        return Finding("ok", "PyTorch's, because of --kernels torch")
    if uses_gpu(settings):
        import torch

        from model.ops.gpu.backend import load_kernels

        if load_kernels(torch.device("cuda")) is None:  # the log has the reason
            return Finding("warning", "PyTorch's, because Triton does not run here; install gcc and Python's headers")
        return Finding("ok", "our own, which Triton compiles when they are first used")
    status = kernel_status()
    if status.problem is not None:
        return Finding("warning", f"{status.problem}; until this is changed, PyTorch computes, which is much slower")
    origin = "from the package" if status.origin == "package" else "compiled on this machine"
    return Finding("ok", f"our own, {status.level}, {origin}")


def check_memory(settings: Settings) -> Finding:
    import torch

    from model.memory import memory_of

    memory = memory_of(torch.device("cpu"))
    if memory is None:
        return Finding("ok", "this system does not tell its size")
    text = f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB of {memory.owner} are free"
    if memory.available < LOW_MEMORY:
        return Finding("warning", f"{text}; end other programs, raise the limit, or serve a small model")
    return Finding("ok", text)


def check_kernel_cache(settings: Settings) -> Finding:
    from model.ops.cpu.build import prepare_cache

    directory = prepare_cache()
    if directory is None:
        return Finding(
            "warning",
            "cannot be written, so kernels that the package lacks are compiled at each start; let XDG_CACHE_HOME name "
            "a folder that can",
        )
    return Finding("ok", f"{directory} can be written")


def check_model_cache(settings: Settings) -> Finding:
    from huggingface_hub.constants import HF_HUB_CACHE

    directory = Path(HF_HUB_CACHE)
    parent = next(path for path in (directory, *directory.parents) if path.exists())
    if not os.access(parent, os.W_OK):
        return Finding(
            "warning", f"{directory} cannot be written, so no model can be downloaded; let HF_HUB_CACHE name another"
        )
    text = f"{directory} can be written, {shutil.disk_usage(parent).free / 1e9:.1f} GB are free"
    if shutil.disk_usage(parent).free < LOW_DISK:
        return Finding("warning", f"{text}, too few for most models; free some, or let HF_HUB_CACHE name another disk")
    return Finding("ok", text)


def check_device(settings: Settings) -> Finding:
    import torch

    from model.device import find_device

    try:
        device = find_device(settings.device)
    except ValueError as error:
        return Finding("error", f"{error}; with --device auto, the service takes what there is")
    if device.startswith("cuda"):
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        return Finding("ok", f"{device}, {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB are free")
    if GPU_DRIVER.exists() and not torch.cuda.is_available():
        cuda = torch.version.cuda
        hint = "install one with CUDA" if cuda is None else f"it needs a driver for CUDA {cuda}"
        return Finding("warning", f"this PyTorch does not find the GPU of this machine, and uses the CPU; {hint}")
    return Finding("ok", "the network runs on the CPU")


def check_port(settings: Settings) -> Finding:
    from service.http.server import listen

    try:
        sockets = listen(settings.host, settings.port)
    except OSError as error:
        return Finding(
            "error",
            f"cannot listen on {settings.host}, port {settings.port}: {error}; end the program that has the port, or "
            "give another --host or --port",
        )
    for socket in sockets:
        socket.close()
    return Finding("ok", f"{settings.host}, port {settings.port} is free")


def check_open_files(settings: Settings) -> Finding:
    from service.http.server import room_for_connections

    room = room_for_connections()
    if room < settings.max_connections:
        return Finding(
            "warning",
            f"there is room for {room} connections, fewer than --max-connections {settings.max_connections}; raise the "
            "hard limit (`ulimit -Hn`, LimitNOFILE= of systemd)",
        )
    return Finding("ok", f"there is room for --max-connections {settings.max_connections}")


def check_variables(settings: Settings) -> Finding:
    unknown = options.unknown_variables()
    if unknown:
        return Finding("warning", f"{', '.join(unknown)}: no such setting; `forwardscope serve --help` lists all")
    return Finding("ok", "every variable of the environment is a setting")


CHECKS: dict[str, Callable[[Settings], Finding]] = {
    "versions": check_versions,
    "CPU": check_cpu,
    "kernels": check_kernels,
    "memory": check_memory,
    "device": check_device,
    "kernel cache": check_kernel_cache,
    "model cache": check_model_cache,
    "port": check_port,
    "open files": check_open_files,
    "variables": check_variables,
}


def make_parser() -> Parser:
    return options.make_parser("doctor", DESCRIPTION)


def main() -> None:
    settings = options.read_settings(sys.argv[1:], make_parser())
    num_errors = 0
    for name, check in CHECKS.items():
        try:
            finding = check(settings)
        except Exception as error:  # such as a broken PyTorch: the other checks still say something
            finding = Finding("error", f"{error or type(error).__name__}")
        num_errors += finding.kind == "error"
        sys.stdout.write(f"{finding.kind:8} {name:13} {finding.text}\n")
        sys.stdout.flush()
    sys.stdout.write("the service cannot start\n" if num_errors else "the service can start\n")
    sys.exit(1 if num_errors else 0)
