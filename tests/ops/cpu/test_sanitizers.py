"""The tests with random shapes pass with kernels that are compiled with AddressSanitizer and UBSan.

The sanitizers end the process at the first access outside of an allocation, and at the first undefined operation.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from model.ops.cpu import build, instruction_levels

ROOT = Path(__file__).resolve().parents[3]
# Without optimization: the compiler then takes seconds, instead of minutes for the large unrolled loops.
FLAGS = "-O0 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"
OUT_OF_BOUNDS = """
#include "kernel.h"
STRUCT(ReadArguments, (const float*, x), (float*, out), (long, size));
void read_number(const ReadArguments& args, long, long) { *args.out = args.x[args.size]; }
void read_vector(const ReadArguments& args, long, long) {
    *args.out = reduce_max(load(args.x, first_lanes(args.size + 1)));
}
void write_vector(const ReadArguments& args, long, long) {
    store(const_cast<float*>(args.x), broadcast(1), first_lanes(args.size + 1));
    *args.out = args.x[0];
}
void read_halves(const ReadArguments& args, long, long) {  // each number is two of 16 bits
    *args.out = reduce_max(load(reinterpret_cast<const BFloat16*>(args.x), first_lanes(2 * args.size + 2)));
}
void write_halves(const ReadArguments& args, long, long) {
    store(reinterpret_cast<BFloat16*>(const_cast<float*>(args.x)), broadcast(1), first_lanes(2 * args.size + 2));
    *args.out = reduce_max(load(reinterpret_cast<const BFloat16*>(args.x), first_lanes(1)));
}
KERNEL(read_number_float32, read_number)
KERNEL(read_vector_float32, read_vector)
KERNEL(write_vector_float32, write_vector)
KERNEL(read_halves_float32, read_halves)
KERNEL(write_halves_float32, write_halves)
"""
CALL_IT = """
import sys
from pathlib import Path
import torch
from model.ops.cpu import build, launch, shared_layout

thread_pool = launch.thread_pool()
build.CSRC = Path(sys.argv[1])
x, out = torch.ones(4), torch.zeros(1)
for name in sys.argv[3:]:
    kernel = shared_layout.find_kernel("reading", name, torch.float32)
    launch.call(kernel, 1, x=x.data_ptr(), out=out.data_ptr(), size=int(sys.argv[2]))
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
@pytest.mark.parametrize("level", ["own", "avx2"])
def test_kernels_access_only_memory_of_their_arguments_and_compute_nothing_undefined(
    environment: dict[str, str], level: str
) -> None:
    if level != "own":
        environment = environment | {instruction_levels.VARIABLE: level}
    ended = run(environment, "-m", "pytest", "-q", "-x", "-s", "-p", "no:cacheprovider", "tests/ops/cpu/test_fuzz.py")
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[:6000]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout


KERNELS = ("read_number", "read_vector", "write_vector", "read_halves", "write_halves")


@pytest.mark.slow
def test_an_access_after_the_end_of_a_tensor_is_noticed(environment: dict[str, str], tmp_path: Path) -> None:
    for header in build.CSRC.glob("*.h"):
        shutil.copy(header, tmp_path)
    (tmp_path / "reading.cpp").write_text(OUT_OF_BOUNDS)
    inside = run(environment, "-c", CALL_IT, str(tmp_path), "3", *KERNELS)
    assert inside.returncode == 0, inside.stderr[:6000]
    assert inside.stdout.splitlines() == ["read 1.0"] * len(KERNELS)
    for kernel in KERNELS:
        outside = run(environment, "-c", CALL_IT, str(tmp_path), "4", kernel)
        assert outside.returncode != 0, kernel
        assert "heap-buffer-overflow" in outside.stderr
