"""The named vectors that edits may use: those that the operator has preloaded, and those that clients have sent.

A request finds the vectors of a copy of the store, made at its arrival, also if they are replaced or deleted
afterwards. All methods are called on the event loop's thread.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from model.checkpoints.vector_files import NAME, NAME_RULE, NamedVector
from service.http.errors import ApiError, invalid, join_some


@dataclass(frozen=True)
class VectorEntry:
    """One named vector. `uploaded`: a client has sent it, so that clients may replace and delete it."""

    name: str
    vector: NamedVector
    uploaded: bool


class VectorStore:
    """Vectors by name. Clients may store `max_uploaded` of them."""

    def __init__(self, max_uploaded: int) -> None:
        self._max_uploaded = max_uploaded
        self._entries: Mapping[str, VectorEntry] = {}  # shared with copies, so it is replaced and never changed

    def __iter__(self) -> Iterator[VectorEntry]:
        """All vectors, in the order of their names."""
        return iter(sorted(self._entries.values(), key=lambda entry: entry.name))

    @property
    def num_bytes(self) -> int:
        return sum(entry.vector.num_bytes for entry in self._entries.values())

    def preload(self, vectors: Mapping[str, NamedVector]) -> None:
        """Add vectors that clients cannot change."""
        added = {name: VectorEntry(name, vector, uploaded=False) for name, vector in vectors.items()}
        self._entries = {**self._entries, **added}

    def check_name(self, name: str) -> None:
        """Raise 400 unless clients may store a vector under this name, and 413 if they have stored too many."""
        if not NAME.fullmatch(name):
            raise invalid("name", f"must be {NAME_RULE}")
        found = self._entries.get(name)
        if found is not None and not found.uploaded:
            raise invalid("name", f"{name!r} is a vector of --vectors, which clients cannot change; use another name")
        if found is None and sum(entry.uploaded for entry in self._entries.values()) >= self._max_uploaded:
            message = (
                f"name: {self._max_uploaded} vectors are stored already, which is the limit; delete one, or start the "
                "server with a larger --max-vectors"
            )
            raise ApiError(413, message, param="name", code="too_many_vectors")

    def put(self, name: str, vector: NamedVector) -> VectorEntry:
        """Store a vector, or replace the one of this name. Raises the errors of `check_name`."""
        self.check_name(name)
        entry = VectorEntry(name, vector, uploaded=True)
        self._entries = {**self._entries, name: entry}
        return entry

    def delete(self, name: str) -> VectorEntry:
        """Delete a vector that a client has stored. Raises 404 for an unknown name, and 400 for a preloaded one."""
        if name not in self._entries:
            raise ApiError(
                404, f"name: there is no vector {name[:100]!r}; {self._known()}", param="name", code="vector_not_found"
            )
        entry = self._entries[name]
        if not entry.uploaded:
            raise invalid("name", f"{name!r} is a vector of --vectors, which clients cannot change")
        self._entries = {other: each for other, each in self._entries.items() if other != name}
        return entry

    def find(self, name: str, param: str) -> Tensor | Mapping[str, Tensor]:
        """The vector that a request names: one tensor, or one for each stage. `file/tensor` names one tensor of a file.

        Raises 400 for an unknown name; `param` is the place of the name in the request.
        """
        file, slash, tensor = name.partition("/")
        entry = self._entries.get(file)
        if entry is None:
            raise invalid(param, f"there is no vector {file[:100]!r}; {self._known()}", "unknown_vector")
        tensors = entry.vector.tensors
        if slash:
            if tensor not in tensors:
                reason = f"{file} has no tensor {tensor[:100]!r}; it has {join_some([*tensors])}"
                raise invalid(param, reason, "unknown_vector")
            return tensors[tensor]
        if entry.vector.by_stage:
            return tensors
        if len(tensors) > 1:
            reason = f"{file} has several tensors; choose one: {join_some([f'{file}/{each}' for each in tensors])}"
            raise invalid(param, reason, "unknown_vector")
        (only,) = tensors.values()
        return only

    def _known(self) -> str:
        names = join_some(sorted(self._entries))
        return f"known are {names}" if names else "none is stored; send PUT /vectors/{name}, or a vector in the request"
