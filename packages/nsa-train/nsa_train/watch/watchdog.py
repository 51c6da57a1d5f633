"""Watchdog: checks a run periodically, logs findings once, and halts the run at critical ones (stall detection).

At a stall it first collects a hang diagnosis (stacks, collectives), then records the finding, and halts last, so that
nothing is lost. A process that has already ended is not halted: a launcher may be restarting it.
"""

import json
import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from nsa.files import write_atomic
from nsa_train import names
from nsa_train.record import halt_file, record_files
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.heartbeat_record import GATE_BRANCHES
from nsa_train.terminal_text import duration, printable
from nsa_train.watch.conditions import AlertLevel, HealthFinding, HealthLimits
from nsa_train.watch.hang_diagnosis import diagnose_hang
from nsa_train.watch.health import examine
from nsa_train.watch.history import RankLog
from nsa_train.watch.run_reader import RunReader
from nsa_train.watch.status import (
    RunPhase,
    RunStatus,
    describe_findings,
    group_findings,
    phase,
    ranks_of,
    status_of,
    where_found,
)

_BY_AGE = ("heartbeat_stall", "throughput_zero", "process_gone")
_GATES = ("gate_entropy_critical", "gate_collapse_critical", "gate_entropy_low", "gate_collapse_high", "gate_max_high")
_RECENT, _MAX_BYTES = 20, 4096
_Key = tuple[str, int | None]
_T = TypeVar("_T")


class Watchdog:
    """Checks a run and acts on what it finds; `emit` receives every line that health_check.log does."""

    def __init__(
        self,
        folder: Path,
        *,
        halt: bool,
        limits: HealthLimits,
        emit: Callable[[str], None],
        reader: RunReader | None = None,
    ) -> None:
        self.folder, self.limits = folder, limits
        self.phase = RunPhase.EMPTY
        self._halts, self._emit = halt, emit
        self._reader = reader or RunReader(folder)
        self._began = self._reader.now.steady
        self._holding: dict[_Key, HealthFinding] = {}
        self._acted: set[_Key] = set()
        self._cause: str | None = None
        self._unreadable = 0

    def begin(self) -> None:
        """Log the `.HALT` and `.anomaly_type` that are already there; neither is acted on or removed."""
        self.log(f"watching {self.folder}; critical findings {'halt the run' if self._halts else 'are logged only'}")
        now = time.time()
        if (requested := halt_file.read(self.folder)) is not None:
            what = requested.describe(now)
            self.log(f"{names.HALT} exists already: {what}. It halts the run and blocks its next start.")
        if (anomaly := _read_anomaly(self.folder)) is not None:
            name, since = anomaly
            age = duration(now - since)
            self.log(f"{names.ANOMALY} exists already: {name}, {age} old, from an earlier watchdog")

    def check(self) -> RunStatus:
        """Read what the run has written since the last check, act on it, and return the status."""
        history = self._reader.update()
        findings = examine(history, now=self._reader.now.steady, limits=self.limits)
        now_phase = phase(history, findings)
        if now_phase != self.phase:
            self.phase = now_phase
            self.log(f"{now_phase} at step {history.step}")
        if (unreadable := history.unreadable.total()) != self._unreadable:
            self._unreadable = unreadable
            self.log(record_files.describe_unreadable(history.unreadable) or "all records are readable again")
        now = {(finding.name, finding.rank): finding for finding in findings}
        before, self._holding = self._holding, now
        for same in group_findings([finding for key, finding in now.items() if key not in before]):
            self._report(same)
        for same in group_findings([finding for key, finding in before.items() if key not in now]):
            self.log(f"resolved: {same[0].name}{where_found(same)}")
            self._event(EventKind.FINDING, same, over=True)
        self._acted &= now.keys()
        critical = [(key, finding) for key, finding in now.items() if finding.level == AlertLevel.CRITICAL]
        due = [finding for key, finding in critical if key not in self._acted and self._is_certain(finding)]
        if due:
            self._acted |= {(finding.name, finding.rank) for finding in due}
            self._act(due)
        if now_phase == RunPhase.RUNNING and not critical:
            self._cause = None  # what ends this process now is not a consequence of an earlier finding
        return status_of(self._reader, findings)

    def run(self, *, interval_s: float, pause: Callable[[float], None] = time.sleep) -> RunPhase:
        """Check until the run is finished or halted; a run that failed, stopped or is gone may be restarted."""
        self.begin()
        while True:
            try:
                self.check()
            except OSError as problem:  # a network file system that is briefly unavailable
                self.log(f"check failed: {problem}")
            if self.phase in (RunPhase.FINISHED, RunPhase.HALTED):
                return self.phase
            pause(interval_s)

    def log(self, line: str) -> None:
        """Emit a line and append it to health_check.log."""
        self._emit(line)
        self._try(lambda: append_health(self.folder, line))

    def close(self) -> None:
        self._reader.close()

    def _is_certain(self, finding: HealthFinding) -> bool:
        """Whether to act now. An age not watched from its start may come from a clock change: wait `stall_s` more."""
        if finding.name not in _BY_AGE or finding.condition.process_ended:
            return True
        log = self._reader.history.ranks.get(finding.rank) if finding.rank is not None else None
        watched_s = self._reader.now.steady - self._began
        return (log is not None and log.last_at >= self._began) or watched_s > self.limits.stall_s

    def _act(self, due: Sequence[HealthFinding]) -> None:
        if any(finding.name in _BY_AGE and not finding.condition.process_ended for finding in due):
            for line in diagnose_hang(self.folder, self._reader.local()):
                self.log(line)
        first = due[0]
        self._record_cause(first)
        if gates := [finding for finding in due if finding.name in _GATES]:
            self._write_gates(gates)
        self._halt([finding for finding in due if not finding.condition.process_ended])

    def _record_cause(self, first: HealthFinding) -> None:
        """Write the condition to `.anomaly_type`; an end of the process that follows a finding does not replace it."""
        if first.condition.process_ended and self._cause:
            self.log(f"{names.ANOMALY} stays {self._cause}: {first.name} is a consequence")
            return
        earlier, self._cause = _read_anomaly(self.folder), first.name
        self._try(lambda: write_atomic(self.folder / names.ANOMALY, f"{first.name}\n"))
        if earlier is not None and earlier[0] != first.name:
            self.log(f"{names.ANOMALY} changed from {earlier[0]} to {first.name}")

    def _halt(self, findings: Sequence[HealthFinding]) -> None:
        if not findings or not self._halts:
            return
        first = findings[0]
        reason, who = f"{first.name}: {first.message}", f"nsa watch, process {os.getpid()} on {socket.gethostname()}"
        requested = self._try(lambda: halt_file.request(self.folder, reason, who))
        if requested:
            self.log(f"{names.HALT} written: {reason}")
            self._event(EventKind.HALT_ASKED, [first], reason=reason)
        elif requested is not None:
            self.log(f"{names.HALT} exists already, not overwritten")

    def _report(self, same: Sequence[HealthFinding]) -> None:
        first = same[0]
        self.log(f"{first.level.upper()} {describe_findings(same)}")
        self._event(EventKind.STALL if first.name in _BY_AGE else EventKind.FINDING, same, message=first.message)
        if first.name in _GATES and first.level == AlertLevel.WARNING:
            self._write_gates(same)

    def _event(self, kind: EventKind, same: Sequence[HealthFinding], **details: Any) -> None:
        which = {"condition": same[0].name, "level": same[0].level.value, "ranks": ranks_of(same)}
        self._try(lambda: add_event(self.folder, kind, ts=time.time(), step=same[0].step, **which, **details))

    def _write_gates(self, findings: Sequence[HealthFinding]) -> None:
        log = self._reader.history.first
        if log is None or not log.progress:
            return
        content = {"findings": [{"condition": f.name, "message": f.message} for f in findings], **_gate_details(log)}
        content["limits"] = {
            name: value for name, value in asdict(self.limits).items() if name.startswith(_GATE_LIMITS)
        }
        self._try(lambda: write_atomic(self.folder / names.GATE_COLLAPSE, json.dumps(content, indent=2) + "\n"))

    def _try(self, write: Callable[[], _T]) -> _T | None:
        """Log a failed write (such as a full disk) and keep watching; None if it failed."""
        try:
            return write()
        except OSError as problem:
            self._emit(f"cannot write to the run folder: {problem}")
            return None


_GATE_LIMITS = ("entropy_", "collapse_", "gate_")
_GATE_FIELDS = (
    "gate_entropy_mean", "gate_max_mean", "gate_collapse_frac", "gate_branch_shares", "loss", "grad_norm", "lr",
)  # fmt: skip


def _gate_details(log: RankLog) -> dict[str, Any]:
    """Content of gate_collapse_details.json: the last record, layers by their largest gate, and recent records."""
    last = log.progress[-1]
    by_layer = last.gate_shares_by_layer or ()
    largest = [max(shares, default=math.nan) for shares in by_layer]
    one_sided = sorted(range(len(by_layer)), key=lambda i: largest[i] if math.isfinite(largest[i]) else math.inf)
    layers = [
        {"layer": i, "shares": [_strict(each) for each in by_layer[i]], "largest": _strict(largest[i])}
        for i in reversed(one_sided)
    ]
    return {
        "step": last.step,
        "rank": log.rank,
        "ts": last.ts,
        "branches": list(GATE_BRANCHES),
        "layers": layers,
        "recent": [
            {"step": beat.step} | {name: _strict(getattr(beat, name)) for name in _GATE_FIELDS}
            for beat in list(log.progress)[-_RECENT:]
        ],
    }


def _read_anomaly(folder: Path) -> tuple[str, float] | None:
    """Content and modification time of `.anomaly_type`; None without one."""
    path = folder / names.ANOMALY
    try:
        return record_files.read_text(path, _MAX_BYTES).strip(), path.stat().st_mtime
    except OSError:  # missing, or not a regular file
        return None


def append_health(folder: Path, line: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    with record_files.open_to_append(folder / names.HEALTH_LOG) as file:
        file.write(f"[{stamp}] {printable(line)}\n")


def _strict(value: Any) -> Any:
    """A value for JSON, which has no non-finite numbers: those as text."""
    return str(value) if isinstance(value, float) and value - value != 0 else value
