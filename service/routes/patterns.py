"""POST /patterns: attention maps of many heads, small enough to show all of them at once.

A map is reduced on the network's thread as soon as its block is computed, so that a pass never holds more than the
scores of one block and the reduced maps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from fastapi import APIRouter, Response
from torch import Tensor
from torch.nn import functional

from forwardscope.results.passes import PassTimings, PatternMap, PatternMeans, Patterns
from model.checkpoints.load import DTYPES
from model.network.joint_passes import cost_of
from model.tracing.pauses import pause
from model.tracing.selection import Selection
from model.tracing.stages import Stage
from model.tracing.tap import Chain, Recorder
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.answers.call import CallDep
from service.answers.edits import answer_bytes
from service.answers.passes import PassAnswer, PreparedAnswer
from service.answers.prompt_passes import PromptInputs, PromptPlan, answer_prompts
from service.answers.prompts import check_indices
from service.answers.subject import find_subject
from service.http.bodies import JsonRoute
from service.http.encoding import NAMES, Base64, cast
from service.http.errors import invalid
from service.http.pattern_schemas import PatternDtype, PatternsRequest

router = APIRouter(route_class=JsonRoute, tags=["inside"])
STEPS = 255  # of uint8 between 0 and 1
TOLERANCE = 0.5 / STEPS  # a pattern that rounds to a step is not out of range


@router.post("/patterns", summary="Attention maps of many heads", response_model=Patterns)
async def patterns(body: PatternsRequest, route: CallDep) -> Response:
    subject = find_subject(route.state, body.model, body.adapter)
    inputs = PromptInputs(route, subject, body, [body.prompt])
    return await answer_prompts(inputs, partial(plan_patterns, body), prepare_answer)


@dataclass(frozen=True, kw_only=True)
class PatternPlan(PromptPlan):
    """A checked request. `layers` and `heads` are the chosen ones, and `stages` the stage of each layer."""

    body: PatternsRequest
    layers: Sequence[int]
    heads: Sequence[int]
    stages: Sequence[Stage]
    block: int

    @property
    def cost(self) -> int:
        return super().cost + cost_of(0, len(self.stages))

    @property
    def size(self) -> int:
        """The number of rows and columns of each map."""
        return -(-len(self.ids) // self.block)

    @property
    def selection(self) -> Selection:
        return Selection(stages=self.stages, detail="values", heads=self.body.heads)

    def make_budget(self) -> Budget:
        """Bound the answer and the largest tensors of the pass, from shapes alone."""
        num_tokens, sizes = len(self.ids), self.subject.sizes(len(self.ids))
        num_maps = len(self.layers) * len(self.heads)
        dtype = torch.promote_types(self.subject.dtype, torch.float32)
        contents = ResponseContents(
            num_records=1 + num_maps,
            num_tokens=num_tokens,
            token_bytes=self.subject.longest_token_bytes,
            num_values=num_maps * self.size**2,
            dtype=dtype if self.body.dtype is None else dtype_of(self.body.dtype),
            encoding="base64",
            extra_bytes=answer_bytes(self.edit_plan),
        )
        num_logits = sizes["d_vocab"] * (1 if self.subject.checkpoint is not None else num_tokens)
        tensors = pass_bytes(num_logits=num_logits, num_scores=sizes["head"] * num_tokens**2, itemsize=dtype.itemsize)
        tensors += contents.num_values * dtype.itemsize  # the maps are held until the pass has ended
        return Budget(contents.num_bytes, tensors, "layers, heads, max_size, dtype or the prompt")


def plan_patterns(body: PatternsRequest, index: int, prompt: PromptPlan) -> PatternPlan:
    """Check a request against the network that it will run on."""
    num_tokens, subject = len(prompt.ids), prompt.subject
    sizes, by_name = subject.sizes(num_tokens), {stage.name: stage for stage in subject.stages}
    num_layers = sum(name.endswith(".attn.pattern") for name in by_name)
    check_indices(body.layers, num_layers, "layers", "layers")
    check_indices(body.heads, sizes["head"], "heads", "heads")
    if body.dtype == "uint8" and body.stage != "pattern":
        reason = f"uint8 has numbers from 0 to 1, but {body.stage} has others; use float16 or float32"
        raise invalid("dtype", reason)
    layers = range(num_layers) if body.layers is None else body.layers
    return PatternPlan(
        **vars(prompt),
        body=body,
        layers=layers,
        heads=range(sizes["head"]) if body.heads is None else body.heads,
        stages=[by_name[f"blocks.{layer}.attn.{body.stage}"] for layer in layers],
        block=1 if body.max_size is None else -(-num_tokens // body.max_size),
    )


class LayerMaps(NamedTuple):
    """The reduced maps (H, S, S) of a layer, and the means of each head."""

    values: Tensor
    means: list[PatternMeans] | None


def prepare_answer(plan: PatternPlan) -> PreparedAnswer:
    """The pass. It reduces each map at once, and computes the logits of one position only: no map depends on them."""
    sizes = plan.subject.sizes(len(plan.ids))

    def keep(stage: Stage, tensor: Tensor) -> LayerMaps:
        maps = plan.selection.take(stage, tensor, sizes)[0]
        means = mean_weights(maps, plan.ids) if plan.body.stage == "pattern" else None
        return LayerMaps(reduce_blocks(maps, plan.block), means)

    recorder = Recorder(plan.stages, keep)
    rows = [len(plan.ids) - 1] if plan.subject.example is None else None  # a worked example is small
    edits = plan.tap(rows)
    prompt_pass = plan.prompt_pass(recorder if edits is None else Chain(edits, recorder), rows)
    return PreparedAnswer([prompt_pass], lambda _, timings: make_answer(plan, recorder.kept, timings))


@torch.inference_mode()
def make_answer(plan: PatternPlan, computed: Mapping[str, LayerMaps], timings: PassTimings) -> PassAnswer:
    """Describe the maps of each stage."""
    dtype: Any = plan.body.dtype or NAMES[next(iter(computed.values())).values.dtype]
    maps = tuple(
        PatternMap(layer, head, None if found.means is None else found.means[index], values)
        for layer, stage in zip(plan.layers, plan.stages, strict=True)
        for found in [computed[stage.name]]
        for index, head in enumerate(plan.heads)
        for values in [encode_map(plan, stage, found.values[index])]
    )
    answer = Patterns(
        **plan.head(timings),
        stage=plan.body.stage,
        size=plan.size,
        block=plan.block,
        dtype=dtype,
        scale=1 / STEPS if dtype == "uint8" else 1.0,
        maps=maps,
    )
    return PassAnswer(answer, {})


def dtype_of(name: PatternDtype) -> torch.dtype:
    return torch.uint8 if name == "uint8" else DTYPES[name]


def reduce_blocks(maps: Tensor, block: int) -> Tensor:
    """The largest number of each block of `block` rows and columns: (H, T, T) -> (H, S, S), S = ceil(T / block).

    The last row and column of blocks may be smaller. Masked scores (-inf) are the largest only where all are masked.
    """
    if block == 1:
        return maps
    return functional.max_pool2d(maps, block, block, ceil_mode=True)


def mean_weights(patterns: Tensor, ids: Sequence[int]) -> list[PatternMeans] | None:
    """Average the weights (H, T, T) of each head over all queries but the first. None for a single token.

    "induction" is the mean over the queries whose token occurred before, and None if no token is repeated.
    """
    if patterns.shape[1] < 2:
        return None
    later = patterns[:, 1:]  # (H, T - 1, T)
    columns = {
        "previous": later.diagonal(dim1=1, dim2=2),
        "first": later[:, :, 0],
        "itself": later.diagonal(offset=1, dim1=1, dim2=2),
    }
    means: dict[str, list[float | None]] = {n: column.double().mean(-1).tolist() for n, column in columns.items()}
    after = after_copies(ids, patterns.device)
    num_queries = int(after.any(1).sum())
    sums = patterns[:, after].double().sum(-1)  # (H,)
    means["induction"] = (sums / num_queries).tolist() if num_queries > 0 else [None] * len(patterns)
    return [PatternMeans(**dict(zip(means, row, strict=True))) for row in zip(*means.values(), strict=True)]


def after_copies(ids: Sequence[int], device: torch.device) -> Tensor:
    """Mark, for each query, the earlier keys that directly follow a copy of the query's token: (query, key) bool.

    An induction head attends to these keys (Olsson et al., 2022, https://arxiv.org/abs/2209.11895).
    """
    tokens = torch.tensor(ids, device=device)
    after = torch.zeros(len(ids), len(ids), dtype=torch.bool, device=device)
    after[:, 1:] = tokens[:, None] == tokens[None, :-1]
    return after.tril(-1)


def encode_map(plan: PatternPlan, stage: Stage, values: Tensor) -> Any:
    """The numbers of a map in the dtype of the request. Raises 400 for numbers that the dtype cannot hold."""
    name = plan.body.dtype
    pause()
    if name is None:
        return Base64(values)
    if name != "uint8":
        return Base64(cast(values, DTYPES[name], stage.name))
    if not bool(((values >= -TOLERANCE) & (values <= 1 + TOLERANCE)).all()):  # also false for NaN
        reason = f"{stage.name} has numbers that are not from 0 to 1, which uint8 cannot hold; use float16 or float32"
        raise invalid("dtype", reason, "overflow")
    return Base64((values.float() * STEPS).round().clamp(0, STEPS).to(torch.uint8))
