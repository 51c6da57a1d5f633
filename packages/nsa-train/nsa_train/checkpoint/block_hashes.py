"""SHA-256 of the blocks of a file: computed while the file is written, or when it is read again.

A file is hashed in blocks of 8 MiB, so that a rank can verify the bytes it loads without reading the rest of the file.
A file of one block has the hash that `sha256sum` prints.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from nsa.files import fsync_data

BLOCK_BYTES = 8 << 20
_RawBytes = bytes | bytearray | memoryview


@dataclass(frozen=True)
class ManifestEntry:
    bytes: int
    blocks: tuple[str, ...]
    """SHA-256 of every block; the last one may be short, an empty file has none."""
    sha256: str | None = None
    """SHA-256 of the whole file, for a checkpoint of the first format whose blocks are not known."""


def same_content(listed: ManifestEntry, actual: ManifestEntry) -> bool:
    """Whether a file that was just hashed is the one listed."""
    if listed.sha256 is not None:
        return (listed.bytes, listed.sha256) == (actual.bytes, actual.sha256)
    return (listed.bytes, listed.blocks) == (actual.bytes, actual.blocks)


class BlockHasher:
    """Size and block hashes of a file given in pieces; with `whole` its own hash too."""

    def __init__(self, *, whole: bool = False) -> None:
        self.bytes = 0
        self._blocks: list[str] = []
        self._block, self._left = hashlib.sha256(), BLOCK_BYTES
        self._entire = hashlib.sha256() if whole else None

    def update(self, chunk: _RawBytes) -> None:
        rest = memoryview(chunk).cast("B")
        self.bytes += len(rest)
        if self._entire is not None:
            self._entire.update(rest)
        while len(rest):
            part, rest = rest[: self._left], rest[self._left :]
            self._block.update(part)
            self._left -= len(part)
            if not self._left:
                self._blocks.append(self._block.hexdigest())
                self._block, self._left = hashlib.sha256(), BLOCK_BYTES

    def entry(self) -> ManifestEntry:
        last = (self._block.hexdigest(),) if self._left < BLOCK_BYTES else ()
        entire = None if self._entire is None else self._entire.hexdigest()
        return ManifestEntry(self.bytes, (*self._blocks, *last), entire)


def hash_blocks(chunks: Iterable[_RawBytes], *, whole: bool = False) -> ManifestEntry:
    hasher = BlockHasher(whole=whole)
    for chunk in chunks:
        hasher.update(chunk)
    return hasher.entry()


class HashedFile:
    """A new file that is hashed while it is written and is on the disk when the `with` block ends.

    The hashes are of the bytes that the program wrote, so damage on the way to the disk is seen by every later check.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failure: OSError | None = None
        """Why a write failed: torch.save replaces the reason by one of its own."""
        self._hasher = BlockHasher()
        self._file = path.open("xb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                fsync_data(self._file)
        finally:
            self._file.close()

    def write(self, content: _RawBytes) -> int:
        try:
            self._file.write(content)
        except OSError as error:
            self.failure = error
            raise
        self._hasher.update(content)
        return memoryview(content).nbytes

    def flush(self) -> None:
        """Do nothing: torch.save flushes after every tensor."""

    def tell(self) -> int:
        return self._hasher.bytes

    def entry(self) -> ManifestEntry:
        """Size and hashes of what has been written so far."""
        return self._hasher.entry()
