"""Plan a POST /forward: check its fields against the network that it will run on, and bound its size."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch

from model.checkpoints.load import DTYPES
from model.network.joint_passes import cost_of
from model.tracing.selection import Selection
from model.worked_examples import WorkedExample
from service.answers.budget import Budget, ResponseContents, pass_bytes
from service.answers.edits import answer_bytes, check_baseline
from service.answers.prompt_passes import MakePlan, PromptPlan
from service.answers.prompts import check_ids, check_selected_heads, find_positions, param_of
from service.answers.stage_answers import select_stages
from service.answers.subject import Subject
from service.http.encoding import Encoding
from service.http.errors import invalid
from service.http.forward_schemas import ForwardRequest

DEFAULT_TOP_K = 10
PUBLISHED_BYTES = 1 << 16  # the most bytes of an article's printed numbers and their comparisons


@dataclass(frozen=True, kw_only=True)
class ForwardPlan(PromptPlan):
    """A checked request, for one of its prompts."""

    targets: list[int | None]
    selection: Selection
    sizes: Mapping[str, int]
    top_k: int
    dtype: torch.dtype | None
    encoding: Encoding
    has_baseline: bool

    @property
    def cost(self) -> int:
        num_runs = 2 if self.has_baseline else 1
        return super().cost + num_runs * cost_of(0, len(self.selection.stages)) + (num_runs - 1) * len(self.ids)

    @property
    def rows(self) -> Sequence[int]:
        """The selected positions."""
        positions = self.selection.positions
        return range(len(self.ids)) if positions is None else positions

    @property
    def example(self) -> WorkedExample | None:
        """The worked example, if the prompt is the one of its article."""
        example = self.subject.example
        return example if example is not None and self.ids == example.prompt_ids else None

    def make_budget(self) -> Budget:
        """Bound the answer and the largest tensors of the pass, from shapes alone."""
        selection, subject, sizes = self.selection, self.subject, self.sizes
        num_runs = 2 if self.has_baseline else 1
        computed_dtype = torch.promote_types(subject.dtype, torch.float32)
        # For each position, its token with its loss; for each selected one, its predictions and the object around them.
        num_predictions = len(self.ids) + len(self.rows) * (self.top_k + 1)
        has_values, has_scores = selection.detail == "values", any("key" in stage.dims for stage in selection.stages)
        num_values = sum(math.prod(selection.shape(stage, sizes)) for stage in selection.stages)
        contents = ResponseContents(
            num_records=1 + len(selection.stages) * (2 if self.has_baseline else 1),  # stages, and their changes
            num_predictions=num_predictions,
            token_bytes=subject.longest_token_bytes,
            num_values=num_values if has_values else 0,
            dtype=self.dtype or computed_dtype,
            encoding=self.encoding,
            extra_bytes=answer_bytes(self.edit_plan) if subject.example is None else PUBLISHED_BYTES,
            num_choices=num_runs,
        )
        largest_tensors = pass_bytes(
            num_logits=sizes["position"] * sizes["d_vocab"],
            num_scores=sizes["head"] * sizes["query"] * sizes["key"] if has_scores else 0,
            itemsize=computed_dtype.itemsize,
        )
        if self.has_baseline:  # the stages of both passes are held, to be compared
            largest_tensors += num_runs * num_values * computed_dtype.itemsize
        return Budget(contents.num_bytes, largest_tensors, "stages, positions, heads, detail, top_k or the prompt")


def make_planner(
    body: ForwardRequest, subject: Subject, num_prompts: int, is_list: bool, as_safetensors: bool
) -> MakePlan[ForwardPlan]:
    """The function that plans the prompts of a request on the network of `subject`. Raises 400 for a wrong field."""
    if as_safetensors and body.encoding == "base64":
        raise invalid("encoding", "base64 is for JSON answers; leave the field out to get safetensors")
    if body.baseline:
        check_baseline(body.edits)
    all_targets = split_targets(body, num_prompts, is_list)
    find_stages = cache(partial(select_stages, subject.stages, body.stages, "stages"))  # many globs take long

    def plan(index: int, prompt: PromptPlan) -> ForwardPlan:
        num_tokens = len(prompt.ids)
        sizes = subject.sizes(num_tokens)
        targets = find_targets(all_targets[index], subject, prompt.ids, param_of("targets", index, is_list))
        positions = None if body.positions is None else find_positions(body.positions, num_tokens, "positions")
        check_selected_heads(body.heads, sizes["head"], find_stages())
        if body.top_k is not None and body.top_k > sizes["d_vocab"]:
            raise invalid("top_k", f"{body.top_k} is more than the vocabulary of {sizes['d_vocab']} tokens")
        detail = "values" if as_safetensors and "detail" not in body.model_fields_set else body.detail
        return ForwardPlan(
            **vars(prompt),
            targets=targets,
            selection=Selection(stages=find_stages(), detail=detail, positions=positions, heads=body.heads),
            sizes=sizes,
            top_k=min(DEFAULT_TOP_K, sizes["d_vocab"]) if body.top_k is None else body.top_k,
            dtype=None if body.dtype is None else DTYPES[body.dtype],
            encoding="safetensors" if as_safetensors else body.encoding,
            has_baseline=body.baseline,
        )

    return plan


def split_targets(body: ForwardRequest, num_prompts: int, is_list: bool) -> list[list[int | None] | None]:
    """The targets of each prompt, or None. Raises 400 unless a list of prompts has as many lists of targets."""
    if body.targets is None:
        return [None] * num_prompts
    has_lists = bool(body.targets) and isinstance(body.targets[0], list)
    if not is_list:
        if has_lists:
            raise invalid("targets", "has lists, but there is one prompt; send one list of token ids")
        return [body.targets]  # type: ignore[list-item]  # all items are of one type
    if not has_lists or len(body.targets) != num_prompts:
        raise invalid("targets", f"send a list of {num_prompts} lists, one for each prompt")
    return [*body.targets]


def find_targets(targets: list[int | None] | None, subject: Subject, ids: list[int], param: str) -> list[int | None]:
    """A target for each position: those of the request, or of the worked example, or else the prompt's next tokens."""
    if targets is None:
        if subject.example is not None and ids == subject.example.prompt_ids:
            return list(subject.example.targets)
        return [*ids[1:], None]
    if len(targets) != len(ids):
        raise invalid(param, f"has {len(targets)} entries for {len(ids)} tokens")
    check_ids(targets, subject.sizes(len(ids))["d_vocab"], param)
    return targets
