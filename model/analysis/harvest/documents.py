"""Read the documents of a corpus as tokens: texts, token ids, and files of them.

A `*.jsonl` file has a document in each line, a `*.parquet` file in each row of a column, and every other file is one
document in UTF-8. A document is a text or a list of token ids. This module does not know how documents become contexts.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.errors import InvalidField, shortened
from model.text.corpus import read_utf8
from model.text.tokenizer import SpanTokenizer, UnreadableText

Source = str | Path | Sequence[int]
"""A text, a file of documents, or the token ids of one document."""
Tokens = NDArray[np.int64]
"""(T, 4): for each token its id, the number of its document, and the characters of its text, from begin to before end.

Tokens that the tokenizer adds have no characters: begin and end are equal. Both are -1 if only ids were given.
"""
MAX_CHARACTERS = 1 << 24  # of one document; the tokens of a text take about 200 bytes each while they are made
ROWS_PER_BATCH = 256  # of a Parquet file


@dataclass(frozen=True)
class Document:
    """A document that is not tokenized yet. `size` is its share of `Corpus.size`."""

    content: Any
    name: str  # for errors
    size: int


@dataclass(frozen=True)
class Corpus:
    """The documents of some sources, in their order. `field` is the key or the column that holds a document."""

    sources: Sequence[Source]
    tokenizer: SpanTokenizer | None
    vocab_size: int
    field: str = "text"
    end_id: int | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidField("corpus", "is empty; give texts, token ids or files")

    @property
    def size(self) -> int:
        """The bytes of the files, and the characters or ids of the other documents."""
        return sum(each.stat().st_size if isinstance(each, Path) else len(each) for each in self.sources)

    def describe(self) -> list[Any]:
        """The sources in a form by which another run sees that its corpus is a different one."""
        sizes = ([str(each), each.stat().st_size] if isinstance(each, Path) else [len(each)] for each in self.sources)
        return [[*size, digest_of(each)] for size, each in zip(sizes, self.sources, strict=True)]

    def documents(self) -> Iterator[Document]:
        for index, source in enumerate(self.sources):
            if not isinstance(source, Path):
                yield Document(source, f"document {index}", len(source))
            elif source.suffix == ".jsonl":
                yield from self._json_lines(source)
            elif source.suffix == ".parquet":
                yield from self._parquet_rows(source)
            else:
                yield Document(read_utf8(source), str(source), source.stat().st_size)

    def _json_lines(self, path: Path) -> Iterator[Document]:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Document(line, f"{path}, line {number}", len(line))

    def _parquet_rows(self, path: Path) -> Iterator[Document]:
        try:
            import pyarrow.parquet
        except ModuleNotFoundError:
            raise InvalidField("corpus", f'{path} needs pyarrow: pip install "forwardscope[harvest]"') from None
        file = pyarrow.parquet.ParquetFile(path)
        if self.field not in file.schema_arrow.names:
            names = ", ".join(file.schema_arrow.names)
            raise InvalidField("field", f"{path} has no column {shortened(self.field)}; it has {names}")
        row, size = 0, path.stat().st_size // max(file.metadata.num_rows, 1)
        for batch in file.iter_batches(ROWS_PER_BATCH, columns=[self.field]):
            for value in batch.column(0).to_pylist():
                yield Document(value, f"{path}, row {row}", size)
                row += 1

    def tokenize(self, document: Document, number: int) -> Tokens:
        """The tokens of a document, and the end-of-text token if the corpus has one.

        Raises `InvalidField`, which names the place of the document.
        """
        content = self._parse(document) if isinstance(document.content, bytes) else document.content
        if isinstance(content, str):
            if self.tokenizer is None:
                raise InvalidField("corpus", f"{document.name}: this model has no tokenizer.json; give token ids")
            if len(content) > MAX_CHARACTERS:
                limit = f"{len(content)} characters are more than {MAX_CHARACTERS}"
                raise InvalidField("corpus", f"{document.name}: {limit}; divide it into several documents")
            try:
                ids, found = self.tokenizer.encode_with_spans(content)
            except UnreadableText as error:
                raise InvalidField("corpus", f"{document.name}: {error}") from None
            spans, end = [span or (0, 0) for span in found], len(content)
        else:
            ids, end = self._check_ids(content, document.name), -1
            spans = [(-1, -1)] * len(ids)
        if self.end_id is not None:
            ids, spans = [*ids, self.end_id], [*spans, (end, end)]
        tokens = np.empty((len(ids), 4), np.int64)
        tokens[:, 0], tokens[:, 1] = ids, number
        tokens[:, 2:] = np.array(spans, np.int64).reshape(-1, 2)
        return tokens

    def _parse(self, document: Document) -> Any:
        try:
            content = json.loads(document.content)
        except ValueError as error:
            raise InvalidField("corpus", f"{document.name} is not JSON: {error}") from None
        if not isinstance(content, dict):
            return content
        if self.field not in content:
            raise InvalidField("field", f"{document.name} has no key {shortened(self.field)}")
        return content[self.field]

    def _check_ids(self, content: Any, name: str) -> list[int]:
        is_list = isinstance(content, Sequence) and not isinstance(content, str | bytes)
        ids = list(content) if is_list else []
        if not is_list or not all(type(each) is int and 0 <= each < self.vocab_size for each in ids):
            vocabulary = f"from 0 to {self.vocab_size - 1}"
            raise InvalidField("corpus", f"{name} is neither a text nor a list of token ids {vocabulary}")
        return ids


def digest_of(source: Source) -> str:
    """A digest of the contents of a source; empty for a pipe, which can be read only once."""
    if isinstance(source, Path):
        if not source.is_file():
            return ""
        with source.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    content = source.encode(errors="surrogatepass") if isinstance(source, str) else repr(list(source)).encode()
    return hashlib.sha256(content).hexdigest()
