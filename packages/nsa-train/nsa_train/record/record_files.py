"""Files of records in a run folder (JSON lines, CSV, JSON): append, follow and read them.

Every reader (status, watch, smoke, exporter, monitor, report, compare) uses these functions. Reading raises nothing:
records that cannot be read are skipped and counted.
"""

import csv
import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Generic, TextIO

from nsa.files import open_regular
from nsa_train.record.value_checks import Parsed, T, section

_LONGEST_LINE = 1 << 20
"""Longer lines are skipped instead of being kept in memory."""
_LARGEST_FILE = 16 << 20
"""Bytes read of the small files (env.json, .HALT, CSV)."""
_PIECE = 1 << 20
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}

Unreadable = Counter[str]
"""Number of records (or files) that could not be fully read, by file name."""


def describe_unreadable(unreadable: Mapping[str, int]) -> str:
    """Describe what could not be read in one line; empty if everything could."""
    files = {name: count for name, count in unreadable.items() if count}
    if not files:
        return ""
    total, where = sum(files.values()), ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
    return f"{total} record{'s' * (total != 1)} could not be read ({where})"


def to_line(record: Mapping[str, Any]) -> str:
    """A record as strict JSON: non-finite numbers become strings that `float` accepts."""
    return json.dumps({name: _encode(value) for name, value in record.items()}, allow_nan=False, separators=(",", ":"))


def parse_record(line: str) -> Parsed[dict[str, Any]]:
    """One line as a record; torn lines and lines that are not JSON objects are unreadable."""
    try:
        record = json.loads(line)
        if isinstance(record, dict) and ("NaN" in line or "Infinity" in line):  # rare
            record = {name: _read(value) for name, value in record.items()}
    except (ValueError, RecursionError):
        return None, True
    return (record, False) if isinstance(record, dict) else (None, True)


class JsonLines:
    """Appends records to a file, each in one write, so that readers see whole lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = False
        with suppress(OSError), open_regular(path) as file:  # no file, or an empty one
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        self._file = open_to_append(path)
        if torn:
            self._file.write("\n")
        self._lock = threading.Lock()  # saves finish in another thread

    def append(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


class RecordTail(Generic[T]):
    """Follows a path through restarts, truncation and rotation; `parse` turns a line into a record.

    An incomplete last line is kept until its end arrives; a torn line is skipped and counted, the lines after it are
    read. With `last_bytes`, reading starts that far from the end of a longer file.
    """

    def __init__(self, path: Path, parse: Callable[[str], Parsed[T]], last_bytes: int | None = None) -> None:
        self.path = path
        self.unread_bytes = 0
        """Bytes of the file after the block that is being read."""
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

    def whole_file(self) -> Iterator[T]:
        """Yield every record of a file that does not grow: its last line may lack an end."""
        yield from self.stream()
        yield from self._parsed(self._half)
        self.close()

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
            self.unread_bytes = os.fstat(self._file.fileno()).st_size - self._file.tell()
            *whole, rest = (self._half + piece).split(b"\n")
            if self._in_long_line and whole:
                del whole[0]
                self._in_long_line = False
            if self._in_long_line or len(rest) > _LONGEST_LINE:
                self._damaged += not self._in_long_line
                self._in_long_line, rest = True, b""
            self._half = rest
            for line in whole:
                yield from self._parsed(line)

    def _parsed(self, line: bytes) -> Iterator[T]:
        if line and not line.isspace():
            record, damaged = self._parse(line.decode("utf-8", "replace"))
            self._damaged += damaged
            if record is not None:
                yield record


def open_to_append(path: Path) -> TextIO:
    """Open a file for appending, or create it; a pipe without a reader raises OSError instead of blocking."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666), "a", encoding="utf-8")


def read_text(path: Path, most: int = _LARGEST_FILE) -> str:
    """The first `most` bytes; raises OSError as `open` does."""
    with open_regular(path) as file:
        return file.read(most).decode("utf-8", "replace")


def read_section(path: Path) -> Parsed[dict[str, Any]]:
    """A JSON file that holds one object; a missing file is no damage."""
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return None, False
    except (OSError, ValueError, RecursionError):
        return None, True
    record = section(content)
    return record, record is None


def read_rows(path: Path) -> tuple[list[dict[str, str]], int]:
    """Rows of a CSV file as dicts by its header, and the number of unreadable ones."""
    rows: list[dict[str, str]] = []
    try:
        lines = read_text(path).splitlines(keepends=True)
    except FileNotFoundError:
        return rows, 0
    except OSError:
        return rows, 1
    bad = 0
    try:
        for row in csv.DictReader(lines):
            if None in row or None in row.values():  # more cells than the header, or fewer
                bad += 1
            else:
                rows.append(row)
    except csv.Error:  # a cell that is too long; the start of the next row is unknown
        bad += 1
    return rows, bad


def _read(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    return [_read(item) for item in value] if isinstance(value, list) else value


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value
