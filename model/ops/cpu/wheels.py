"""The build backend of the package (PEP 517): setuptools, with compiled kernels in wheels.

The environment variable `KERNEL_LEVELS` says which kernels a wheel holds: `own` (the default) for those of this CPU's
instruction level, `all`, or `none`. Only the wheel with all of them runs fast on every CPU, so its name alone claims
`manylinux`; on macOS, there is one level. `KERNEL_MACHINE` names the machine whose levels `all` means: `x86_64` or
`aarch64` (Linux), or `arm64` (macOS); by default, it is this one. An editable install holds none: kernels are then
compiled when they are used.
"""

import os
import platform
from pathlib import Path
from typing import Any

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

from model.ops.cpu import build
from model.ops.cpu.instruction_levels import TARGETS, InstructionLevel, Target, chosen_level, this_target

VARIABLE, MACHINE_VARIABLE = "KERNEL_LEVELS", "KERNEL_MACHINE"


def target() -> Target | None:
    """The machine that a wheel is for; None without kernels for it. Raises ValueError for an unknown one."""
    wanted = os.environ.get(MACHINE_VARIABLE)
    if wanted and wanted not in TARGETS:
        raise ValueError(f"{MACHINE_VARIABLE} is {wanted!r}; take {', '.join(TARGETS)}")
    return TARGETS[wanted] if wanted else this_target()


def levels() -> tuple[InstructionLevel, ...]:
    """The instruction levels of the kernels in a wheel. Raises ValueError for an unknown value of the variable."""
    wanted = os.environ.get(VARIABLE) or "own"
    if wanted not in ("own", "all", "none"):
        raise ValueError(f"{VARIABLE} is {wanted!r}; take own, all or none")
    if wanted == "all":
        return () if (chosen := target()) is None else chosen.levels
    if os.environ.get(MACHINE_VARIABLE):
        raise ValueError(f"{MACHINE_VARIABLE} has no effect with {VARIABLE}={wanted}; set {VARIABLE} to all")
    own = chosen_level() if wanted == "own" else None
    return () if own is None else (own,)


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    compiler = [build.ZIG] if levels() and not os.environ.get("CXX") else []
    return [*build_meta.get_requires_for_build_wheel(config_settings), *compiler]


class BuildKernels(build_py):
    """Copy the Python files, and compile the kernels next to them."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            build.compile_all(Path(self.build_lib) / build.SHIPPED.relative_to(Path.cwd()), levels(), target())


class WheelWithKernels(bdist_wheel):
    """A wheel for any Python 3, and for one kind of machine if it holds kernels."""

    def finalize_options(self) -> None:
        self.distribution.has_ext_modules = lambda: bool(levels())  # so that the files go where those of platforms do
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        chosen = target()
        if chosen is None or not levels():
            return "py3", "none", "any"
        is_portable = levels() == chosen.levels
        return "py3", "none", chosen.wheel if is_portable else f"linux_{platform.machine()}"
