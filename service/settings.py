"""The service's settings: environment variables `FORWARDSCOPE_*`, or the command line, which wins."""

from ipaddress import ip_address
from typing import Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from model.quantization import Quantization

MIB = 1 << 20
PREFIX = "FORWARDSCOPE_"


class Settings(BaseSettings):
    """See-through inference server for GPT-2 and Llama family checkpoints."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX,
        env_ignore_empty=True,
        cli_prog_name="forwardscope",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        extra="forbid",
    )

    model: str = Field(
        "bundled",
        description="checkpoint directory, hub id, 'bundled', or 'none' for the worked examples alone",
    )
    model_name: str | None = Field(None, description="name in answers; default: the directory's")
    device: str = Field("auto", description="auto (cuda where there is one, else cpu), cpu, cuda, cuda:1, ...")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: as the weights are stored"
    )
    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 for any free one")
    threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads of the network; default: torch's choice, within a container's limit of CPUs",
    )
    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="auto: our own on a CPU with AVX2 or AVX-512 and a C++ compiler; torch: PyTorch's",
    )
    quantize: Quantization = Field(
        "none",
        description="weights in int8 (a scale an output) or int4 (a scale for 32 inputs): faster, a little less exact",
    )
    speculate: bool = Field(
        True,
        description="greedy requests guess what follows from their own text, where that saves time; it changes no bit",
    )
    max_body_bytes: int = Field(4 * MIB, ge=1, description="largest request body")
    max_response_bytes: int = Field(256 * MIB, ge=1, description="largest answer; known before it is computed")
    max_pass_bytes: int = Field(
        8192 * MIB, ge=1, description="largest tensors of a traced pass or step: scores, logits"
    )
    max_pass_tokens: int = Field(2048, ge=1, description="longest prompt of /forward and /logits: streams wait for it")
    cache_bytes: int | None = Field(
        None,
        ge=1,
        description="memory for keys and values, taken at the start; default: what `--max-num-seqs` of the longest "
        "sequences take, at most 1 GiB; on CUDA 80 % of what is free",
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences in a step; others wait")
    max_step_tokens: int | None = Field(
        None, ge=1, description="tokens of a step, prompts are divided; default: 512, on CUDA 2048, and one a sequence"
    )
    max_step_stretch: float = Field(
        2.0, gt=1, description="how many times as long prompts may make a step while more stream than enter"
    )
    max_waiting_requests: int = Field(1024, ge=0, description="requests that wait; beyond: 429")
    max_waiting_tokens: int = Field(1 << 20, ge=1, description="tokens of waiting prompts; beyond: 429")
    request_timeout_seconds: float = Field(600.0, gt=0, description="a generation that takes longer is cancelled")
    shutdown_grace_seconds: float = Field(30.0, ge=0, description="how long requests may finish on SIGTERM")
    max_buffered_bytes: int = Field(
        1024 * MIB, ge=1, description="request bodies and unread responses of all clients together; beyond: 429"
    )
    max_connections: int = Field(
        4096, ge=1, description="open connections; beyond: 429, health checks excepted. At most what the system allows"
    )
    header_timeout_seconds: float = Field(10.0, gt=0, description="for the headers of a request to arrive")
    body_timeout_seconds: float = Field(60.0, gt=0, description="for the body of a request to arrive")
    write_timeout_seconds: float = Field(30.0, gt=0, description="how long a client may read nothing of its response")
    idle_timeout_seconds: float = Field(75.0, gt=0, description="how long a connection may wait for its next request")
    allowed_hosts: str | None = Field(
        None,
        description="names in the Host header, divided by commas, or *; default: localhost where the service listens "
        "on a loopback address, else *. Addresses are always allowed",
    )
    api_key: SecretStr | None = Field(
        None, description="asks for 'Authorization: Bearer <key>' on all but health, metrics and docs"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="what is logged")

    @model_validator(mode="after")
    def _check_buffers(self) -> Self:
        largest = self.max_response_bytes + self.max_body_bytes
        if self.max_buffered_bytes < largest:
            raise ValueError(
                f"max_buffered_bytes: {self.max_buffered_bytes} hold no largest body and largest response: {largest}"
            )
        return self

    @property
    def host_names(self) -> frozenset[str]:
        """The names in the Host header that are answered; "*" for all."""
        if self.allowed_hosts is not None:
            return frozenset(name.strip().lower() for name in self.allowed_hosts.split(","))
        is_loopback = self.host == "localhost" or (is_address(self.host) and ip_address(self.host).is_loopback)
        return frozenset({"localhost", self.host.lower()} if is_loopback else {"*"})


def is_address(name: str) -> bool:
    """Whether a host is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
