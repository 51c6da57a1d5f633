"""The heartbeat: one JSON record per line, the truth that every other record of a run copies.

Writer and readers share `Beat`. A full disk or a kill may tear a line; readers pass over it and writers begin anew.
"""

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from nsa.observe import names

ALIVE_EVERY_S = 15.0
"""A run whose steps go on is silent no longer than this and one step."""
_NON_FINITE = {"NaN", "Infinity", "-Infinity"}


@dataclass(frozen=True, kw_only=True)
class Beat:
    """`ts` to `msg` are in every record, the others in progress records; `names.UNITS` has the units."""

    ts: float
    iso: str
    pid: int
    rank: int
    step: int
    msg: str
    loss: float | None = None
    toks_per_s: float | None = None
    step_s: float | None = None
    forward_s: float | None = None
    dt_fetch_s: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    tokens_seen: int | None = None
    skipped_steps: int | None = None
    nonfinite_steps: int | None = None
    host_mem_rss: float | None = None
    gpu_mem_alloc: float | None = None
    gpu_mem_reserved: float | None = None
    gpu_mem_alloc_gib: float | None = None
    gpu_mem_reserved_gib: float | None = None
    gate_entropy_mean: float | None = None
    gate_max_mean: float | None = None
    gate_collapse_frac: float | None = None
    gate_branch_shares: tuple[float, ...] | None = None
    gate_shares_by_layer: tuple[tuple[float, ...], ...] | None = None
    sel_k_mean: float | None = None
    sel_k_max: float | None = None
    sel_pct_at_max: float | None = None
    reads_pred: int | None = None
    reads_act_total: int | None = None
    kernel_compressed: str | None = None
    kernel_select: str | None = None
    kernel_selected: str | None = None
    kernel_sliding: str | None = None
    fallbacks_compressed: int | None = None
    fallbacks_select: int | None = None
    fallbacks_selected: int | None = None
    fallbacks_sliding: int | None = None
    data: str | None = None
    synthetic: bool | None = None
    allowed: tuple[str, ...] | None = None
    detail: str | None = None

    @classmethod
    def now(cls, *, ts: float, rank: int, step: int, msg: str, **more: Any) -> Self:
        iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
        return cls(ts=ts, iso=iso, pid=os.getpid(), rank=rank, step=step, msg=msg, **more)

    def as_dict(self) -> dict[str, Any]:
        """Without what is not known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to_line(self) -> str:
        return to_line(self.as_dict())

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Self:
        """A record with fields this version does not know loses them; one without the fixed fields is no beat."""
        known = cls.__dataclass_fields__
        return cls(
            **{
                name: _frozen(value) if isinstance(value, list) else value
                for name, value in record.items()
                if name in known
            }
        )


PROGRESS_FIELDS = tuple(
    field.name for field in fields(Beat) if field.default is None and field.name not in ("detail", "step_s")
)
"""Fields that a progress record always has."""


class JsonLines:
    """A file of records, opened for appending; each record is one write, so that readers see it whole or not at all."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(path)
        self._file = path.open("a", encoding="utf-8")
        if torn:
            self._file.write("\n")
        self._turn = threading.Lock()  # saves end in a thread of their own

    def append(self, line: str) -> None:
        with self._turn:
            self._file.write(line + "\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def to_line(record: Mapping[str, Any]) -> str:
    """Strict JSON: what is not finite becomes a string that `float` understands."""
    return json.dumps({name: _spell(value) for name, value in record.items()}, allow_nan=False, separators=(",", ":"))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Every whole record of a file, oldest first; nothing if there is no file."""
    try:
        text = path.read_bytes().decode("utf-8", "replace")
    except FileNotFoundError:
        return
    for line in text.split("\n"):
        record = parse_record(line)
        if record is not None:
            yield record


def parse_record(line: str) -> dict[str, Any] | None:
    """One line as a record, or None if it was torn or is something else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    spelled = "NaN" in line or "Infinity" in line  # few records are: most need no second look
    return {name: _read(value) for name, value in record.items()} if spelled else record


def read_beats(path: Path) -> Iterator[Beat]:
    """Every whole beat of a heartbeat file, oldest first."""
    for record in read_records(path):
        try:
            yield Beat.from_dict(record)
        except TypeError:
            continue


def last_beat(path: Path, msg: str | None = None) -> Beat | None:
    """The newest beat, or the newest that says `msg`."""
    found = None
    for beat in read_beats(path):
        if msg in (None, beat.msg):
            found = beat
    return found


def mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 3)


def gib(n_bytes: int) -> float:
    return round(n_bytes / 2**30, 6)


def resident_mib() -> float:
    """Memory of this process that is in RAM; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return mib(pages * os.sysconf("SC_PAGE_SIZE"))


def _spell(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_spell(item) for item in value]
    return value


def _read(value: Any) -> Any:
    if isinstance(value, str) and value in _NON_FINITE:
        return float(value)
    return [_read(item) for item in value] if isinstance(value, list) else value


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _ends_torn(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file, or an empty one
        return False


assert names.UNITS.keys() <= {field.name for field in fields(Beat)}
