"""Six tasks give the numbers of TransformerLens and of nnsight, and never take more lines than there.

The libraries are installed into an environment of their own, because they exclude versions that the tests need.
"""

import ast
import inspect
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from forwardscope.local import load
from tests.forwardscope import peer_tasks
from tests.forwardscope.peer_tasks import CLEAN, CORRUPTED, HEAD, TOKEN
from tests.published_models import CACHE, smollm2

pytestmark = pytest.mark.slow
PACKAGES = ("torch==2.13.*", "transformer-lens==4.3.*", "nnsight==0.8.*")
TASKS = ("ablate", "patch", "lens", "gradient", "steer")
# Sums are in another order: the logits are about 20, and the residuals of some dims 1,000.
ATOL, RTOL = 2e-3, 2e-4


class Ours:
    def __init__(self, directory: str) -> None:
        self.model = load(directory, dtype="float32")
        self.graph_model = load(directory, grad=True)

    def ablate(self) -> Any:
        def zero(z: Any, context: Any) -> Any:
            z[:, :, HEAD] = 0

        return self.model.run(CLEAN, hooks={"blocks.5.attn.hook_z": zero}).logits[-1]

    def patch(self) -> Any:
        trace = self.model.run(CLEAN)

        def patch(resid: Any, context: Any) -> Any:
            resid[:, 4] = trace[context.name][:, 4]

        return self.model.run(CORRUPTED, hooks={"blocks.12.hook_resid_pre": patch}).logits[-1]

    def lens(self) -> Any:
        lens: Any = self.model.attribute("logit_lens", CLEAN, token=TOKEN)
        return torch.tensor([layer.token[0].logit for layer in lens.layers[1:]])

    def gradient(self) -> Any:
        trace = self.graph_model.run(CLEAN, "blocks.12.resid_post")
        return torch.autograd.grad(trace.logits[-1, TOKEN], trace["blocks.12.resid_post"])[0]

    def steer(self) -> Any:
        hooks = {"blocks.12.resid_post": lambda resid, context: resid + 0.5}
        return torch.tensor(self.model.generate(CLEAN, max_tokens=6, temperature=0, hooks=hooks).tokens)


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Mapping[str, Tensor]]:
    """The results of each library, by task or stage."""
    environment = CACHE / "peers"
    python = environment / "bin" / "python"
    installed = environment / "installed"
    if not installed.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        found = subprocess.run(install, capture_output=True, text=True)
        if found.returncode:
            pytest.skip(f"TransformerLens and nnsight cannot be installed: {found.stderr[-200:]}")
        installed.touch()
    results = {}
    for library in ("transformer_lens", "nnsight"):
        out = tmp_path_factory.mktemp("peers") / f"{library}.safetensors"
        command = [str(python), peer_tasks.__file__, library, str(smollm2()), str(out)]
        subprocess.run(command, check=True, capture_output=True)
        results[library] = load_file(out)
    return results


@pytest.fixture(scope="module")
def ours() -> Ours:
    return Ours(str(smollm2()))


@pytest.mark.parametrize("library", ["transformer_lens", "nnsight"])
@pytest.mark.parametrize("task", TASKS)
def test_a_task_has_the_same_numbers(
    task: str, library: str, ours: Ours, peers: Mapping[str, Mapping[str, Tensor]]
) -> None:
    torch.testing.assert_close(getattr(ours, task)(), peers[library][task], atol=ATOL, rtol=RTOL)


def test_all_stages_with_the_same_name_have_the_same_numbers(
    ours: Ours, peers: Mapping[str, Mapping[str, Tensor]]
) -> None:
    theirs, trace = peers["transformer_lens"], ours.model.run(CLEAN)
    hooks = {name: f"{name.rpartition('.')[0]}.hook_{name.rpartition('.')[2]}".lstrip(".") for name in trace}
    common = {name: theirs[hook] for name, hook in hooks.items() if hook in theirs}
    assert len(common) > 600
    for name, expected in common.items():
        expected[expected < -1e30] = -torch.inf  # masked scores
        atol = 2e-4 * max(1.0, float(expected[expected.isfinite()].abs().max()))
        torch.testing.assert_close(trace[name].view(expected.shape), expected, atol=atol, rtol=1e-3, msg=name)


@pytest.mark.parametrize("library", [peer_tasks.TransformerLens, peer_tasks.Nnsight])
@pytest.mark.parametrize("task", TASKS)
def test_no_task_takes_more_lines(task: str, library: type) -> None:
    counts = [num_lines(getattr(kind, task)) for kind in (Ours, library)]
    assert counts[0] <= counts[1]


def num_lines(function: Any) -> int:
    """The lines of the body of a function."""
    (definition,) = ast.parse(inspect.cleandoc(f"\n{inspect.getsource(function)}")).body
    assert isinstance(definition, ast.FunctionDef)
    first, last = definition.body[0], definition.body[-1]
    text = inspect.cleandoc(f"\n{inspect.getsource(function)}").splitlines()[first.lineno - 1 : last.end_lineno]
    return sum(bool(line.strip()) for line in text)
