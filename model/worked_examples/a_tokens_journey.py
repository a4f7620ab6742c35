"""The article "A token's journey": one block of width 4 on "the cat sat on", with every weight printed.

How this network differs from a standard block:
- Nothing reads the result of the first LayerNorm: q, k and v are computed from the raw sum of the embeddings. Editing
  `ln1` therefore changes no later stage.
- There is no mask and no scaling by 1/sqrt(d), so `attn_scores` equals `scores`.
- There are no biases and there is no final norm.

From `attn_out` on, the article follows only the last position. Between the steps, the article rounds to one
or two decimals.
"""

from typing import ClassVar

import numpy as np
from torch import Tensor

from model.ops.torch_ops import ACTIVATIONS
from model.tracing.tap import Probe
from model.worked_examples.published import Printed
from model.worked_examples.worked_example import WorkedExample, fixed, layer_norm

TOKEN_EMBEDDING = [
    [0.2, -0.1, 0.7, 0.2],
    [0.1, 0.4, -0.3, 0.6],
    [0.5, 0.2, 0.1, -0.3],
    [-0.2, 0.2, 0.4, 0.1],
    [0.4, 0.1, 0.3, 0.5],
    [0.2, 0.3, -0.2, 0.4],
]
POSITION_EMBEDDING = [
    [0.1, 0.0, 0.1, 0.0],
    [0.0, 0.1, 0.0, 0.1],
    [0.1, 0.0, 0.0, -0.1],
    [0.0, 0.1, 0.1, 0.0],
]
W_Q = [
    [0.5, 0.2, -0.3, 0.1],
    [-0.2, 0.4, 0.1, 0.3],
    [0.1, -0.1, 0.5, 0.2],
    [0.3, 0.2, -0.1, 0.4],
]
W_K = [
    [0.4, -0.2, 0.3, 0.1],
    [0.2, 0.5, -0.1, 0.3],
    [-0.1, 0.3, 0.4, -0.2],
    [0.3, 0.1, 0.2, 0.5],
]
W_V = [
    [0.2, 0.4, -0.1, 0.3],
    [0.5, -0.1, 0.2, 0.4],
    [-0.2, 0.3, 0.5, -0.1],
    [0.1, 0.2, 0.3, 0.6],
]
W_O = [
    [0.8, 0.1, -0.1, 0.2],
    [0.1, 0.7, 0.1, 0.1],
    [-0.1, 0.2, 0.8, 0.1],
    [0.2, 0.1, 0.1, 0.7],
]
W_1 = [
    [0.3, -0.1, 0.2, 0.1],
    [0.1, 0.4, -0.1, 0.2],
    [-0.2, 0.1, 0.3, -0.1],
    [0.1, 0.2, 0.1, 0.3],
]
W_2 = [
    [0.2, 0.1, -0.1, 0.3],
    [0.1, 0.4, 0.2, -0.1],
    [-0.1, 0.2, 0.3, 0.1],
    [0.3, -0.1, 0.1, 0.2],
]
W_LM = [
    [0.1, 0.2, 0.2, 0.2, 0.1, 0.0],
    [0.1, 0.4, 0.2, 0.2, 0.1, 0.1],
    [0.1, 0.5, 0.2, 0.3, 0.2, 0.0],
    [0.1, 0.5, 0.2, 0.2, 0.2, 0.1],
]

LAST = np.s_[0, 3]

PRINTED = {
    "embed": Printed(
        "0.2 -0.1 0.7 0.2   0.1 0.4 -0.3 0.6   0.5 0.2 0.1 -0.3   -0.2 0.2 0.4 0.1",
        given=True,
    ),
    "pos_embed": Printed(
        "0.1 0.0 0.1 0.0   0.0 0.1 0.0 0.1   0.1 0.0 0.0 -0.1   0.0 0.1 0.1 0.0",
        given=True,
    ),
    # The article prints the last row a second time, with two decimals, as the input of LayerNorm and of the
    # residual connection.
    "blocks.0.resid_pre": Printed("0.3 -0.1 0.8 0.2   0.1 0.5 -0.3 0.7   0.6 0.2 0.1 -0.4   -0.20 0.30 0.50 0.10"),
    "blocks.0.ln1.scale": Printed("0.259", LAST),
    "blocks.0.ln1.out": Printed("-1.45 0.48 1.26 -0.29", LAST),
    "blocks.0.attn.q": Printed("0.3 0.0 0.3 0.2   0.1 0.4 -0.2 0.4   0.2 0.1 -0.1 0.0   -0.1 0.1 0.3 0.2"),
    "blocks.0.attn.k": Printed("0.1 0.2 0.5 -0.1   0.4 0.2 0.0 0.6   0.2 0.0 0.1 -0.1   0.0 0.4 0.1 0.0"),
    "blocks.0.attn.v": Printed("-0.1 0.4 0.4 0.1   0.4 0.0 0.2 0.7   0.2 0.2 -0.1 0.0   0.0 0.1 0.4 0.1"),
    "blocks.0.attn.scores": Printed(
        "0.16 0.24 0.07 0.03   -0.05 0.36 -0.04 0.14   -0.01 0.10 0.03 0.03   0.14 0.10 -0.01 0.07"
    ),
    "blocks.0.attn.pattern": Printed(
        "0.26 0.28 0.24 0.23   0.21 0.32 0.21 0.26   0.24 0.27 0.25 0.25   0.27 0.26 0.23 0.25"
    ),
    "blocks.0.attn.z": Printed("0.13 0.17 0.23 0.25   0.15 0.15 0.22 0.27   0.14 0.18 0.22 0.24   0.12 0.19 0.24 0.24"),
    "blocks.0.attn_out": Printed("0.14 0.19 0.22 0.24", LAST),
    "blocks.0.resid_mid": Printed("-0.06 0.49 0.72 0.34", LAST),
    "blocks.0.ln2.scale": Printed("0.284", LAST),
    "blocks.0.ln2.out": Printed("-1.52 0.41 1.22 -0.11", LAST),
    "blocks.0.mlp.pre": Printed("-0.67 0.42 0.01 -0.23", LAST),
    "blocks.0.mlp.post": Printed("0.00 0.42 0.01 0.00", LAST),
    "blocks.0.mlp_out": Printed("0.04 0.17 0.09 -0.04", LAST),
    "blocks.0.resid_post": Printed("-0.02 0.66 0.81 0.30", LAST),
    "logits": Printed("0.18 0.82 0.35 0.43 0.29 0.10", LAST),
    "probabilities": Printed("0.14 0.26 0.16 0.17 0.15 0.12", LAST),
    "loss": Printed("1.89", np.s_[0, 3:]),
}


class ATokensJourney(WorkedExample):
    """h = x + attention(x), then h + relu(LayerNorm(h) W1) W2; one head, every query sees every key."""

    name = "a-tokens-journey"
    title = "A token's journey: the cat sat on"
    source = "articles/003"
    vocabulary = ("the", "cat", "sat", "on", "mat", "dog")
    prompt_ids: ClassVar[list[int]] = [0, 1, 2, 3]
    targets: ClassVar[list[int | None]] = [None, None, None, 4]
    max_positions = 4
    d_model, num_heads, d_head, d_mlp = 4, 1, 4, 4
    block = ("resid_pre", "ln1", "attn", "attn_out", "resid_mid", "ln2", "mlp", "mlp_out", "resid_post")
    printed = PRINTED
    published_results: ClassVar[dict[str, str]] = {
        "loss": "1.89",
        "prediction": "cat",
        "prediction_probability": "0.26",
    }

    def __init__(self) -> None:
        super().__init__()
        self.W_E, self.W_pos = fixed(TOKEN_EMBEDDING), fixed(POSITION_EMBEDDING)
        self.ln1, self.ln2 = layer_norm(self.d_model), layer_norm(self.d_model)
        self.W_Q, self.W_K, self.W_V = fixed([W_Q]), fixed([W_K]), fixed([W_V])  # (H, C, D)
        self.W_O, self.W_in, self.W_out, self.W_U = fixed(W_O), fixed(W_1), fixed(W_2), fixed(W_LM)

    def compute(self, ids: Tensor, probe: Probe, block: Probe) -> Tensor:
        mlp = block.at("mlp")
        x = block("resid_pre", self.embed(ids, probe))  # (1, T, C)
        self.ln1(x, block.at("ln1"))  # the article shows this stage, but no later stage reads it
        x = block("resid_mid", x + block("attn_out", self.attention(x, block.at("attn"), is_causal=False, scale=1.0)))

        pre = mlp("pre", self.ln2(x, block.at("ln2")) @ self.W_in)
        post = mlp("post", ACTIVATIONS["relu"](pre))
        return block("resid_post", x + block("mlp_out", post @ self.W_out)) @ self.W_U
