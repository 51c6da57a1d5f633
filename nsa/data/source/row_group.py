"""Parquet bytes to documents.

pyarrow reports a failed checksum and a failed read alike, as OSError. `RangeFile` lets a failed fetch through, so that
the stream can quarantine a corrupt row group and stop at a lost server. pyarrow's per-column metadata is not asked for
anything: with a damaged footer it ends the process (C++ `terminate`; 6 of 1,500 bit flips), while reading raises.
"""

import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa.data.document import Document
from nsa.data.source.unit import CorruptUnit

FOOTER_TRAILER_BYTES = 8  # footer length, "PAR1"


@dataclass(frozen=True, slots=True)
class DocumentColumns:
    """Where text and id are. `id=None` names documents after their content; it must be said, because the held-out split
    hangs on ids."""

    text: str = "text"
    id: str | None = "id"


def footer_length(tail: bytes) -> int:
    """Length of the footer with its trailer, from a file's last bytes."""
    if len(tail) < FOOTER_TRAILER_BYTES or tail[-4:] != b"PAR1":
        raise CorruptUnit(f"it does not end like a parquet file (last bytes {tail[-4:]!r})")
    return int.from_bytes(tail[-8:-4], "little") + FOOTER_TRAILER_BYTES


def parse_footer(footer: bytes) -> Any:
    import pyarrow.parquet as pq

    with _corruption_as_error("its footer cannot be parsed"):
        return pq.read_metadata(io.BytesIO(footer))


def check_footer(metadata: Any, columns: DocumentColumns) -> None:
    """What the footer must say to be usable. It has no checksum of its own, so it is also held against itself."""
    import pyarrow.types as types

    schema = metadata.schema.to_arrow_schema()
    for column in filter(None, (columns.text, columns.id)):
        if column not in schema.names:
            raise CorruptUnit(f"it has no column {column!r}, only {schema.names}")
        kind = schema.field(column).type
        integer_id = column == columns.id and types.is_integer(kind)
        if not (types.is_string(kind) or types.is_large_string(kind) or integer_id):
            raise CorruptUnit(f"its column {column!r} is {kind}, not text")
    rows = sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise CorruptUnit(f"its row groups hold {rows} rows together, the file says {metadata.num_rows}")


def parse_row_group(file: io.RawIOBase, metadata: Any, row_group: int, columns: DocumentColumns) -> list[Document]:
    """The documents of a row group; one read of `file` per column. Page checksums are verified where there are any."""
    import pyarrow.parquet as pq

    wanted = [columns.text] if columns.id is None else [columns.text, columns.id]
    with _corruption_as_error("its pages cannot be decoded"):
        reader = pq.ParquetFile(file, metadata=metadata, page_checksum_verification=True, pre_buffer=False)
        table = reader.read_row_group(row_group, columns=wanted, use_threads=False)
        table.validate(full=True)
        texts = table.column(columns.text).to_pylist()
        ids = [None] * len(texts) if columns.id is None else table.column(columns.id).to_pylist()
    expected = metadata.row_group(row_group).num_rows
    if len(texts) != expected:
        raise CorruptUnit(f"it holds {len(texts)} rows where the footer says {expected}")
    return [make_document(id, text) for id, text in zip(ids, texts, strict=True)]


def make_document(id: object, text: str | None) -> Document:
    """A document without an id is named after its content, which is stable under any change of files and order."""
    text = text or ""
    if id is None or id == "":
        id = "blake2b:" + hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
    return Document(str(id), text)


class _corruption_as_error:
    """Turn what pyarrow raises for bad bytes into `CorruptUnit`."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        # ArrowInvalid is a ValueError, a failed checksum an OSError, an absurd length a MemoryError, bad UTF-8 a
        # UnicodeDecodeError. A failed fetch is a DataError and passes through.
        if isinstance(error, (ValueError, OSError, ArithmeticError, LookupError, NotImplementedError, MemoryError)):
            raise CorruptUnit(f"{self._what} ({type(error).__name__}: {error})") from error


class RangeFile(io.RawIOBase):
    """What pyarrow reads from. A `DataError` raised by `fetch` comes out of pyarrow unchanged."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size < 0 else min(size, left)
        data = self._fetch(self._position, length)
        self._position += len(data)
        return data
