"""The settings of the service: environment variables `FORWARDSCOPE_*`, or options, which take precedence."""

import os
import re
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from model.choices import Dtype, Kernels, KVCacheDtype, Quantization, parse_increase
from model.errors import InvalidField
from service import PREFIX
from service.log_format import LogFormat

MIB = 1 << 20
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?", re.I)
MAX_THREADS_PER_CPU = 4
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
ENDPOINT = re.compile(r"https?://[^/\s?#]+(/[^\s?#]*)?")
# The names under which containers reach their host. No page of another site can have them: `.internal` is reserved.
CONTAINER_HOSTS = frozenset({"host.docker.internal", "gateway.docker.internal", "host.containers.internal"})
CONTAINER_FILES = (Path("/.dockerenv"), Path("/run/.containerenv"))
ROOT_PATH = re.compile(r"(/[^/\s?#]+)+")
ADAPTER = re.compile(r"[^\s=]{1,200}=.+")
OF_CHECKPOINTS = (  # settings that have no effect without a checkpoint
    "revision",
    "model_name",
    "adapter",
    "lens",
    "chat_template",
    "draft",
    "prefix_cache_directory",
    "vectors",
)
HOST_NAME = re.compile(r"[^\s,:/*\[\]]+")


def read_size(value: Any) -> Any:
    """Read a number of bytes, such as 1048576, 512M or 4G: K, M, G and T are powers of 1024, but MB is 10**6 bytes."""
    if not isinstance(value, str):
        return value
    found = SIZE.fullmatch(value.strip())
    if found is None or not float(found[1]):
        raise ValueError(
            f"{value!r} is not a size; give a number of bytes, or one with K, M, G or T, such as 512M or 4G"
        )
    number, unit, ending = found.groups()
    base = 1000 if ending is not None and len(ending) == 1 else 1024
    factor = 1 if unit is None else base ** ("KMGT".index(unit.upper()) + 1)
    return int(number) * factor if number.isdecimal() else round(float(number) * factor)


ByteSize = Annotated[int, BeforeValidator(read_size), Field(ge=1)]


def _split(value: Any) -> Any:
    """Split texts at commas: a list from the command line, or the text of a variable."""
    texts = [value] if isinstance(value, str) else value
    return [part.strip() for text in texts for part in text.split(",") if part.strip()]


def _check_origins(origins: list[str]) -> list[str]:
    for origin in origins:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin!r} is not an origin; write only scheme, host and port, in lower case, as in "
                "https://example.org or http://localhost:3000, or * for all origins"
            )
    return origins


def _check_adapters(adapters: list[str]) -> list[str]:
    names = [adapter.partition("=")[0] for adapter in adapters]
    for adapter, name in zip(adapters, names, strict=True):
        if not ADAPTER.fullmatch(adapter):
            raise ValueError(f"{adapter!r} is not NAME=PATH, with a name of at most 200 characters without spaces")
        if names.count(name) > 1:
            raise ValueError(f"the name {name!r} is given twice; each adapter needs a name of its own")
    return adapters


def _check_endpoint(endpoint: str | None) -> str | None:
    if endpoint is not None and not ENDPOINT.fullmatch(endpoint):
        raise ValueError(
            f"{endpoint!r} is not the URL of a collector; write http:// or https://, a host and a port, as in "
            "http://localhost:4318"
        )
    return endpoint


def _check_root_path(path: str | None) -> str | None:
    if path is not None and not ROOT_PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not a path such as /fs or /models/fs; begin it with a slash, and end it without")
    return path


def _check_hosts(names: str | None) -> str | None:
    for name in _split(names or ""):
        if name != "*" and not is_address(name) and not HOST_NAME.fullmatch(name):
            raise ValueError(
                f"{name!r} is not a name of a host; write it without scheme, port, path and brackets, as in "
                "api.example.org, or * alone for all names"
            )
    return names


def _check_api_key(key: SecretStr | None) -> SecretStr | None:
    """Raise `ValueError`, without the key, for one that no request could send."""
    text = None if key is None else key.get_secret_value()
    if text is not None and (not text or text != text.strip() or not text.isprintable()):
        raise ValueError(
            "is empty, begins or ends with a space or a line end, or has a control character, so no HTTP header can "
            "carry it; remove these characters (a file of a secret often ends with a line end), or give the file as "
            "--api-key-file"
        )
    return key


def read_api_keys(path: Path) -> list[str]:
    """The keys in a file, one a line, without empty lines and lines that begin with #.

    Raises `ValueError`, without a key, if the file cannot be read, has none, or one that no request could send.
    """
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ValueError(f"{path} cannot be read: {reason}; give a text file with one API key a line") from None
    if bad := [number for number, line in enumerate(lines, start=1) if not line.isprintable()]:
        raise ValueError(f"{path}, line {bad[0]}: has a control character, so no HTTP header can carry it; remove it")
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"{path} has no API key; write one key a line")
    return keys


def _check_api_key_file(path: Path | None) -> Path | None:
    if path is not None:
        read_api_keys(path)
    return path


def _increase(value: str | float | None) -> float | None:
    return None if value is None else parse_increase(value)


class Settings(BaseSettings):
    """A see-through inference server for decoder-only transformers."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        extra="forbid",
    )

    model: str = Field(
        "bundled",
        description="checkpoint directory, *.safetensors or *.gguf file, hub id (`org/name:Q4_K_M` for a GGUF model), "
        "'bundled', or 'none' to serve only the worked examples",
    )
    revision: str | None = Field(None, description="branch, tag or commit of a hub id; default: its main branch")
    model_name: str | None = Field(
        None, description="name of the model in answers; default: the name of the directory, or the hub id"
    )
    adapter: Annotated[list[str], NoDecode, BeforeValidator(_split), AfterValidator(_check_adapters)] = Field(
        [],
        description="LoRA adapter as NAME=DIRECTORY, as PEFT has saved it; requests choose it by name; repeatable, or "
        "separated by commas",
    )
    lens: Path | None = Field(
        None,
        description="safetensors file of a tuned lens (N.weight and N.bias for layer N), for the logit lens of "
        "/attribute",
    )
    chat_template: Path | None = Field(
        None, description="file with a Jinja template for chats, instead of those of the checkpoint"
    )
    device: str = Field("auto", description="auto (cuda if available, else cpu), cpu, cuda, cuda:1, ...")
    dtype: Literal["auto", Dtype] = Field(
        "auto", description="dtype of the network; auto: the dtype in which the weights are stored"
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=1024,
        description="number of processes that compute the network together; torchrun or Ray starts them",
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all addresses")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for any free port")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads for the network, at most 4 for each CPU of the machine; default: torch's choice, at "
        "most the CPUs that the container may use",
    )
    kernels: Kernels = Field(
        "auto",
        description="auto: our own kernels where there are any for the dtype and the device (CPUs with AVX2, AVX-512 "
        "or NEON; GPUs of NVIDIA), else PyTorch's; invariant: also on a GPU no bit of a token depends on other "
        "tokens, which takes longer; torch: PyTorch only",
    )
    quantize: Literal[Quantization, "auto"] = Field(
        "stored",
        description="weights of the linear layers. stored: in the formats of a GGUF file, else in dtype; none: all "
        "in dtype; int8, int5, int4 (groups of 32 inputs): faster, but less accurate; int5 and int4 are calibrated at "
        "the first start; auto: the fewest bits for each layer with which the perplexity grows by at most "
        "--quantize-loss",
    )
    quantize_loss: Annotated[float | None, BeforeValidator(_increase)] = Field(
        None,
        description="with --quantize auto: the largest increase of the perplexity, such as 1% or 0.01; default: 0.5%",
    )
    speculate: bool = Field(
        True,
        description="prompt-lookup decoding, used only when measured step times show a gain; answers stay the same to "
        "the last bit",
    )
    draft: str = Field(
        "none",
        min_length=1,
        description="network that drafts tokens, which the network checks, so that answers stay the same to the last "
        "bit. int8, int5 or int4: a copy of the network in this format; or a smaller checkpoint with the same "
        "tokenizer, named like --model",
    )
    max_body_bytes: ByteSize = Field(4 * MIB, description="maximum size of a request body")
    max_response_bytes: ByteSize = Field(256 * MIB, description="maximum size of an answer")
    max_pass_bytes: ByteSize = Field(
        8192 * MIB,
        description="maximum memory for the logits and traced attention scores of one pass or step, and for the "
        "stages of a comparison",
    )
    max_pass_tokens: int = Field(2048, ge=1, description="longest prompt of a pass, such as of /forward and /logits")
    gradients: Literal["off", "float32", "float64"] = Field(
        "float32",
        description="dtype of the gradients of /attribute; the first such request copies the network in this dtype; "
        "off: no gradients",
    )
    max_gradient_tokens: int = Field(
        1 << 16,
        ge=1,
        description="maximum number of prompt tokens of all passes of a request for gradients (tokens times steps)",
    )
    max_sweep_cells: int = Field(
        4096, ge=1, description="maximum number of cells of a patching sweep; each is a generation"
    )
    max_lens_logits: int = Field(
        1 << 30,
        ge=1,
        description="maximum number of logits of a request for the logit lens (layers times positions times "
        "vocabulary)",
    )
    cache_bytes: ByteSize | None = Field(
        None,
        description="memory for keys and values, allocated at the start; default: enough for `--max-num-seqs` "
        "sequences of the maximum length, at most 1 GiB; on CUDA 80 % of the free memory",
    )
    kv_cache_dtype: KVCacheDtype = Field(
        "auto",
        description="how generation stores keys and values. auto: in the dtype of the network; int8: in 8 bits, so "
        "that about twice as many tokens fit",
    )
    prefix_cache_directory: Path | None = Field(
        None,
        description="directory that stores computed keys and values, so that prompts that begin like earlier ones "
        "start soon also after a restart; processes may share it; it must be as private as the prompts",
    )
    prefix_cache_bytes: ByteSize = Field(
        8192 * MIB, description="limit for all files in this directory; the least recently used are deleted"
    )
    max_num_seqs: int = Field(64, ge=1, description="maximum number of sequences in one step; others wait")
    max_step_tokens: int | None = Field(
        None,
        ge=1,
        description="maximum number of tokens in one step; default: 512 (on CUDA 2048) plus `--max-num-seqs`",
    )
    max_step_stretch: float = Field(
        2.0,
        gt=1,
        description="limit for the time of a step with prompts, as a multiple of its time without them, which counts "
        "as 30 ms if it is shorter",
    )
    target_itl_ms: float | None = Field(
        None,
        gt=0,
        description="time between two tokens of a stream, in milliseconds, beside prompts: a step takes as many prompt "
        "tokens as fit into it, at least 16; replaces --max-step-stretch",
    )
    vectors: Path | None = Field(
        None,
        description="directory with vectors for edits: safetensors, and control vectors of llama.cpp (*.gguf); "
        "requests name them by file name without the ending",
    )
    max_vector_bytes: ByteSize = Field(
        8 * MIB, description="maximum size of a vector that a client stores with PUT /vectors/{name}"
    )
    max_vectors: int = Field(64, ge=0, description="maximum number of vectors that clients store")
    max_stored_responses: int = Field(
        0,
        ge=0,
        description="number of responses of /v1/responses that are kept in memory for `previous_response_id`; 0: none",
    )
    max_stored_response_bytes: ByteSize = Field(
        64 * MIB, description="memory for stored responses and their conversations; the oldest are dropped beyond it"
    )
    max_compare_tokens: int = Field(256, ge=1, description="longest prompt of /compare")
    compare_directory: Path | None = Field(
        None, description="directory of stage files and checkpoints that requests to /compare may name"
    )
    max_waiting_requests: int = Field(
        1024, ge=0, description="maximum number of waiting requests; further requests get 429"
    )
    max_waiting_tokens: int = Field(
        1 << 20, ge=1, description="maximum number of prompt tokens of waiting requests; further requests get 429"
    )
    request_timeout_seconds: float = Field(
        600.0,
        gt=0,
        description="time limit of a request with its time in the queue; a longer generation is cancelled",
    )
    shutdown_grace_seconds: float = Field(30.0, ge=0, description="time that requests have to finish after SIGTERM")
    max_buffered_bytes: ByteSize = Field(
        1024 * MIB,
        description="limit for request bodies and unread responses of all clients together; further requests get 429",
    )
    max_connections: int = Field(
        4096,
        ge=1,
        description="maximum number of open connections, as far as the system allows; above it, only /health, /ready "
        "and /metrics are answered, and other requests get 429",
    )
    header_timeout_seconds: float = Field(
        10.0,
        gt=0,
        description="time limit for the headers of a request; on a reused connection, this and the idle timeout "
        "together are the limit, from the end of the last response",
    )
    body_timeout_seconds: float = Field(60.0, gt=0, description="time limit for the body of a request")
    write_timeout_seconds: float = Field(
        30.0, gt=0, description="how long a client may read nothing of its response before it is disconnected"
    )
    idle_timeout_seconds: float = Field(75.0, gt=0, description="how long a connection may wait for its next request")
    allowed_hosts: Annotated[str | None, AfterValidator(_check_hosts)] = Field(
        None,
        description="names that are allowed in the Host header besides localhost and IP addresses, separated by "
        "commas, or * for all; default: no others if the service listens on a loopback address (in a container "
        "host.docker.internal), else *",
    )
    root_path: Annotated[str | None, AfterValidator(_check_root_path)] = Field(
        None,
        description="path below which a proxy serves the server, such as /fs, if the proxy leaves it in its requests",
    )
    cors_origin: Annotated[list[str], NoDecode, BeforeValidator(_split), AfterValidator(_check_origins)] = Field(
        [],
        description="other origin whose web pages may use the service from a browser, such as https://example.org, or "
        "* for all; repeatable, or separated by commas",
    )
    api_key: Annotated[SecretStr | None, AfterValidator(_check_api_key)] = Field(
        None,
        description="key that requests must send as 'Authorization: Bearer <key>' or 'x-api-key: <key>', except for "
        "health, metrics, docs and the page",
    )
    api_key_file: Annotated[Path | None, AfterValidator(_check_api_key_file)] = Field(
        None,
        description="text file with keys that requests may send, one a line; a line that begins with # does not count. "
        "The file is read again when it changes",
    )
    strict_fields: bool = Field(
        False,
        description="refuse unknown fields on /v1/* and /infill with 422, as on all other routes; by default they are "
        "left out, and named in the header x-ignored-fields and the log",
    )
    sse_keepalive_seconds: float = Field(
        10.0,
        ge=0,
        description="a stream that has sent nothing for this time sends an SSE comment, so that proxies keep the "
        "connection; 0 for none",
    )
    page: bool = Field(True, description="serve the web page at `/`")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="lowest level of messages that are logged"
    )
    log_format: LogFormat = Field("text", description="form of log lines. json: one JSON object a line")
    otlp_endpoint: Annotated[str | None, AfterValidator(_check_endpoint)] = Field(
        None,
        description="URL of an OpenTelemetry collector that gets a trace of each request, with OTLP over HTTP, such as "
        "http://localhost:4318; a URL without a path gets /v1/traces. Needs the extra 'otel'",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Raise `InvalidField` for a setting that contradicts another one or the machine."""
        self._check_threads()
        largest = self.max_response_bytes + self.max_body_bytes
        if self.max_buffered_bytes < largest:
            raise InvalidField(
                "max_buffered_bytes",
                f"{self.max_buffered_bytes} is less than --max-response-bytes and --max-body-bytes together, which are "
                f"{largest}",
            )
        if self.quantize_loss is not None and self.quantize != "auto":
            raise InvalidField("quantize_loss", f"is only for --quantize auto, but it is {self.quantize}; leave it out")
        if self.draft != "none" and not self.speculate:
            raise InvalidField("draft", f"{self.draft} drafts tokens, which --speculate false forbids; leave out one")
        if self.model == "none":
            for field in OF_CHECKPOINTS:
                if getattr(self, field) not in (None, [], "none"):
                    raise InvalidField(field, "--model none serves no checkpoint; leave it out")
        if self.prefix_cache_directory is None and "prefix_cache_bytes" in self.model_fields_set:
            raise InvalidField("prefix_cache_bytes", "is only for --prefix-cache-directory; give both or leave it out")
        if self.target_itl_ms is not None and "max_step_stretch" in self.model_fields_set:
            raise InvalidField("max_step_stretch", "is replaced by --target-itl-ms; leave one of the two out")
        if self.tensor_parallel > 1:
            self._check_tensor_parallel()
        return self

    def _check_threads(self) -> None:
        num_cpus = os.cpu_count() or 1
        limit = MAX_THREADS_PER_CPU * num_cpus
        if self.threads is not None and self.threads > limit:
            raise InvalidField(
                "threads",
                f"{self.threads} is more than {limit}, which is {MAX_THREADS_PER_CPU} for each of the {num_cpus} CPUs "
                "of this machine; threads without a CPU of their own make every step slower, so leave the setting out, "
                "or take the number of CPUs",
            )

    def _check_tensor_parallel(self) -> None:
        refused = {
            "adapter": bool(self.adapter),
            "quantize": self.quantize not in ("stored", "none"),
            "draft": self.draft != "none",
            "gradients": "gradients" in self.model_fields_set and self.gradients != "off",
            "compare_directory": self.compare_directory is not None,
            "prefix_cache_directory": self.prefix_cache_directory is not None,
            "model": self.model == "none",
        }
        for field, is_given in refused.items():
            if is_given:
                raise InvalidField(
                    field,
                    f"{getattr(self, field)} is not implemented with --tensor-parallel {self.tensor_parallel}; leave "
                    "out one of the two options",
                )

    @property
    def needs_api_key(self) -> bool:
        """Whether requests need an API key."""
        return self.api_key is not None or self.api_key_file is not None

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters: name -> path."""
        return dict(adapter.split("=", 1) for adapter in self.adapter)

    @property
    def host_names(self) -> frozenset[str]:
        """The names that are allowed in the Host header, in lower case; "*" allows all."""
        if self.allowed_hosts is not None:
            return frozenset({"localhost", *_split(self.allowed_hosts.lower())})
        if not self.is_loopback:
            return frozenset({"*"})
        return frozenset({"localhost", self.host.lower()} | (CONTAINER_HOSTS if is_in_container() else set()))

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the service."""
        return self.host == "localhost" or (is_address(self.host) and ip_address(self.host).is_loopback)


def is_in_container() -> bool:
    """Whether this process runs in a container of Docker, Podman or Kubernetes."""
    return any(path.exists() for path in CONTAINER_FILES) or "KUBERNETES_SERVICE_HOST" in os.environ


def is_address(name: str) -> bool:
    """Whether a host name is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
