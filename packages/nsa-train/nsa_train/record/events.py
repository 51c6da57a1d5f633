"""Event log of a run (`events.jsonl`): starts, saves, rollbacks, findings, errors; one file across all restarts."""

from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record import record_files, value_checks
from nsa_train.record.record_files import JsonLines, RecordTail, to_line


class LauncherAction(StrEnum):
    """Field `launcher` of an event: what the launcher did when the ranks had ended, or before they started."""

    RESTARTED = "restarted"
    NOT_RESTARTED = "not restarted"
    GAVE_UP = "given up"
    STOPPED = "stopped as asked"
    WAITING = "waits for nodes"


class EventKind(StrEnum):
    START = "start"
    RESTART = "restart"
    WAITING = "waiting"
    """A launcher has started no rank yet because other nodes are missing."""
    SETTINGS_CHANGED = "settings_changed"
    """The run was resumed with changed settings (only those that may change)."""
    LOST_STEPS = "lost_steps"
    FIRST_STEP = "first_step"
    SAVE = "save"
    COPIED = "copied"
    """A checkpoint was copied to `train.checkpoint_store`."""
    COPY_FAILED = "copy_failed"
    """A copy was given up; the checkpoint itself is good, and training continued."""
    CHECKPOINT_REJECTED = "checkpoint_rejected"
    EVALUATION = "evaluation"
    EVALUATION_FAILED = "evaluation_failed"
    """The held-out split could not be read or evaluated; training continued."""
    STALL = "stall"
    SKIPPED_STEP = "skipped_step"
    ROLLBACK = "rollback"
    HALT = "halt"
    STOP = "stop"
    DONE = "done"
    ERROR = "error"
    FINDING = "finding"
    """The watchdog found a condition, or found it resolved (`over`)."""
    HALT_ASKED = "halt_asked"
    HALT_CLEARED = "halt_cleared"


@dataclass(frozen=True)
class RunEvent:
    ts: float
    kind: EventKind
    step: int
    details: dict[str, Any]


def add_event(run_folder: Path, kind: EventKind, *, ts: float, step: int, **details: Any) -> None:
    """Append an event. Called by rank 0, the launcher, the watchdog and commands.

    The file is opened for each event: they are rare, and the last save of a run may finish in another thread after
    everything else has been closed.
    """
    iso = datetime.fromtimestamp(ts, UTC).isoformat(timespec="milliseconds")
    with closing(JsonLines(run_folder / names.EVENTS)) as lines:
        lines.append(to_line({"ts": ts, "iso": iso, "event": kind.value, "step": step, **details}))


_CHECKS = {
    "ts": value_checks.time_stamp,
    "event": value_checks.text,
    "step": value_checks.whole,
    **dict.fromkeys(("val_loss", "loss", "grad_norm"), value_checks.number),
    "val_accuracy": value_checks.amount,
    **dict.fromkeys(("steps", "world", "tokens"), value_checks.whole),
    "code": value_checks.exit_status,
    **dict.fromkeys(
        ("reason", "error", "problem", "why", "message", "condition", "level", "launcher", "origin", "data", "path",
         "logs", "by", "aside", "failure_code", "address"), value_checks.text,
    ),
    "over": value_checks.flag,
    "rank": value_checks.rank_number,
}  # fmt: skip
"""Fields that readers use; others may have any type."""
_KINDS = frozenset(EventKind)
_COMMON_FIELDS = ("ts", "iso", "event", "step")


def parse_event(line: str) -> value_checks.Parsed[RunEvent]:
    """One line of events.jsonl. Kinds of a later version are skipped without counting as damage."""
    record, torn = record_files.parse_record(line)
    if record is None:
        return None, torn
    checks = dict.fromkeys(record, value_checks.anything) | _CHECKS
    values, damaged = value_checks.fields(record, checks, ("ts", "event", "step"))
    if values is None or values["event"] not in _KINDS:
        return None, damaged
    details = {name: value for name, value in values.items() if name not in _COMMON_FIELDS}
    return RunEvent(values["ts"], EventKind(values["event"]), values["step"], details), damaged


def read_events(run_folder: Path) -> list[RunEvent]:
    """Every readable event, oldest first."""
    return list(RecordTail(run_folder / names.EVENTS, parse_event).whole_file())
