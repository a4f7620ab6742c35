"""An unknown field of a body is an error that names the known field that was probably meant, at every depth."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from service.http.bodies import shape_error
from service.http.errors import ApiError
from service.http.field_names import DIFFERENCES, SYNONYMS, check_names
from service.http.forward_schemas import ForwardRequest
from service.http.generate_schemas import GenerateRequest, TraceRequest
from service.http.logits_schemas import LogitsRequest
from service.http.tokenize_schemas import DetokenizeRequest, TokenizeRequest


def error_of(body: Any, model: type[BaseModel]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        check_names(body, model)
    assert (caught.value.status, caught.value.code) == (422, "extra_forbidden")
    return caught.value


@pytest.mark.parametrize(
    ("model", "name", "meant"),
    [
        *(
            (GenerateRequest, name, "max_tokens")
            for name in ("max_new_tokens", "max_completion_tokens", "maxNewTokens")
        ),
        *((GenerateRequest, name, "max_tokens") for name in ("max_completion_tokens", "num_predict", "max-tokens")),
        *((GenerateRequest, name, "prompt") for name in ("input", "inputs", "text", "promt", "messages")),
        *((LogitsRequest, name, "prompt") for name in ("input_ids", "text", "tokens")),
        *((TokenizeRequest, name, "text") for name in ("txt", "texts")),
        (TokenizeRequest, "content", "prompt"),
        *((DetokenizeRequest, name, "tokens") for name in ("ids", "token_ids", "input_ids")),
        *((ForwardRequest, name, "stages") for name in ("layers", "hooks", "names_filter", "stage")),
        (ForwardRequest, "labels", "targets"),
        (GenerateRequest, "num_return_sequences", "n"),
        (GenerateRequest, "stop_sequences", "stop"),
        (GenerateRequest, "stop_strings", "stop"),
        (GenerateRequest, "repeat_penalty", "repetition_penalty"),
        (GenerateRequest, "n_probs", "logprobs"),
        (GenerateRequest, "topK", "top_k"),
        (GenerateRequest, "logit_lens", "trace.logit_lens"),
        (GenerateRequest, "hooks", "trace.stages"),
    ],
)
def test_the_nearest_known_field_is_suggested_by_meaning_or_by_spelling(
    model: type[BaseModel], name: str, meant: str
) -> None:
    error = error_of({name: 1}, model)
    assert error.message == f"{name}: this field is not known; did you mean '{meant}'?"
    assert error.param == name


def test_a_suggestion_says_how_its_field_differs() -> None:
    assert "'temperature'? Temperature 0 always" in error_of({"do_sample": True}, GenerateRequest).message
    assert "'max_tokens'? It counts only new tokens" in error_of({"max_length": 3}, GenerateRequest).message


def test_without_a_similar_field_all_known_ones_are_listed() -> None:
    assert error_of({"zzz": 1}, DetokenizeRequest).message.endswith(
        "this field is not known; known fields are model, tokens, skip_special_tokens"
    )


def test_each_group_of_synonyms_begins_with_a_field_of_the_api_and_each_difference_belongs_to_a_group() -> None:
    models = (GenerateRequest, TraceRequest, ForwardRequest, TokenizeRequest, DetokenizeRequest)
    known = {name for model in models for name in model.model_fields} | {"messages"}
    assert {group[0] for group in SYNONYMS} <= known
    assert all(any({*pair} <= {*group} for group in SYNONYMS) for pair in DIFFERENCES)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Part(Strict):
    type: Literal["part"]
    text: str


class UserMessage(Strict):
    role: Literal["user"]
    content: str | list[Part]


class ToolMessage(Strict):
    role: Literal["tool"]
    content: str
    tool_call_id: str


class Format(Strict):
    json_schema: dict[str, Any] | None = None
    given_name: str = Field("", alias="schema")


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class ChatRequest(Strict):
    messages: list[Annotated[UserMessage | ToolMessage, Field(discriminator="role")]]
    response_format: Format | None = None
    by_name: dict[str, Part] = {}
    either: Part | dict[str, Any] | None = None
    anything: Open | None = None
    max_tokens: int | None = None


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"trace": {"detial": 1}}, "trace.detial", "did you mean 'detail'?"),
        ({"trace": {"layers": 1}}, "trace.layers", "did you mean 'stages'?"),
    ],
)
def test_fields_of_a_trace_are_checked(body: Any, param: str, hint: str) -> None:
    error = error_of(body, GenerateRequest)
    assert (error.param, error.message) == (param, f"{param}: this field is not known; {hint}")


@pytest.mark.parametrize(
    ("body", "param", "hint"),
    [
        ({"messages": [{"role": "user"}, {"rol": "user"}]}, "messages.1.rol", "did you mean 'role'?"),
        ({"messages": [{"content": [{"texts": ""}]}]}, "messages.0.content.0.texts", "did you mean 'text'?"),
        ({"response_format": {"given_name": 1}}, "response_format.given_name", "known fields are json_schema, schema"),
        ({"by_name": {"a": {"text": "", "typ": 1}}}, "by_name.a.typ", "did you mean 'type'?"),
        ({"messages": [], "\n": 1}, "body", "known fields are"),
        ({"messages": [{"\n": 1}]}, "messages.0", "known fields are role, content, tool_call_id"),
    ],
)
def test_objects_in_lists_unions_and_objects_are_checked(body: Any, param: str, hint: str) -> None:
    error = error_of(body, ChatRequest)
    assert error.param == param
    assert f"this field is not known; {hint}" in error.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": "a", "tool_call_id": "b"}]},  # known to one of the models
        {"response_format": {"json_schema": {"anything": {"goes": [{}]}}, "schema": ""}},
        {"by_name": {"any name": {"type": "part", "text": ""}}},
        {"either": {"any": "name"}},
        {"anything": {"any": "name"}},
        {"messages": 3, "response_format": [], "by_name": "text"},  # wrong types are for pydantic
    ],
)
def test_names_that_a_model_allows_are_no_error(body: Any) -> None:
    check_names(body, ChatRequest)


def test_the_error_of_a_nested_field_names_its_place_without_branches_of_unions_or_keys_of_the_client() -> None:
    def param(body: Any) -> str | None:
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate({"messages": []} | body)
        return shape_error(caught.value, ChatRequest).param

    assert (
        param({"messages": [{"role": "user", "content": [{"type": "part", "text": 1}]}]}) == "messages.0.content.0.text"
    )
    assert param({"by_name": {"secret": {"type": "part", "text": 1}}}) == "by_name.text"
    assert param({"response_format": {"schema": 1}}) == "response_format.schema"


def test_an_error_names_at_most_a_few_of_many_unknown_fields() -> None:
    error = error_of({f"unknown{i}": 1 for i in range(3000)}, GenerateRequest)
    assert "and 2980 more" in error.message
    assert len(error.message) < 700
