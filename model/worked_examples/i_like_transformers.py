"""The article "Understanding gradients": one block of width 16 on "<BOS> I like transformers <EOS>".

The weights are drawn with the random generator and the seed that the article prints.

How this network differs from a standard block:
- There is no residual connection around attention, so there is no `resid_mid`; the feed-forward network reads the
  output of attention.
- The only residual connection adds the output of attention to that of the feed-forward network; the sum is
  `resid_post`.
- The only LayerNorm follows this sum. It is named `ln2`, as in a post-norm block, and the head reads its output.
"""

import random
from typing import ClassVar

import numpy as np
from torch import Tensor

from model.ops.torch_ops import ACTIVATIONS
from model.tracing.tap import Probe
from model.worked_examples.published import Printed
from model.worked_examples.worked_example import WorkedExample, drawn, fixed, layer_norm

PRINTED = {
    "blocks.0.ln2.out": Printed(
        "-0.1319 -1.2702 -0.4969 1.5600 0.6278 0.4769 -2.2261 0.1465"
        " 1.5670 0.2124 -0.6301 -0.9558 0.8655 -0.7691 0.9595 0.0645",
        np.s_[0, 0],
    ),
    # The article prints one logit, and its probability and loss, a second time with six decimals.
    "logits": Printed("""
        0.3362 -0.1025 -0.0514 -0.005250 0.2907 0.0848
        0.3332 -0.1114 -0.0743 -0.0182 0.2730 0.0714
        0.3179 -0.1641 -0.0885 -0.0041 0.3290 0.0326
        0.3252 -0.1279 -0.0646 -0.0031 0.3202 0.0518
        0.3209 -0.1388 -0.0673 0.0066 0.3317 0.0356
    """),
    "probabilities": Printed("""
        0.2098 0.1353 0.1424 0.149082 0.2004 0.1631
        0.2118 0.1358 0.1409 0.1490 0.1994 0.1630
        0.2096 0.1294 0.1396 0.1519 0.2119 0.1576
        0.2088 0.1327 0.1414 0.1504 0.2078 0.1589
        0.2082 0.1315 0.1412 0.1521 0.2105 0.1565
    """),
    "loss": Printed("1.903260 1.6123 1.8479 1.9560", np.s_[0, :4]),
}


class ILikeTransformers(WorkedExample):
    """o = attention(x), LayerNorm(o + feed-forward(o)), head; two heads, causal."""

    name = "i-like-transformers"
    title = "I like transformers: from hidden states to loss"
    source = "articles/004"
    vocabulary = ("<PAD>", "<BOS>", "<EOS>", "I", "like", "transformers")
    prompt_ids: ClassVar[list[int]] = [1, 3, 4, 5, 2]
    targets: ClassVar[list[int | None]] = [3, 4, 5, 2, None]
    max_positions = 5
    d_model, num_heads, d_head, d_mlp = 16, 2, 8, 64
    block = ("resid_pre", "attn", "attn_out", "mlp", "mlp_out", "resid_post", "ln2")
    printed = PRINTED
    published_results: ClassVar[dict[str, str]] = {"loss": "1.8299", "total_loss": "7.3195", "perplexity": "6.23"}

    def __init__(self) -> None:
        super().__init__()
        width, hidden, words = self.d_model, self.d_mlp, len(self.vocabulary)
        generator = random.Random(42)

        def heads() -> list[list[list[float]]]:
            return [drawn(generator, width, self.d_head) for _ in range(self.num_heads)]

        # The weights depend on the order in which they are drawn; this is the order of the article.
        self.W_E = fixed(drawn(generator, words, width))
        self.W_pos = fixed(drawn(generator, self.max_positions, width))
        self.W_Q, self.W_K, self.W_V = fixed(heads()), fixed(heads()), fixed(heads())  # (H, C, D)
        self.W_O = fixed(np.transpose(drawn(generator, width, width)))
        self.W_in = fixed(np.transpose(drawn(generator, hidden, width)))
        self.b_in = fixed(drawn(generator, 1, hidden)[0])
        self.W_out = fixed(np.transpose(drawn(generator, width, hidden)))
        self.b_out = fixed(drawn(generator, 1, width)[0])
        self.W_U = fixed(np.transpose(drawn(generator, words, width)))
        self.ln2 = layer_norm(self.d_model)

    def compute(self, ids: Tensor, probe: Probe, block: Probe) -> Tensor:
        mlp = block.at("mlp")
        x = block("resid_pre", self.embed(ids, probe))  # (1, T, C)
        x = block("attn_out", self.attention(x, block.at("attn"), is_causal=True, scale=self.d_head**-0.5))

        post = mlp("post", ACTIVATIONS["gelu_tanh"](mlp("pre", x @ self.W_in + self.b_in)))
        x = block("resid_post", x + block("mlp_out", post @ self.W_out + self.b_out))
        logits: Tensor = self.ln2(x, block.at("ln2")) @ self.W_U
        return logits
