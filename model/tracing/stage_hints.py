"""Hints for the error about a glob that matches no stage: what the caller probably meant."""

import difflib
import re
from collections.abc import Callable, Iterator, Sequence

from model.errors import shortened

LAYER = re.compile(r"\.(-?\d{1,300})\.")
# Names that other programs use for the stages of a block -> our name.
OTHER_NAMES = {
    **dict.fromkeys(
        ("attention", "attentions", "attn", "attn.probs", "attn_probs", "attn_weights", "attention_weights"),
        "attn.pattern",
    ),
    "attn.out": "attn_out",
    **dict.fromkeys(("mlp", "mlp.out"), "mlp_out"),
    **dict.fromkeys(("resid", "residual", "residuals", "hidden_state", "hidden_states"), "resid_post"),
    **dict.fromkeys(("query", "q_proj"), "attn.q"),
    **dict.fromkeys(("key", "k_proj"), "attn.k"),
    **dict.fromkeys(("value", "v_proj"), "attn.v"),
    "act_fn": "mlp.post",
}
# The same for the stages outside of the blocks.
OTHER_OUTER_NAMES = {
    **dict.fromkeys(("embedding", "embeddings"), "embed"),
    **dict.fromkeys(("probs", "softmax"), "probabilities"),
    "final_norm": "ln_final.out",
}


def stage_hint(glob: str, names: Sequence[str], matches: Callable[[str], bool]) -> str:
    """Say what is wrong with a glob that matches none of the stage names. Empty if nothing similar is found.

    `matches` says whether another glob matches a stage.
    """
    hints = []
    layer = LAYER.search(glob)
    num_layers = 1 + max((int(found[1]) for name in names if (found := LAYER.search(name))), default=-1)
    if layer is not None and not 0 <= int(layer[1]) < num_layers:
        layers = f"{num_layers} layers, 0 to {num_layers - 1}" if num_layers else "no layers"
        hints.append(f"layer {shortened(int(layer[1]))} does not exist: {layers}")
        glob = f"{glob[: layer.start(1)]}0{glob[layer.end(1) :]}"
    if not hints or not matches(glob):
        meant = next(filter(matches, other_globs(glob)), None)
        similar = [] if meant is not None else similar_names(glob, names)
        if meant is not None:
            hints.append(f"did you mean {meant!r}?")
        elif similar:
            hints.append(f"similar names: {', '.join(similar)}")
    return "; ".join(hints)


def other_globs(glob: str) -> Iterator[str]:
    """Globs that may have been meant: with other names for the same stages, or for the stage in every block."""
    plain = re.sub(r"^(model\.|transformer\.)?(layers?|h|block)\.(?=[\d*?\[])", "blocks.", glob.strip().lower())
    yield plain
    yield f"*.{plain}"
    prefix, name = re.fullmatch(r"(blocks\.[^.]*\.|\*\.)?(.*)", plain, re.S).groups()  # type: ignore[union-attr]  # every string matches
    if name in OTHER_OUTER_NAMES:
        yield OTHER_OUTER_NAMES[name]
    if name in OTHER_NAMES:
        yield f"{prefix or '*.'}{OTHER_NAMES[name]}"


def similar_names(glob: str, names: Sequence[str]) -> list[str]:
    """Up to three stage names similar to the glob.

    Only one layer is searched, since all layers have the same stages: the layer that the glob names, otherwise layer 0.
    """
    layer = LAYER.search(glob)
    of_layer = layer[0] if layer else ".0."
    candidates = [name for name in names if of_layer in name or not LAYER.search(name)]
    return difflib.get_close_matches(glob, candidates, n=3, cutoff=0.4)
