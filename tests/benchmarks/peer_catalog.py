"""The engines that `tests.benchmarks.peers` compares, in their precisions."""

from dataclasses import dataclass, replace

SCENARIOS = {
    "S1": (1, 16, 128),
    "S2": (8, 16, 128),
    "S3": (8, 512, 64),
    "S4": (32, 64, 64),
}  # streams, tokens in, tokens out
LLAMA_KINDS = ("llama.cpp", "ik_llama.cpp")


class MissingError(Exception):
    """The peer is not installed, or does not work as it should. The message says why."""


@dataclass(frozen=True)
class Peer:
    """An engine in one precision.

    `variant` is the precision as the engine names it. `weight_bits` is the size of a weight on disk. `rate` is the
    dtype in which the engine multiplies.
    """

    kind: str
    variant: str
    weight_bits: float
    rate: str
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.variant}"

    @property
    def reads_gguf(self) -> bool:
        return self.kind in LLAMA_KINDS or self in STORED

    @property
    def format(self) -> str:
        """The name of the file or directory that the engine reads, in the working directory."""
        if self.reads_gguf:
            return f"{self.variant}.gguf"
        if self.kind == "openvino":
            return f"openvino-{self.variant}" if self.variant.startswith("int") else "openvino"
        return "ctranslate2" if self.kind == "ctranslate2" else "checkpoint"


OURS = [
    Peer("ours", "float32", 32, "float32", ("--dtype", "float32")),
    Peer("ours", "bfloat16", 16, "bfloat16", ("--dtype", "bfloat16")),
    Peer("ours", "int8", 8.5, "int8", ("--dtype", "bfloat16", "--quantize", "int8")),
    Peer("ours", "int4", 5.4, "int8", ("--dtype", "bfloat16", "--quantize", "int4")),  # 4.5 bits, but 8.5 for the head
]
QUANTIZED_FILES = [
    Peer("llama.cpp", "source", 5.85, "int8"),  # the file of `--model`; the bits are those of SmolLM2's package
    Peer("llama.cpp", "q8_0", 8.5, "int8"),
    Peer("llama.cpp", "q4_0", 5.2, "int8"),  # 4.5 bits, but 6.6 for the embeddings
    Peer("llama.cpp", "q4_k_m", 5.5, "int8"),  # 4.5 to 6.6 bits
]
GGUF = [Peer("llama.cpp", "f32", 32, "float32"), Peer("llama.cpp", "bf16", 16, "bfloat16"), *QUANTIZED_FILES]
# Our engine with the weights as they are stored in the same files.
STORED = [replace(peer, kind="ours", options=("--dtype", "bfloat16", "--no-speculate")) for peer in QUANTIZED_FILES]
LONG_STEPS = ("--no-speculate", "--target-itl-ms", "150")  # nearer to those of the peers than the default
ALL = (
    *(replace(peer, options=(*peer.options, "--no-speculate")) for peer in OURS),
    *(replace(peer, variant=f"{peer.variant}-drafts") for peer in OURS),
    *(replace(peer, variant=f"{peer.variant}-target", options=(*peer.options, *LONG_STEPS)) for peer in OURS),
    *STORED,
    *GGUF,
    *(replace(peer, kind="ik_llama.cpp") for peer in GGUF),
    Peer("openvino", "float32", 32, "float32"),
    Peer("openvino", "bfloat16", 16, "bfloat16"),
    Peer("openvino", "int8", 8, "int8"),
    Peer("openvino", "int4", 4.5, "int8"),  # groups of 64; 8 bits for the embeddings
    Peer("vllm", "float32", 32, "float32"),
    Peer("vllm", "bfloat16", 16, "bfloat16"),
    Peer("ctranslate2", "float32", 32, "float32"),
    Peer("ctranslate2", "int8", 8, "int8"),
    Peer("transformers", "float32", 32, "float32"),
    Peer("transformers", "bfloat16", 16, "bfloat16"),
    Peer("transformers", "float32-compiled", 32, "float32"),
    Peer("transformers", "bfloat16-compiled", 16, "bfloat16"),
)
PEERS = {peer.name: peer for peer in ALL}


def reference_of(peer: Peer) -> str:
    """The name of the peer of the same kind with unquantized weights, to which perplexity is compared."""
    return f"{peer.kind}-{'f32' if peer.kind in LLAMA_KINDS else 'float32'}"
