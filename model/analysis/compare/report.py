"""A comparison as text for a terminal."""

import math

from model.analysis.compare import Comparison
from model.errors import join_names

MAX_LISTED = 8  # stages that one line names


def report(found: Comparison, a: str, *, table: bool = True) -> str:
    """Format a comparison for printing: the table of stages, the logits and the verdict."""
    dtype = str(found.dtype).removeprefix("torch.")
    lines = [f"A: {a} in float64; B: {found.b}, which computes in {dtype}; {found.num_tokens} tokens"]
    if table:
        lines += _table(found)
    if found.unknown:
        lines.append(f"not compared, because A has no such stages: {join_names(found.unknown, MAX_LISTED)}")
    changed = [f"{stage.name} ({stage.layout})" for stage in found.stages if stage.layout]
    if changed:
        lines.append(f"axes of B changed: {join_names(changed, 2)}")
    if found.logits is not None:
        logits = found.logits
        agreement = f"the same most likely token at {100 * logits.top1_agreement:.1f} % of the positions"
        lines.append(f"logits: KL divergence {logits.kl:.3g} nats (at most {logits.max_kl:.3g}), {agreement}")
    return "\n".join(lines + _verdict(found))


def _table(found: Comparison) -> list[str]:
    lines = [f"{'stage':30} {'error':>8} {'noise':>8} {'inherits':>8} {'adds':>8}  largest difference"]
    for stage in found.stages:
        difference = stage.difference
        numbers = (difference.error, stage.noise, stage.inherited, stage.added)
        place = ", ".join(map(str, difference.max_index))
        marks = f", {difference.mismatches} not finite in one" if difference.mismatches else ""
        marks += "  <- differs" if stage.differs else ""
        row = " ".join(f"{number:8.1e}" for number in numbers)
        lines.append(f"{stage.name:30} {row}  {difference.max_difference:.2e} at [{place}]{marks}")
        for name, errors in (("position", stage.per_position), ("head", stage.per_head)):
            if errors is not None:
                lines.append(f"    by {name}: " + " ".join(f"{error:.1e}" for error in errors))
    return lines


def _verdict(found: Comparison) -> list[str]:
    first = found.first
    if first is None:
        return ["verdict: no difference; rounding explains every error"]
    if first.difference.mismatches:
        what = f"{first.difference.mismatches} numbers are finite in only one of the two"
    elif not math.isfinite(first.added):
        what = "its error is too large for float64"
    else:
        what = f"it adds an error of {first.added:.2g}, where rounding adds {first.added_noise:.1g}"
    lines = [f"verdict: the first stage that differs is {first.name}: {what}"]
    if found.last_equal is not None:
        lines.append(f"before it, {found.last_equal} still agrees; the inherited error is {first.inherited:.1g}")
    difference = first.difference
    if all(number is not None and math.isfinite(number) for number in (difference.scale, difference.cosine)):
        lines.append(f"B's {first.name} is about {difference.scale:.4g} times A's, with cosine {difference.cosine:.6f}")
    others = [name for name in found.differing if name != first.name]
    if others:
        lines.append(f"errors are also added at {join_names(others, MAX_LISTED)}")
    lines += [f"hint: {hint.message} [{hint.code}]" for hint in found.hints]
    if not found.hints:
        lines.append("hint: no known mistake explains it; compare the weights and the operation that give this stage")
    return lines
