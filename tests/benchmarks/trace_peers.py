"""The peers of `trace.py`, each in a process of its own: two libraries, and the server of interp-engine.

This file is also a program, which measures a library in the library's interpreter and does not need Forwardscope:

    python tests/benchmarks/trace_peers.py {transformer_lens,nnsight} DIRECTORY THREADS

It first writes a line with the names of its measures and the versions. Then it reads lines `[measure, token ids]`. For
each, it writes a line with the seconds, the bytes of the kept tensors, and the largest logit of the last position. An
error is the last line.
"""

import base64
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Measure = Callable[[list[int]], tuple[float, int]]
"""token ids -> seconds, and the bytes of the kept tensors or of the answer"""
Pass = Callable[[Tensor], tuple[Tensor, Iterable[Tensor]]]
"""ids (1, T) -> logits (1, T, V), and the kept tensors"""


class Skipped(Exception):
    """A measure or peer that cannot be measured. The message says why."""


@dataclass(frozen=True)
class Peer:
    measures: dict[str, Measure]
    versions: dict[str, str]
    largest_logit: float  # after the last token of `CHECKED`, to check that the network is the same


CHECKED = list(range(16))


def transformer_lens(directory: str) -> dict[str, Pass]:
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(directory, device="cpu", dtype=torch.float32)

    def run_with_cache(ids: Tensor) -> tuple[Tensor, Iterable[Tensor]]:
        logits, cache = bridge.run_with_cache(ids)
        return logits, cache.values()

    return {"TransformerLens, plain": lambda ids: (bridge(ids), []), "TransformerLens, run_with_cache": run_with_cache}


def nnsight(directory: str) -> dict[str, Pass]:
    import nnsight
    from transformers import AutoModelForCausalLM

    # Eager attention makes the pattern available. The plain model below has its default attention.
    options = {"device_map": "cpu", "dtype": torch.float32, "attn_implementation": "eager", "dispatch": True}
    model = nnsight.TransformersModel(directory, task="text-generation", **options)
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def save(ids: Tensor) -> tuple[Tensor, Iterable[Tensor]]:
        with model.trace(ids):
            kept = [model.transformer.drop.output]
            for block in model.transformer.h:
                kept += [block.ln_1.output, block.attn.c_attn.output, block.attn.c_proj.input]
                kept += [block.attn.output[0], block.attn.output[1], block.ln_2.input, block.ln_2.output]
                kept += [block.mlp.c_fc.output, block.mlp.act.output, block.mlp.output, block.output]
            kept += [model.transformer.ln_f.output, model.lm_head.output]
            kept = nnsight.save(kept)
        return kept[-1], kept

    return {"Transformers, plain": lambda ids: (plain(ids).logits, []), "nnsight, save": save}


LIBRARIES = {"transformer_lens": (transformer_lens, "transformer-lens"), "nnsight": (nnsight, "nnsight")}


@torch.inference_mode()
def run(measured: Pass, ids: list[int]) -> dict[str, Any]:
    tensor = torch.tensor([ids])
    start = time.perf_counter()
    logits, kept = measured(tensor)
    seconds = time.perf_counter() - start
    sizes = {(tensor.data_ptr(), tensor.shape): tensor.nbytes for tensor in kept}  # many tensors have two names
    return {"seconds": seconds, "bytes": sum(sizes.values()), "largest_logit": logits[0, -1].max().item()}


def main() -> None:
    answers, sys.stdout = sys.stdout, sys.stderr  # keeps the output of libraries away from the answers

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    name, directory, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    load, package = LIBRARIES[name]
    try:
        passes = load(directory)
        versions = {used: version(used) for used in (package, "transformers", "torch")}
        answer({"measures": list(passes), "versions": versions})
        for line in sys.stdin:
            measure, ids = json.loads(line)
            answer(run(passes[measure], ids))
    except Exception as error:  # whatever the library raises: it is skipped, and the others are measured
        answer({"error": f"{type(error).__name__}: {error}".splitlines()[0]})


@contextmanager
def library(name: str, python: str, directory: Path, threads: int) -> Iterator[Peer]:
    """Start a library in a process of its own."""
    command, pipe = [python, __file__, name, str(directory), str(threads)], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment(threads)
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        questions, answers = process.stdin, process.stdout

        def read_answer() -> dict[str, Any]:
            found: dict[str, Any] = json.loads(answers.readline() or '{"error": "it ended without a message"}')
            if "error" in found:
                raise Skipped(found["error"])
            return found

        def ask(measure: str, ids: list[int]) -> dict[str, Any]:
            questions.write(json.dumps([measure, ids]) + "\n")
            questions.flush()
            return read_answer()

        def measured(measure: str) -> Measure:
            def seconds_and_bytes(ids: list[int]) -> tuple[float, int]:
                found = ask(measure, ids)
                return found["seconds"], found["bytes"]

            return seconds_and_bytes

        try:
            ready = read_answer()
            measures = {measure: measured(measure) for measure in ready["measures"]}
            yield Peer(measures, ready["versions"], ask(ready["measures"][-1], CHECKED)["largest_logit"])
        finally:
            process.kill()


@contextmanager
def interp_engine(points: list[str], python: str, directory: Path, threads: int) -> Iterator[Peer]:
    """Start the server of interp-engine, to capture `points`."""
    command = [python, "-m", "interp_engine.server", "--model", str(directory), "--dtype", "float32", "--port", "0"]
    command += ["--backend", "eager", "--device", "cpu", "--max-capture-points", str(len(points))]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment(threads)
    ) as process:
        assert process.stderr is not None
        try:
            line = "none"
            for line in process.stderr:
                if found := re.search(r"http://\S+:(\d+)", line):
                    break
            else:
                raise Skipped(f"the server ended; last line of its log: {line.strip()}")
            threading.Thread(
                target=process.stderr.read, daemon=True
            ).start()  # or the server blocks when the pipe is full
            port = int(found[1])
            while (health := json.load(request(port, "GET", "/health")))["status"] == "loading":
                time.sleep(0.1)
            if health["status"] != "ready":
                raise Skipped(health["error"])
            described = json.load(request(port, "GET", "/v1/describe"))
            measures = {"interp-engine, /v1/capture": posted(port, "/v1/capture", "prompt_token_ids", points=points)}
            last = {"prompt_token_ids": CHECKED, "points": ["lm_head"], "rows": [len(CHECKED) - 1]}
            found = json.load(request(port, "POST", "/v1/capture", last))["activations"]["lm_head"]["data"]
            logits = torch.frombuffer(bytearray(base64.b64decode(found)), dtype=torch.float32)
            yield Peer(measures, {"interp-engine": described["engine_version"]}, logits.max().item())
        finally:
            process.kill()


def environment(threads: int) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def request(port: int, method: str, path: str, body: Any = None, accept: str = "json") -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    headers = {"Content-Type": "application/json", "Accept": f"application/{accept}"}
    connection.request(method, path, json.dumps(body), headers)
    return connection.getresponse()


def posted(port: int, path: str, ids_as: str, accept: str = "json", **body: Any) -> Measure:
    """A measure that sends a request, and times it to the last byte of the answer, which is not decoded."""

    def measure(ids: list[int]) -> tuple[float, int]:
        buffer, size = bytearray(1 << 20), 0
        start = time.perf_counter()
        with request(port, "POST", path, {ids_as: ids, **body}, accept) as response:
            if response.status != 200:
                raise Skipped(f"{response.status} {response.read(300).decode(errors='replace')}")
            while got := response.readinto(buffer):
                size += got
        return time.perf_counter() - start, size

    return measure


if __name__ == "__main__":
    main()
