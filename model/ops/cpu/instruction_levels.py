"""The sets of vector instructions for which kernels are compiled, and the choice of one for this CPU."""

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

CPU_INFO = Path("/proc/cpuinfo")
VARIABLE = "KERNEL_INSTRUCTIONS"  # environment variable with the name of a level to use instead of the best one


@dataclass(frozen=True)
class InstructionLevel:
    """A set of instructions: the compiler's options for it, and the CPU features that it needs, as Linux names them."""

    name: str
    compiler_flags: tuple[str, ...]
    cpu_features: frozenset[str]


def _extended(level: InstructionLevel, name: str, features: dict[str, str]) -> InstructionLevel:
    """A level with further features, each with the compiler's option for it."""
    return InstructionLevel(name, (*level.compiler_flags, *features.values()), level.cpu_features | features.keys())


AVX2 = InstructionLevel("avx2", ("-mavx2", "-mfma", "-mf16c", "-mpopcnt"), frozenset(("avx2", "fma", "f16c", "popcnt")))
AVX2_VNNI = _extended(AVX2, "avx2-vnni", {"avx_vnni": "-mavxvnni"})
AVX512 = _extended(
    AVX2,
    "avx512",
    {"avx512f": "-mavx512f", "avx512bw": "-mavx512bw", "avx512dq": "-mavx512dq", "avx512vl": "-mavx512vl"},
)
AVX512_VNNI = _extended(AVX512, "avx512-vnni", {"avx512_vnni": "-mavx512vnni"})
AVX512_BF16 = _extended(AVX512_VNNI, "avx512-bf16", {"avx512_bf16": "-mavx512bf16"})
AMX = _extended(AVX512_BF16, "amx", {"amx_tile": "-mamx-tile", "amx_bf16": "-mamx-bf16"})
NEON = InstructionLevel("neon", ("-march=armv8-a",), frozenset(("asimd",)))
NEON_DOTPROD = InstructionLevel("neon-dotprod", ("-march=armv8.2-a+dotprod",), frozenset(("asimd", "asimddp")))
NEON_BF16 = InstructionLevel(
    "neon-bf16", ("-march=armv8.2-a+dotprod+i8mm+bf16",), NEON_DOTPROD.cpu_features | {"i8mm", "bf16"}
)
# ARM's features: the entry of Linux's auxiliary vector (AT_HWCAP or AT_HWCAP2) that has them, and their bit there.
ARM_FEATURES = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13), "bf16": (26, 14)}
FEATURES_OF_ALL_MACS = frozenset(("asimd", "asimddp"))  # with this architecture
# Its CPUs multiply pairs of bfloat16 numbers at a quarter of the rate of float32 numbers (docs/experiments.md).
VENDOR_WITH_SLOW_PAIRS = "GenuineIntel"


@dataclass(frozen=True)
class Target:
    """A kind of machine for which kernels are compiled: its system, as `sys.platform` names it, and its levels.

    A better level comes later. `zig` is the oldest system that runs the kernels, as Zig names it, and `wheel` as the
    tag of a wheel names it.
    """

    system: str
    levels: tuple[InstructionLevel, ...]
    zig: str
    wheel: str


TARGETS = {  # by `platform.machine()` ("arm64" on macOS, "aarch64" on Linux); the glibc is the one that PyTorch needs
    "x86_64": Target(
        "linux",
        (AVX2, AVX2_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, AMX),
        "x86_64-linux-gnu.2.28",
        "manylinux_2_28_x86_64",
    ),
    "aarch64": Target("linux", (NEON, NEON_DOTPROD, NEON_BF16), "aarch64-linux-gnu.2.28", "manylinux_2_28_aarch64"),
    "arm64": Target("darwin", (NEON_DOTPROD, NEON_BF16), "aarch64-macos.11.0", "macosx_11_0_arm64"),
}


def this_target() -> Target | None:
    """The target of this machine; None if no kernels are compiled for its system or its processor."""
    target = TARGETS.get(platform.machine())
    return target if target is not None and target.system == sys.platform else None


_THIS = this_target()
LEVELS = () if _THIS is None else _THIS.levels  # those of this machine


def chosen_level() -> InstructionLevel | None:
    """The fastest level of this CPU, or else the one that the environment variable names; None if the CPU has none.

    Raises `ValueError` if the variable names no level, or one that the CPU does not have.
    """
    available = [level for level in LEVELS if level.cpu_features <= cpu_features()]
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        if available[-1:] == [AVX512_BF16] and _cpu_info("vendor_id") == VENDOR_WITH_SLOW_PAIRS:
            return AVX512_VNNI
        return available[-1] if available else None
    for level in available:
        if level.name == wanted:
            return level
    names = ", ".join(level.name for level in available) or "none"
    raise ValueError(f"{VARIABLE} is {wanted!r}, but this CPU has the levels: {names}; take one of these, or unset it")


@cache
def cpu_features() -> frozenset[str]:
    """The features of this CPU that levels need, and on x86 also others, as Linux names them; none without kernels."""
    if (sys.platform, platform.machine()) == ("darwin", "arm64"):
        return FEATURES_OF_ALL_MACS | {name for name in ARM_FEATURES if _is_set(f"hw.optional.arm.FEAT_{name.upper()}")}
    if (sys.platform, platform.machine()) == ("linux", "aarch64"):  # CPU_INFO is that of the host in an emulator
        read = ctypes.CDLL(None).getauxval
        read.argtypes, read.restype = [ctypes.c_ulong], ctypes.c_ulong
        return frozenset(name for name, (entry, bit) in ARM_FEATURES.items() if read(entry) >> bit & 1)
    return frozenset(_cpu_info("flags").split())


def _cpu_info(name: str) -> str:
    """Read an entry of the first processor in Linux's cpuinfo; empty if there is none."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(name)), "").partition(":")[2].strip()


def _is_set(name: str) -> bool:
    """Whether macOS knows a number of this name that is not 0."""
    number = ctypes.c_int()
    size = ctypes.c_size_t(ctypes.sizeof(number))
    arguments = (name.encode(), ctypes.byref(number), ctypes.byref(size), None, ctypes.c_size_t(0))
    return ctypes.CDLL(None).sysctlbyname(*arguments) == 0 and number.value != 0
