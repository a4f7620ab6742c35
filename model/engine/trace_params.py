"""The parameters of a trace during generation, and the part of the trace that one step computes."""

from dataclasses import dataclass
from functools import cached_property

from model.tracing.selection import Selection
from model.tracing.stages import OUTPUT_STAGES


@dataclass(frozen=True, kw_only=True)
class TraceParams:
    """The stages and positions to trace while a sequence is generated.

    `selection.positions` are positions of the sequence (None: all that the sequence computes itself). Each is traced in
    the step that computes it, with its `top_k` most likely next tokens.

    `logit_lens`: decode the residual of every block at the position that chose a token, and report this many of its
    most likely tokens. None: no logit lens.
    """

    selection: Selection
    top_k: int = 0
    logit_lens: int | None = None

    @cached_property
    def needs_logits(self) -> bool:
        """Whether the logits of every traced position are needed, not only those of the last one."""
        return self.top_k > 0 or any(stage in OUTPUT_STAGES for stage in self.selection.stages)

    @cached_property
    def needs_final_norm(self) -> bool:
        """Whether the final norm of every traced position is needed."""
        return self.needs_logits or any(stage.has_selected_rows for stage in self.selection.stages)

    @cached_property
    def wanted_positions(self) -> frozenset[int] | None:
        return None if self.selection.positions is None else frozenset(self.selection.positions)

    @cached_property
    def key(self) -> str:
        """Equal keys mean that a recorded step keeps the same of a sequence."""
        selection = self.selection
        names = [stage.name for stage in selection.stages]
        heads = None if selection.heads is None else list(selection.heads)
        return repr((names, selection.detail, heads, self.logit_lens))


@dataclass(frozen=True)
class StepTraceKind:
    """The part of a trace that one step computes: the stages of the one new token, the logit lens, or both."""

    params: TraceParams
    has_stages: bool
    has_lens: bool

    @property
    def key(self) -> tuple[str, bool, bool]:
        return self.params.key, self.has_stages, self.has_lens
