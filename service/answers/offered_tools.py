"""The functions that the model may call in a chat, and those of which it must call one."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.http.errors import invalid, wrong_shape
from service.http.openai_schemas import AllowedTools, ChatRequest, JsonObject, NamedFunction, NamedTool, ToolChoice

NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}}
MODES = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


@dataclass(frozen=True)
class OfferedFunction:
    """A function of a request. `place` is its place in the request, such as `tools.0` or `functions.0`.

    `definition` has the fields that the client has sent, and always `parameters`, the JSON schema of the arguments.
    """

    place: str
    definition: JsonObject

    @property
    def name(self) -> str:
        name: str = self.definition["name"]
        return name

    @property
    def parameters(self) -> JsonObject:
        parameters: JsonObject = self.definition["parameters"]
        return parameters

    @property
    def is_strict(self) -> bool:
        return bool(self.definition.get("strict"))


@dataclass(frozen=True)
class OfferedTools:
    """The `offered` functions, and the `enforced` ones, of which at least one must be called.

    `has_name`: the request names the function to call. `left_out`: the places of tools that are not functions.
    """

    offered: Sequence[OfferedFunction] = ()
    enforced: Sequence[OfferedFunction] = ()
    has_name: bool = False
    left_out: Sequence[str] = ()

    @property
    def definitions(self) -> list[JsonObject]:
        """The offered functions, as chat templates take them."""
        return [{"type": "function", "function": function.definition} for function in self.offered]


def read_tools(body: ChatRequest) -> OfferedTools:
    """The tools of a request. Raises 400 for two functions with one name, and for a choice that cannot be made."""
    left_out = [f"tools.{index}" for index, tool in enumerate(body.tools) if tool.type != "function"]
    field = "function_call" if body.functions else "tool_choice"
    choice, name = read_choice(body), None
    functions = read_functions(body)
    if choice is None or isinstance(choice, str):
        mode = MODES[choice or "auto"]
    elif isinstance(choice, NamedFunction):
        mode, name = "required", choice.name
    elif choice.type == "allowed_tools":
        allowed = choice.allowed_tools or AllowedTools(mode=choice.mode, tools=choice.tools)
        mode, names = allowed.mode, {name_of(tool) for tool in allowed.tools}
        for each in sorted(names):
            find(functions, each, field)
        functions = [function for function in functions if function.name in names]
    elif choice.type in MODES:
        mode = MODES[choice.type]
    elif choice.type in ("function", "tool"):
        mode, name = "required", name_of(choice)
    else:
        raise invalid(
            "tool_choice", f"the type {choice.type[:40]!r} is not known; send a function or one of {', '.join(MODES)}"
        )
    if mode == "required" and not functions:
        raise invalid("tool_choice", "there are no tools; send the functions in tools")
    enforced = functions if mode == "required" else []
    if name is not None:
        enforced = [find(functions, name, field)]
    return OfferedTools([] if mode == "none" else functions, enforced, name is not None, left_out)


def read_choice(body: ChatRequest) -> str | ToolChoice | NamedFunction | None:
    """The choice of a function in either form. Raises 400 for fields of both forms, whose answers differ."""
    if body.functions:
        for name in ("tools", "tool_choice"):
            if getattr(body, name):
                raise invalid("functions", f"cannot be combined with {name}; send only tools and tool_choice")
        return body.function_call
    if body.function_call not in (None, "auto") and (body.tools or body.function_call != "none"):
        raise invalid("function_call", "is only for functions; with tools, send tool_choice")
    return body.tool_choice


def read_functions(body: ChatRequest) -> list[OfferedFunction]:
    """The functions of a request. Raises 400 for two with one name, and for parameters that are not an object."""
    given = [(f"functions.{index}", function) for index, function in enumerate(body.functions)]
    for index, tool in enumerate(body.tools):
        if tool.type != "function":
            continue
        if tool.function is None:
            raise wrong_shape(f"tools.{index}.function", "is required for a tool of the type function", "missing")
        given.append((f"tools.{index}", tool.function))
    functions: list[OfferedFunction] = []
    for place, function in given:
        if any(function.name == other.name for other in functions):
            raise invalid(place, f"there are two functions with the name {function.name!r}")
        kind = (function.parameters or {}).get("type", "object")
        if kind != "object" and not (isinstance(kind, list) and "object" in kind):
            raise invalid(place, "parameters must have the type 'object'")
        definition = function.model_dump(exclude_unset=True)
        functions.append(OfferedFunction(place, definition | {"parameters": function.parameters or NO_ARGUMENTS}))
    return functions


def name_of(tool: NamedTool) -> str:
    """The name of the function that a choice names. Raises 400 if there is none."""
    name = tool.name if tool.function is None else tool.function.name
    if name is None:
        raise invalid("tool_choice", "names no function; send its name in tool_choice.function.name")
    return name


def find(functions: Sequence[OfferedFunction], name: str, field: str) -> OfferedFunction:
    """The function of the name that `field` gives. Raises 400 if there is none."""
    for function in functions:
        if function.name == name:
            return function
    known = ", ".join(function.name for function in functions[:5]) or "none"
    raise invalid(field, f"there is no function {name[:64]!r}; known: {known}")
