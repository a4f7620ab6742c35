"""Chat templates: from a list of messages to the prompt that a model was trained on.

A template comes from the checkpoint, the messages come from a client, and both are untrusted. So templates run in a
sandbox with limits on time and memory (`template_sandbox.py`), and a special token in a client's text is plain text,
unless the caller allows it (`stand_ins.py`). Messages get the form that the template reads (`template_forms.py`). The
ids equal those of transformers' `apply_chat_template`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypedDict, Unpack

import jinja2
from jinja2 import meta, nodes

from model.errors import InvalidField, join_names, shortened
from model.text.renamed_tokens import only_literal_matches, rename_tokens
from model.text.roles import as_one_message, standard_role, without_system_role
from model.text.special_token_names import SpecialTokenNames
from model.text.stand_ins import StandIns, without
from model.text.template_budget import TooExpensive
from model.text.template_forms import FIRST, SECOND, TemplateForms, find_forms
from model.text.template_sandbox import TemplateEnvironment, render
from model.text.tokenizer import Tokenizer

MAX_SOURCE_CHARACTERS = 1 << 18  # the longest published templates have some 20,000
MAX_MESSAGE_CHARACTERS = 500  # of an error that a template raises
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
CHOSEN = ("default", "tool_use")  # the names of templates that may be chosen
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")  # transformers accepts all of them

# The roles of conversations with a system message after the beginning.
LATER_SYSTEM_MESSAGES = (
    ("user", "system", "user"),
    ("user", "assistant", "system", "user"),
    ("system", "user", "assistant", "system", "user"),
    ("system", "user", "assistant", "user", "system"),
)

Message = Mapping[str, Any]
"""A message, as templates expect it: the fields of the OpenAI protocol, as plain JSON values.

`role` and `content` (a string, None, or a list of parts such as `{"type": "text", "text": ...}`); where they apply,
`name`, `tool_calls`, `tool_call_id` and `reasoning_content`. `function.arguments` of a tool call is an object, not the
JSON text of the protocol: parse the text first. Fields that are None are left out. The caller checks roles and types.
"""


class PromptOptions(TypedDict, total=False):
    """How a prompt is written: `ChatTemplate.encode` describes each option."""

    tools: Sequence[Mapping[str, Any]] | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: Mapping[str, Any] | None
    allow_special_tokens: bool


class InvalidTemplate(ValueError):
    """A template that cannot be compiled. `name` is the name of the template."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"chat template {name!r}: {reason}")
        self.name = name


@dataclass(frozen=True)
class _Variant:
    """A compiled template of a checkpoint."""

    source: str
    template: jinja2.Template
    variables: frozenset[str]
    stand_ins: StandIns
    special_tokens: Mapping[str, str]

    @cached_property
    def forms(self) -> TemplateForms:
        """The forms in which the template reads messages, found when they are first needed."""

        def probe(messages: Sequence[Message]) -> str | None:
            values = dict.fromkeys(OWN_VARIABLES) | {"messages": messages, "add_generation_prompt": False}
            try:
                return render(self.template, {**self.special_tokens, **values})
            except Exception:  # of any kind: the template was not written for such messages
                return None

        return find_forms(probe)


class ChatTemplate:
    """The chat templates of a checkpoint.

    `source` is one template, or several by name. `special_tokens` are variables of the templates, such as `bos_token`.
    Raises an `InvalidTemplate` that names the template and the line.
    """

    def __init__(
        self, source: str | Mapping[str, str], tokenizer: Tokenizer, special_tokens: Mapping[str, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = dict(special_tokens or {})
        named = set(self._special_tokens.values())
        special = {text for text, token in tokenizer.added_tokens.items() if token.special or text in named}
        self._special = special
        self._names = SpecialTokenNames(special)
        self._only_literal_matches = only_literal_matches(tokenizer, special)
        sources = {"default": source} if isinstance(source, str) else source
        environment = TemplateEnvironment()
        self._system_places: dict[tuple[str, ...], bool] = {}
        self._variants = {name: self._compile(environment, name, text) for name, text in sources.items()}

    def _compile(self, environment: TemplateEnvironment, name: str, source: str) -> _Variant:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise InvalidTemplate(name, f"has more than {MAX_SOURCE_CHARACTERS} characters, the limit")
        try:
            tree = environment.parse(source)
            variables = frozenset(meta.find_undeclared_variables(tree))
            stand_ins = StandIns(self._special, _literals(tree))
            compiled = environment.compile_limited(tree)
        except jinja2.TemplateSyntaxError as error:
            raise InvalidTemplate(name, f"line {error.lineno}: {error.message}") from error
        except Exception as error:  # Python's own compiler refuses, for example, too many nested loops
            raise InvalidTemplate(name, f"cannot be compiled: {error}") from error
        return _Variant(source, compiled, variables, stand_ins, self._special_tokens)

    def source_for(self, *, with_tools: bool) -> str:
        """The source of the template that is chosen for conversations with or without tools."""
        return self._choose(with_tools=with_tools).source

    def uses(self, variable: str) -> bool:
        """Whether any template that may be chosen refers to a variable, such as "tools" or "enable_thinking"."""
        return any(variable in self._variants[name].variables for name in CHOSEN if name in self._variants)

    def ends_answers_with(self, token: str) -> bool:
        """Whether the default template writes this text after every answer of the model."""
        turns = [("user", "x"), ("assistant", FIRST), ("user", "x"), ("assistant", SECOND)]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, allow_special_tokens=True)
        except InvalidField:  # the template does not take such a conversation
            return False
        return all(text.partition(answer)[2].lstrip().startswith(token) for answer in (FIRST, SECOND))

    def adapted(self, messages: Sequence[Message], *, with_tools: bool) -> list[dict[str, Any]]:
        """Messages of the OpenAI protocol in the form that the default template reads, so that no text is lost.

        A developer message is a system message. Where the template does not read one, its text is the user's; several
        at the beginning become one, if the template reads only the first message. Several text parts
        become one text if the template does not read parts, and arguments of calls become a text if the template writes
        them as they are. Otherwise the messages stay as transformers gets them.
        """
        own = [{**message, "role": standard_role(message.get("role"))} for message in messages]
        if any(message["role"] == "system" for message in own):
            if not self._reads_system_in(("system", "user")):
                own = without_system_role(own)
            elif any(message["role"] == "system" for message in own[1:]):
                own = self._with_read_system_messages(own)
        forms = self._choose(with_tools=with_tools).forms
        return [forms.message(message) for message in own]

    def _with_read_system_messages(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """System messages in the places where the template reads them: some read only the first message."""
        first = next((place for place, each in enumerate(messages) if each["role"] != "system"), len(messages))
        head, rest = messages[:first], messages[first:]
        if not self._reads_system_in(("system", "system", "user")):
            head = as_one_message(head)
        if not all(map(self._reads_system_in, LATER_SYSTEM_MESSAGES)):
            rest = without_system_role(rest)
        return [*head, *rest]

    def _reads_system_in(self, roles: tuple[str, ...]) -> bool:
        """Whether a prompt has the texts of all messages of a conversation with these roles, some of them "system".

        Some templates refuse system messages, and others drop them.
        """
        if roles not in self._system_places:
            forms = self._choose(with_tools=False).forms
            contents = [f"{FIRST}{place}" for place in range(len(roles))]
            messages = [
                forms.message({"role": role, "content": content}) for role, content in zip(roles, contents, strict=True)
            ]
            try:
                text = self.render(messages, add_generation_prompt=True)
            except InvalidField:
                text = ""
            self._system_places[roles] = all(content in text for content in contents)
        return self._system_places[roles]

    def render(self, messages: Sequence[Message], **options: Unpack[PromptOptions]) -> str:
        """The prompt as text, for people to read. The arguments are those of `encode`."""
        return self._names.show(self._render(messages, **options))

    def encode(
        self, messages: Sequence[Message], *, max_tokens: int | None = None, **options: Unpack[PromptOptions]
    ) -> list[int]:
        """The token ids of the prompt.

        `add_generation_prompt` ends the prompt with the beginning of an answer. `continue_final_message` ends it inside
        the content of the last message, which the model then continues. The template is "tool_use" if there are tools
        and such a template, else "default". `variables` are additional variables of the template, such as
        `enable_thinking`; the caller refuses those that the template does not use.

        The text of a special token in a message, a tool, a document or a variable is plain text, so that no client can
        end its own message and begin another one. With `allow_special_tokens` it is the token, as in transformers.

        Raises `InvalidField`. Its field is "messages" if the template refuses them, or takes too much time or memory.
        Raises `TooManyTokens` for a prompt that is clearly too long for `max_tokens`.
        """
        text = self._render(messages, **options)
        are_allowed = options.get("allow_special_tokens", False)
        # The template writes a begin-of-sequence token itself, if the model needs one.
        if not are_allowed and not (self._only_literal_matches and self._names.are_the_only_ones(text)):
            return self._renamed.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        return self._tokenizer.encode(self._names.show(text), add_special_tokens=False, max_tokens=max_tokens)

    @cached_property
    def _renamed(self) -> Tokenizer:
        """A tokenizer that finds special tokens only by their unguessable names, built when it is first needed."""
        return rename_tokens(self._tokenizer, self._names.name_of)

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        allow_special_tokens: bool = False,
    ) -> str:
        """The prompt, with names in place of the special tokens that the template wrote, unless they are allowed."""
        variant = self._choose(with_tools=tools is not None)
        variables = variables or {}
        for own in OWN_VARIABLES:
            if own in variables:
                raise InvalidField("chat_template_kwargs", f"{own!r} cannot be set here; it has a field of its own")
        if not messages:
            raise InvalidField("messages", "must have at least one message")
        prepared = [
            _with_reasoning_fields(variant.forms.with_parts({k: v for k, v in each.items() if v is not None}))
            for each in messages
        ]
        stand_ins: Mapping[str, str] = {}
        if not allow_special_tokens:
            given = (prepared, tools, documents, variables)
            (prepared, tools, documents, variables), stand_ins = variant.stand_ins.protect(given)
        if continue_final_message:
            if add_generation_prompt:
                raise InvalidField("continue_final_message", "cannot be combined with add_generation_prompt")
            final_text = self._mark_end(prepared, variant.source)
        values = (prepared, tools, documents, add_generation_prompt)
        all_variables = {**self._special_tokens, **variables, **dict(zip(OWN_VARIABLES, values, strict=True))}
        try:
            text = render(variant.template, all_variables, stand_ins)
        except TooExpensive as error:
            raise InvalidField("messages", f"the chat template {error}; send less text, or fewer messages") from error
        except Exception as error:  # a template can raise anything, mostly for messages that it was not written for
            reason = without(str(error), stand_ins).replace(self._names.end_mark.strip(), "") or type(error).__name__
            is_own = isinstance(error, jinja2.TemplateError)
            raise InvalidField(
                "messages",
                f"the chat template {'refuses them' if is_own else 'cannot render them'}: {_shortened(reason)}",
            ) from error
        if continue_final_message:
            text = self._cut_at_end(text, final_text)
        return text if allow_special_tokens else without(self._names.hide(text), stand_ins)

    def _choose(self, *, with_tools: bool) -> _Variant:
        """The template that transformers chooses."""
        name = "tool_use" if with_tools and "tool_use" in self._variants else "default"
        if name not in self._variants:
            known = join_names(self._variants)
            raise InvalidField("chat_template", f"{shortened(name)} is not a template of this model; known: {known}")
        return self._variants[name]

    def _mark_end(self, messages: list[dict[str, Any]], source: str) -> str:
        """Mark the end of the content of the last message. Returns the content."""
        content = messages[-1].get("content")
        if content is None or "content" not in source:
            raise InvalidField("continue_final_message", "the last message has no content that could be continued")
        if isinstance(content, str):
            messages[-1]["content"] = content + self._names.end_mark
            return content
        parts = [dict(part) for part in content]
        for part in reversed(parts):
            if isinstance(part.get("text"), str):
                text: str = part["text"]
                part["text"] += self._names.end_mark
                messages[-1]["content"] = parts
                return text
        raise InvalidField("continue_final_message", "the last message has no text that could be continued")

    def _cut_at_end(self, text: str, final_text: str) -> str:
        """The text before the mark of `_mark_end`, without spaces at its end if the template trims the content."""
        mark = self._names.end_mark
        place = text.rfind(mark.strip())
        if place < 0 or final_text.strip() not in text:
            raise InvalidField("continue_final_message", "the chat template does not write the last message as it is")
        return text[:place] if text.startswith(mark, place) else text[:place].rstrip()


def _literals(tree: nodes.Template) -> set[str]:
    """The texts that a template compares, looks up or writes, and the names of the fields that it reads."""
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    return texts | {node.attr for node in tree.find_all(nodes.Getattr)}


def _with_reasoning_fields(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its reasoning under the names that templates read, as transformers gives it to them."""
    reasoning = next((message[key] for key in REASONING_FIELDS if message.get(key) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _shortened(reason: str) -> str:
    reason = " ".join(reason.split())
    return reason if len(reason) <= MAX_MESSAGE_CHARACTERS else f"{reason[:MAX_MESSAGE_CHARACTERS]}..."
