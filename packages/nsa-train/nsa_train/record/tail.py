"""Follows a growing file of records, like `tail -F`: reads only new bytes, survives truncation and rotation."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from nsa.files import open_regular
from nsa_train.record.records import LONGEST_LINE, Parsed

_PIECE = 1 << 20
T = TypeVar("T")


class RecordTail(Generic[T]):
    """Follows a path through restarts, truncation and rotation; `parse` turns a line into a record.

    An incomplete last line is kept until its end arrives; a torn line is skipped and counted, the lines after it are
    read. With `last_bytes`, reading starts that far from the end of a longer file.
    """

    def __init__(self, path: Path, parse: Callable[[str], Parsed[T]], last_bytes: int | None = None) -> None:
        self.path = path
        self._parse = parse
        self._damaged = 0
        self._no_file = False
        self._last_bytes = last_bytes
        self._file: BinaryIO | None = None
        self._half = b""
        self._in_long_line = False

    @property
    def unreadable(self) -> int:
        """Number of records that could not be fully read; something else in place of the file counts as one."""
        return self._damaged + self._no_file

    def read(self) -> list[T]:
        """Records completed since the last call, oldest first."""
        return list(self.stream())

    def stream(self) -> Iterator[T]:
        """Yield the records completed since the last call: those of a long run do not fit into memory at once."""
        if self._file is None and not self._open():
            return
        yield from self._drain()
        if self._replaced():
            # The last records are in the old file; then the new file follows from its beginning.
            yield from self._drain()
            self.close()
            if self._open():
                yield from self._drain()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._half, self._in_long_line = None, b"", False

    def _open(self) -> bool:
        self._no_file = False
        try:
            self._file = open_regular(self.path)
        except FileNotFoundError:
            return False
        except OSError:
            self._no_file = True
            return False
        if self._last_bytes is not None:
            size = os.fstat(self._file.fileno()).st_size
            if size > self._last_bytes:
                self._file.seek(size - self._last_bytes - 1)
                self._in_long_line = True  # skip the line that was cut
            self._last_bytes = None
        return True

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            there, here = os.stat(self.path), os.fstat(self._file.fileno())
        except OSError:
            return False  # moved away; the new file does not exist yet
        return (there.st_dev, there.st_ino) != (here.st_dev, here.st_ino)

    def _drain(self) -> Iterator[T]:
        assert self._file is not None
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)
            self._half, self._in_long_line = b"", False
        while piece := self._file.read(_PIECE):
            *whole, rest = (self._half + piece).split(b"\n")
            if self._in_long_line and whole:
                del whole[0]
                self._in_long_line = False
            if self._in_long_line or len(rest) > LONGEST_LINE:
                self._damaged += not self._in_long_line
                self._in_long_line, rest = True, b""
            self._half = rest
            for line in whole:
                if not line or line.isspace():
                    continue
                record, damaged = self._parse(line.decode("utf-8", "replace"))
                self._damaged += damaged
                if record is not None:
                    yield record
