"""Files of a source (local, HTTP, object store), read by byte ranges; their kinds, by the ending of the name."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit
from nsa_train.data.source.http import HttpClient, ReadDeadline, RetryPolicy
from nsa_train.storage import StorageFolder

_SAMPLE_BYTES = 64 * 1024
FileKind = Literal["parquet", "jsonl", "text", "markdown", "html"]

FILE_KINDS: tuple[FileKind, ...] = get_args(FileKind)
PARQUET_SUFFIX = ".parquet"
JSONL_SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
WHOLE_FILE_KINDS: tuple[FileKind, ...] = ("text", "markdown", "html")
"""Kinds of which one file is one document."""

_SUFFIXES: dict[FileKind, tuple[str, ...]] = {
    "parquet": (PARQUET_SUFFIX,),
    "jsonl": JSONL_SUFFIXES,
    "text": (".txt", ".text"),
    "markdown": (".md", ".markdown"),
    "html": (".html", ".htm", ".xhtml"),
}
SUFFIXES = tuple(suffix for suffixes in _SUFFIXES.values() for suffix in suffixes)


def file_kind(name: str) -> FileKind | None:
    """The kind of a file by its name, in upper or lower case; None for an ending that is not read."""
    lowered = name.lower()
    return next((kind for kind, suffixes in _SUFFIXES.items() if lowered.endswith(suffixes)), None)


class SourceFile(Protocol):
    @property
    def name(self) -> str:
        """Independent of the location, so that a cursor stays valid when the folder or the server's port changes."""
        ...

    @property
    def where(self) -> str:
        """Path or URL, for messages."""
        ...

    def tail(self, length: int, deadline: ReadDeadline) -> tuple[bytes, int]:
        """The last bytes of the file, and its size."""
        ...

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes: ...


@dataclass(frozen=True, slots=True)
class LocalFile:
    name: str
    path: Path

    @property
    def where(self) -> str:
        return str(self.path)

    def size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error

    def signature(self) -> bytes:
        """Name, size and a hash of the beginning and the end, for a fingerprint of the source."""
        return f"\n{self.name}\t{self.size()}\t{self._sample_hash()}".encode("utf-8", "surrogateescape")

    def _sample_hash(self) -> str:
        deadline = ReadDeadline(RetryPolicy())
        tail, size = self.tail(_SAMPLE_BYTES, deadline)
        return hashlib.sha256(self.range(0, min(size, _SAMPLE_BYTES), deadline) + tail).hexdigest()

    def tail(self, length: int, deadline: ReadDeadline) -> tuple[bytes, int]:
        size = self.size()
        start = max(0, size - length)
        return self.range(start, size - start, deadline), size

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        try:
            with open(self.path, "rb", buffering=0) as file:
                file.seek(start)
                pieces, missing = [], length
                while missing and (piece := file.read(missing)):
                    pieces.append(piece)
                    missing -= len(piece)
        except OSError as error:
            raise DataError(f"{self.path} cannot be read ({error.strerror}). Check the disk.") from error
        if missing:
            raise CorruptUnit(f"{self.path} ends {missing} bytes before byte {start + length}: the file is truncated")
        return b"".join(pieces)


class HttpFile:
    """`immutable`: the URL identifies the content (a commit on the hub), so no ETag has to be compared."""

    def __init__(self, name: str, url: str, client: HttpClient, *, immutable: bool = False) -> None:
        self.name = name
        self.where = url
        self._immutable = immutable
        self._client = client
        self._etag = ""

    def tail(self, length: int, deadline: ReadDeadline) -> tuple[bytes, int]:
        data, size, etag = self._client.tail(self.where, length, deadline)
        # A weak ETag, or one from the storage behind a hub, may differ between two servers of the same file.
        if not (self._immutable or etag.startswith("W/")):
            self._etag = etag
        return data, size

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        return self._client.range(self.where, start, length, deadline, etag=self._etag)


class StoredFile:
    """A file in an object store; the store's client has its own retries and timeouts."""

    def __init__(self, folder: StorageFolder, name: str) -> None:
        self._folder = folder
        self.name = name
        self.where = f"{folder.url}/{name}"

    def tail(self, length: int, deadline: ReadDeadline) -> tuple[bytes, int]:
        with self._folder.open_random(self.name) as file:
            size = file.size()
            return file.read_at(min(length, size), max(0, size - length)), size

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        with self._folder.open_random(self.name) as file:
            data: bytes = file.read_at(length, start)
            return data
