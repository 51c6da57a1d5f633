"""`events.jsonl`: what happened to a run, once per run and not per rank, across all its restarts."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa.observe import names, records
from nsa.observe.heartbeat import JsonLines, to_line


class EventKind(StrEnum):
    START = "start"
    RESTART = "restart"
    SETTINGS_CHANGED = "settings_changed"
    """A run was resumed with settings that its checkpoint was not saved with, and that may change."""
    LOST_STEPS = "lost_steps"
    FIRST_STEP = "first_step"
    SAVE = "save"
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    EVALUATION = "evaluation"
    EVALUATION_FAILED = "evaluation_failed"
    """The held-out split could not be read or scored; training continued."""
    STALL = "stall"
    SKIPPED_STEP = "skipped_step"
    ROLLBACK = "rollback"
    HALT = "halt"
    STOP = "stop"
    DONE = "done"
    ERROR = "error"
    FINDING = "finding"
    """The watchdog found a condition to hold, or to hold no more."""
    HALT_ASKED = "halt_asked"
    HALT_CLEARED = "halt_cleared"


class LauncherAction(StrEnum):
    """Field `launcher` of an event: what the launcher did when the ranks had ended."""

    RESTARTED = "restarted"
    NOT_RESTARTED = "not restarted"
    GAVE_UP = "given up"
    STOPPED = "stopped as asked"


@dataclass(frozen=True)
class RunEvent:
    ts: float
    kind: EventKind
    step: int
    details: dict[str, Any]


def add_event(run_folder: Path, kind: EventKind, *, ts: float, step: int, **details: Any) -> None:
    """By rank 0, the launcher, the watchdog or an operator's command. Events are rare, so no file is held open: the
    last save of a run may end, in a thread of its own, when everything else has been closed."""
    iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    lines = JsonLines(run_folder / names.EVENTS)
    try:
        lines.append(to_line({"ts": ts, "iso": iso, "event": kind.value, "step": step, **details}))
    finally:
        lines.close()


_CHECKS = {
    "ts": records.time_stamp,
    "event": records.text,
    "step": records.whole,
    **dict.fromkeys(("val_loss", "loss", "grad_norm"), records.number),
    **dict.fromkeys(("steps", "world", "tokens"), records.whole),
    "code": records.exit_status,
    **dict.fromkeys(
        ("reason", "error", "problem", "why", "message", "condition", "level", "launcher", "origin", "data", "path",
         "logs", "by", "aside", "failure_code"), records.text,
    ),
    "over": records.flag,
    "rank": records.rank_number,
}  # fmt: skip
"""Of the fields that readers use; others may be anything."""
_KINDS = frozenset(EventKind)
_OF_EVERY_EVENT = ("ts", "iso", "event", "step")


def parse_event(line: str) -> records.Parsed[RunEvent]:
    """One line of events.jsonl. Kinds of a later version are skipped, and are not damage."""
    record, torn = records.parse_record(line)
    if record is None:
        return None, torn
    checks = dict.fromkeys(record, records.anything) | _CHECKS
    kept, damaged = records.fields(record, checks, ("ts", "event", "step"))
    if kept is None or kept["event"] not in _KINDS:
        return None, damaged
    details = {name: value for name, value in kept.items() if name not in _OF_EVERY_EVENT}
    return RunEvent(kept["ts"], EventKind(kept["event"]), kept["step"], details), damaged


def read_events_and_damage(run_folder: Path) -> tuple[list[RunEvent], int]:
    """Events, oldest first, and how many records could not be read, whole or in part."""
    found = list(records.read_records(run_folder / names.EVENTS, parse_event))
    return [event for event, _ in found if event is not None], sum(damaged for _, damaged in found)


def read_events(run_folder: Path) -> list[RunEvent]:
    return read_events_and_damage(run_folder)[0]
