"""New whole records of a growing file, at the cost of its new bytes: what `tail -F` is for people."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from nsa.files import open_regular
from nsa.observe.records import LONGEST_LINE, Parsed

_PIECE = 1 << 20
T = TypeVar("T")


class RecordTail(Generic[T]):
    """Follows a path through restarts, truncation and rotation; `parse` makes a record of a line.

    A half-written last line is kept until its end arrives; a torn line is skipped and counted, whatever follows it is
    not. `last_bytes` begins that far from the end of a file that is longer already.
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
        """Records so far that could not be read, whole or in part; something in the file's place counts as one."""
        return self._damaged + self._no_file

    def read(self) -> list[T]:
        """Records that became whole since the last call; oldest first."""
        return list(self.stream())

    def stream(self) -> Iterator[T]:
        """The same one by one: a file of days is larger as records than the memory there is."""
        if self._file is None and not self._open():
            return
        yield from self._drain()
        if self._replaced():
            # The last words went to the old file; what follows begins the new one.
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
                self._in_long_line = True  # the line that was cut is not ours to read
            self._last_bytes = None
        return True

    def _replaced(self) -> bool:
        assert self._file is not None
        try:
            there, here = os.stat(self.path), os.fstat(self._file.fileno())
        except OSError:
            return False  # moved away, and the new file is not there yet
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
