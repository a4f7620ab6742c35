"""The base classes of results: what Python, JSON and the OpenAPI page share. This module knows no single result.

A result is a frozen dataclass that is the only description of an answer. The server builds it and writes it as JSON
(service/http/encoding.py), FastAPI derives the OpenAPI schema from its fields, and clients read it from JSON
(forwardscope/reading.py). A field whose default is None or empty is left out of the JSON while it has this value.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, ClassVar, Protocol, dataclass_transform, get_args

from typing_extensions import TypeVar

from forwardscope.display import Displayed, short_list


class Indexable(Protocol):
    """A numpy array or a tensor."""

    def __getitem__(self, key: Any, /) -> Any: ...


Array = TypeVar("Array", bound=Indexable, default=Any)


class Doc:
    """The description of a field on the OpenAPI page: `Annotated[int, Doc("the number of ...")]`."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        return handler(schema) | {"description": self.text}


class OrNull:
    """Marks a field that may be null in JSON, but never is None in Python."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> dict[str, Any]:
        return {"type": "nullable", "schema": handler(source)}


Number = Annotated[float, OrNull()]
"""A number that is null in JSON, and NaN in Python, if it is not finite."""


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
class Record(Displayed):
    """The base of all results. A subclass is a frozen dataclass whose `vars` are the fields in JSON."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    as_dicts: ClassVar[Callable[..., list[dict[str, Any]]]]

    def __init_subclass__(cls, *, eq: bool = True, kw_only: bool = False) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, eq=eq, kw_only=kw_only, repr=False)(cls)
        cls.__init__, as_dicts = functions_of(cls)  # type: ignore[method-assign]  # takes half the time
        cls.as_dicts = staticmethod(as_dicts)

    def __class_getitem__(cls, _: Any) -> Any:
        return cls  # the types of arrays are for type checkers only

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Any:
        """Build the record from the values of its fields, as they were read from JSON."""
        return cls(**values)


def functions_of(kind: Any) -> tuple[Any, Any]:
    """The `__init__` of a record, and a function from columns of its fields to dictionaries, which builds no records.

    A field whose default is None or empty is not set to it, so JSON does not have it. Reading such a field gives the
    default, which is an attribute of the class.
    """
    defaults = {f"default_{each.name}": each.default for each in fields(kind) if each.default is not MISSING}
    arguments = ["self", *(["*"] if any(each.kw_only for each in fields(kind)) else [])]
    lines = ["__own = self.__dict__"]
    for each in fields(kind):
        name, default = each.name, each.default
        arguments.append(name if default is MISSING else f"{name}=default_{name}")
        condition = "" if default is MISSING or default else f"if {name}{' is not None' if default is None else ''}: "
        lines.append(f"{condition}__own[{name!r}] = {name}")
    exec(f"def __init__({', '.join(arguments)}):\n    " + "\n    ".join(lines), defaults)
    names = [each.name for each in fields(kind)]
    pairs = ", ".join(f"{each!r}: {each}" for each in names)
    exec(f"def as_dicts(*columns):\n    return [{{{pairs}}} for [{', '.join(names)}] in zip(*columns)]", defaults)
    return defaults["__init__"], defaults["as_dicts"]


Item = TypeVar("Item", bound=Record, default=Any)


class Columns(Sequence[Item]):
    """Records that are stored as columns, one for each field, because many small objects cost time.

    A record is built when it is read, and equals the one at its place in a tuple. In JSON, they are a list.
    """

    __slots__ = ("_columns", "_kind")

    def __init__(self, kind: Callable[..., Item], *columns: Sequence[Any]) -> None:
        self._kind, self._columns = kind, columns

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self._kind(*(column[index] for column in self._columns))

    def __len__(self) -> int:
        return len(self._columns[0])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns | tuple) and tuple(self) == tuple(other)

    __hash__ = None  # type: ignore[assignment]  # the columns may be lists

    def __repr__(self) -> str:
        return short_list(self)

    def as_list(self) -> list[dict[str, Any]]:
        """The JSON form."""
        kind: Any = self._kind
        found: list[dict[str, Any]] = kind.as_dicts(*self._columns)
        return found


class Fields(Record, Mapping[str, Any]):
    """A record whose fields can also be read by their names, as in `limits["max_positions"]`."""

    def __getitem__(self, name: str) -> Any:
        return vars(self)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


class HasName(Protocol):
    @property
    def name(self) -> str: ...


Named_ = TypeVar("Named_", bound=HasName, default=Any)


class Named(Mapping[str, Named_]):
    """Records by their names, in the order of computation. In JSON, they are a list."""

    def __init__(self, records: Iterable[Named_] = ()) -> None:
        self._records = {each.name: each for each in records}

    def __getitem__(self, name: str) -> Named_:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __hash__(self) -> int:
        return hash(tuple(self._records))

    def __repr__(self) -> str:
        return short_list(self)

    def as_list(self) -> list[Named_]:
        """The JSON form."""
        return list(self._records.values())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        (record,) = get_args(source) or (Any,)
        schema = handler.generate_schema(list[record])  # type: ignore[valid-type]  # a class
        return schema | {"serialization": {"type": "function-plain", "function": cls.as_list}}


EMPTY: Named[Any] = Named()
