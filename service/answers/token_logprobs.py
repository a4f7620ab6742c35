"""The log-probabilities of generated tokens, as POST /generate and POST /v1/messages answer them."""

from collections.abc import Sequence

from forwardscope.local_results import TextOf
from forwardscope.results import generations
from forwardscope.results.records import Columns
from model.text.transcript import TokenOutput


def logprob_answer(token: TokenOutput, text_of: TextOf) -> generations.TokenLogprob:
    """Describe a token with its log-probability."""
    logprob = None if token.logprobs is None else token.logprobs.chosen
    return generations.TokenLogprob(token.token_id, text_of(token.token_id), logprob, top_logprobs(token, text_of))


def top_logprobs(token: TokenOutput, text_of: TextOf) -> Sequence[generations.Logprob]:
    """Describe the most likely tokens at the place of `token`."""
    top = [] if token.logprobs is None else token.logprobs.top
    ids = [token_id for token_id, _ in top]
    return Columns(generations.Logprob, ids, list(map(text_of, ids)), [logprob for _, logprob in top])
