"""The tests with random shapes pass with kernels that are compiled with AddressSanitizer and UBSan.

The sanitizers end the process at the first access outside of an allocation, and at the first undefined operation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.ops.cpu import build

ROOT = Path(__file__).resolve().parents[3]
# Without optimization: the compiler then takes seconds, instead of minutes for the large unrolled loops.
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
OUT_OF_BOUNDS = """
#include "kernel.h"
STRUCT(ReadArguments, (const float*, x), (float*, out), (long, size));
void read_after_the_end(const ReadArguments& args, long, long) { *args.out = args.x[args.size]; }
KERNEL(read_float32, read_after_the_end)
"""
CALL_IT = """
import sys
from pathlib import Path
from typing import NamedTuple
import torch
from model.ops.cpu import build, recording, shared_layout
from model.ops.cpu.arguments import Address

class ReadArguments(NamedTuple):
    x: Address
    out: Address
    size: int

thread_pool = recording.thread_pool()
build.CSRC = Path(sys.argv[1])
kernel = shared_layout.find_kernel("reading", "read", torch.float32, ReadArguments)
x, out = torch.ones(16), torch.zeros(1)
recording.call(kernel, 1, ReadArguments(x.data_ptr(), out.data_ptr(), int(sys.argv[2])))
print("read", out.item())
"""


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The variables of a process that can load libraries with sanitizers. Skips the test if there are none."""
    compiler = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    # Without libstdc++, AddressSanitizer ends the process when PyTorch throws an exception.
    runtimes = []
    for name in ("libasan.so", "libstdc++.so"):
        command = [compiler, f"-print-file-name={name}"]
        runtimes.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not all(map(os.path.isabs, runtimes)):
        pytest.skip("the compiler has no runtime library of AddressSanitizer")
    options = {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:alloc_dealloc_mismatch=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
        "OMP_NUM_THREADS": "1",
        "CXXFLAGS": FLAGS,
    }
    environment = os.environ | options
    started = subprocess.run([sys.executable, "-c", "import torch"], env=environment, capture_output=True, text=True)
    if started.returncode != 0:
        pytest.skip(f"PyTorch does not start with AddressSanitizer: {started.stderr[-300:]}")
    return environment


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_kernels_access_only_memory_of_their_arguments_and_compute_nothing_undefined(
    environment: dict[str, str],
) -> None:
    ended = run(environment, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "tests/ops/cpu/test_fuzz.py")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[:6000]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


def test_a_read_after_the_end_of_a_tensor_is_noticed(environment: dict[str, str], tmp_path: Path) -> None:
    for header in build.CSRC.glob("*.h"):
        shutil.copy(header, tmp_path)
    (tmp_path / "reading.cpp").write_text(OUT_OF_BOUNDS)
    inside = run(environment, "-c", CALL_IT, str(tmp_path), "15")
    assert inside.returncode == 0, inside.stderr[:6000]
    assert "read 1.0" in inside.stdout
    outside = run(environment, "-c", CALL_IT, str(tmp_path), "16")
    assert outside.returncode != 0
    assert "heap-buffer-overflow" in outside.stderr
