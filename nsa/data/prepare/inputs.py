"""The input of `prepare`: which files a source has, how many units each, and one of them opened alone.

The parent lists once; a worker opens only the file of its task, so that a thousand workers do not read a thousand
footers each. Files are read by the direct stream's own sources: both modes see the same documents, ids and corruption.
"""

import hashlib
from pathlib import Path
from urllib.parse import urlsplit

from nsa.data.source.file import FileTail, LocalFile
from nsa.data.source.jsonl import SUFFIXES as JSONL_SUFFIXES
from nsa.data.source.jsonl import JsonlSource
from nsa.data.source.parquet import ParquetSource
from nsa.data.source.resolve import open_source
from nsa.data.source.retry_policy import ReadDeadline, RetryPolicy
from nsa.data.source.row_group import DocumentColumns
from nsa.data.source.unit import DocumentSource
from nsa.errors import ConfigError
from nsa.storage import StorageFolder

_PARQUET = ".parquet"


class StoredFile:
    """A file in an object store, read by ranges; the store's client retries and has its own timeouts."""

    def __init__(self, folder: StorageFolder, name: str) -> None:
        self._folder = folder
        self.name = name
        self.where = f"{folder.url}/{name}"

    def tail(self, length: int, deadline: ReadDeadline) -> FileTail:
        with self._folder.open_random(self.name) as file:
            size = file.size()
            return FileTail(file.read_at(min(length, size), max(0, size - length)), size)

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        with self._folder.open_random(self.name) as file:
            data: bytes = file.read_at(length, start)
            return data


def list_files(spec: str, columns: DocumentColumns) -> tuple[list[tuple[str, int]], str]:
    """(file, units) of every file, in the order that fixes the output, and a fingerprint of all of them."""
    if not _is_stored(spec):
        source = open_source(spec, columns=columns)
        counts: dict[str, int] = {}
        for index in range(len(source)):
            file = source.unit(index).file
            counts[file] = counts.get(file, 0) + 1
        return list(counts.items()), source.fingerprint
    folder = StorageFolder(spec)
    sizes = {name: size for name, size in folder.files((_PARQUET, *JSONL_SUFFIXES)) if size}
    names = list(sizes)
    kinds = {name.endswith(_PARQUET) for name in names}
    if len(kinds) != 1:
        what = "both parquet and JSONL files: the same documents may be in both" if kinds else "no data file"
        raise ConfigError(f"{spec} holds {what}. Name a prefix with parquet or JSONL(.gz/.zst) files only.")
    if kinds == {False}:
        # A stored JSONL file is fetched and read whole.
        return [(name, 1) for name in names], hashlib.sha256(repr(sizes).encode()).hexdigest()
    sources = [ParquetSource([StoredFile(folder, name)], RetryPolicy(), columns=columns) for name in names]
    digest = hashlib.sha256("".join(source.fingerprint for source in sources).encode())
    return [(name, len(source)) for name, source in zip(names, sources, strict=True)], digest.hexdigest()


def open_file(spec: str, file: str, columns: DocumentColumns, scratch: Path) -> DocumentSource:
    """One listed file as a source of its own. A stored JSONL file is copied to `scratch` first."""
    if not _is_stored(spec):
        return open_source(file, columns=columns)
    folder = StorageFolder(spec)
    if file.endswith(_PARQUET):
        return ParquetSource([StoredFile(folder, file)], RetryPolicy(), columns=columns)
    local = scratch / Path(file).name
    folder.copy_to(file, local)
    # One block for the whole file, because the listing counted it as one unit.
    return JsonlSource([LocalFile(file, local)], columns=columns, block_bytes=max(1, local.stat().st_size))


def units_are_whole_files(files: list[tuple[str, int]]) -> bool:
    return all(units == 1 and file.endswith(JSONL_SUFFIXES) for file, units in files)


def _is_stored(spec: str) -> bool:
    scheme = urlsplit(spec).scheme
    return scheme not in ("", "file", "http", "https") and "://" in spec
