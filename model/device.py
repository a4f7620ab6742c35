"""Find the device that a setting names."""

import re

import torch

NAME = re.compile(r"(cpu|cuda)(:\d+)?")
OTHERS = ("mps", "xpu")  # devices of PyTorch with which nothing here is tested


def find_device(name: str) -> str:
    """The device of a name; "auto" is CUDA if there is a GPU, or else the CPU.

    Raises `ValueError` that says why the device cannot be used.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in OTHERS and NAME.fullmatch(f"{name}") is None:
        raise ValueError(f"device {name!r} cannot be used here: it is not auto, cpu, cuda or cuda:N")
    num_gpus = torch.cuda.device_count() if kind == "cuda" else 0
    if kind == "cuda" and torch.version.cuda is None and torch.version.hip is None:
        raise ValueError(f"device {name!r} cannot be used here: this PyTorch is built without CUDA; use cpu")
    if kind == "cuda" and num_gpus <= int(index or 0):
        found = f"the GPUs are cuda:0 to cuda:{num_gpus - 1}" if num_gpus else "PyTorch finds no GPU"
        raise ValueError(f"device {name!r} cannot be used here: {found}")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {name!r} cannot be used here: {str(error).splitlines()[0]}") from error
    return name
