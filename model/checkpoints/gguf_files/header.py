"""Read the header of a GGUF file: its metadata, and the name, shape, type and place of each tensor.

The format is described at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Files are untrusted: each count
and length is compared with the rest of the file, and with a limit, before anything of that size is read or allocated.
This module does not know the meaning of any key or tensor.
"""

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from model.errors import CheckpointError, printable_name
from model.files import require_regular_file

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
# Limits. The largest published headers have about 50 keys, 2,000 tensors, 800,000 strings and 20 MB.
MAX_KEYS = 1 << 14
MAX_TENSORS = 1 << 16
MAX_STRINGS = 1 << 21
MAX_STRING_BYTES = 1 << 26  # of all strings together
MAX_ARRAY_BYTES = 1 << 26  # of all arrays of numbers together
MAX_NAME_BYTES = 1 << 10
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_ELEMENTS = 1 << 62

_SCALARS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}
_DTYPES = {kind: np.dtype(code) for kind, code in _SCALARS.items()}
_COUNT = struct.Struct("<Q")


@dataclass(frozen=True)
class StoredTensor:
    """The entry of one tensor. `shape` has the outermost dim first, like PyTorch and unlike the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int  # of the data, from the beginning of the file
    num_bytes: int


@dataclass(frozen=True)
class GGUFHeader:
    """The header of one file. A value is an int, a float, a bool, a str, a list of str, or an array of numbers."""

    file: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]


def read_header(path: Path) -> GGUFHeader:
    """Read the header of one file. Raises `CheckpointError` for a file that is not a valid GGUF file."""
    try:
        require_regular_file(path)
        num_bytes = path.stat().st_size
        if num_bytes < 4:
            raise CheckpointError(f"{path}: not a GGUF file: it has only {num_bytes} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Parser(path, content).header()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: file is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


class _Parser:
    """Reads the content of one file from its beginning to the end of its header."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self._path = path
        self._content = content
        self._size = len(content)
        self._position = 0
        self._strings_left = MAX_STRINGS
        self._string_bytes_left = MAX_STRING_BYTES
        self._array_bytes_left = MAX_ARRAY_BYTES

    def header(self) -> GGUFHeader:
        num_tensors, num_keys = self._counts()
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._name("a key")
            if key in metadata:
                raise self._invalid(f"the key {printable_name(key)} occurs twice")
            metadata[key] = self._value(key)
        entries = [self._tensor_entry() for _ in range(num_tensors)]
        tensors = self._place(entries, self._data_offset(metadata))
        return GGUFHeader(self._path, metadata, tensors)

    def _counts(self) -> tuple[int, int]:
        """Read the magic number and the version. Returns the numbers of tensors and keys."""
        if self._content[:4] != MAGIC:
            raise CheckpointError(f"{self._path}: not a GGUF file: it does not begin with the letters GGUF")
        self._position = 4
        version: int = self._scalar(GGUFValueType.UINT32)
        if version & 0xFFFF == 0:
            raise self._invalid("its byte order is big-endian, which is not implemented; use a little-endian file")
        if version not in VERSIONS:
            raise self._invalid(
                f"its version is {version}, which is not implemented (only 2 and 3); convert the model again with a "
                "current llama.cpp"
            )
        num_tensors, num_keys = self._count(), self._count()
        for count, limit, noun in ((num_tensors, MAX_TENSORS, "tensors"), (num_keys, MAX_KEYS, "keys")):
            if count > limit:
                raise self._invalid(f"it states {count} {noun}, more than {limit}, the limit")
        return num_tensors, num_keys

    def _invalid(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: not a readable GGUF file: {reason}")

    def _take(self, num_bytes: int) -> int:
        """Move over `num_bytes`. Returns the position of the first of them."""
        start = self._position
        if num_bytes > self._size - start:
            raise self._invalid("the file ends inside its header, so it is truncated or damaged")
        self._position = start + num_bytes
        return start

    def _count(self) -> int:
        count: int = _COUNT.unpack_from(self._content, self._take(8))[0]
        return count

    def _scalar(self, kind: GGUFValueType) -> Any:
        dtype = _DTYPES[kind]
        start = self._take(dtype.itemsize)
        if kind is GGUFValueType.BOOL and self._content[start] > 1:
            raise self._invalid(f"a truth value is {self._content[start]}, neither 0 nor 1")
        return np.frombuffer(self._content[start : self._position], dtype).item()

    def _name(self, noun: str) -> str:
        length = self._count()
        if length > MAX_NAME_BYTES:
            raise self._invalid(f"the name of {noun} has {length} bytes, more than {MAX_NAME_BYTES}, the limit")
        start = self._take(length)
        try:
            return self._content[start : self._position].decode()
        except UnicodeDecodeError:
            raise self._invalid(f"the name of {noun} is not a text in UTF-8") from None

    def _strings(self, key: str, count: int) -> list[str]:
        """Read `count` strings. The loop has few steps because vocabularies have some 100,000 tokens."""
        if count > self._strings_left:
            raise self._invalid(f"{printable_name(key)} brings the strings in the header over {MAX_STRINGS}, the limit")
        self._strings_left -= count
        if 8 * count > self._size - self._position:
            self._take(8 * count)  # raises
        content, position, size = self._content, self._position, self._size
        unpack, texts, first = _COUNT.unpack_from, [], position
        try:
            for _ in range(count):
                (length,) = unpack(content, position)
                start, position = position + 8, position + 8 + length
                if position > size or position - first > self._string_bytes_left:
                    break
                texts.append(content[start:position].decode())
        except struct.error:
            position = size + 1
        except UnicodeDecodeError:
            raise self._invalid(f"{printable_name(key)} has a string that is not UTF-8") from None
        self._take(position - first)
        self._string_bytes_left -= position - first
        if self._string_bytes_left < 0:
            raise self._invalid(f"its strings have more than {MAX_STRING_BYTES} bytes, the limit")
        return texts

    def _kind(self, key: str) -> GGUFValueType:
        number = self._scalar(GGUFValueType.UINT32)
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._invalid(f"{printable_name(key)} has the unknown type {number}") from None

    def _value(self, key: str) -> Any:
        kind = self._kind(key)
        if kind is GGUFValueType.STRING:
            return self._strings(key, 1)[0]
        if kind is not GGUFValueType.ARRAY:
            return self._scalar(kind)
        kind, count = self._kind(key), self._count()
        if kind is GGUFValueType.STRING:
            return self._strings(key, count)
        if kind is GGUFValueType.ARRAY:
            raise self._invalid(f"{printable_name(key)} is an array of arrays, which is not implemented")
        dtype = _DTYPES[kind]
        num_bytes = count * dtype.itemsize
        if num_bytes > self._array_bytes_left:
            raise self._invalid(f"{printable_name(key)} brings the arrays over {MAX_ARRAY_BYTES} bytes, the limit")
        self._array_bytes_left -= num_bytes
        start = self._take(num_bytes)
        return np.frombuffer(self._content[start : self._position], dtype)

    def _tensor_entry(self) -> StoredTensor:
        """Read one entry. Its offset is still that within the data."""
        name = self._name("a tensor")
        shown = printable_name(name)
        num_dims = self._scalar(GGUFValueType.UINT32)
        if not 1 <= num_dims <= MAX_DIMS:
            raise self._invalid(f"{shown} has {num_dims} dims; 1 to {MAX_DIMS} are allowed")
        shape = tuple(self._count() for _ in range(num_dims))[::-1]
        num_elements = math.prod(shape)
        if not 0 < num_elements <= MAX_ELEMENTS:
            raise self._invalid(f"{shown} has the impossible shape {shape}")
        number = self._scalar(GGUFValueType.UINT32)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise self._invalid(f"{shown} has the unknown tensor type {number}") from None
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise self._invalid(f"{shown} has rows of {shape[-1]} values, not whole {kind.name} blocks of {block_size}")
        return StoredTensor(self._path, name, shape, kind, self._count(), num_elements // block_size * block_bytes)

    def _data_offset(self, metadata: Mapping[str, Any]) -> int:
        """The position of the data: the end of the header, aligned. Sets `_alignment`."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._invalid(f"general.alignment is not a power of two up to {MAX_ALIGNMENT}")
        self._alignment = alignment
        return -(-self._position // alignment) * alignment

    def _place(self, entries: list[StoredTensor], data_offset: int) -> dict[str, StoredTensor]:
        """Check that the data of all tensors lies in the file, and that no two tensors share any of it."""
        tensors: dict[str, StoredTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self._invalid(f"the tensor {printable_name(entry.name)} occurs twice")
            if entry.offset % self._alignment:
                raise self._invalid(f"the data of {printable_name(entry.name)} is not aligned")
            offset = data_offset + entry.offset
            if offset + entry.num_bytes > self._size:
                raise self._invalid(
                    f"the data of {printable_name(entry.name)} ends after the file, so the file is truncated or damaged"
                )
            tensors[entry.name] = StoredTensor(entry.file, entry.name, entry.shape, entry.kind, offset, entry.num_bytes)
        end, previous = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                names = f"{printable_name(previous)} and {printable_name(tensor.name)}"
                raise self._invalid(f"the tensors {names} overlap")
            end, previous = tensor.offset + tensor.num_bytes, tensor.name
        return tensors
