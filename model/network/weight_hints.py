"""Hints for the error about a name that no weight has: the weight that was probably meant."""

import difflib
import re
from collections.abc import Iterable

from model.errors import shortened

LAYER = re.compile(r"(?:^|\.)(\d{1,9})\.")
MAX_COMPARED = 200  # names, and characters of a name: comparing takes longer than looking up
# The parts of a block under the names that checkpoints give them -> our name, with W or w for a weight.
PARTS = {
    **{f"{part}_proj": f"attn.W_{part.upper()}" for part in "qkvo"},
    "gate_proj": "mlp.W_gate",
    "up_proj": "mlp.W_in",
    "down_proj": "mlp.W_out",
    "gate": "mlp.W_gate",
    "router": "mlp.W_gate",
    **dict.fromkeys(("input_layernorm", "ln_1"), "ln1.w"),
    **dict.fromkeys(("post_attention_layernorm", "ln_2"), "ln2.w"),
}
OUTER = {
    **dict.fromkeys(("embed_tokens", "wte", "embed_in", "token_embd", "embed"), "embed.W_E"),
    **dict.fromkeys(("wpe", "pos_embed"), "pos_embed.W_pos"),
    **dict.fromkeys(("lm_head", "embed_out", "output", "head", "unembed"), "unembed.W_U"),
    **dict.fromkeys(("norm", "ln_f", "output_norm", "ln_final"), "ln_final.w"),
}


def weight_hint(name: str, names: Iterable[str]) -> str:
    """Say what is wrong with a name that no weight has, or name up to three similar weights. Empty if none is."""
    known, name = list(names), name[:MAX_COMPARED]
    in_known = set(known)
    layer = LAYER.search(name)
    num_layers = 1 + max((int(found[1]) for each in known if (found := LAYER.search(each))), default=-1)
    if layer is not None and int(layer[1]) >= num_layers:
        return f"layer {shortened(int(layer[1]))} does not exist: {num_layers} layers, 0 to {num_layers - 1}"
    number = "0" if layer is None else layer[1]
    ending = (each for each in known if each.endswith(f".{name}"))
    meant = next((each for each in (*_other_names(name, number), *ending) if each in in_known), None)
    if meant is not None:
        return f"did you mean {meant!r}?"
    near = [each for each in known if each.startswith(f"blocks.{number}.") or not each.startswith("blocks.")]
    similar = difflib.get_close_matches(name, near[:MAX_COMPARED], n=3, cutoff=0.4)
    return f"similar names: {', '.join(similar)}" if similar else ""


def _other_names(name: str, number: str) -> list[str]:
    """The names of the weight that other programs name so."""
    plain, _, kind = name.rpartition(".")
    if kind not in ("weight", "bias"):
        plain, kind = name, "weight"
    last = plain.rpartition(".")[2]
    found = [f"blocks.{number}.{PARTS[last]}"] if last in PARTS else []
    found += [OUTER[last]] if last in OUTER else []
    if kind == "bias":
        found = [re.sub(r"\bW_", "b_", re.sub(r"\.w$", ".b", each)) for each in found]
    return found
