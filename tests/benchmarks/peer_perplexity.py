"""Measure the perplexity of an engine in this process, as llama-perplexity does.

    python -m tests.benchmarks.peer_perplexity WINDOWS KIND MODEL --variant V [--threads 2] [OPTION OF OUR SERVICE]...

`WINDOWS` is a JSON file with a list of token ids for each window of a text. The second half of each window is scored,
each token with all tokens of its window before it as context. Our engine and transformers run one forward pass for each
window; so does the compiled model of OpenVINO, the same that its GenAI pipeline runs. vLLM reports the
log-probabilities of prompts.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Windows = list[list[int]]


def nats_of(logits: Any, ids: Sequence[int]) -> float:
    """The sum of -ln p over the second half of a window, from the logits (T, V) of all its positions."""
    import torch
    import torch.nn.functional as F

    first = len(ids) // 2
    return float(F.cross_entropy(logits[first:-1].float(), torch.tensor(ids[first + 1 :]), reduction="sum"))


def score_ours(model: str, variant: str, threads: int, options: Sequence[str], windows: Windows) -> float:
    import torch

    from service.commands.options import read_settings
    from service.loading import load_model

    torch.set_num_threads(threads)
    checkpoint = load_model(read_settings(["--model", model, "--threads", str(threads), *options]))
    assert checkpoint is not None
    with torch.inference_mode():
        return sum(nats_of(checkpoint.model(torch.tensor([ids]))[0], ids) for ids in windows)


def score_transformers(model: str, variant: str, threads: int, options: Sequence[str], windows: Windows) -> float:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, variant)).eval()
    with torch.inference_mode():
        return sum(nats_of(network(torch.tensor([ids])).logits[0], ids) for ids in windows)


def score_openvino(model: str, variant: str, threads: int, options: Sequence[str], windows: Windows) -> float:
    import numpy as np
    import openvino
    import torch

    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if not variant.startswith("int"):
        properties["INFERENCE_PRECISION_HINT"] = {"float32": "f32", "bfloat16": "bf16"}[variant]
    request = openvino.Core().compile_model(f"{model}/openvino_model.xml", "CPU", properties).create_infer_request()
    names = {name for tensor in request.model_inputs for name in tensor.get_names()}
    nats = 0.0
    for ids in windows:
        request.reset_state()
        inputs = {
            "input_ids": np.array([ids]),
            "attention_mask": np.ones((1, len(ids)), dtype=np.int64),
            "position_ids": np.arange(len(ids))[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        request.infer({name: value for name, value in inputs.items() if name in names})
        nats += nats_of(torch.from_numpy(request.get_tensor("logits").data[0]), ids)
    return nats


def score_vllm(model: str, variant: str, threads: int, options: Sequence[str], windows: Windows) -> float:
    from vllm import LLM, SamplingParams

    longest = max(map(len, windows)) + 1
    engine = LLM(model, dtype=variant, max_model_len=longest, max_num_seqs=1, enable_prefix_caching=False)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in windows], params)
    nats = 0.0
    for ids, output in zip(windows, outputs, strict=True):
        places = range(len(ids) // 2 + 1, len(ids))
        nats -= sum(output.prompt_logprobs[place][ids[place]].logprob for place in places)
    return nats


SCORES: dict[str, Callable[[str, str, int, Sequence[str], Windows], float]] = {
    "ours": score_ours,
    "transformers": score_transformers,
    "openvino": score_openvino,
    "vllm": score_vllm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("windows", type=Path, help="file with the token ids of each window")
    parser.add_argument("kind", help=f"engine: {', '.join(SCORES)}")
    parser.add_argument("model", help="checkpoint, in the format of the engine")
    parser.add_argument("--variant", default="float32", help="precision, as the engine names it")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads of the engine")
    arguments, options = parser.parse_known_args()
    if arguments.kind not in SCORES:
        parser.exit(1, f"perplexity is not measured for {arguments.kind}\n")
    windows: Windows = json.loads(arguments.windows.read_text())
    score = SCORES[arguments.kind]
    nats = score(arguments.model, arguments.variant, arguments.threads, options, windows)
    num_tokens = sum(len(ids) - len(ids) // 2 - 1 for ids in windows)
    sys.stdout.write(json.dumps({"perplexity": math.exp(nats / num_tokens), "tokens": num_tokens}) + "\n")


if __name__ == "__main__":
    main()
