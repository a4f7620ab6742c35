"""Windows and macOS, simulated: all modules can be imported, and a service answers, without what only Linux has."""

import subprocess
import sys

import pytest

from tests.service.running import ROOT

# Libraries are imported on Linux, with which they were installed. Then everything that the other system lacks is
# hidden, and our own modules are imported again.
SIMULATION = """
import importlib, mmap, os, pkgutil, select, signal, sys
from pathlib import Path

def modules():
    names = []
    for package in ("forwardscope", "model", "service"):
        found = pkgutil.walk_packages([package], f"{package}.")
        names += [package, *(module.name for module in found if not module.name.endswith("__main__"))]
    return names

for name in modules():
    importlib.import_module(name)
for name in list(sys.modules):
    if name.partition(".")[0] in ("forwardscope", "model", "service"):
        del sys.modules[name]

sys.platform = sys.argv[1]
sys.modules |= dict.fromkeys(("uvloop", "matplotlib"))  # None: cannot be imported
if sys.platform == "win32":
    sys.modules |= dict.fromkeys(("fcntl", "grp", "pwd", "readline", "resource", "termios"))
    missing = {
        os: ("fork", "getuid", "geteuid", "killpg", "nice", "pread", "setpriority", "statvfs", "sysconf", "waitpid"),
        signal: ("SIGHUP", "SIGKILL", "SIGPROF", "SIGUSR1", "SIGUSR2", "alarm", "setitimer"),
        select: ("poll",),
    }
else:
    missing = {os: ("sched_getaffinity", "sched_setaffinity"), select: ("POLLRDHUP", "epoll")}
missing |= {mmap: ("MADV_HUGEPAGE",)}
for module, names in missing.items():
    for name in names:
        delattr(module, name)
is_file = Path.exists
Path.exists = lambda path: not str(path).startswith(("/proc/", "/sys/")) and is_file(path)
open_file = Path.open
def open_other(path, *arguments, **options):
    if str(path).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(path)
    return open_file(path, *arguments, **options)
Path.open = open_other

for name in modules():
    importlib.import_module(name)

from tests.service.running import running

with running(model="bundled") as service:
    answer = service.answer("/generate", prompt="One day", max_tokens=3, temperature=0)
    assert b"[DONE]" in service.post("/generate", {"prompt": "One day", "max_tokens": 3, "stream": True}).content
    assert "forwardscope_ready 1.0" in service.get("/metrics").text
    body = {"prompt": "a", "max_tokens": 9, "structured_outputs": {"choice": ["yes", "no"]}}
    chosen = service.post("/generate", body)
print(answer["tokens"], chosen.status_code, chosen.text)
"""


@pytest.mark.slow
@pytest.mark.parametrize("system", ["win32", "darwin"])
def test_a_service_answers_without_what_only_linux_has(system: str) -> None:
    found = subprocess.run([sys.executable, "-c", SIMULATION, system], capture_output=True, text=True, cwd=ROOT)
    assert found.returncode == 0, found.stderr
    if system == "win32":
        assert " 400 " in found.stdout
        assert "cannot be used on this system" in found.stdout
    else:
        assert " 200 " in found.stdout
