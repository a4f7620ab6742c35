"""The JSON bodies of GET /health, GET /ready and GET /status."""

from pydantic import Field

from service.http.field_types import Answer


class Status(Answer):
    status: str


class CacheStatus(Answer):
    """The cache of keys and values. Prompt tokens that were found in it since the start were not computed again."""

    used_tokens: int = Field(description="places that sequences hold; blocks are counted as a whole")
    total_tokens: int
    prompt_tokens_looked_up: int
    prompt_tokens_found: int


class TokenRatesAnswer(Answer):
    """Tokens per second over the last `window_seconds`. A prompt counts when its first token is generated."""

    window_seconds: float
    prompt: float
    generated: float


class ServiceStatus(Answer):
    """What the service does at this moment."""

    version: str
    model: str | None = Field(description="null while the model loads, or if no checkpoint is served")
    ready: bool
    uptime_seconds: float
    requests_running: int = Field(description="requests that have started, including passes and work on texts")
    requests_waiting: int
    sequences_running: int = Field(description="continuations in the current batch")
    sequences_waiting: int
    max_sequences: int = Field(description="the most sequences in one step")
    cache: CacheStatus | None = Field(description="null while the model loads, or if no checkpoint is served")
    tokens_per_second: TokenRatesAnswer
