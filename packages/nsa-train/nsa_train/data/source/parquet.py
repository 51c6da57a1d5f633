"""Document source for parquet files (local, HTTP, object store), one unit per row group; cache of their footers.

pyarrow reports a failed checksum and a failed read alike, as OSError. `RangeFile` lets the error of a failed fetch
through, so that the stream can quarantine a corrupt row group but stop if the server is lost. pyarrow's per-column
metadata is never read: with a damaged footer it ends the process (C++ `terminate`; 6 of 1,500 bit flips), while reading
the data raises.
"""

import hashlib
import io
import json
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nsa.errors import DataError, DataTimeout
from nsa.files import storage_errors, write_atomic
from nsa_train.data.document import (
    DEFAULT_ID,
    DEFAULT_MAX_UNIT_BYTES,
    DOCUMENT_BYTES,
    CorruptUnit,
    Document,
    DocumentColumns,
    NoTextColumn,
    SourceUnit,
    UnitOffsets,
    make_document,
    require_plausible_ratio,
)
from nsa_train.data.source.file import SourceFile
from nsa_train.data.source.http import MAX_PARALLEL, ReadDeadline, RetryPolicy, ServerUnreachable

_FOOTER_TRAILER_BYTES = 8  # footer length, "PAR1"
_TAIL_BYTES = 256 * 1024
_FOOTER_MAX_BYTES = 64 * 2**20  # about sixty times the footer of a FineWeb-Edu file
_FOOTER_CACHE_BYTES = 256 * 2**20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _ListedFile:
    """Listing entry of a parquet file; the footer itself is fetched again when it is needed."""

    size: int
    footer_bytes: int
    footer_sha256: str
    row_groups: int


def _listing_path(folder: Path, names: Sequence[str], columns: DocumentColumns) -> Path:
    key = hashlib.sha256("\n".join([columns.identity, *names]).encode()).hexdigest()[:32]
    return folder / f"listing-{key}.json"


def _load_listing(path: Path, files: int) -> list[_ListedFile] | None:
    """The stored listing, or None if there is no usable one; a damaged one only makes the start slower."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = [_ListedFile(**entry) for entry in content["files"]]
        sound = content["sha256"] == _digest(listed) and len(listed) == files
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        _log.warning("ignoring unreadable listing cache %s (%s: %s)", path, type(error).__name__, error)
        return None
    return listed if sound else None


def _digest(files: Sequence[_ListedFile]) -> str:
    return hashlib.sha256(json.dumps([asdict(file) for file in files]).encode()).hexdigest()


class ParquetSource:
    """`files` in the order that defines the units; `open_source` resolves a path or dataset id to files.

    `cache_dir` keeps what the footers contain: all of FineWeb-Edu is about 2,400 files with footers of about a
    megabyte. It is for files whose URL identifies their content (a commit on the hub); each footer is still verified by
    its hash when it is used.
    """

    def __init__(
        self,
        files: Sequence[SourceFile],
        retry_policy: RetryPolicy,
        *,
        columns: DocumentColumns | None = None,
        max_unit_bytes: int = DEFAULT_MAX_UNIT_BYTES,
        cache_dir: Path | None = None,
    ) -> None:
        self._files = list(files)
        self._retry_policy = retry_policy
        self._columns = columns or DocumentColumns()
        self._max_unit_bytes = max_unit_bytes
        self._footers: OrderedDict[int, tuple[int, Any]] = OrderedDict()
        self._cached_bytes = 0
        if cache_dir is None:
            self._listed = self._list_files()
        else:
            path = _listing_path(cache_dir, [file.name for file in self._files], self._columns)
            self._listed = _load_listing(path, len(self._files)) or self._list_files()
            fix = "Set data.cache_dir to a writable folder, or leave it out."
            with storage_errors(f"listing cache {path} cannot be written", fix=fix):
                cache_dir.mkdir(parents=True, exist_ok=True)
                content = {"sha256": _digest(self._listed), "files": [asdict(file) for file in self._listed]}
                write_atomic(path, json.dumps(content), many_writers=True)
        self._units = UnitOffsets(listed.row_groups for listed in self._listed)
        digest = hashlib.sha256(self._columns.identity.encode())
        for file, listed in zip(self._files, self._listed, strict=True):
            digest.update(f"\n{file.name}\t{listed.size}\t{listed.row_groups}\t{listed.footer_sha256}".encode())
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return len(self._units)

    def unit(self, index: int) -> SourceUnit:
        file, row_group = self._units.locate(index)
        return SourceUnit(index, self._files[file].where, f"row group {row_group}")

    def read(self, index: int) -> list[Document]:
        deadline = ReadDeadline(self._retry_policy)
        unit = self.unit(index)
        try:
            try:
                return self._read_once(index, deadline)
            except CorruptUnit:
                # Retry once from the start: without TLS, bytes can be damaged in transit and not at rest.
                dropped_bytes, _ = self._footers.pop(self._units.locate(index)[0], (0, None))
                self._cached_bytes -= dropped_bytes
                return self._read_once(index, deadline)
        except CorruptUnit as error:
            raise CorruptUnit(f"{unit} is corrupt: {error}") from error
        except DataTimeout as error:
            raise DataTimeout(f"{unit} could not be read: {error}") from error
        except DataError as error:
            raise DataError(f"{unit} could not be read: {error}") from error

    def _read_once(self, index: int, deadline: ReadDeadline) -> list[Document]:
        file, row_group = self._units.locate(index)
        metadata = self._metadata(file, deadline)
        group = metadata.row_group(row_group)
        if (size := group.total_byte_size + DOCUMENT_BYTES * group.num_rows) > self._max_unit_bytes:
            raise DataError(
                f"it holds {size} bytes, more than max_unit_bytes={self._max_unit_bytes}: a unit must fit in memory. "
                "Write the file with smaller row groups (FineWeb-Edu has 1000 rows), or raise the limit."
            )

        def fetch(start: int, length: int) -> bytes:
            chunk = self._files[file].range(start, length, deadline)
            require_plausible_ratio(_unpacked_bytes(chunk), len(chunk))
            return chunk

        return _parse_row_group(_RangeFile(fetch, self._listed[file].size), metadata, row_group, self._columns)

    def _list_files(self) -> list[_ListedFile]:
        all_listed: list[_ListedFile] = []
        with ThreadPoolExecutor(MAX_PARALLEL) as pool:
            for index, (listed, metadata) in enumerate(pool.map(self._list_file, self._files)):
                all_listed.append(listed)
                self._cache_footer(index, metadata, listed.footer_bytes)
        return all_listed

    def _list_file(self, file: SourceFile) -> tuple[_ListedFile, Any]:
        deadline = ReadDeadline(self._retry_policy)
        try:
            tail, size = file.tail(_TAIL_BYTES, deadline)
            length = _footer_length(tail)
            if length > size:
                raise CorruptUnit(f"its footer claims {length} bytes, the file has {size}")
            if length > _FOOTER_MAX_BYTES:
                raise CorruptUnit(f"its footer claims {length} bytes, more than {_FOOTER_MAX_BYTES}")
            footer = tail[-length:] if length <= len(tail) else file.range(size - length, length, deadline)
            metadata = _parse_footer(footer)
            _check_footer(metadata, self._columns)
        except ServerUnreachable as error:
            kind = DataTimeout if isinstance(error, DataTimeout) else DataError
            raise kind(f"{file.where} could not be listed: {error}") from error
        except NoTextColumn as error:
            raise DataError(f"{file.where} cannot be used: {error}. {error.fix}.") from error
        except CorruptUnit as error:
            raise DataError(
                f"{file.where} is not a usable parquet file: {error}. Without its footer the number of units and so "
                "the global order is unknown. Download the file again or remove it."
            ) from error
        return _ListedFile(size, length, hashlib.sha256(footer).hexdigest(), metadata.num_row_groups), metadata

    def _metadata(self, file: int, deadline: ReadDeadline) -> Any:
        if file in self._footers:
            self._footers.move_to_end(file)
            return self._footers[file][1]
        listed = self._listed[file]
        footer = self._files[file].range(listed.size - listed.footer_bytes, listed.footer_bytes, deadline)
        if hashlib.sha256(footer).hexdigest() != listed.footer_sha256:
            raise CorruptUnit("its footer differs from the one listed at the start: the file has changed")
        metadata = _parse_footer(footer)
        self._cache_footer(file, metadata, listed.footer_bytes)
        return metadata

    def _cache_footer(self, file: int, metadata: Any, footer_bytes: int) -> None:
        self._footers[file] = (footer_bytes, metadata)
        self._cached_bytes += footer_bytes
        while self._cached_bytes > _FOOTER_CACHE_BYTES and len(self._footers) > 1:
            _, (dropped_bytes, _) = self._footers.popitem(last=False)
            self._cached_bytes -= dropped_bytes


def _footer_length(tail: bytes) -> int:
    """Length of the footer including its trailer, from the last bytes of a file."""
    if len(tail) < _FOOTER_TRAILER_BYTES or tail[-4:] != b"PAR1":
        raise CorruptUnit(f"it is not a parquet file (last bytes {tail[-4:]!r})")
    return int.from_bytes(tail[-8:-4], "little") + _FOOTER_TRAILER_BYTES


def _parse_footer(footer: bytes) -> Any:
    import pyarrow.parquet as pq

    with _corruption_as_error("its footer cannot be parsed"):
        return pq.read_metadata(io.BytesIO(footer))


def _check_footer(metadata: Any, columns: DocumentColumns) -> None:
    """Check columns, types and row counts. A footer has no checksum, so its numbers are compared with each other."""
    import pyarrow.types as types

    schema = metadata.schema.to_arrow_schema()
    for column in filter(None, (columns.text, columns.id)):
        if column == columns.id == DEFAULT_ID and column not in schema.names:
            continue  # ids are made from the text, as for JSONL without them
        unusable = NoTextColumn if column == columns.text else CorruptUnit
        if column not in schema.names:
            raise unusable(f"it has no column {column!r}, only {schema.names}")
        kind = schema.field(column).type
        integer_id = column == columns.id and types.is_integer(kind)
        if not (types.is_string(kind) or types.is_large_string(kind) or integer_id):
            raise unusable(f"its column {column!r} is {kind}, not text")
    rows = sum(metadata.row_group(index).num_rows for index in range(metadata.num_row_groups))
    if rows != metadata.num_rows:
        raise CorruptUnit(f"its row groups have {rows} rows in total, its footer {metadata.num_rows}")


def _parse_row_group(file: "_RangeFile", metadata: Any, row_group: int, columns: DocumentColumns) -> list[Document]:
    """The documents of a row group; one read of `file` per column. Page checksums are verified if present."""
    import pyarrow.parquet as pq

    has_ids = columns.id is not None and columns.id in metadata.schema.to_arrow_schema().names
    names = [columns.text, columns.id] if has_ids else [columns.text]
    with _corruption_as_error("its pages cannot be decoded"):
        # A value that a dictionary holds once stays one value, however many rows name it.
        reader = pq.ParquetFile(
            file, metadata=metadata, page_checksum_verification=True, pre_buffer=False, read_dictionary=names
        )
        table = reader.read_row_group(row_group, columns=names, use_threads=False)
        table.validate(full=True)
        texts = _values(table.column(columns.text), file.bytes_read)
        ids = _values(table.column(columns.id), file.bytes_read) if has_ids else [None] * len(texts)
    expected = metadata.row_group(row_group).num_rows
    if len(texts) != expected:
        raise CorruptUnit(f"it has {len(texts)} rows, the footer {expected}")
    return [make_document(id, text) for id, text in zip(ids, texts, strict=True)]


def _values(column: Any, packed: int) -> list[Any]:
    """The values of a column, read from so many bytes; equal texts of a dictionary are one object."""
    cells: list[Any] = []
    length = 0
    for chunk in column.chunks:
        if not hasattr(chunk, "dictionary"):  # integers
            cells += chunk.to_pylist()
            continue
        values = chunk.dictionary.to_pylist()
        cells += [None if index is None else values[index] for index in chunk.indices.to_pylist()]
        length += sum(len(value) for value in cells[len(cells) - len(chunk) :] if value)
        require_plausible_ratio(length, packed)
    return cells


def _unpacked_bytes(chunk: bytes) -> int:
    """Size of the pages of a column chunk when they are decompressed, from the headers that the decompression obeys.

    A header is a struct of Thrift's compact protocol: field 2 is the size, field 3 the size in the file.
    """
    total = at = 0
    try:
        while at < len(chunk):
            fields: dict[int, int] = {}
            at = _skip_struct(chunk, at, fields)
            if fields[2] < 0 or fields[3] < 0:
                raise ValueError("a page has a negative size")
            total += fields[2]
            at += fields[3]
    except (IndexError, KeyError, ValueError, RecursionError) as error:
        raise CorruptUnit(f"a page header cannot be parsed ({type(error).__name__}: {error})") from error
    return total


def _skip_struct(raw: bytes, at: int, fields: dict[int, int] | None = None) -> int:
    """The end of a Thrift struct; its integers are put into `fields`."""
    number = 0
    while (head := raw[at]) != 0:
        at += 1
        if head >> 4:
            number += head >> 4
        else:
            value, at = _varint(raw, at)
            number = _signed(value)
        if fields is not None and head & 15 in (4, 5, 6):
            value, at = _varint(raw, at)
            fields[number] = _signed(value)
        else:
            at = _skip_value(raw, at, head & 15, in_list=False)
    return at + 1


def _skip_value(raw: bytes, at: int, kind: int, *, in_list: bool) -> int:
    if kind in (1, 2):  # a flag: of a field, in the type itself
        return at + in_list
    if kind in (3, 7):
        return at + (1 if kind == 3 else 8)
    if kind in (4, 5, 6):
        return _varint(raw, at)[1]
    if kind == 8:
        length, at = _varint(raw, at)
        return at + length
    if kind == 12:
        return _skip_struct(raw, at)
    if kind in (9, 10):
        size, inner, at = raw[at] >> 4, raw[at] & 15, at + 1
        if size == 15:
            size, at = _varint(raw, at)
        if size > len(raw):
            raise ValueError("a list is longer than its file")
        for _ in range(size):
            at = _skip_value(raw, at, inner, in_list=True)
        return at
    raise ValueError(f"type {kind} does not occur in page headers")


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while (byte := raw[at]) & 0x80:
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if shift > 63:
            raise ValueError("a number is too long")
    return value | byte << shift, at + 1


def _signed(value: int) -> int:
    return value >> 1 ^ -(value & 1)


@contextmanager
def _corruption_as_error(what: str) -> Iterator[None]:
    """Convert pyarrow's exceptions for damaged bytes to `CorruptUnit`. A failed fetch is a DataError, which is none.

    ArrowInvalid is a ValueError, a failed checksum an OSError, an absurd length a MemoryError, bad UTF-8 a
    UnicodeDecodeError.
    """
    try:
        yield
    except (ValueError, OSError, ArithmeticError, LookupError, NotImplementedError, MemoryError) as error:
        raise CorruptUnit(f"{what} ({type(error).__name__}: {error})") from error


class _RangeFile(io.RawIOBase):
    """File object for pyarrow over `fetch(start, length)`. A `DataError` of `fetch` passes through unchanged."""

    def __init__(self, fetch: Callable[[int, int], bytes], size: int) -> None:
        self._fetch = fetch
        self._size = size
        self._position = 0
        self.bytes_read = 0

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
        self.bytes_read += len(data)
        return data
