"""The tools of `forwardscope mcp`: what an assistant can ask of a running server. This module knows no protocol.

Each tool is a method whose docstring, arguments and annotations are what the assistant reads. Results are small: a
tool refuses a request with a larger one, and says how to narrow it.
"""

import re
import struct
import zlib
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from forwardscope import Client
from forwardscope.results import Stage
from forwardscope.results.passes import Pass
from forwardscope.tensor_files import NumpyArray

MAX_STAGES, MAX_NUMBERS, MAX_TOKENS, MAX_LISTED = 40, 256, 256, 20
MAX_CELLS, PICTURE_PIXELS = 128, 512  # rows and columns of a picture; the pixels of its longer side, at most
Prompt = Annotated[str, Field(max_length=20_000, description="the text that the model reads")]
Edits = Annotated[
    list[dict[str, Any]],
    Field(
        min_length=1,
        max_length=16,
        description="changes of stages, such as {'stage': 'blocks.3.attn.z', 'heads': [2], 'op': 'zero'}; ops: zero, "
        "set, mean, patch, add, scale, project, cap, noise; 'positions' is all (default), prompt, generated, last or a "
        "list of indices",
    ),
]


class Tools:
    """The tools, on the server of `client`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def model(self) -> dict[str, Any]:
        """Describe the served model: its sizes, and the names and axes of the stages that the other tools take."""
        found = self._client.model()
        stages = {re.sub(r"^blocks\.\d+\.", "blocks.N.", each.name): list(each.dims) for each in found.stages}
        return {
            "name": found.name,
            "parameters": found.parameters.total,
            "num_layers": found.config["num_layers"],
            "can_chat": found.capabilities.chat_template,
            "sizes": dict(found.sizes),
            "stages": stages,
        }

    def generate(
        self,
        prompt: Prompt,
        max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 64,
        temperature: Annotated[float, Field(ge=0, description="0 always takes the most likely token")] = 0.0,
        seed: int = 0,
    ) -> dict[str, Any]:
        """Continue a text. Returns the new text, and for each token its probability and the likeliest alternatives."""
        found = self._client.generate(prompt, max_tokens=max_tokens, temperature=temperature, seed=seed, logprobs=3)
        tokens = [
            {
                "text": token.text,
                "probability": probability(token.logprob),
                "top": {str(each.text): probability(each.logprob) for each in token.top},
            }
            for token in found.choices[0].logprobs or ()
        ]
        return {"text": found.text, "finish_reason": found.finish_reason, "tokens": tokens}

    def look(
        self,
        prompt: Prompt,
        stages: Annotated[list[str], Field(min_length=1, max_length=MAX_STAGES, description="names or globs")],
        positions: Annotated[list[int] | None, Field(description="tokens, from 0; -1 is the last; all if null")] = None,
        heads: Annotated[list[int] | None, Field(description="query heads; all if null")] = None,
    ) -> dict[str, Any]:
        """Read stages of one forward pass over a text: shapes and statistics, and the numbers of small stages.

        Also returns the tokens of the text and the likeliest next token at each position.
        """
        selection: dict[str, Any] = {"positions": positions, "heads": heads}
        found = self._client.run(prompt, stages, detail="summary", top_k=1, **selection)
        if len(found.stages) > MAX_STAGES:
            raise ValueError(f"{len(found.stages)} stages match; at most {MAX_STAGES} are shown: name fewer")
        small = [each.name for each in found.stages if np.prod(each.shape) <= MAX_NUMBERS]
        values = self._client.run(prompt, small, top_k=0, **selection) if small else {}
        return {
            "tokens": [token.text for token in found.tokens],
            "next": {each.position: each[0].text for each in found.predictions},
            "stages": [describe(each, values.get(each.name)) for each in found.stages],
        }

    def picture(
        self,
        prompt: Prompt,
        stage: Annotated[str, Field(description="one stage, such as blocks.3.attn.pattern or blocks.3.resid_post")],
        head: Annotated[int | None, Field(ge=0, description="of a stage with heads")] = None,
    ) -> bytes:
        """Draw one stage of one head or token stream as a picture: rows are tokens (queries), columns keys or dims.

        White is 0, blue positive, red negative. A large stage is drawn in blocks, each with its largest number.
        """
        found = self._client.run(prompt, [stage], heads=None if head is None else [head], top_k=0)
        names = [name for name in found if name != "logits" or stage == "logits"]
        if len(names) != 1:
            raise ValueError(f"{len(names)} stages match; a picture shows one")
        dims, values = found.dims(names[0]), found[names[0]][0]
        if values.ndim == 3:
            if head is None:
                raise ValueError(f"{names[0]} has the axes {', '.join(dims)}; choose one head")
            values = values.take(0, axis=0 if dims[1] == "head" else 1)
        if values.ndim != 2:
            raise ValueError(f"{names[0]} has the axes {', '.join(dims)}, which are no picture")
        return png(colours(blocks(np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0))))

    def edit(
        self, prompt: Prompt, edits: Edits, max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 32
    ) -> dict[str, Any]:
        """Continue a text with and without changes of stages. Returns both texts, the next token's probabilities in
        both, and how far each block's residual stream moved."""
        found = self._client.generate(prompt, max_tokens=max_tokens, temperature=0, edits=edits, baseline=True)
        shown: dict[str, Any] = {"positions": [-1], "top_k": 5, "detail": "none"}
        first = self._client.run(prompt, "logits", edits=edits, baseline=True, **shown)
        assert first.baseline is not None
        moved = {each.name: rounded(each.relative) for each in found.changes[0].stages.values()}
        return {
            "text": found.text,
            "text_without_edits": found.baseline.choices[0].text,
            "next": next_tokens(first),
            "next_without_edits": next_tokens(first.baseline),
            "matched": [
                {"stages": list(each.stages)[:MAX_LISTED], "positions": each.positions} for each in found.edits
            ],
            "moved": moved,
        }

    def attribute(
        self,
        prompt: Prompt,
        token: Annotated[str, Field(description="the next token to explain, with its leading space, such as ' Mary'")],
        minus: Annotated[str | None, Field(description="explain how far `token` is above this one")] = None,
        method: Literal["direct", "integrated_gradients", "logit_lens"] = "direct",
    ) -> dict[str, Any]:
        """Explain why the model gives a logit to a next token.

        direct: the shares of heads and feed-forward layers. integrated_gradients: the shares of the prompt's tokens.
        logit_lens: the probability of the token after each layer.
        """
        fields: dict[str, Any] = {"minus": minus} if method != "logit_lens" else {"positions": [-1]}
        if method == "logit_lens" and minus is not None:
            raise ValueError("minus: the logit lens follows one token; leave minus out")
        found = self._client.attribute(method, prompt, token=token, **fields)
        answer = found.answer
        if method == "direct":
            heads = [[each.layer, each.head, rounded(each.share)] for each in found.top_heads(MAX_LISTED)]
            mlps = [rounded(each.mlp) for each in answer["layers"]]
            return {"logit": rounded(answer["logit"]), "heads": heads, "mlp_by_layer": mlps}
        if method == "integrated_gradients":
            shares = [rounded(each) for each in answer["attributions"]]
            return {"shares": [[each.text, share] for each, share in zip(found.tokens, shares, strict=True)]}
        followed = [[each.stage, rounded(each.token[0].probability), each.token[0].rank] for each in answer["layers"]]
        return {"probability_and_rank_by_stage": followed}

    def compare(
        self,
        prompt: Prompt,
        dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        quantize: Literal["none", "int8", "int5", "int4"] | None = None,
    ) -> dict[str, Any]:
        """Compare the served model with itself in another dtype or quantization: the first stage that differs by more
        than rounding, and how far the predictions are apart."""
        setting = {name: value for name, value in (("dtype", dtype), ("quantize", quantize)) if value is not None}
        found = self._client.compare(prompt, setting=setting)
        return {
            "other": found.b,
            "differs": found.differs,
            "first_stage": found.first_stage,
            "differing_stages": list(found.differing_stages)[:MAX_LISTED],
            "hints": [each.message for each in found.hints],
            "kl": None if found.logits is None else found.logits.kl,
            "top1_agreement": None if found.logits is None else found.logits.top1_agreement,
        }


def describe(stage: Stage[Any], values: NumpyArray | None) -> dict[str, Any]:
    statistics = {} if stage.summary is None else {name: rounded(value) for name, value in vars(stage.summary).items()}
    own = {} if values is None else {"values": np.vectorize(rounded, otypes=[object])(values).tolist()}
    return {"name": stage.name, "axes": dict(zip(stage.dims, stage.shape, strict=True)), **statistics, **own}


def next_tokens(found: Pass[Any]) -> dict[str, float | None]:
    """The probabilities of the most likely next tokens, by their texts."""
    return {str(each.text): rounded(each.probability) for each in found.predictions[0]}


def probability(logprob: float | None) -> float | None:
    return None if logprob is None else rounded(np.exp(logprob))


def rounded(number: Any) -> float | None:
    """A number with four digits; None if it is not finite."""
    return None if number is None or not np.isfinite(number) else float(f"{number:.4g}")


def blocks(values: NumpyArray) -> NumpyArray:
    """At most `MAX_CELLS` rows and columns: each is the number of the largest magnitude in a block."""
    for axis in (0, 1):
        size = -(-values.shape[axis] // MAX_CELLS)
        padded = np.pad(values, [(0, -values.shape[each] % size if each == axis else 0) for each in (0, 1)])
        shape = [*padded.shape[:axis], -1, size, *padded.shape[axis + 1 :]]
        grouped = padded.reshape(shape)
        largest = np.abs(grouped).argmax(axis + 1)
        values = np.take_along_axis(grouped, np.expand_dims(largest, axis + 1), axis + 1).squeeze(axis + 1)
    return values


def colours(values: NumpyArray) -> NumpyArray:
    """Pixels (rows, columns, 3) of 0 to 255: white to blue for positive numbers, white to red for negative ones."""
    strength = values / max(np.abs(values).max(), 1e-30)
    faded = 1 - np.abs(strength)
    pixels = np.stack([np.where(strength > 0, faded, 1), faded, np.where(strength < 0, faded, 1)], -1)
    scale = max(1, PICTURE_PIXELS // max(values.shape))
    return (255 * pixels).round().astype(np.uint8).repeat(scale, 0).repeat(scale, 1)


def png(pixels: NumpyArray) -> bytes:
    """A PNG file of 8-bit colours (ISO/IEC 15948), every row unfiltered."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
