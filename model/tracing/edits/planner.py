"""Check the edits of a request, and plan them for the stages of a network and the length of a prompt."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from model.config import ModelConfig
from model.errors import InvalidField, shortened
from model.ops.row_edits import EditRule, RowEdit
from model.tracing.edits.bound_edit import BoundEdit, Noise, StageEdit
from model.tracing.edits.conditions import Condition, StageThreshold
from model.tracing.edits.declared import Edit, EditCondition, check_fields
from model.tracing.edits.operands import Numbers, Part, check_number, limits, read_basis, read_row, read_vector
from model.tracing.edits.plan import EditMatch, EditPlan, FromSource, PlannedEdit, SourcePass
from model.tracing.edits.positions import Positions, PositionSet, PositionWord, resolve_positions
from model.tracing.pauses import pause
from model.tracing.stages import AFTER_LOGITS, Stage, UnknownStage, Widths, select, select_rows, sizes_of

MAX_EDITS = 64
MAX_CHANGED_STAGES = 2048  # of all edits together: each costs time in every step
MAX_NOISY_STAGES = 64  # in a request; each takes half a millisecond in every step
MAX_NOISE = 1 << 22  # numbers of noise for one prompt, which take about half a second
MAX_SEED = (1 << 63) - 1


def plan_edits(
    edits: Sequence[Edit], config: Widths, stages: Sequence[Stage], prompt_ids: Sequence[int], max_length: int
) -> EditPlan:
    """Check the edits of a request, whose sequence begins with `prompt_ids` and has at most `max_length` tokens.

    Raises `InvalidField` for the first field that is invalid, such as `edits.2.positions`.
    """
    if len(edits) > MAX_EDITS:
        raise InvalidField("edits", f"has {len(edits)} entries; at most {MAX_EDITS} are allowed")
    planner = _Planner(config, stages, prompt_ids, max_length)
    planned = []
    for index, edit in enumerate(edits):
        planned.append(planner.plan(edit, f"edits.{index}"))
        pause()
    num_changed = sum(len(each.edit.stage_edits) for each in planned)
    if num_changed > MAX_CHANGED_STAGES:
        raise InvalidField("edits", f"change {num_changed} stages in all; at most {MAX_CHANGED_STAGES} are allowed")
    sources = planner.sources()
    return EditPlan(
        sources=sources,
        matches=[each.match for each in planned],
        num_source_values=sum(source.num_values(config) for source in sources),
        _edits=planned,
        _num_prompt=len(prompt_ids),
        _max_length=max_length,
    )


class _Planner:
    """Plans the edits of one request, and collects the source passes that they need."""

    def __init__(self, config: Widths, stages: Sequence[Stage], prompt_ids: Sequence[int], max_length: int) -> None:
        self._config = config
        self._stages = stages
        self._prompt_ids = tuple(prompt_ids)
        self._max_length = max_length
        self._sizes = sizes_of(config, len(prompt_ids))
        self._sizes_of_one = sizes_of(config, 1)
        self._num_noisy = self._num_noise = 0  # stages with noise, and random numbers for the prompt
        self._selected: dict[str, list[Stage]] = {}  # by glob: often several edits have the same
        # Token ids of a source -> the stages and positions that are kept of its pass.
        self._sources: dict[tuple[int, ...], tuple[dict[str, Stage], set[int]]] = {}

    def plan(self, edit: Edit, field: str) -> PlannedEdit:
        check_fields(edit, field)
        positions = self._resolve(edit.positions, f"{field}.positions")
        keys = None if edit.keys is None or edit.keys == "all" else self._resolve(edit.keys, f"{field}.keys")
        stages = self._matching_stages(edit, field)
        has_keys = any("key" in stage.dims for stage in stages)
        if has_keys and (edit.op in ("mean", "project") or (edit.op == "cap" and edit.vector is not None)):
            reason = f"{edit.op} of a vector" if edit.op == "cap" else edit.op
            raise InvalidField(f"{field}.op", f"{reason} does not fit stages with keys (scores, attn_scores, pattern)")
        if edit.neurons is not None and (
            edit.op in ("project", "noise")
            or edit.subspace is not None
            or (edit.op == "cap" and edit.vector is not None)
        ):
            raise InvalidField(f"{field}.neurons", f"do not fit {edit.op} of vectors or with noise; leave them out")
        if edit.keys is not None and not all("key" in stage.dims for stage in stages):
            other = next(stage.name for stage in stages if "key" not in stage.dims)
            raise InvalidField(f"{field}.keys", f"{other} has no keys; only scores, attn_scores and pattern have")
        if keys is not None:
            self._check_visible(stages, positions, keys, field)
        edits = self._stage_edits(edit, stages, positions, keys, field)
        self._check_amount(edits, positions, field)
        source = self._source(edit, stages, positions, keys, field) if edit.op in ("mean", "patch") else None
        word: PositionWord = "generated" if edit.positions == "generated" else "all"
        is_word = positions.is_open and isinstance(edit.positions, str)
        match = EditMatch([stage.name for stage in stages], word if is_word else positions.ranges())
        when = None if edit.when is None else self._condition(edit.when, stages, f"{field}.when")
        return PlannedEdit(BoundEdit(positions, edits, when), match, source)

    def sources(self) -> list[SourcePass]:
        return [SourcePass(ids, list(stages.values()), sorted(kept)) for ids, (stages, kept) in self._sources.items()]

    def _condition(self, when: EditCondition, edited: Sequence[Stage], field: str) -> Condition:
        positions = self._resolve(when.positions, f"{field}.positions")
        if when.tokens is not None and not when.tokens:
            raise InvalidField(f"{field}.tokens", "the list is empty, so the condition never holds")
        if when.tokens is not None and (when.stage, when.vector, when.above) == (None, None, None):
            return Condition(positions, frozenset(self._check_ids(when.tokens, f"{field}.tokens")))
        if when.tokens is not None or when.stage is None or when.vector is None or when.above is None:
            raise InvalidField(field, "takes either `tokens`, or `stage`, `vector` and `above`")
        try:
            stage = select_rows(self._stages, when.stage)
        except UnknownStage as error:
            raise InvalidField(f"{field}.stage", str(error)) from error
        names = [each.name for each in self._stages]
        early = next((each.name for each in edited if names.index(each.name) < names.index(stage.name)), None)
        if early is not None:
            reason = (
                f"{stage.name} is computed after {early}, which the edit changes; take that stage or an earlier one"
            )
            raise InvalidField(f"{field}.stage", reason)
        vector = read_row(when.vector, stage, stage.shape(self._sizes_of_one)[2:], f"{field}.vector")
        above = check_number(when.above, f"{field}.above")
        return Condition(positions, threshold=StageThreshold(stage, vector, above))

    def _resolve(self, positions: Positions, field: str) -> PositionSet:
        return resolve_positions(positions, len(self._prompt_ids), self._max_length, field)

    def _matching_stages(self, edit: Edit, field: str) -> list[Stage]:
        if edit.stage not in self._selected:
            try:
                self._selected[edit.stage] = select(self._stages, [edit.stage])
            except UnknownStage as error:
                raise InvalidField(f"{field}.stage", str(error)) from error
        stages = self._selected[edit.stage]
        if isinstance(edit.vector, Mapping):
            known = {stage.name for stage in self._stages}
            unknown = next((name for name in edit.vector if name not in known), None)
            if unknown is not None:
                raise InvalidField(f"{field}.vector", f"{shortened(unknown)} is no stage of this network")
            found = [stage for stage in stages if stage.name in edit.vector]
            if not found:
                names = ", ".join(map(shortened, list(edit.vector)[:3])) or "none"
                reason = f"has no tensor for any of the {len(stages)} stages that match; it has tensors for {names}"
                raise InvalidField(f"{field}.vector", reason)
            stages = found
        for stage in stages:
            if stage.name in AFTER_LOGITS:
                reason = f"{stage.name} cannot be edited, because nothing depends on it; 'blocks.*' leaves it out"
                raise InvalidField(f"{field}.stage", reason)
        return stages

    def _stage_edits(
        self, edit: Edit, stages: Sequence[Stage], positions: PositionSet, keys: PositionSet | None, field: str
    ) -> list[StageEdit]:
        """Plan the edit at each stage, still without the numbers of a source."""
        rule, vectors, basis = _rule(edit, field), _vectors(edit, stages, field), _basis(edit, field)
        planned = []
        for stage in stages:
            part = Part.of(stage, positions, edit.heads, edit.neurons, keys, self._sizes, field)
            numbers = part.fit(vectors[stage.name], f"{field}.vector") if vectors else None
            whole = StageEdit(
                stage=stage,
                width=math.prod(stage.shape(self._sizes_of_one)),
                edit=RowEdit(
                    rule=rule,
                    vectors=None if numbers is None else numbers.single,
                    exact=None if numbers is None else numbers.exact,
                    heads=None if part.heads is None else torch.tensor(part.heads),
                    is_per_number=part.is_per_number,
                ),
                keys=keys,
                window=self._window(stage),
                noise=self._noise(edit, stage, field) if edit.op == "noise" else None,
                needs_values=edit.op in ("mean", "patch"),
            )
            if basis is not None:
                planned += self._along_each(basis, whole, edit.coeff, f"{field}.subspace")
            if basis is None or whole.needs_values:
                planned.append(whole)
        return planned

    def _along_each(self, basis: Tensor, whole: StageEdit, coeff: float, field: str) -> list[StageEdit]:
        """The edits that multiply the component in the span of a basis: one along each of its vectors."""
        size = self._sizes[whole.stage.dims[-1]]
        if basis.shape[1] != size:
            raise InvalidField(field, f"has vectors of {basis.shape[1]} numbers, but {whole.stage.name} takes {size}")
        rule, found = EditRule("project", check_number(coeff, f"{field}.coeff")), []
        for vector in basis:
            numbers = Numbers.of(vector[None, None])
            edit = replace(whole.edit, rule=rule, vectors=numbers.single, exact=numbers.exact)
            found.append(replace(whole, edit=edit, needs_values=False))
        return found

    def _check_visible(self, stages: Sequence[Stage], positions: PositionSet, keys: PositionSet, field: str) -> None:
        """Raise `InvalidField` unless at least one query sees one of the keys, at one of the stages."""
        windows = {self._window(stage) for stage in stages}
        reach = self._max_length if None in windows else max(window for window in windows if window is not None)
        if not any(positions.touches(key, key + reach) for key in keys.indices):
            seen = "earlier keys and its own" if None in windows else f"its own key and the {reach - 1} before"
            raise InvalidField(f"{field}.keys", f"none is seen from the positions of the edit: a query sees {seen}")

    def _check_amount(self, edits: Sequence[StageEdit], positions: PositionSet, field: str) -> None:
        """Raise `InvalidField` for too much noise: it is drawn in each pass, which delays other requests."""
        num_positions = max(1, positions.count(0, len(self._prompt_ids)))
        noises = [edit.noise for edit in edits if edit.noise is not None]
        self._num_noisy += len(noises)
        self._num_noise += sum(num_positions * noise.num_heads * (noise.size or self._max_length) for noise in noises)
        if self._num_noisy > MAX_NOISY_STAGES:
            reason = f"the request adds noise to {self._num_noisy} stages; at most {MAX_NOISY_STAGES} are allowed"
            raise InvalidField(f"{field}.stage", reason)
        if self._num_noise > MAX_NOISE:
            reason = (
                f"{self._num_noise} random numbers for the prompt are more than {MAX_NOISE}; change fewer positions"
            )
            raise InvalidField(f"{field}.positions", f"{reason} or stages")

    def _window(self, stage: Stage) -> int | None:
        """The sliding window of the layer, for stages with keys."""
        if "key" not in stage.dims or not isinstance(self._config, ModelConfig):
            return None
        return self._config.window_of(int(stage.name.split(".")[1]))

    def _noise(self, edit: Edit, stage: Stage, field: str) -> Noise:
        assert edit.std is not None
        std = check_number(edit.std, f"{field}.std")
        if std < 0:
            raise InvalidField(f"{field}.std", f"{shortened(std)} is negative")
        if type(edit.seed) is not int or not 0 <= edit.seed <= MAX_SEED:
            raise InvalidField(f"{field}.seed", f"{shortened(edit.seed)} is no integer between 0 and {MAX_SEED}")
        heads = [self._sizes[dim] for dim in stage.dims if dim in ("head", "kv_head")]
        size = None if "key" in stage.dims else self._sizes[stage.dims[-1]]
        return Noise(edit.seed, std, heads[0] if heads else 1, size)

    def _source(
        self, edit: Edit, stages: Sequence[Stage], positions: PositionSet, keys: PositionSet | None, field: str
    ) -> FromSource:
        """Resolve the source of a mean or a patch, and add its stages and positions to the source passes."""
        is_mean, source_field = edit.op == "mean", f"{field}.source.positions"
        prompts = [self._prompt_ids]
        if edit.source is not None:
            given = [edit.source.ids, *edit.source.more]
            names = [f"{field}.source.prompt", *(f"{field}.source.prompts.{i}" for i in range(1, len(given)))]
            prompts = [self._check_source(ids, name) for ids, name in zip(given, names, strict=True)]
            if len(prompts) > 1 and not is_mean:
                raise InvalidField(f"{field}.source.prompts", "are for a mean; a patch takes one `prompt`")
        wanted = None if edit.source is None else edit.source.positions
        if wanted is None:
            wanted = "all" if is_mean else edit.positions
        if positions.is_open and not is_mean:
            reason = "patch needs a known number of positions: name them, or use 'prompt' or 'last'"
            raise InvalidField(f"{field}.positions", reason)
        passes = []
        for ids in prompts:
            found = resolve_positions(wanted, len(ids), len(ids), source_field)
            if not is_mean:
                self._check_patched(found, positions, stages, source_field)
            if keys is not None and max(keys.indices) >= len(ids):
                reason = f"the source has {len(ids)} keys, so there is no {max(keys.indices)}"
                raise InvalidField(f"{field}.keys", reason)
            kept_stages, kept_positions = self._sources.setdefault(ids, ({}, set()))
            kept_stages |= {stage.name: stage for stage in stages}
            kept_positions.update(found.indices)
            passes.append((list(self._sources).index(ids), found))
        return FromSource(passes, is_mean, _basis(edit, field))

    def _check_patched(self, found: PositionSet, positions: PositionSet, stages: Sequence[Stage], field: str) -> None:
        """Raise `InvalidField` unless a source has a position for each one of the edit, with the same keys."""
        if len(found.indices) != len(positions.indices):
            reason = (
                f"names {len(found.indices)} positions, but the edit changes {len(positions.indices)}; name as many"
            )
            raise InvalidField(field, reason)
        if any("key" in stage.dims for stage in stages) and tuple(found.indices) != tuple(positions.indices):
            raise InvalidField(field, "must be the positions of the edit, because a position has its own keys")

    def _check_source(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        limit = self._config.max_positions if isinstance(self._config, ModelConfig) else len(ids)
        if not 0 < len(ids) <= limit:
            raise InvalidField(field, f"has {len(ids)} tokens; a source has 1 to {limit}")
        return self._check_ids(ids, field)

    def _check_ids(self, ids: Sequence[int], field: str) -> tuple[int, ...]:
        for token_id in ids:
            if not 0 <= token_id < self._config.vocab_size:
                reason = f"{shortened(token_id)} is no token id; the vocabulary has {self._config.vocab_size}"
                raise InvalidField(field, reason)
        return tuple(ids)


def _rule(edit: Edit, field: str) -> EditRule:
    """The arithmetic of an edit. Raises `InvalidField` for numbers that do not fit."""
    match edit.op:
        case "scale":
            return EditRule("scale", check_number(edit.factor, f"{field}.factor"))
        case "project":
            return EditRule("project", check_number(edit.coeff, f"{field}.coeff"))
        case "cap":
            return EditRule("cap" if edit.vector is None else "cap_component", *limits(edit.min, edit.max, field))
        case "add":
            scale = check_number(edit.scale, f"{field}.scale")
            value = 0.0 if edit.value is None else check_number(edit.value, f"{field}.value")
            return EditRule("add", check_number(value * scale, f"{field}.value"))
        case "noise":  # its numbers are drawn for each pass
            return EditRule("add")
        case "mean" | "patch":  # the numbers come from the source, in `EditPlan.bind`
            return EditRule("set" if edit.subspace is None else "add")  # the component in the subspace is 0 then
        case "set" | "zero":
            return EditRule("set", 0.0 if edit.value is None else check_number(edit.value, f"{field}.value"))


def _basis(edit: Edit, field: str) -> Tensor | None:
    return None if edit.subspace is None else read_basis(edit.subspace, f"{field}.subspace")


def _vectors(edit: Edit, stages: Sequence[Stage], field: str) -> dict[str, Numbers]:
    """The vector of an edit for each stage; empty if the edit has none."""
    if edit.vector is None:
        return {}
    is_direction, names = edit.op in ("project", "cap"), [stage.name for stage in stages]
    read = partial(read_vector, scale=edit.scale, field=f"{field}.vector", is_direction=is_direction)
    if isinstance(edit.vector, Tensor):
        return dict.fromkeys(names, read(edit.vector))
    return {name: read(edit.vector[name]) for name in names}
