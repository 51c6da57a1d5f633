"""Files of a source (local, HTTP, object store), read by byte ranges."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from nsa.errors import DataError
from nsa_train.data.document import CorruptUnit
from nsa_train.data.source.http import HttpClient
from nsa_train.data.source.retry_policy import ReadDeadline, RetryPolicy
from nsa_train.storage import StorageFolder

_SAMPLE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class _FileTail:
    """The last bytes of a file, and the size of the file."""

    data: bytes
    size: int


class SourceFile(Protocol):
    @property
    def name(self) -> str:
        """Independent of the location, so that a cursor stays valid when the folder or the server's port changes."""
        ...

    @property
    def where(self) -> str:
        """Path or URL, for messages."""
        ...

    def tail(self, length: int, deadline: ReadDeadline) -> _FileTail: ...

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

    def sample_hash(self) -> str:
        """SHA-256 of the beginning and the end, for a fingerprint of the source."""
        deadline = ReadDeadline(RetryPolicy())
        tail = self.tail(_SAMPLE_BYTES, deadline)
        head = self.range(0, min(tail.size, _SAMPLE_BYTES), deadline)
        return hashlib.sha256(head + tail.data).hexdigest()

    def tail(self, length: int, deadline: ReadDeadline) -> _FileTail:
        size = self.size()
        start = max(0, size - length)
        return _FileTail(self.range(start, size - start, deadline), size)

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
        self.immutable = immutable
        self._client = client
        self._etag = ""

    def tail(self, length: int, deadline: ReadDeadline) -> _FileTail:
        body = self._client.tail(self.where, length, deadline)
        # A weak ETag, or one from the storage behind a hub, may differ between two servers of the same file.
        if not (self.immutable or body.etag.startswith("W/")):
            self._etag = body.etag
        return _FileTail(body.data, body.file_size)

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        return self._client.range(self.where, start, length, deadline, etag=self._etag)


class StoredFile:
    """A file in an object store; the store's client has its own retries and timeouts."""

    def __init__(self, folder: StorageFolder, name: str) -> None:
        self._folder = folder
        self.name = name
        self.where = f"{folder.url}/{name}"

    def tail(self, length: int, deadline: ReadDeadline) -> _FileTail:
        with self._folder.open_random(self.name) as file:
            size = file.size()
            return _FileTail(file.read_at(min(length, size), max(0, size - length)), size)

    def range(self, start: int, length: int, deadline: ReadDeadline) -> bytes:
        with self._folder.open_random(self.name) as file:
            data: bytes = file.read_at(length, start)
            return data
