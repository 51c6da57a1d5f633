"""Heartbeat files: one JSON record per line, written by each rank; the source of all other metric files.

Writer and readers share `HeartbeatRecord`. A full disk or a kill may tear a line: readers skip and count it, a writer
starts a new line.
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nsa.files import open_regular
from nsa_train.record import records
from nsa_train.record.heartbeat_record import RECORD_FIELDS, REQUIRED_FIELDS, HeartbeatRecord, MetricFormat, RecordField

ALIVE_EVERY_S = 15.0
"""A run that makes progress writes a record at least this often, plus one step."""


class JsonLines:
    """Appends records to a file, each in one write, so that readers see whole lines."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(path)
        self._file = records.open_to_append(path)
        if torn:
            self._file.write("\n")
        self._lock = threading.Lock()  # saves finish in another thread

    def append(self, line: str) -> None:
        with self._lock:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


_BY_TYPE: Mapping[Any, records.Check] = {
    float: records.number,
    int: records.whole,
    str: records.text,
    float | None: records.number,
    int | None: records.whole,
    str | None: records.text,
    bool | None: records.flag,
    tuple[str, ...] | None: records.texts,
    tuple[float, ...] | None: records.numbers,
    tuple[tuple[float, ...], ...] | None: records.rows_of_numbers,
}
_AMOUNTS = (MetricFormat.COUNT, MetricFormat.DURATION, MetricFormat.MEMORY)


def _check(field: RecordField) -> records.Check:
    return records.amount if field.type == float | None and field.format in _AMOUNTS else _BY_TYPE[field.type]


CHECKS: Mapping[str, records.Check] = {
    **{name: _check(field) for name, field in RECORD_FIELDS.items()},
    "ts": records.time_stamp,
    "pid": records.process_id,
    "rank": records.rank_number,
}


def beat_fields(rank: int | None = None) -> Callable[[str], records.Parsed[dict[str, Any]]]:
    """Return a parser of lines into fields; with `rank`, lines of other ranks are unreadable."""

    def parse(line: str) -> records.Parsed[dict[str, Any]]:
        record, torn = records.parse_record(line)
        if record is None:
            return None, torn
        values, damaged = records.fields(record, CHECKS, REQUIRED_FIELDS)
        if values is None or (rank is not None and values["rank"] != rank):
            return None, True
        return values, damaged

    return parse


def beat_parser(rank: int | None = None) -> Callable[[str], records.Parsed[HeartbeatRecord]]:
    """Return a parser of lines into records; with `rank`, lines of other ranks are unreadable."""
    parse_fields = beat_fields(rank)

    def parse(line: str) -> records.Parsed[HeartbeatRecord]:
        values, damaged = parse_fields(line)
        return (None if values is None else HeartbeatRecord(**({"iso": ""} | values))), damaged

    return parse


def read_beats(path: Path) -> Iterator[HeartbeatRecord]:
    """Every readable record of a heartbeat file, oldest first."""
    return (beat for beat, _ in records.read_records(path, beat_parser()) if beat is not None)


def last_beat(path: Path, msg: str | None = None) -> HeartbeatRecord | None:
    """The newest record, or the newest with this `msg`."""
    newest = None
    for beat in read_beats(path):
        if msg in (None, beat.msg):
            newest = beat
    return newest


def _ends_torn(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file, or an empty one
        return False
