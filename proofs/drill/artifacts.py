"""Reads a run folder's artifacts for the drill: heartbeat, events, checkpoints, stack dumps, weights."""

from pathlib import Path

from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.record.events import EventKind, RunEvent, read_events
from nsa_train.record.heartbeat_record import HeartbeatRecord, read_beats

StepHistory = dict[int, tuple[float | None, float | None]]


def beats(folder: Path, rank: int = 0, msg: str = names.PROGRESS) -> list[HeartbeatRecord]:
    path = folder / names.heartbeat(rank)
    return [beat for beat in read_beats(path) if beat.msg == msg] if path.exists() else []


def last_beat_at(folder: Path, rank: int = 0) -> float:
    path = folder / names.heartbeat(rank)
    return max((beat.ts for beat in read_beats(path)), default=0.0) if path.exists() else 0.0


def last_step(folder: Path, rank: int = 0) -> int:
    records = beats(folder, rank)
    return records[-1].step if records else 0


def events(folder: Path, kind: EventKind) -> list[RunEvent]:
    return [event for event in read_events(folder) if event.kind == kind]


def launcher_verdicts(folder: Path) -> list[RunEvent]:
    """The launcher's events about processes that exited."""
    return [event for event in read_events(folder) if "launcher" in event.details]


def findings(folder: Path) -> list[RunEvent]:
    """The watchdog's findings in order."""
    events = [event for event in read_events(folder) if event.kind in (EventKind.FINDING, EventKind.STALL)]
    return [event for event in events if not event.details.get("over")]


def findings_of(folder: Path, *conditions: str) -> list[RunEvent]:
    return [event for event in findings(folder) if event.details.get("condition") in conditions]


def anomaly(folder: Path) -> str:
    """Content of `.anomaly_type`; empty without one."""
    path = folder / names.ANOMALY
    return path.read_text(encoding="utf-8") if path.exists() else ""


def stack_dumps(folder: Path) -> dict[str, str]:
    """File name → stacks, of the dumps that are not empty."""
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(names.STACKDUMPS)}
    return {name: text for name, text in texts.items() if text}


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / names.CHECKPOINTS)


def saved_steps(folder: Path) -> list[int]:
    """Steps of complete checkpoints; hashes are not checked."""
    return checkpoints(folder).committed_steps()


def newest_good_step(folder: Path) -> int | None:
    """Step of the newest checkpoint whose files all match their hashes."""
    return checkpoints(folder).find_resumable().step


def step_history(folder: Path) -> StepHistory:
    """Loss and gradient norm of every step, from the last process that logged it."""
    return {beat.step: (beat.loss, beat.grad_norm) for beat in beats(folder)}


def finite_weights(folder: Path) -> bool:
    import numpy as np
    from safetensors.numpy import load_file

    return all(bool(np.isfinite(values).all()) for values in load_file(folder / names.MODEL_SAFETENSORS).values())


def same_weights(folder: Path, other: Path) -> bool:
    """Whether two runs have bitwise equal final weights."""
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / names.MODEL_SAFETENSORS) for path in (folder, other))
    return (
        bool(theirs)
        and ours.keys() == theirs.keys()
        and all(
            ours[name].tobytes() == theirs[name].tobytes() and ours[name].shape == theirs[name].shape for name in theirs
        )
    )


def same_end(folder: Path, other: Path) -> bool:
    """Whether two runs logged the same losses and have bitwise equal final weights."""
    return same_weights(folder, other) and step_history(folder) == step_history(other)


def largest_differences(folder: Path, other: Path) -> tuple[float, float]:
    """Largest absolute difference of two runs in the loss of a step and in a final weight; infinite if steps or
    weights are missing in one of them.
    """
    import numpy as np
    from safetensors.numpy import load_file

    ours, theirs = step_history(folder), step_history(other)
    weights, reference = (load_file(path / names.MODEL_SAFETENSORS) for path in (folder, other))
    if ours.keys() != theirs.keys() or weights.keys() != reference.keys() or not ours:
        return float("inf"), float("inf")
    losses = [(ours[step][0], theirs[step][0]) for step in ours]
    return (
        max(float("inf") if a is None or b is None else abs(a - b) for a, b in losses),
        max(float(np.abs(weights[name] - reference[name]).max()) for name in weights),
    )
