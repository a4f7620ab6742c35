"""The JSON bodies of POST /attribute: one kind of request for each method."""

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, RootModel

from service.http.edit_schemas import Vector
from service.http.field_types import Indices, Prompt, ShortText, StrictBody, Text, TokenId, at_most
from service.http.forward_schemas import TargetIds
from service.http.schemas import EditedRequest, Globs, Positions

PROMPT = "When Mary and John went to the park, John gave a ball to"
MAX_STEPS = 512
OneToken = Annotated[
    Annotated[Text, Field(max_length=1000)] | TokenId, Field(description="a token id, or a text that is one token")
]
Axes = Annotated[list[Literal["position", "head"]], Field(min_length=1, max_length=2), at_most(2)]


class PromptRequest(EditedRequest):
    """A request that is about one prompt."""

    prompt: Prompt


class LogitRequest(PromptRequest):
    """A request that explains a logit, or the difference of two."""

    token: OneToken = Field(description="the token whose logit is explained: an id, or a text that is one token")
    minus: OneToken | None = Field(
        None, description="a second token, whose logit is subtracted; default: nothing is subtracted"
    )
    position: int = Field(
        -1, description="the position whose logits are explained; a negative one counts from the end of the prompt"
    )


class TargetRequest(PromptRequest):
    """A request that explains a logit, the difference of two, the loss, or a number of a stage."""

    of: Literal["logit", "loss", "stage"] = Field(
        "logit", description="what is explained: the logit of `token`, the loss, or a number of a stage"
    )
    token: OneToken | None = Field(None, description="as for the method direct; required if a logit is explained")
    minus: OneToken | None = Field(None, description="as for the method direct")
    position: int | None = Field(None, description="as for the method direct")
    targets: TargetIds | None = Field(
        None,
        description="for the loss: the correct next token of each position, null for none; default: the next token of "
        "the prompt. The mean over the positions that have one is explained",
    )
    stage: ShortText | None = Field(None, description="for a number of a stage: its name")
    vector: Vector | None = Field(
        None, description="the row of the stage at `position` times this vector, of the same shape, is explained"
    )


class DirectRequest(LogitRequest):
    method: Literal["direct"]


class GradientRequest(TargetRequest):
    method: Literal["gradient"]
    stages: Globs = Field(["embed"], description="the stages with respect to which gradients are computed, as globs")
    detail: Literal["summary", "values", "none"] = "summary"
    positions: Positions | None = Field(None, description="positions to return; default: all")
    heads: Indices | None = Field(None, description="heads to return, as in POST /forward; default: all")
    encoding: Literal["json", "base64"] = Field("json", description="as in POST /forward")


class IntegratedGradientsRequest(TargetRequest):
    method: Literal["integrated_gradients"]
    steps: int = Field(32, ge=1, le=MAX_STEPS, description="passes along the line; more make the error smaller")
    baseline: Literal["mean", "zero"] = Field(
        "mean", description="where the line begins, at every position: at the mean of all token embeddings, or at zero"
    )
    baseline_prompt: Prompt | None = Field(
        None, description="a prompt with as many tokens, whose embeddings are the baseline instead"
    )


class PatchRequest(StrictBody):
    """The patches of a request, from the pass over `prompt` into the pass over `corrupted`."""

    corrupted: Prompt = Field(
        description="a second prompt with as many tokens; parts of its pass are replaced by those of `prompt`"
    )
    positions: Positions | None = Field(None, description="positions to patch; default: all")
    heads: Indices | None = Field(None, description="heads to patch, as in POST /forward; default: all")


class AttributionPatchingRequest(TargetRequest, PatchRequest):
    method: Literal["attribution_patching"]
    stages: Globs = Field(["*.resid_pre", "*.attn.z"], description="the stages to patch, as globs")


class PatchingRequest(LogitRequest, PatchRequest):
    method: Literal["patching"]
    stages: Globs = Field(["*.resid_pre"], description="the stages to patch, as globs")
    by: Axes = Field(
        ["position", "head"],
        description="each cell patches one position, one head, or one head at one position; along an axis that is not "
        "named, all selected positions or heads are patched together",
    )
    receivers: Globs | None = Field(
        None,
        description="path patching: each patch acts through these stages only, and on them only directly; globs",
    )
    stream: bool = Field(False, description="send the cells as Server-Sent Events while they are computed")


class LogitLensRequest(PromptRequest):
    method: Literal["logit_lens"]
    token: OneToken | None = Field(None, description="a token whose logit, probability and rank are followed")
    positions: Positions | None = Field(None, description="positions to decode; default: the last one")
    top_k: int = Field(5, ge=1, description="most likely tokens to return for each layer and position")
    lens: Literal["tuned", "plain"] | None = Field(
        None,
        description="tuned: translate each residual before it is decoded, with the translators of `--lens`; plain: "
        "decode it as it is; default: tuned if the server has translators",
    )


AttributeUnion = Annotated[
    DirectRequest
    | GradientRequest
    | IntegratedGradientsRequest
    | AttributionPatchingRequest
    | PatchingRequest
    | LogitLensRequest,
    Field(discriminator="method"),
]
EXAMPLES: list[Any] = [
    {"method": "direct", "prompt": PROMPT, "token": 10, "minus": 11},
    {"method": "gradient", "prompt": PROMPT, "token": 10, "stages": ["blocks.*.attn.z"]},
    {"method": "integrated_gradients", "prompt": PROMPT, "token": 10, "steps": 8},
    {"method": "attribution_patching", "prompt": [40, 41, 42], "corrupted": [40, 43, 42], "token": 10, "minus": 11},
    {"method": "logit_lens", "prompt": PROMPT, "top_k": 3},
]


class AttributeRequest(RootModel[AttributeUnion]):
    """A request for an attribution. docs/api.md describes what each `method` computes."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES})
