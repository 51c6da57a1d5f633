"""Run data for charts: a run folder as columns of numbers per rank, with evaluations, events and processes.

Built record by record, so that the report (reads everything) and the monitor (follows) share the code. Numbers are kept
in arrays: half a million records take some tens of megabytes. Steps repeated after a restart are marked superseded.
"""

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from nsa_train import names
from nsa_train.config.starter_config import CONFIG_FILE, RUN_FOLDER
from nsa_train.record import halt_file, record_files, value_checks
from nsa_train.record.evaluations import ModelEvaluation, read_evaluations
from nsa_train.record.events import RunEvent
from nsa_train.record.halt_file import HaltRequest
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS

RANK_COLUMNS = tuple(name for name, metric in METRICS.items() if metric.every_rank)
"""Columns kept for every rank; all others are kept for the lowest rank only."""
_LEAD_COLUMNS = (*(name for name, metric in METRICS.items() if metric.title), "step_s", "tokens_seen")
"""Columns that are drawn, and those that summaries are computed from."""
SHARES = tuple(f"share_{branch}" for branch in GATE_BRANCHES)
"""Columns made from `gate_branch_shares`."""

ABSENT = math.nan
"""In a column: the record does not have this value."""
_NOT_FINITE = math.inf
"""In a column: the value is NaN or infinite."""

_INVERTED = bytes([1, 0]) + bytes(254)
_STEP_RESET = (names.START, names.ROLLED_BACK)


class EvaluationRecord(NamedTuple):
    step: int
    val_loss: float
    seconds: float
    ts: float
    val_accuracy: float = math.nan
    """NaN: not recorded."""


class _GateShares(NamedTuple):
    """Gate shares by layer at one step."""

    step: int
    shares: list[list[float]]


@dataclass
class _ProcessRecord:
    """One process of a rank, from its heartbeats."""

    pid: int
    begin: float
    step: int
    """Step at which it started or resumed."""
    first_row: int
    last: float = 0.0
    last_step: int = 0
    ending: str | None = None
    """`msg` of its final record, if it wrote one."""
    detail: str = ""


class _ThinnedSeries:
    """Keeps at most `most` items, evenly spaced over all that were added, plus the newest."""

    def __init__(self, most: int = 512) -> None:
        self.most = most
        self._kept: list[Any] = []
        self._stride, self._seen = 1, 0
        self._newest: Any = None

    def add(self, item: Any) -> None:
        """Add an item; cheap for one that is not kept."""
        self._newest = item
        if self._seen % self._stride == 0:
            self._kept.append(item)
            if len(self._kept) > self.most:
                self._kept = self._kept[::2]
                self._stride *= 2
        self._seen += 1

    def items(self) -> list[Any]:
        if not self._kept or self._kept[-1] is self._newest:
            return list(self._kept)
        return [*self._kept, self._newest]


class RankSeries:
    """Progress records of one rank as rows, oldest first; a row whose step was repeated later is superseded."""

    def __init__(self, rank: int, columns: Sequence[str]) -> None:
        self.rank = rank
        self.step, self.ts = array("q"), array("d")
        self.steps = array("q")
        """Steps since the previous row, or since the checkpoint that the run resumed from."""
        self.superseded = bytearray()
        self.columns = {name: array("d") for name in columns}
        self._gates = _ThinnedSeries()
        self.processes: list[_ProcessRecord] = []
        self.last: Mapping[str, Any] = {}
        self.last_progress: Mapping[str, Any] = {}
        self._counted_to = 0
        self._scalars = tuple((name, self.columns[name]) for name in columns if name not in SHARES)

    def __len__(self) -> int:
        return len(self.step)

    def add(self, record: Mapping[str, Any]) -> None:
        ts, step, msg = record["ts"], record["step"], record["msg"]
        if not self.processes or msg == names.START or record["pid"] != self.processes[-1].pid:
            self.processes.append(_ProcessRecord(record["pid"], ts, step, len(self)))
            self._counted_to = step if msg == names.START else max(0, step - 1)
        if msg in _STEP_RESET:
            self._supersede(step)
        if msg == names.PROGRESS:
            self._add_row(record)
        process = self.processes[-1]
        process.last, process.last_step = ts, step
        if msg in names.ENDINGS:
            process.ending, process.detail = msg, str(record.get("detail") or "")
        self.last = record

    def column(self, name: str) -> "array[float]":
        """Values of all rows."""
        return self.columns[name]

    def counted(self, name: str) -> "array[float]":
        """Values of the rows that were not superseded; also for `step` and `ts`."""
        values = getattr(self, name) if name in ("step", "ts") else self.columns[name]
        if not any(self.superseded):
            return values
        return array(values.typecode, compress(values, self.superseded.translate(_INVERTED)))

    def gates(self) -> list[_GateShares]:
        """Gate shares by layer of evenly spaced records over the whole run, without repeated steps."""
        shares: list[_GateShares] = []
        for step, by_layer in self._gates.items():
            while shares and shares[-1].step >= step:
                shares.pop()
            shares.append(_GateShares(step, [[_number(share) for share in layer] for layer in by_layer]))
        return shares

    def _add_row(self, record: Mapping[str, Any]) -> None:
        step = record["step"]
        self.step.append(step)
        self.ts.append(record["ts"])
        self.steps.append(max(1, step - self._counted_to))
        self.superseded.append(0)
        self._counted_to = step
        for name, column in self._scalars:
            value = record.get(name)
            column.append(value if type(value) is float and isfinite(value) else _number(value))
        if SHARES[0] in self.columns:
            shares = record.get("gate_branch_shares") or ()
            for name, share in zip(SHARES, [*shares, *[None] * 3], strict=False):
                self.columns[name].append(_number(share))
            if by_layer := record.get("gate_shares_by_layer"):
                self._gates.add((step, by_layer))
        self.last_progress = record

    def _supersede(self, step: int) -> None:
        """Mark later rows as superseded: the run continues from `step`."""
        for row in range(len(self) - 1, -1, -1):
            if self.step[row] > step:
                self.superseded[row] = 1
            elif not self.superseded[row]:
                break
        self._counted_to = step


@dataclass
class RunData:
    folder: Path
    ranks: dict[int, RankSeries] = field(default_factory=dict)
    events: list[RunEvent] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    """Held-out losses during training."""
    model_evaluations: list[ModelEvaluation] = field(default_factory=list)
    """Results of `nsa eval`."""
    env: dict[str, Any] = field(default_factory=dict)
    halt: HaltRequest | None = None
    unreadable: record_files.Unreadable = field(default_factory=record_files.Unreadable)
    """Number of unreadable records, by file."""

    @property
    def named_folder(self) -> Path:
        """The folder that a person named: that of `nsa init` or `nsa demo`, if the run lies in one."""
        folder = self.folder.resolve()
        inside = folder.name == RUN_FOLDER and (folder.parent / CONFIG_FILE).is_file()
        return folder.parent if inside else folder

    @property
    def name(self) -> str:
        return self.named_folder.name

    @property
    def lead(self) -> RankSeries:
        """The lowest rank; values that all ranks share are read from it."""
        return self.ranks[min(self.ranks)] if self.ranks else RankSeries(0, (*_LEAD_COLUMNS, *SHARES))

    @property
    def uses_gpu(self) -> bool:
        return any(value > 0 for value in self.lead.column("gpu_mem_reserved"))

    @property
    def config(self) -> dict[str, Any]:
        return value_checks.section(self.env.get("config")) or {}

    @property
    def target_steps(self) -> int | None:
        return value_checks.whole((value_checks.section(self.config.get("train")) or {}).get("steps"))

    def add(self, rank: int, record: Mapping[str, Any]) -> None:
        """Add a record of a heartbeat file, as `beat_fields` parses it."""
        if rank not in self.ranks:
            lead = not self.ranks or rank < min(self.ranks)
            self.ranks[rank] = RankSeries(rank, (*_LEAD_COLUMNS, *SHARES) if lead else RANK_COLUMNS)
        self.ranks[rank].add(record)

    def counted_evaluations(self) -> list[EvaluationRecord]:
        """The last evaluation at each step, ordered by step."""
        newest = {evaluation.step: evaluation for evaluation in self.evaluations}
        return [newest[step] for step in sorted(newest)]

    def read_other_files(self, env: dict[str, Any]) -> None:
        """Read everything but heartbeats and events; these files are small and read as a whole."""
        self.env, self.halt = env, halt_file.read(self.folder)
        self.evaluations, self.unreadable[names.VAL_CSV] = _read_evaluations(self.folder / names.VAL_CSV)
        self.model_evaluations = read_evaluations(self.folder)
        self.unreadable[names.EVALUATIONS] = sum(each.unreadable for each in self.model_evaluations)


def _number(value: Any) -> float:
    if value is None or isinstance(value, (bool, list, dict)):
        return ABSENT
    try:
        number = float(value)
    except ValueError:
        return ABSENT
    return number if math.isfinite(number) else _NOT_FINITE


def _read_evaluations(path: Path) -> tuple[list[EvaluationRecord], int]:
    rows, bad = record_files.read_rows(path)
    evaluations = []
    for row in rows:
        try:
            step, loss, seconds, ts = int(row["step"]), float(row["val_loss"]), float(row["seconds"]), float(row["ts"])
            accuracy = float(row.get("val_accuracy") or math.nan)
        except (KeyError, ValueError):
            bad += 1
            continue
        checks = (value_checks.whole(step), value_checks.number(loss), value_checks.amount(seconds))
        if None in (*checks, value_checks.time_stamp(ts)) or not (math.isnan(accuracy) or 0 <= accuracy <= 1):
            bad += 1
        else:
            evaluations.append(EvaluationRecord(step, loss, seconds, ts, accuracy))
    return evaluations, bad
