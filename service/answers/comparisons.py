"""The result of a comparison, for POST /compare and the command line."""

from forwardscope.results.comparisons import ComparedLogits, ComparedStage, Comparison, Hint, Verdict
from forwardscope.results.records import Named
from model.analysis.compare import Comparison as Found
from model.analysis.compare import StageComparison
from model.errors import printable_name

MAX_NOT_COMPARED = 100  # names of B's other tensors


def describe_comparison(found: Found, a: str) -> Comparison:
    first, logits = found.first, found.logits
    return Comparison(
        a=a,
        b=found.b,
        dtype=str(found.dtype).removeprefix("torch."),
        num_tokens=found.num_tokens,
        verdict=Verdict(
            differs=first is not None,
            first_stage=None if first is None else first.name,
            last_equal_stage=found.last_equal,
            differing_stages=tuple(found.differing),
            hints=tuple(Hint(hint.code, hint.message) for hint in found.hints),
        ),
        logits=None if logits is None else ComparedLogits(logits.kl, logits.max_kl, logits.top1_agreement),
        stages=Named(map(describe_stage, found.stages)),
        not_compared=tuple(printable_name(name) for name in found.unknown[:MAX_NOT_COMPARED]),
        num_not_compared=len(found.unknown),
    )


def describe_stage(stage: StageComparison) -> ComparedStage:
    return ComparedStage(
        **vars(stage.difference),
        name=stage.name,
        differs=stage.differs,
        noise=stage.noise,
        inherited=stage.inherited,
        added=stage.added,
        added_noise=stage.added_noise,
        layout=stage.layout or None,
        per_position=stage.per_position,
        per_head=stage.per_head,
    )
