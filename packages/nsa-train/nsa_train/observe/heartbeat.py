"""Heartbeat files: one JSON record per line, written by each rank; the source of all other metric files.

Writer and readers share `HeartbeatRecord`. A full disk or a kill may tear a line: readers skip and count it, a writer
starts a new line.
"""

import json
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from nsa.files import open_regular
from nsa_train import names
from nsa_train.observe import records

ALIVE_EVERY_S = 15.0
"""A run that makes progress writes a record at least this often, plus one step."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatRecord:
    """`ts` to `msg` are in every record, the others in progress records; `names.UNITS` has the units."""

    ts: float
    """Time of the record."""
    iso: str
    """The same as text, UTC."""
    pid: int
    """Process id of the rank on its host."""
    rank: int
    """Rank that wrote the record."""
    step: int
    """Optimizer steps done."""
    msg: str
    """Kind of the record: start, progress, alive, skipped_step, rollback, halt, stop, done or error."""
    loss: float | None = None
    """Training loss of the last step, mean over ranks."""
    toks_per_s: float | None = None
    """Speed since the last progress record."""
    step_s: float | None = None
    """Duration of a step since the last progress record."""
    forward_s: float | None = None
    """Duration of the forward passes of the last step."""
    dt_fetch_s: float | None = None
    """Wait for data before the last step."""
    grad_norm: float | None = None
    """Gradient norm before clipping."""
    lr: float | None = None
    """Learning rate of the last step."""
    tokens_seen: int | None = None
    """Training tokens so far."""
    skipped_steps: int | None = None
    """Steps skipped because of a non-finite or spiking loss or gradient."""
    nonfinite_steps: int | None = None
    """Those of them with a non-finite loss or gradient."""
    host_mem_rss: float | None = None
    """Resident memory of the process."""
    gpu_mem_alloc: float | None = None
    """GPU memory in tensors."""
    gpu_mem_reserved: float | None = None
    """GPU memory held by PyTorch's allocator."""
    gate_entropy_mean: float | None = None
    """Entropy of the gates, mean over layers, tokens and heads."""
    gate_max_mean: float | None = None
    """Largest gate of a token and head, mean."""
    gate_collapse_frac: float | None = None
    """Gates whose mean entropy is below 0.2 nats."""
    gate_branch_shares: tuple[float, ...] | None = None
    """Mean weight of each branch."""
    gate_shares_by_layer: tuple[tuple[float, ...], ...] | None = None
    """Mean weight of each branch in each layer."""
    sel_k_mean: float | None = None
    """Keys that a query reads in the selected branch, mean."""
    sel_k_max: float | None = None
    """Keys that a query reads in the selected branch, largest."""
    sel_pct_at_max: float | None = None
    """Queries that read the largest possible number of selected keys."""
    selector_loss: float | None = None
    """Auxiliary loss of the block selection."""
    reads_pred: int | None = None
    """Key reads that the block sizes predict."""
    reads_act_total: int | None = None
    """Key reads that were counted; they equal reads_pred."""
    kernel_compressed: str | None = None
    """Backend of the compressed branch."""
    kernel_select: str | None = None
    """Backend of the block selection."""
    kernel_selected: str | None = None
    """Backend of the selected branch."""
    kernel_sliding: str | None = None
    """Backend of the sliding branch."""
    kernels_reason: str | None = None
    """Why these backends: "first choice", "requested by name", "verified on this GPU", or why others were not taken."""
    data: str | None = None
    """Where the data comes from."""
    synthetic: bool | None = None
    """Whether the run trains on synthetic data."""
    allowed: tuple[str, ...] | None = None
    """Preflight rules that were overridden with --allow."""
    detail: str | None = None
    """Text of an error, a stop or a skipped step."""
    failure_code: str | None = None
    """In the record of a failure, one of `failure_codes.FailureCode`; runs of older versions have none."""

    @classmethod
    def now(cls, *, ts: float, rank: int, step: int, msg: str, **more: Any) -> Self:
        iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
        return cls(ts=ts, iso=iso, pid=os.getpid(), rank=rank, step=step, msg=msg, **more)

    def as_dict(self) -> dict[str, Any]:
        """Without the fields that are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def to_line(self) -> str:
        return to_line(self.as_dict())


PROGRESS_FIELDS = tuple(
    field.name
    for field in fields(HeartbeatRecord)
    if field.default is None and field.name not in ("detail", "failure_code", "step_s", "selector_loss")
)
"""Fields of every progress record of a model whose layers have gates."""


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


def to_line(record: Mapping[str, Any]) -> str:
    """Strict JSON: non-finite numbers become strings that `float` accepts."""
    return json.dumps({name: _encode(value) for name, value in record.items()}, allow_nan=False, separators=(",", ":"))


FIXED_FIELDS = ("ts", "pid", "rank", "step", "msg")
"""Required fields of a record."""
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
_AMOUNTS = (
    "toks_per_s", "step_s", "forward_s", "dt_fetch_s", "host_mem_rss", "gpu_mem_alloc", "gpu_mem_reserved",
)  # fmt: skip
CHECKS: Mapping[str, records.Check] = {
    **{field.name: _BY_TYPE[field.type] for field in fields(HeartbeatRecord)},
    **dict.fromkeys(_AMOUNTS, records.amount),
    "ts": records.time_stamp,
    "pid": records.process_id,
    "rank": records.rank_number,
}


def beat_fields(rank: int | None = None) -> Callable[[str], records.Parsed[dict[str, Any]]]:
    """Parser of one line of a heartbeat file into its fields; with `rank`, lines of other ranks are unreadable."""

    def parse(line: str) -> records.Parsed[dict[str, Any]]:
        record, torn = records.parse_record(line)
        if record is None:
            return None, torn
        kept, damaged = records.fields(record, CHECKS, FIXED_FIELDS)
        if kept is None or (rank is not None and kept["rank"] != rank):
            return None, True
        return kept, damaged

    return parse


def beat_parser(rank: int | None = None) -> Callable[[str], records.Parsed[HeartbeatRecord]]:
    """The same, as a `HeartbeatRecord`."""
    parse_fields = beat_fields(rank)

    def parse(line: str) -> records.Parsed[HeartbeatRecord]:
        kept, damaged = parse_fields(line)
        return (None if kept is None else HeartbeatRecord(**({"iso": ""} | kept))), damaged

    return parse


def read_beats(path: Path) -> Iterator[HeartbeatRecord]:
    """Every readable record of a heartbeat file, oldest first."""
    return (beat for beat, _ in records.read_records(path, beat_parser()) if beat is not None)


def last_beat(path: Path, msg: str | None = None) -> HeartbeatRecord | None:
    """The newest record, or the newest with this `msg`."""
    found = None
    for beat in read_beats(path):
        if msg in (None, beat.msg):
            found = beat
    return found


def mib(n_bytes: int) -> float:
    return round(n_bytes / 2**20, 3)


def resident_mib() -> float:
    """Resident memory of this process; 0 where /proc is missing."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return mib(pages * os.sysconf("SC_PAGE_SIZE"))


def _encode(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return value


def _ends_torn(path: Path) -> bool:
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:  # no file, or an empty one
        return False


assert names.UNITS.keys() <= {field.name for field in fields(HeartbeatRecord)}
