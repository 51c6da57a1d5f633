"""Typed parsing of the files of a run folder (JSON lines, CSV, JSON). Unreadable records are skipped and counted.

A run folder is written by processes that may be killed, on disks that fill up, by other versions, and by anybody with
write access. Every reader (status, watch, smoke, exporter, monitor, report, compare) parses with these functions: a
field has the type and range that its check requires, or it is absent. Reading raises nothing.
"""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, TypeVar

from nsa.files import open_regular
from nsa_train import names

LONGEST_LINE = 1 << 20
"""Longer lines are skipped instead of being kept in memory."""
_LARGEST_FILE = 16 << 20
"""Bytes read of the small files (env.json, .HALT, CSV)."""
_DEEPEST = 16
_LARGEST_NUMBER = 1e100
"""Larger values are not measurements; sums and squares of smaller ones do not overflow."""
_LATEST_TIME = 253_402_300_000.0  # end of the year 9999, the last that datetime supports
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Returns the checked value, or None if it is invalid."""
Parsed = tuple[T | None, bool]
"""The parsed record, if usable, and whether something in the line could not be read."""
Unreadable = Counter[str]
"""Number of records (or files) that could not be fully read, by file name."""


def describe_unreadable(unreadable: Mapping[str, int]) -> str:
    """Describe what could not be read in one line; empty if everything could."""
    files = {name: count for name, count in unreadable.items() if count}
    if not files:
        return ""
    total, where = sum(files.values()), ", ".join(f"{name} {count}" for name, count in sorted(files.items()))
    return f"{total} record{'s' * (total != 1)} could not be read ({where})"


# Checks of one value.


def number(value: Any) -> float | None:
    """A number; NaN and infinite values are valid."""
    if type(value) is float and (value != value or -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER or math.isinf(value)):
        return value
    return value if type(value) is int and -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER else None


def amount(value: Any) -> float | None:
    """A finite number that is not negative: seconds, bytes, rates."""
    return value if type(value) in (float, int) and 0 <= value <= _LARGEST_NUMBER else None


def whole(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 2**53 else None


def process_id(value: Any) -> int | None:
    """A positive process id: 0 and negative numbers address process groups in kill(2)."""
    return value if type(value) is int and 0 < value < 2**31 else None


def exit_status(value: Any) -> int | None:
    """An exit code, or a negative signal number."""
    return value if type(value) is int and -128 <= value <= 255 else None


def rank_number(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value < 1_000_000 else None


def time_stamp(value: Any) -> float | None:
    return value if type(value) in (float, int) and 0 <= value <= _LATEST_TIME else None


def text(value: Any) -> str | None:
    return value if type(value) is str else None


def flag(value: Any) -> bool | None:
    return value if type(value) is bool else None


def texts(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if type(value) is list and all(type(item) is str for item in value) else None


def numbers(value: Any) -> tuple[float, ...] | None:
    if type(value) is not list:
        return None
    for item in value:
        if number(item) is None:
            return None
    return tuple(value)


def wholes(value: Any) -> tuple[int, ...] | None:
    return tuple(value) if type(value) is list and all(whole(item) is not None for item in value) else None


def rows_of_numbers(value: Any) -> tuple[tuple[float, ...], ...] | None:
    if type(value) is not list:
        return None
    rows = []
    for item in value:
        row = numbers(item)
        if row is None:
            return None
        rows.append(row)
    return tuple(rows)


def anything(value: Any) -> Any:
    """A value of any type, up to a nesting depth that readers can traverse."""
    return value if _is_shallow(value) else None


def section(value: Any) -> dict[str, Any] | None:
    return value if type(value) is dict and _is_shallow(value) else None


# Records.


def fields(
    record: Mapping[str, Any], checks: Mapping[str, Check], required: tuple[str, ...] = ()
) -> Parsed[dict[str, Any]]:
    """The fields that pass their check. Unknown fields (of a later version) and null are left out."""
    values: dict[str, Any] = {}
    damaged = False
    for name, value in record.items():
        check = checks.get(name)
        if check is None or value is None:
            continue
        good = check(value)
        if good is None:
            damaged = True
        else:
            values[name] = good
    for name in required:
        if name not in values:
            return None, True
    return values, damaged


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


def read_records(path: Path, parse: Callable[[str], Parsed[T]]) -> Iterator[tuple[T | None, bool]]:
    """Every record of a file, oldest first, and whether something in it could not be read; none without a file."""
    try:
        with open_regular(path) as file:
            while line := file.readline(LONGEST_LINE + 1):
                if len(line) > LONGEST_LINE:
                    while line and not line.endswith(b"\n"):
                        line = file.readline(LONGEST_LINE + 1)
                    yield None, True
                elif not line.isspace():
                    yield parse(line.decode("utf-8", "replace"))
    except FileNotFoundError:
        return
    except OSError:
        yield None, True


# Files.


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
    reader = csv.reader(lines)
    try:
        header = next(reader, [])
        for cells in reader:
            if len(cells) == len(header):
                rows.append(dict(zip(header, cells, strict=True)))
            else:
                bad += bool(cells)
    except csv.Error:  # a cell that is too long; the start of the next row is unknown
        bad += 1
    return rows, bad


def heartbeat_files(folder: Path) -> list[tuple[int, Path]]:
    """Heartbeat files as (rank, path), lowest rank first."""
    files = []
    for path in folder.glob(names.HEARTBEATS):
        if (rank := names.rank_of_heartbeat(path.name)) is not None:
            files.append((rank, path))
    return sorted(files)


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


def _is_shallow(value: Any) -> bool:
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item for each in level if isinstance(each, (dict, list))
            for item in (each.values() if isinstance(each, dict) else each)
        ]  # fmt: skip
        if not level:
            return True
    return False
