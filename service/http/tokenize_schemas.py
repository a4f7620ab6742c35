"""The JSON bodies of POST /tokenize and POST /detokenize."""

from typing import Annotated

from pydantic import Field

from service.http.field_types import Text, TokenIds, at_most
from service.http.openai_schemas import MAX_MESSAGES, JsonObject, Message, Tool
from service.http.schemas import PROMPT, ModelRequest, example


class TokenizeRequest(ModelRequest):
    """The text is in `text`, or in `prompt` as vLLM's clients send it: then the answer has vLLM's form, too.

    In place of a text, `messages` are rendered with the chat template, as for POST /v1/chat/completions.
    """

    model_config = example(text=PROMPT)

    text: Text | None = None
    prompt: Text | None = Field(None, description="the text, for an answer in vLLM's form")
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1), at_most(MAX_MESSAGES)] | None = Field(
        None, description="a conversation, which the chat template of the model turns into a prompt"
    )
    add_generation_prompt: bool = Field(
        True, description="with `messages`: end the prompt with the beginning of an answer"
    )
    tools: Annotated[list[Tool], Field(fail_fast=True), at_most(128)] = Field(
        [], description="with `messages`: the functions that the chat would offer"
    )
    chat_template_kwargs: JsonObject = Field({}, description="with `messages`: variables for the chat template")
    add_special_tokens: bool = Field(
        True, description="add the special tokens of the checkpoint to a text; a chat template writes its own"
    )
    return_offsets: bool = Field(False, description="for a `text`: also return the characters of each token")
    return_token_strs: bool = Field(False, description="in vLLM's form: also return the texts of the tokens")


class DetokenizeRequest(ModelRequest):
    model_config = example(tokens=[3, 1, 2])

    tokens: TokenIds
    skip_special_tokens: bool = True
