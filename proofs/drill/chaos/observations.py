"""Follows everything a chaos run writes and records what is out of the ordinary, with the time at which it was seen.

Times are those of the drill's own clock: the clock of a rank may be wrong on purpose.
"""

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record.events import EventKind, RunEvent, parse_event
from nsa_train.record.heartbeat_record import beat_fields
from nsa_train.record.record_files import RecordTail
from nsa_train.record.value_checks import Parsed

_ORDINARY = (
    EventKind.START, EventKind.FIRST_STEP, EventKind.SAVE, EventKind.COPIED, EventKind.EVALUATION, EventKind.DONE
)  # fmt: skip
_PROBLEM = re.compile(r"Traceback|\w*(Error|Timeout|Killed|Exception)\b|WARNING|CRITICAL|FATAL|not copied to")
_CRASH = re.compile(r"^Traceback")
_LONGEST = 300
_TEXT_FIELDS = ("why", "failure_code", "error", "problem", "reason", "message", "steps")


@dataclass(frozen=True)
class Observation:
    at: float
    kind: str
    """Kind of an event; `launcher:ACTION`, `finding:CONDITION`; `log` for a line of a log file, `exit` for a launcher
    that ended, `unreadable` for damaged records."""
    text: str
    step: int | None = None
    """Step that an event names."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


class RunObserver:
    """Observations and progress of a run so far; `update` reads what was appended since the last call.

    folder: the drill's, with the logs of launchers, watchdog and servers. run_folder: the run's.
    """

    def __init__(self, folder: Path, run_folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._run_folder, self._clock = folder, run_folder, clock
        self._events = RecordTail(run_folder / names.EVENTS, parse_event)
        self._beats = RecordTail(run_folder / names.heartbeat(0), beat_fields(0))
        self._logs: dict[Path, RecordTail[str]] = {}
        self._unreadable = 0
        self.observations: list[Observation] = []
        self.step = 0
        """Newest step of rank 0."""
        self.furthest_step = 0
        self.progressed_at = 0.0
        """Time at which a step was last seen."""
        self.repeated_steps = 0

    def update(self) -> None:
        for beat in self._beats.read():
            self._add_beat(beat["msg"], beat["step"])
        for event in self._events.read():
            if (kind := _kind(event)) is not None:
                self.add(kind, _text(event), event.step)
        for path, problem in self._log_files():
            tail = self._logs.setdefault(path, RecordTail(path, _line))
            for line in tail.read():
                if problem.search(line):
                    self.add("log", f"{path.parent.name}/{path.name}: {line[:_LONGEST]}")
        if (unreadable := self._events.unreadable + self._beats.unreadable) != self._unreadable:
            self._unreadable = unreadable
            self.add("unreadable", f"{unreadable} records of events or heartbeats cannot be read")

    def add(self, kind: str, text: str, step: int | None = None) -> None:
        self.observations.append(Observation(self._clock(), kind, text, step))

    def close(self) -> None:
        tails: list[RecordTail[Any]] = [self._events, self._beats, *self._logs.values()]
        for tail in tails:
            tail.close()

    def _add_beat(self, msg: str, step: int) -> None:
        if msg != names.PROGRESS:
            return
        self.step, self.progressed_at = step, self._clock()
        self.repeated_steps += step <= self.furthest_step
        self.furthest_step = max(self.furthest_step, step)

    def _log_files(self) -> Iterator[tuple[Path, re.Pattern[str]]]:
        """Log files, and what is a problem in them: the watchdog's quotes findings, which are events already."""
        for path in (*self._folder.glob("*-launch.log"), *self._run_folder.glob("logs/*/*.log")):
            yield path, _PROBLEM
        for path in (*self._folder.glob("*-watch.log"), *self._folder.glob("*-serve.log")):
            yield path, _CRASH


def _line(text: str) -> Parsed[str]:
    return text.rstrip("\n"), False


def _kind(event: RunEvent) -> str | None:
    """None for events of a run that nothing happened to."""
    if "launcher" in event.details:
        return f"launcher:{event.details['launcher']}"
    if event.kind in (EventKind.FINDING, EventKind.STALL):
        return None if event.details.get("over") else f"finding:{event.details.get('condition')}"
    return None if event.kind in _ORDINARY else event.kind.value


def _text(event: RunEvent) -> str:
    words = [str(event.details[name]) for name in _TEXT_FIELDS if event.details.get(name) is not None]
    return f"step {event.step}: {'; '.join(words)}"[:_LONGEST]
