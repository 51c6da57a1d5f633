"""`events.jsonl`: what happened to a run, once per run and not per rank, across all its restarts."""

from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa.observe import names
from nsa.observe.heartbeat import JsonLines, read_records, to_line


class Kind(StrEnum):
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


@dataclass(frozen=True)
class Event:
    ts: float
    kind: Kind
    step: int
    details: dict[str, Any]


def add_event(run_folder: Path, kind: Kind, *, ts: float, step: int, **details: Any) -> None:
    """By rank 0, the launcher, the watchdog or an operator's command. Events are rare, so no file is held open: the
    last save of a run may end, in a thread of its own, when everything else has been closed."""
    iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    lines = JsonLines(run_folder / names.EVENTS)
    try:
        lines.append(to_line({"ts": ts, "iso": iso, "event": kind.value, "step": step, **details}))
    finally:
        lines.close()


def event_of(record: dict[str, Any]) -> Event | None:
    """None for kinds of a later version and records that are none."""
    if record.get("event") not in list(Kind) or not {"ts", "step"} <= record.keys():
        return None
    details = {name: value for name, value in record.items() if name not in ("ts", "iso", "event", "step")}
    return Event(record["ts"], Kind(record["event"]), record["step"], details)


def read_events(run_folder: Path) -> list[Event]:
    """Oldest first; torn lines and kinds of a later version are passed over."""
    return [event for record in read_records(run_folder / names.EVENTS) if (event := event_of(record)) is not None]
