"""Estimates of the time that edits and traces add to a step, made before it, so that the scheduler can limit this time.

The prices are seconds on two cores of a Zen 4 with a network of 135 million parameters. Other machines pay others, but
the proportions are similar.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from operator import add
from typing import NamedTuple
from weakref import WeakKeyDictionary

from model.config import ModelConfig
from model.engine.request import Request
from model.engine.sequence import ExtraCost
from model.tracing.edits.bound_edit import BoundEdit
from model.tracing.edits.positions import PositionSet
from model.tracing.selection import Selection
from model.tracing.stages import sizes_of

EDITED_STAGE, REPLAYED_EDIT = 20e-6, 0.5e-6  # one edit of one stage in a step, and in a step that is replayed
TRACED_STAGE, REPLAYED_TRACE, TRACED_KEY_STAGE = 20e-6, 4e-6, 120e-6
EDITED_KEY_STAGE = 250e-6  # a stage with keys, which fused attention does not compute
NOISY_STAGE = 250e-6
EDITED_NUMBER, NOISY_NUMBER, SUMMARIZED_NUMBER, COPIED_NUMBER = 0.8e-9, 120e-9, 0.1e-9, 3.6e-9
EDITED_KEY, TRACED_KEY = 18e-9, 7e-9  # a number of a stage with keys
PREDICTION = 0.5e-6  # a reported token, of many
MAX_KNOWN = 256  # costs of steps that are remembered for a request
LOGIT = 13e-12  # of each of the `d_model` products that a logit adds


class Price(NamedTuple):
    """Of some stages: for a step, for a replayed step, for each position, and for each position and key."""

    step: float
    replayed: float
    position: float
    key: float


_EDIT_PRICES: WeakKeyDictionary[BoundEdit, Price] = WeakKeyDictionary()  # many requests share their edits


def extra_cost_of(request: Request, config: ModelConfig, *, traces: bool) -> Callable[[int, int], ExtraCost] | None:
    """The cost of a request in a step, by the first of its positions and their number; None if there is never any.

    With `traces`, those of its traces and log-probabilities count, too.
    """
    prices: dict[PositionSet | None, Price] = {}  # None: all positions
    for positions, price in (*_prices_of_edits(request), *(_prices_of_traces(request, config) if traces else ())):
        before = prices.get(positions)
        prices[positions] = price if before is None else Price(*map(add, before, price))
    # The continuations of a request ask for the same costs.
    return lru_cache(MAX_KNOWN)(partial(_cost, prices)) if prices else None


def _prices_of_edits(request: Request) -> Iterator[tuple[PositionSet, Price]]:
    for edit in () if request.edits is None else request.edits.edits:
        if edit not in _EDIT_PRICES:
            _EDIT_PRICES[edit] = _price_of_edit(edit)
        yield edit.positions, _EDIT_PRICES[edit]
        if edit.when is not None and edit.when.threshold is not None:  # read as an edit is, in steps without replay
            of_position = EDITED_NUMBER * len(edit.when.threshold.vector)
            yield edit.when.positions, Price(EDITED_STAGE, EDITED_STAGE, of_position, 0.0)


def _prices_of_traces(request: Request, config: ModelConfig) -> Iterator[tuple[PositionSet | None, Price]]:
    trace, logits = request.trace, LOGIT * config.d_model * config.vocab_size
    if trace is not None:
        selection = trace.selection
        price = _price_of_trace(selection, config)
        if trace.needs_logits:
            price = price._replace(position=price.position + logits + PREDICTION * trace.top_k)
        yield None if selection.positions is None else PositionSet(tuple(selection.positions)), price
        if trace.logit_lens is not None:
            seconds = config.num_layers * (logits + PREDICTION * trace.logit_lens)
            yield None, Price(seconds, seconds, 0.0, 0.0)
    if request.params.prompt_logprobs is not None:
        scored = range(request.params.first_predicting, len(request.prompt_ids))
        yield PositionSet(scored), Price(0.0, 0.0, logits, 0.0)


def _cost(prices: Mapping[PositionSet | None, Price], start: int, num_new: int) -> ExtraCost:
    """Of a step that computes the positions `start .. start + num_new - 1`."""
    usual = most = 0.0
    for positions, price in prices.items():
        number = num_new if positions is None else positions.count(start, start + num_new)
        if number:
            of_positions = number * (price.position + price.key * (start + num_new))
            most += price.step + of_positions
            usual += (price.replayed if num_new == 1 else price.step) + of_positions
    return ExtraCost(usual, most)


def _price_of_edit(edit: BoundEdit) -> Price:
    step = replayed = position = key = 0.0
    for each in edit.stage_edits:
        seconds = EDITED_STAGE
        if "key" in each.stage.dims:
            seconds += EDITED_KEY_STAGE
            key += EDITED_KEY * each.width
        if each.noise is not None:
            seconds += NOISY_STAGE
            position += NOISY_NUMBER * each.noise.num_heads * (each.noise.size or 0)
            key += 0.0 if each.noise.size else NOISY_NUMBER * each.noise.num_heads
        step += seconds
        replayed += REPLAYED_EDIT if each.can_be_recorded and edit.when is None else seconds
        position += EDITED_NUMBER * each.width
    return Price(step, replayed, position, key)


def _price_of_trace(selection: Selection, config: ModelConfig) -> Price:
    sizes, stages = sizes_of(config, 1), selection.stages
    widths = [math.prod(stage.shape(sizes)) for stage in stages if "key" not in stage.dims]
    key_widths = [math.prod(stage.shape(sizes)) for stage in stages if "key" in stage.dims]
    return Price(
        step=TRACED_STAGE * len(stages) + TRACED_KEY_STAGE * len(key_widths),
        replayed=REPLAYED_TRACE * len(stages),
        position=(COPIED_NUMBER if selection.detail == "values" else SUMMARIZED_NUMBER) * sum(widths),
        key=TRACED_KEY * sum(key_widths),
    )
