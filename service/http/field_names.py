"""Find unknown fields in JSON bodies, also in nested objects: leave them out, or suggest the known fields that were
probably meant.

pydantic finds unknown fields as well, but its errors do not name the known fields.
"""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from service.http.errors import ApiError, join_some, wrong_shape

# Groups of names with the same or a similar meaning. The first name of a group that the request knows is suggested.
SYNONYMS = (
    ("prompt", "messages", "text", "tokens", "input", "inputs", "query", "content"),
    ("prompt", "tokens", "ids", "input_ids", "token_ids", "prompt_token_ids", "prompt_ids"),
    ("messages", "conversation", "chat", "history"),
    (
        *("max_tokens", "max_completion_tokens", "max_new_tokens", "max_output_tokens", "max_gen_tokens"),
        *("n_predict", "num_predict", "max_length", "length"),
    ),
    ("temperature", "do_sample", "temp", "greedy"),
    ("n", "num_return_sequences", "num_samples", "num_completions", "best_of", "candidate_count"),
    ("stop", "stop_sequences", "stop_strings", "stop_words", "until"),
    ("stop_token_ids", "eos_token_id", "eos_token_ids", "stop_tokens"),
    ("ignore_eos", "no_stop"),
    ("repetition_penalty", "repeat_penalty"),
    ("logprobs", "n_probs", "num_logprobs", "return_logprob", "top_logprobs"),
    ("seed", "random_seed", "rng_seed"),
    ("echo", "return_full_text", "include_prompt"),
    ("model", "model_name", "model_id", "engine"),
    ("stages", "layers", "hooks", "hook_names", "hook_points", "names_filter", "activations"),
    ("trace", "output_hidden_states", "output_attentions", "return_hidden_states", "cache_activations"),
    ("detail", "return_values", "summary"),
    ("positions", "pos", "pos_slice", "token_positions"),
    ("heads", "head_indices", "head_index"),
    ("targets", "labels", "target_ids"),
    ("dtype", "torch_dtype", "precision"),
    ("add_special_tokens", "add_special", "add_bos", "add_bos_token"),
    ("skip_special_tokens", "skip_special"),
)
# How a suggested field differs from the unknown one: (unknown field, suggested field) -> a sentence.
DIFFERENCES = {
    ("do_sample", "temperature"): "Temperature 0 always takes the most likely token.",
    ("greedy", "temperature"): "Temperature 0 always takes the most likely token.",
    ("max_length", "max_tokens"): "It counts only new tokens, without the prompt.",
}
MAX_NAME = 100  # characters of a field's name in an error message


@dataclass(frozen=True)
class Shape:
    """The positions in a JSON value at which objects of pydantic models can be.

    `models`: the value itself can be an object of one of these models. `items`: the shape of its items, if it is a
    list. `values`: the shape of its values, if it is an object whose keys the client chooses. Both are None if no
    model can be in them. `has_free_keys`: the value can be an object whose keys the client chooses.
    """

    models: tuple[type[BaseModel], ...] = ()
    items: "Shape | None" = None
    values: "Shape | None" = None
    has_free_keys: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether fields other than those of the models are unknown."""
        has_extra = any(model.model_config.get("extra") == "allow" for model in self.models)
        return bool(self.models) and not has_extra and not self.has_free_keys

    @property
    def ignores_unknown(self) -> bool:
        """Whether unknown fields of an object may be left out."""
        return all(model.model_config.get("extra") == "ignore" for model in self.models)

    def fields(self, value: Mapping[str, Any] | None = None) -> dict[str, "Shape | None"]:
        """The fields that an object of any of the models may have, with their shapes.

        If the `type` of `value` is that of some of the models, the object is of one of these.
        """
        models = self.models
        if value is not None and len(models) > 1:
            models = tuple(model for model in models if value.get("type") in types_of(model)) or models
        fields: dict[str, Shape | None] = {}
        for name, shape in (item for model in models for item in fields_of(model).items()):
            fields[name] = either(fields[name], shape) if name in fields else shape
        return fields


@lru_cache(maxsize=256)
def fields_of(model: type[BaseModel]) -> Mapping[str, Shape | None]:
    """The fields of a model under their names in JSON, each with the shape of its value."""
    return {field.alias or name: shape_of(field.annotation) for name, field in model.model_fields.items()}


@lru_cache(maxsize=256)
def types_of(model: type[BaseModel]) -> tuple[Any, ...]:
    """The values that the field `type` of a model may have; None stands for no such field."""
    field = model.model_fields.get("type")
    if field is None or get_origin(field.annotation) is not Literal:
        return ()
    return get_args(field.annotation) if field.is_required() else (*get_args(field.annotation), None)


def shape_of(annotation: Any) -> Shape | None:
    """The shape of the values of a type; None if no model can be in them."""
    shape = None
    for kind in alternatives(annotation):
        origin, arguments = get_origin(kind), get_args(kind)
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            shape = either(shape, Shape(models=(kind,)))
        elif origin in (list, tuple):
            for argument in arguments:
                items = shape_of(argument)
                shape = shape if items is None else either(shape, Shape(items=items))
        elif kind is Any or kind is dict or origin is dict:
            shape = either(shape, Shape(values=shape_of(arguments[1]) if arguments else None, has_free_keys=True))
    return shape


def either(first: Shape | None, second: Shape | None) -> Shape | None:
    """The shape of values that have one of two shapes."""
    if first is None or second is None:
        return first or second
    return Shape(
        models=(*first.models, *(model for model in second.models if model not in first.models)),
        items=either(first.items, second.items),
        values=either(first.values, second.values),
        has_free_keys=first.has_free_keys or second.has_free_keys,
    )


def alternatives(annotation: Any) -> Iterator[Any]:
    """The types of a union, without annotations; or the type itself."""
    if get_origin(annotation) is Annotated:
        yield from alternatives(get_args(annotation)[0])
    elif get_origin(annotation) in (Union, UnionType):
        for argument in get_args(annotation):
            yield from alternatives(argument)
    else:
        yield annotation


def check_names(value: Any, *models: type[BaseModel], ignored: list[str] | None = None) -> None:
    """Raise 422 for the first object with a field that its model does not know, and suggest a known field.

    Of several models, the value may be any. With `ignored`, unknown fields are removed from the objects whose model
    ignores them, and their paths are added to it. A field that is null counts as not sent then, in all objects.
    """
    _check(value, Shape(models), (), ignored)


def _check(value: Any, shape: Shape, path: tuple[int | str, ...], ignored: list[str] | None) -> None:
    """Check an object or a list at `path`. With `ignored`, unknown fields are removed and their paths added to it."""
    inner: list[tuple[int | str, Any, Shape | None]] = []
    if isinstance(value, list) and shape.items is not None:
        inner = [(index, item, shape.items) for index, item in enumerate(value)]
    elif isinstance(value, dict):
        fields = shape.fields(value)
        unknown = [name for name in value if name not in fields]
        if unknown and shape.is_closed:
            _leave_out(value, unknown, shape, path, ignored)
        inner = [(name, item, fields.get(name, shape.values)) for name, item in value.items()]
    for key, item, item_shape in inner:
        if item_shape is not None and isinstance(item, dict | list):
            _check(item, item_shape, (*path, key), ignored)


def _leave_out(
    value: dict[str, Any], unknown: list[str], shape: Shape, path: tuple[int | str, ...], ignored: list[str] | None
) -> None:
    """Remove unknown fields from an object. Raises 422 if they may not be left out."""
    if ignored is None:
        raise _unknown_field(unknown, shape, path)
    sent = [name for name in unknown if value[name] is not None]
    if sent and not shape.ignores_unknown:
        raise _unknown_field(sent, shape, path)
    for name in unknown:
        del value[name]
    ignored += [".".join(map(str, (*path, name))) for name in sent]


def _unknown_field(unknown: list[str], shape: Shape, path: tuple[int | str, ...]) -> ApiError:
    """422 that names the first unknown field of the object at `path`, with a hint, and then the other ones."""
    name = unknown[0][:MAX_NAME]
    more = f" (nor are {join_some(unknown[1:])})" if len(unknown) > 1 else ""
    place = [str(key)[:MAX_NAME] for key in path]
    param = ".".join([*place, name] if name.isprintable() and name else place) or "body"
    return wrong_shape(param, f"this field is not known{more}; {hint(name, shape)}", "extra_forbidden")


def hint(name: str, shape: Shape) -> str:
    """The known field that was probably meant, as a question; or a list of all known fields."""
    fields = shape.fields()
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).replace("-", "_").lower()
    found = _same_meaning(plain, list(fields)) or _nested_name(plain, fields)
    if found is None:
        found = next(iter(difflib.get_close_matches(plain, fields, n=1)), None)
    if found is None:
        return f"known fields are {', '.join(fields)}"
    difference = DIFFERENCES.get((plain, found))
    return f"did you mean {found!r}?" + (f" {difference}" if difference else "")


def _same_meaning(name: str, known: list[str]) -> str | None:
    """The known field that has this name, or means the same."""
    if name in known:
        return name
    groups = (group for group in SYNONYMS if name in group)
    return next((other for group in groups for other in group if other in known), None)


def _nested_name(name: str, fields: Mapping[str, Shape | None]) -> str | None:
    """A field of an object inside, such as `trace.detail`, that has this name or means the same."""
    for outer, shape in fields.items():
        inner = None if shape is None else _same_meaning(name, list(shape.fields()))
        if inner is not None:
            return f"{outer}.{inner}"
    return None


def known_part(loc: tuple[int | str, ...], model: type[BaseModel]) -> tuple[int | str, ...]:
    """The part of the location of a pydantic error that clients know: names of fields, and indices.

    The other strings are dropped: they are branches of a union, or keys that the client chose. So the tag of a branch
    must not be the name of a field.
    """
    shape: Shape | None = Shape((model,))
    kept: list[int | str] = []
    for part in loc:
        fields = {} if shape is None else shape.fields()
        if isinstance(part, int):
            kept.append(part)
            shape = None if shape is None else shape.items
        elif part in fields:
            kept.append(part)
            shape = fields[part]
        elif shape is not None and shape.values is not None:
            shape = shape.values
    return tuple(kept)
