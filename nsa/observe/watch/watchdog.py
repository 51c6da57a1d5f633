"""The process that watches a run: looks, tells what is new and what is over, and acts on what is critical.

It acts in an order that loses nothing: at a stall it first asks the run where it hangs, then writes down what it found,
and halts last. What has ended by itself is not halted: a launcher may be starting it again.
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
from nsa.observe import halt_file, names, records
from nsa.observe.events import EventKind, add_event
from nsa.observe.watch.conditions import AlertLevel, HealthFinding, HealthLimits
from nsa.observe.watch.hang_diagnosis import HangDiagnosis
from nsa.observe.watch.health import RunPhase, examine, phase
from nsa.observe.watch.history import HistoryReader, RankLog
from nsa.terminal_text import printable

_BY_AGE = ("heartbeat_stall", "throughput_zero", "process_gone")
_GATES = ("gate_entropy_critical", "gate_collapse_critical", "gate_entropy_low", "gate_collapse_high", "gate_max_high")
_RECENT, _MOST_WORDS = 20, 4096
_FEW = 8
_Key = tuple[str, int | None]
_T = TypeVar("_T")


class Watchdog:
    """`say` takes every line that also goes to health_check.log."""

    def __init__(
        self,
        folder: Path,
        *,
        halt: bool,
        limits: HealthLimits,
        say: Callable[[str], None],
        reader: HistoryReader | None = None,
    ) -> None:
        self.folder, self.limits = folder, limits
        self.phase = RunPhase.EMPTY
        self._halts, self._say = halt, say
        self._reader = reader or HistoryReader(folder)
        self._began = self._reader.now.steady
        self._holding: dict[_Key, HealthFinding] = {}
        self._acted: set[_Key] = set()
        self._named: str | None = None
        self._unreadable = 0

    def begin(self) -> None:
        """Tell what an earlier watch or an operator left behind: it is neither obeyed nor removed."""
        self.log(f"watching {self.folder}, {'halting' if self._halts else 'not halting'} at critical findings")
        now = time.time()
        if (asked := halt_file.read(self.folder)) is not None:
            self.log(f"{names.HALT} is there already: {asked.describe(now)}. The run obeys it; so does its next start.")
        if (anomaly := read_anomaly(self.folder)) is not None:
            name, since = anomaly
            self.log(
                f"{names.ANOMALY} is there already: {name}, {halt_file.age(now - since)} old, from an earlier watch."
            )

    def look(self) -> list[HealthFinding]:
        """Once; returns what is wrong now."""
        history = self._reader.update()
        findings = examine(history, now=self._reader.now.steady, limits=self.limits)
        found = phase(history, findings)
        if found != self.phase:
            self.phase = found
            self.log(f"{found} at step {history.step}")
        if (unreadable := history.unreadable.total()) != self._unreadable:
            self._unreadable = unreadable
            self.log(records.describe_unreadable(history.unreadable) or "all records can be read")
        now = {(finding.name, finding.rank): finding for finding in findings}
        before, self._holding = self._holding, now
        for same in by_condition([finding for key, finding in now.items() if key not in before]):
            self._tell(same)
        for same in by_condition([finding for key, finding in before.items() if key not in now]):
            self._tell_over(same)
        self._acted &= now.keys()
        due = [
            f
            for key, f in now.items()
            if f.level == AlertLevel.CRITICAL and key not in self._acted and self._is_sure(f)
        ]
        if due:
            self._acted |= {(finding.name, finding.rank) for finding in due}
            self._act(due)
        return findings

    def log(self, line: str) -> None:
        """To whoever listens and to health_check.log."""
        self._say(line)
        self._try(lambda: append_health(self.folder, line))

    def close(self) -> None:
        self._reader.close()

    def _is_sure(self, finding: HealthFinding) -> bool:
        """An age that the watcher has not lived through itself may be a clock that was set: wait for as long again."""
        if finding.name not in _BY_AGE or finding.condition.over:
            return True
        log = self._reader.history.ranks.get(finding.rank) if finding.rank is not None else None
        watched_s = self._reader.now.steady - self._began
        return (log is not None and log.last_at >= self._began) or watched_s > self.limits.stall_s

    def _act(self, due: Sequence[HealthFinding]) -> None:
        if any(finding.name in _BY_AGE and not finding.condition.over for finding in due):
            for line in HangDiagnosis(self.folder, list(self._reader.local())).ask():
                self.log(line)
        first = due[0]
        self._name_cause(first)
        if gates := [finding for finding in due if finding.name in _GATES]:
            self._write_gates(gates)
        self._halt([finding for finding in due if not finding.condition.over])

    def _name_cause(self, first: HealthFinding) -> None:
        """What ends after this watch has found a cause ends because of it: the cause stays named."""
        if first.condition.over and self._named:
            self.log(f"{names.ANOMALY} stays {self._named}: {first.name} came of it")
            return
        earlier, self._named = read_anomaly(self.folder), first.name
        self._try(lambda: write_atomic(self.folder / names.ANOMALY, f"{first.name}\n"))
        if earlier is not None and earlier[0] != first.name:
            self.log(f"{names.ANOMALY} says {first.name} now, it said {earlier[0]}")

    def _halt(self, findings: Sequence[HealthFinding]) -> None:
        if not findings or not self._halts:
            return
        first = findings[0]
        reason, who = f"{first.name}: {first.message}", f"nsa watch, process {os.getpid()} on {socket.gethostname()}"
        asked = self._try(lambda: halt_file.ask(self.folder, reason, who))
        if asked:
            self.log(f"{names.HALT} written: {reason}")
            self._event(EventKind.HALT_ASKED, [first], reason=reason)
        elif asked is not None:
            self.log(f"{names.HALT} is there already, not overwritten")

    def _tell(self, same: Sequence[HealthFinding]) -> None:
        first = same[0]
        self.log(f"{first.level.upper()} {describe(same)}")
        self._event(EventKind.STALL if first.name in _BY_AGE else EventKind.FINDING, same, message=first.message)
        if first.name in _GATES and first.level == AlertLevel.WARNING:
            self._write_gates(same)

    def _tell_over(self, same: Sequence[HealthFinding]) -> None:
        self.log(f"over: {same[0].name}{_where(same)}")
        self._event(EventKind.FINDING, same, over=True)

    def _event(self, kind: EventKind, same: Sequence[HealthFinding], **details: Any) -> None:
        which = {"condition": same[0].name, "level": same[0].level.value, "ranks": ranks_of(same)}
        self._try(lambda: add_event(self.folder, kind, ts=time.time(), step=same[0].step, **which, **details))

    def _write_gates(self, findings: Sequence[HealthFinding]) -> None:
        log = self._reader.history.first
        if log is None or not log.progress:
            return
        content = {"findings": [{"condition": f.name, "message": f.message} for f in findings], **gate_details(log)}
        content["limits"] = {name: value for name, value in asdict(self.limits).items() if name.startswith(_LIMITS)}
        self._try(lambda: write_atomic(self.folder / names.GATE_COLLAPSE, json.dumps(content, indent=2) + "\n"))

    def _try(self, write: Callable[[], _T]) -> _T | None:
        """A full disk is one of the things to report, not a reason to stop watching; None where it could not write."""
        try:
            return write()
        except OSError as problem:
            self._say(f"could not write: {problem}")
            return None


_LIMITS = ("entropy_", "collapse_", "gate_")


def gate_details(log: RankLog) -> dict[str, Any]:
    """What is known of the gates: the last record, the layers from the most one-sided on, and how it came about."""
    last = log.progress[-1]
    by_layer = last.gate_shares_by_layer or ()
    largest = [max(shares, default=math.nan) for shares in by_layer]
    one_sided = sorted(range(len(by_layer)), key=lambda i: largest[i] if math.isfinite(largest[i]) else math.inf)
    layers = [
        {"layer": i, "shares": [_strict(each) for each in by_layer[i]], "largest": _strict(largest[i])}
        for i in reversed(one_sided)
    ]
    fields = (
        "gate_entropy_mean",
        "gate_max_mean",
        "gate_collapse_frac",
        "gate_branch_shares",
        "loss",
        "grad_norm",
        "lr",
    )
    return {
        "step": last.step,
        "rank": log.rank,
        "ts": last.ts,
        "branches": ["compressed", "selected", "sliding"],
        "layers": layers,
        "recent": [
            {"step": beat.step} | {name: _strict(getattr(beat, name)) for name in fields}
            for beat in list(log.progress)[-_RECENT:]
        ],
    }


def by_condition(findings: Sequence[HealthFinding]) -> list[list[HealthFinding]]:
    """Findings of the same condition on several ranks belong together."""
    groups: dict[str, list[HealthFinding]] = {}
    for finding in findings:
        groups.setdefault(finding.name, []).append(finding)
    return list(groups.values())


def ranks_of(same: Sequence[HealthFinding]) -> list[int]:
    return [finding.rank for finding in same if finding.rank is not None]


def describe(same: Sequence[HealthFinding]) -> str:
    """One line for findings of one condition."""
    return f"{same[0].name}{_where(same)}: {same[0].message}"


def read_anomaly(folder: Path) -> tuple[str, float] | None:
    """What `.anomaly_type` says and since when; None without one."""
    path = folder / names.ANOMALY
    try:
        return records.read_text(path, _MOST_WORDS).strip(), path.stat().st_mtime
    except OSError:  # none, or something that is no file
        return None


def append_health(folder: Path, line: str) -> None:
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime())
    with records.open_to_append(folder / names.HEALTH_LOG) as file:
        file.write(f"[{stamp}] {printable(line)}\n")


def watch(watchdog: Watchdog, *, interval_s: float, pause: Callable[[float], None] = time.sleep) -> RunPhase:
    """Until the run is finished or halted; what failed, stopped or is gone may come back and is watched on."""
    watchdog.begin()
    while True:
        try:
            watchdog.look()
        except OSError as problem:  # a file server that is away for a moment
            watchdog.log(f"could not look: {problem}")
        if watchdog.phase in (RunPhase.FINISHED, RunPhase.HALTED):
            return watchdog.phase
        pause(interval_s)


def _where(same: Sequence[HealthFinding]) -> str:
    ranks = ranks_of(same)
    if not ranks:
        return f" (step {same[0].step})"
    few = ", ".join(map(str, ranks[:_FEW])) + (f" and {len(ranks) - _FEW} more" if len(ranks) > _FEW else "")
    return f" (rank{'s' * (len(ranks) > 1)} {few}, step {same[0].step})"


def _strict(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    return str(value) if isinstance(value, float) and value - value != 0 else value
