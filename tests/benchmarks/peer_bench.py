"""Find the engines of other projects, convert a checkpoint for them, and measure each of them over HTTP."""

import asyncio
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from tests.benchmarks.client import LLAMA, OURS, VLLM, Timed, generate
from tests.benchmarks.peer_catalog import LLAMA_KINDS, PEERS, MissingError, Peer
from tests.benchmarks.peer_servers import CACHE_GIB, PREFILLS, versions
from tests.benchmarks.serve import ROOT, Prompts

START_SECONDS = 300


@dataclass(frozen=True)
class Installed:
    """The installed peers: interpreters that have their packages, and directories of their binaries."""

    peers_python: str
    vllm_python: str
    llama_cpp: Path | None
    ik_llama_cpp: Path | None


def cache_gib(config: Mapping[str, Any], num_tokens: int) -> int:
    """The GiB of keys and values in float32 of this many tokens, rounded up."""
    num_heads = config["num_attention_heads"]
    d_head = config.get("head_dim") or config["hidden_size"] // num_heads
    num_numbers: int = (
        2 * config["num_hidden_layers"] * config.get("num_key_value_heads", num_heads) * d_head * num_tokens
    )
    return math.ceil(4 * num_numbers / (1 << 30))


class Bench:
    """Starts the server of one peer at a time, for at most `slots` requests of at most `slot_tokens` tokens each.

    `work` has the checkpoint, and the converted checkpoints of all peers.
    """

    def __init__(self, installed: Installed, work: Path, *, threads: int, slots: int, slot_tokens: int) -> None:
        self._threads = threads
        self._slots, self._slot_tokens = slots, slot_tokens
        # Not resolved: the path of the link determines the environment.
        self._python = os.path.abspath(shutil.which(installed.peers_python) or installed.peers_python)
        self._vllm_python = os.path.abspath(shutil.which(installed.vllm_python) or installed.vllm_python)
        self._binaries = {"llama.cpp": installed.llama_cpp, "ik_llama.cpp": installed.ik_llama_cpp}
        self.work = work
        config = json.loads((work / "checkpoint" / "config.json").read_text())
        self._cache_gib = str(cache_gib(config, slots * slot_tokens))
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": self._cache_gib,
            CACHE_GIB: self._cache_gib,
        }
        self.prompts = Prompts(config["vocab_size"])

    # Requests

    def drive(self, peer: Peer, port: int, bodies: list[dict[str, Any]]) -> list[Timed]:
        """Send requests at the same time. Raises `MissingError` if one does not get as many tokens as it asked for."""
        timed = uvloop.run(self._drive(peer, port, bodies))
        for one, body in zip(timed, bodies, strict=True):
            if peer.kind in LLAMA_KINDS and one.tokens:  # they send no event for a token that ends no character
                one.tokens += [one.tokens[-1]] * (body["max_tokens"] - len(one.tokens))
            if one.error is not None or len(one.tokens) != body["max_tokens"]:
                raise MissingError(one.error or f"{len(one.tokens)} tokens instead of {body['max_tokens']}")
        return timed

    async def _drive(self, peer: Peer, port: int, bodies: list[dict[str, Any]]) -> list[Timed]:
        return await asyncio.gather(*(self._generate(peer, port, body) for body in bodies))

    async def _generate(self, peer: Peer, port: int, body: dict[str, Any]) -> Timed:
        dialect, content = OURS, body
        if peer.kind in LLAMA_KINDS:
            # Only the named sampler, instead of the default samplers.
            greedy = {"temperature": 0, "samplers": ["temperature"], "ignore_eos": True}
            own = {"n_predict": body["max_tokens"], "cache_prompt": False, "return_tokens": True}
            dialect, content = LLAMA[peer.kind], {"prompt": body["prompt"], **own, **greedy}
        elif peer.kind == "vllm":
            dialect, content = VLLM, {**body, "model": "checkpoint", "return_token_ids": True}
        return await generate(port, content, dialect=dialect)

    # Servers

    @contextmanager
    def serving(self, peer: Peer) -> Iterator[tuple[int, float]]:
        """Start the server of a peer; yield its port, and the seconds from the start until it was ready."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}/{'health' if peer.kind in (*LLAMA_KINDS, 'vllm') else 'ready'}"
        start = time.perf_counter()
        with tempfile.TemporaryFile() as log, self._started(self._server(peer, port), log) as process:
            try:
                while not answers(url):
                    if process.poll() is not None or time.perf_counter() - start > START_SECONDS:
                        raise MissingError(last_line(log))
                    time.sleep(0.02)
                yield port, time.perf_counter() - start
            finally:
                process.terminate()

    def _server(self, peer: Peer, port: int) -> list[str]:
        model = str(self.work / peer.format)
        if peer.kind in LLAMA_KINDS:
            context = self._slots * self._slot_tokens
            size = ["-np", str(self._slots), "-c", str(context), "-t", str(self._threads), "-tb", str(self._threads)]
            no_cache = ["--cache-ram", "0", "-sps", "0"] + ["--no-cache-prompt"] * (peer.kind == "llama.cpp")
            return [self._binary(peer, "llama-server"), "-m", model, "--port", str(port), *size, *no_cache]
        if peer.kind == "vllm":
            size = ["--max-model-len", str(self._slot_tokens), "--max-num-seqs", str(self._slots)]
            options = ["--dtype", peer.variant, "--no-enable-prefix-caching", "--served-model-name", "checkpoint"]
            command = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--port", str(port)]
            return [self._vllm_python, *command, *size, *options]
        if peer.kind == "ours":
            size = ["--port", str(port), "--cache-bytes", f"{self._cache_gib}G"]
            return self._own(peer, "-m", "service", "--model", model, *size, *peer.options)
        return self._own(peer, *self._module("peer_servers", "serve", peer), "--port", str(port))

    def _module(self, module: str, command: str, peer: Peer) -> list[str]:
        model = str(self.work / peer.format)
        return ["-m", f"tests.benchmarks.{module}", command, peer.kind, model, "--variant", peer.variant]

    def _own(self, peer: Peer, *arguments: str) -> list[str]:
        """A command line for the interpreter that has the peer."""
        own = {"ours": sys.executable, "transformers": sys.executable, "vllm": self._vllm_python}
        return [own.get(peer.kind, self._python), *arguments, "--threads", str(self._threads)]

    # Measurements without a server

    def prefills(self, peer: Peer) -> dict[str, float]:
        """For each length of `PREFILLS`, the tokens per second of a prompt alone, in process."""
        if peer.kind not in LLAMA_KINDS:
            command = [*self._own(peer, *self._module("peer_servers", "measure", peer)), *peer.options]
            return dict(json.loads(self._output(command))["prefill"])
        lengths = ",".join(map(str, PREFILLS))
        command = ["-m", str(self.work / peer.format), "-p", lengths, "-n", "0", "-r", "2", "-t", str(self._threads)]
        found = json.loads(self._output([self._binary(peer, "llama-bench"), *command, "-o", "json"], whole=True))
        return {str(run["n_prompt"]): max(run["samples_ts"]) for run in found}

    def perplexity(self, peer: Peer, text: Path, windows: Path, window: int) -> float:
        """The perplexity of a text. `windows` is a file with the token ids of its windows of `window` tokens each."""
        if peer.kind not in LLAMA_KINDS:
            command = self._own(peer, *self._module("peer_perplexity", str(windows), peer))
            lines = self._output([*command, *peer.options], whole=True).splitlines()
            results = [line for line in lines if line.startswith('{"perplexity"')]  # vLLM may write lines after it
            if not results:
                raise MissingError(f"peer_perplexity printed no perplexity; its last line is {lines[-1:]}")
            return float(json.loads(results[-1])["perplexity"])
        command = ["-m", str(self.work / peer.format), "-f", str(text), "-c", str(window), "-b", str(window)]
        binary = self._binary(peer, "llama-perplexity")
        out = self._output([binary, *command, "-t", str(self._threads)], whole=True, with_log=True)
        found = re.search(r"Final estimate: PPL.* = ([0-9.]+) \+/-", out)
        if found is None:
            raise MissingError(f"llama-perplexity printed no final estimate: {out.splitlines()[-1:]}")
        return float(found[1])

    # Conversion

    def export(self, peer: Peer) -> None:
        """Convert the checkpoint to the format of the peer, unless an earlier run did."""
        out = self.work / peer.format
        if out.exists():
            return
        partial = out.with_name(f"partial-{out.name}")
        source = self.work / "source.gguf"
        if peer.variant == "source":
            raise MissingError("--model is not a GGUF file")
        if peer.reads_gguf and (peer.variant != "f32" or source.exists()):
            if peer.variant != "f32":
                self.export(PEERS["llama.cpp-f32"])
                source = self.work / "f32.gguf"
            quantize = self._binary(PEERS["llama.cpp-f32"], "llama-quantize")
            command = [quantize, "--allow-requantize", str(source), str(partial), peer.variant]
        else:
            kind = "gguf" if peer.reads_gguf else peer.format
            paths = [str(self.work / "checkpoint"), str(partial)]
            command = [self._python, "-m", "tests.benchmarks.peer_formats", kind, *paths]
        self._output(command)
        partial.rename(out)

    # Processes

    def versions(self) -> dict[str, Any]:
        """The versions of the packages of this interpreter, of those of the peers, and of llama.cpp."""

        def of(read: Callable[[], Any]) -> Any:
            try:
                return read()
            except MissingError as error:
                return f"missing: {error}"

        def packages(python: str) -> Any:
            command = [python, "-m", "tests.benchmarks.peer_servers", "versions"]
            return of(lambda: json.loads(self._output(command)))

        binaries = {kind: of(partial(self._llama_version, kind)) for kind in LLAMA_KINDS}
        return {"own": versions(), "peers": packages(self._python), "vllm": packages(self._vllm_python), **binaries}

    def _llama_version(self, kind: str) -> str:
        command = [self._binary(PEERS[f"{kind}-f32"], "llama-server"), "--version"]
        out = self._output(command, whole=True, with_log=True)
        return next((line for line in out.splitlines() if line.startswith("version: ")), "?").removeprefix("version: ")

    def _binary(self, peer: Peer, name: str) -> str:
        directory = self._binaries[peer.kind]
        if directory is None and peer.kind == "ik_llama.cpp":
            raise MissingError("its directory was not given with --ik-llama-cpp")
        found = shutil.which(name, path=None if directory is None else str(directory.absolute()))
        if found is None:
            raise MissingError(f"no {name} in {directory or 'PATH'}")
        return found

    def _started(self, command: list[str], log: Any, out: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
        try:
            return subprocess.Popen(command, stdout=out, stderr=log, cwd=ROOT, env=self._environment)
        except OSError as error:
            raise MissingError(str(error)) from error

    def _output(self, command: list[str], *, whole: bool = False, with_log: bool = False) -> str:
        """The last line of the output of a command, or with `whole` all of it, followed by its log `with_log`."""
        with tempfile.TemporaryFile() as log, self._started(command, log, subprocess.PIPE) as process:
            out = process.communicate()[0].decode(errors="replace")
            if process.returncode:
                raise MissingError(last_line(log))
            if with_log:
                log.seek(0)
                out += log.read().decode(errors="replace")
        return out if whole else (out.splitlines() or [""])[-1]


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def last_line(log: Any) -> str:
    log.seek(0)
    lines = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it ended without a message"
