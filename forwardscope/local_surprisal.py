"""The surprisal of a text by the model of a server: it tokenizes the text, and scores one window after the other."""

from collections.abc import Sequence

from forwardscope import requests
from forwardscope.arguments import to_integer, to_text
from forwardscope.local_harvest_of_server import Send, ServerTokenizer
from model.analysis.surprisal import TextSurprisal, score_text
from model.analysis.token_losses import context_windows
from model.errors import InvalidField


def score_on_server(send: Send, text: str, stride: int | None, bos: bool) -> TextSurprisal:
    """Score a text with requests, which `send` sends."""
    to_text(text, "text")
    stride = None if stride is None else to_integer(stride, "stride", "give a number of tokens")
    limits = send(requests.model()).limits
    length = min(limits.max_positions, limits.cache_tokens)

    def nats_of(ids: Sequence[int]) -> list[float]:
        nats: list[float] = []
        for start, scored, end in context_windows(len(ids), length, stride):
            found = send(requests.score(ids[start:scored], [ids[scored:end]]))
            nats += [-each.logprob for each in found.scores[0].tokens]
        return nats

    return score_text(ServerTokenizer(send), nats_of, text, first_ids(send) if bos else ())


def first_ids(send: Send) -> list[int]:
    """The begin-of-sequence token of a server's model, unless its tokenizer puts it before every text."""
    first = send(requests.tokenizer_info()).bos_token
    ids = [] if first is None else send(requests.to_tokens(first, add_special_tokens=False))
    if len(ids) != 1:
        raise InvalidField("bos", f"{send(requests.model()).name} names no begin-of-sequence token")
    return [] if send(requests.to_tokens(""))[:1] == ids else ids
