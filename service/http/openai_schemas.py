"""The JSON bodies of the OpenAI routes: the fields of OpenAI's API, vLLM's additions to it, and our own.

Null means the default, as in OpenAI's API. Fields that do not change the answer are accepted (`Ignored`). A field that
would change the answer, but is not implemented, is accepted only with its neutral values (`not_implemented`). All other
fields are unknown, and left out (field_names.py).
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, ConfigDict, Discriminator, Field, GetJsonSchemaHandler, Tag, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from service.http.errors import invalid
from service.http.field_names import alternatives
from service.http.field_types import ShortText, StrictBody, Text, TokenIds, at_most
from service.http.generate_schemas import MAX_TOP, MAX_TOP_K, TOP_LOGPROBS, GenerationRequest
from service.http.schemas import PROMPT, PROMPT_KIND, example

MINUS_ONE = frozenset({"max_tokens", "max_completion_tokens", "seed"})  # -1 means the default
MAX_MESSAGES = 4096
FUNCTION_NAME = r"^[a-zA-Z0-9_.:/-]{1,128}$"
Ignored = Annotated[Any, Field(None, description="accepted; it does not change the answer")]
JsonObject = dict[str, Any]
ANNOTATIONS = ("title", "description", "default", "neutral", "instead")  # of a field's JSON schema, beside its type
NULL = {"type": "null"}


def not_implemented(*neutral: Any, instead: str = "") -> Any:
    """A field that is refused unless it has one of its neutral values (or null).

    `instead` is the field to send in its place, if there is one.
    """
    accepted = f"accepted: {', '.join(map(repr, neutral))}" if neutral else "null is accepted"
    description = f"not implemented; {accepted}" + (f"; send {instead} instead" if instead else "")
    return Field(None, description=description, json_schema_extra={"neutral": list(neutral), "instead": instead})


@lru_cache(maxsize=64)
def loose_fields(model: type[BaseModel]) -> tuple[frozenset[str], frozenset[str]]:
    """The fields of a model that hold an integer but no other number, and those that hold an object but no list."""
    kinds = {
        field.alias or name: {get_origin(kind) or kind for kind in alternatives(field.annotation)}
        for name, field in model.model_fields.items()
    }
    objects = {name for name, found in kinds.items() if list not in found and any(map(_is_object, found))}
    return frozenset(name for name, found in kinds.items() if int in found and float not in found), frozenset(objects)


def _is_object(kind: Any) -> bool:
    return kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel))


def nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    """The JSON schema of a field that may also be null."""
    about = {name: value for name, value in field.items() if name in ANNOTATIONS}
    kinds = field.get("anyOf") or [{name: value for name, value in field.items() if name not in ANNOTATIONS}]
    return field if {} in kinds or NULL in kinds else {**about, "anyOf": [*kinds, NULL]}


class Nullable(StrictBody):
    """An object of a client's request, whose unknown fields may be left out.

    A field that is null has its default. As some programming languages have only one kind of number, or write an empty
    object like an empty list, 8.0 is read as an integer, and [] as an empty object, which has its default, too.
    """

    model_config = ConfigDict(extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _read_loosely(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        integers, objects = loose_fields(cls)
        return {
            name: int(value) if name in integers and isinstance(value, float) and value.is_integer() else value
            for name, value in values.items()
            if value is not None and not (value == [] and name in objects)
        }

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        described = handler(schema)
        fields = handler.resolve_ref_schema(described)
        for name, field in fields.get("properties", {}).items():
            if name not in fields.get("required", []):
                fields["properties"][name] = nullable(field)
        return described


def check_implemented(body: Nullable, where: str = "") -> None:
    """Raise 400 for the first field that is not implemented and has no neutral value."""
    for name, field in type(body).model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, Mapping) and "neutral" in extra:
            value, neutral = getattr(body, name), extra["neutral"]
            assert isinstance(neutral, list)
            if value is not None and not any(type(value) is type(each) and value == each for each in neutral):
                accepted = f"; accepted are null and {', '.join(map(repr, neutral))}" if neutral else ""
                advice = f"send {extra['instead']} in its place" if extra["instead"] else "leave the field out"
                reason = f"is not implemented, and would change the answer{accepted}; {advice}"
                raise invalid(f"{where}{name}", reason, "not_implemented")


MAX_NEW_TOKENS: Any = Field(
    None,
    ge=1,
    description="maximum number of new tokens; default: as many as the context and the cache have room for, but 1024 "
    "with log-probabilities or trace",
)


class StreamOptions(Nullable):
    include_usage: bool = Field(False, description="end the stream with a chunk that has `usage` and no choices")
    include_obfuscation: Ignored
    continuous_usage_stats: bool = Field(False, description="each chunk has the `usage` so far")


class OtherServers(Nullable):
    """Fields and values of other servers, which clients send by mistake or by habit.

    Those that change the text are not implemented here under these names: to leave them out would be a silent change.
    """

    max_new_tokens: Any = not_implemented(-1, instead="max_tokens")
    max_output_tokens: Any = not_implemented(-1, instead="max_tokens")
    n_predict: Any = not_implemented(-1, instead="max_tokens")
    num_predict: Any = not_implemented(-1, instead="max_tokens")
    min_new_tokens: Any = not_implemented(0, instead="min_tokens")
    stop_sequences: Any = not_implemented([], "", instead="stop")
    do_sample: Any = not_implemented(True, instead="temperature: 0")
    repeat_penalty: Any = not_implemented(1, 1.0, instead="repetition_penalty")
    random_seed: Any = not_implemented(instead="seed")
    system: Any = not_implemented("", instead="a message with the role system")
    guided_json: Any = not_implemented(instead="structured_outputs.json")
    guided_regex: Any = not_implemented(instead="structured_outputs.regex")
    guided_choice: Any = not_implemented([], instead="structured_outputs.choice")
    guided_grammar: Any = not_implemented(instead="structured_outputs.grammar")
    grammar: Any = not_implemented("", instead="structured_outputs.grammar")
    ebnf: Any = not_implemented(instead="structured_outputs.grammar")
    regex: Any = not_implemented(instead="structured_outputs.regex")
    json_schema: Any = not_implemented(instead="structured_outputs.json")
    format: Any = not_implemented("", instead="response_format")
    structural_tag: Any = not_implemented()
    logits_processors: Any = not_implemented([])
    samplers: Any = not_implemented([])
    lora: Any = not_implemented([], instead="model, which names an adapter,")
    typical_p: Any = not_implemented(1, 1.0)
    typ_p: Any = not_implemented(1, 1.0)
    tfs_z: Any = not_implemented(1, 1.0)
    top_a: Any = not_implemented(0, 0.0)
    top_n_sigma: Any = not_implemented(-1, -1.0, 0, 0.0)
    epsilon_cutoff: Any = not_implemented(0, 0.0)
    eta_cutoff: Any = not_implemented(0, 0.0)
    mirostat: Any = not_implemented(0)
    mirostat_mode: Any = not_implemented(0)
    dry_multiplier: Any = not_implemented(0, 0.0)
    xtc_probability: Any = not_implemented(0, 0.0)
    dynatemp_range: Any = not_implemented(0, 0.0)
    smoothing_factor: Any = not_implemented(0, 0.0)
    no_repeat_ngram_size: Any = not_implemented(0)
    prompt_embeds: Any = not_implemented()
    extra_body: Any = not_implemented({}, instead="each of its fields")  # an option of OpenAI's SDK
    top_k: int | None = Field(
        None, ge=-1, le=MAX_TOP_K, description="0 or -1 keeps all tokens; default: the checkpoint's, else 0"
    )
    top_p: float | None = Field(
        None, ge=0, le=1, description="0 keeps only the most likely token; default: the checkpoint's, else 1"
    )
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="default: a new random seed for each request")

    @model_validator(mode="before")
    @classmethod
    def _drop_none(cls, values: Any) -> Any:
        """Drop the values that mean "none" to other servers: no limit, a random seed, no stop string.

        OpenAI's API also allows 0 for `top_p`.
        """
        if not isinstance(values, dict):
            return values
        values = {name: value for name, value in values.items() if not (name in MINUS_ONE and value == -1)}
        if type(values.get("top_p")) in (int, float) and values["top_p"] == 0:
            values |= {"top_p": 1, "top_k": 1}
        stop = values.get("stop")
        if stop == "" or (isinstance(stop, list) and "" in stop):
            values["stop"] = [text for text in stop if text != ""]
        return values


class OpenAIRequest(OtherServers, GenerationRequest):
    """The fields that both routes have."""

    model_config = ConfigDict(extra="ignore")

    stream_options: StreamOptions | None = None
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP, description="report the log-probabilities of the prompt's tokens, as vLLM does"
    )
    return_token_ids: bool = Field(False, description="report the token ids of the prompt and of the choices")
    return_tokens_as_token_ids: bool = Field(
        False, description="write tokens in logprobs as `token_id:7`, also those that are no whole text"
    )
    user: Ignored
    store: Ignored
    metadata: Ignored
    service_tier: Ignored
    safety_identifier: Ignored
    prompt_cache_key: Ignored
    prompt_cache_retention: Ignored
    prompt_cache_options: Ignored
    priority: Ignored
    use_beam_search: Any = not_implemented(False)
    num_beams: Any = not_implemented(1)
    length_penalty: Any = not_implemented(1, 1.0)
    spaces_between_special_tokens: Ignored
    truncate_prompt_tokens: Any = not_implemented()
    detokenize: Any = not_implemented(True)
    request_id: Ignored


# POST /v1/completions

MAX_PROMPTS = 2048  # as in OpenAI's API
Prompts = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[Text], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("texts")]
    | Annotated[list[TokenIds], Field(fail_fast=True), at_most(MAX_PROMPTS), Tag("lists of ids")],
    PROMPT_KIND,
    Field(description="text, or token ids, which are used as they are; or a list of such prompts"),
]


class CompletionRequest(OpenAIRequest):
    model_config = example(prompt=PROMPT, max_tokens=16, temperature=0, logprobs=2)

    prompt: Prompts
    logprobs: int | None = TOP_LOGPROBS
    echo: bool = Field(False, description="return the prompt before its continuation")
    best_of: int | None = Field(
        None, ge=1, description="generate this many continuations, and return the `n` with the highest mean logprob"
    )
    add_special_tokens: bool = Field(True, description="add the checkpoint's special tokens to a text")
    suffix: Text = Field(
        "",
        description="the text after the new one, for models that fill in the middle; the prompt is what is before it",
    )
    max_completion_tokens: Any = not_implemented(-1, instead="max_tokens")
    response_format: Any = not_implemented({"type": "text"}, instead="structured_outputs.json")


# POST /v1/chat/completions


class FunctionCall(Nullable):
    name: ShortText
    arguments: Text | JsonObject = Field("", description="a JSON object, as text or as it is")


class ToolCall(Nullable):
    id: ShortText | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: Ignored


class CustomCall(Nullable):
    name: ShortText
    input: Text


class CustomToolCall(Nullable):
    """A call of a tool that takes text. The model reads it as a call with the argument `input`."""

    id: ShortText | None = None
    type: Literal["custom"]
    custom: CustomCall
    index: Ignored

    @property
    def function(self) -> FunctionCall:
        """The call as one of a function."""
        return FunctionCall(name=self.custom.name, arguments={"input": self.custom.input})


def kind_of_call(value: Any) -> str:
    return "custom call" if isinstance(value, dict) and value.get("type") == "custom" else "function call"


AnyToolCall = Annotated[
    Annotated[ToolCall, Tag("function call")] | Annotated[CustomToolCall, Tag("custom call")],
    Discriminator(kind_of_call),
]


class ContentPart(Nullable):
    """A part of a message. The model reads parts with text only."""

    type: ShortText | None = None
    text: Text | None = None
    refusal: Text | None = None


class Message(Nullable):
    """One message of a conversation. `developer` means `system`."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[ContentPart], Field(fail_fast=True), at_most(MAX_MESSAGES)] | None = Field(
        None, description="a text, or a list of text parts"
    )
    name: ShortText | None = None
    tool_calls: Annotated[list[AnyToolCall], at_most(MAX_MESSAGES)] | None = None
    tool_call_id: ShortText | None = None
    reasoning_content: Text | None = Field(None, description="passed to the chat template")
    reasoning: Text | None = Field(None, description="another name of reasoning_content")
    refusal: Text | None = None
    annotations: Ignored
    audio: Any = not_implemented()
    function_call: FunctionCall | None = Field(None, description="the older form of tool_calls with one call")

    @property
    def calls(self) -> list[ToolCall | CustomToolCall]:
        """The calls of the message, in any form."""
        older = [] if self.function_call is None else [ToolCall(function=self.function_call, index=None)]
        return [*older, *(self.tool_calls or ())]


class Function(Nullable):
    name: str = Field(pattern=FUNCTION_NAME)
    description: Text | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments; default: no arguments")
    strict: bool = Field(False, description="calls follow the schema even if the model decides whether to call")


class Tool(Nullable):
    """A function that the model may call. Tools of other types are left out, as nobody here runs them."""

    type: ShortText = "function"
    function: Function | None = Field(None, description="required for the type function")


class NamedFunction(Nullable):
    name: ShortText


class NamedTool(Nullable):
    type: ShortText = "function"
    function: NamedFunction | None = None
    name: ShortText | None = Field(None, description="the name of the function, in the form of other APIs")


class AllowedTools(Nullable):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(fail_fast=True, min_length=1), at_most(128)]


class ResponseToolChoice(NamedTool):
    """One function by its name, or the functions that are allowed."""

    mode: Literal["auto", "required"] = Field("auto", description="of allowed tools")
    tools: Annotated[list[NamedTool], Field(fail_fast=True), at_most(128)] = Field([], description="allowed tools")


class ToolChoice(ResponseToolChoice):
    """One function by its name, a choice such as `{"type": "auto"}`, or the functions that are allowed."""

    allowed_tools: AllowedTools | None = None


class JsonSchema(Nullable):
    name: ShortText | None = None
    description: Text | None = None
    schema_: JsonObject | None = Field(None, alias="schema", description="required")
    strict: bool = Field(
        True,
        description="the answer always follows the schema; false: objects may have properties that it does not name",
    )


class ResponseFormat(Nullable):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: JsonObject | None = Field(None, alias="schema", description="the schema, in the form of other servers")


class ChatFields(OpenAIRequest):
    """The fields that chats have in both forms of OpenAI's API."""

    parallel_tool_calls: bool = Field(True, description="false: at most one call, if a grammar enforces its form")
    chat_template_kwargs: JsonObject = Field({}, description="variables for the chat template, such as enable_thinking")
    enable_thinking: bool | None = Field(None, description="passed to a chat template with a switch for thinking")
    allow_special_tokens: bool = Field(
        False, description="the text of a special token in the request is the token; default: plain text"
    )


class ChatRequest(ChatFields):
    model_config = example(
        messages=[{"role": "user", "content": "What is the capital of France?"}], max_completion_tokens=16
    )

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)]
    max_completion_tokens: int | None = MAX_NEW_TOKENS
    logprobs: bool = Field(False, description="report the log-probabilities of the new tokens")
    top_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP, description="with `logprobs`: report this many most likely tokens as well"
    )
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(128)] = Field([], description="functions to call")
    tool_choice: Literal["none", "auto", "required", "any"] | ToolChoice | None = Field(
        None, description="default: auto with tools, else none; any means required"
    )
    add_generation_prompt: bool | None = Field(
        None, description="begin a new message of the assistant; default: true, unless the last message is continued"
    )
    continue_final_message: bool = Field(False, description="continue the last message instead of beginning a new one")
    documents: Annotated[list[JsonObject], at_most(MAX_MESSAGES)] | None = Field(
        None, description="passed to the chat template"
    )
    prediction: Ignored
    modalities: Any = not_implemented(["text"])
    audio: Any = not_implemented()
    functions: Annotated[list[Function], Field(fail_fast=True), at_most(128)] = Field(
        [], description="the older form of tools; the answer has at most one call, as function_call"
    )
    function_call: Literal["none", "auto"] | NamedFunction | None = Field(
        None, description="the older form of tool_choice, for functions"
    )
    reasoning_effort: ShortText | None = Field(
        None, description="passed to a chat template that uses it; if the template only has a switch, none turns it off"
    )
    web_search_options: Any = not_implemented()
    moderation: Any = not_implemented()
    include_reasoning: bool = Field(True, description="false: leave the text between the marks of thinking out")
    chat_template: Any = not_implemented()
    echo: Any = not_implemented(False)
    add_special_tokens: Any = not_implemented(False)
