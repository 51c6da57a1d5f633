"""What a run left in its folder, read as an operator would: files and processes, never the run's own memory."""

from pathlib import Path

from nsa.checkpoint.folder import CheckpointFolder
from nsa.observe import names
from nsa.observe.events import EventKind, RunEvent, read_events
from nsa.observe.heartbeat import HeartbeatRecord, read_beats

Story = dict[int, tuple[float | None, float | None]]


def beats(folder: Path, rank: int = 0, msg: str = names.PROGRESS) -> list[HeartbeatRecord]:
    path = folder / names.heartbeat(rank)
    return [beat for beat in read_beats(path) if beat.msg == msg] if path.exists() else []


def last_beat_at(folder: Path, rank: int = 0) -> float:
    path = folder / names.heartbeat(rank)
    return max((beat.ts for beat in read_beats(path)), default=0.0) if path.exists() else 0.0


def last_step(folder: Path, rank: int = 0) -> int:
    told = beats(folder, rank)
    return told[-1].step if told else 0


def events(folder: Path, kind: EventKind) -> list[RunEvent]:
    return [event for event in read_events(folder) if event.kind == kind]


def launcher_verdicts(folder: Path) -> list[RunEvent]:
    """What the launcher wrote down about lives that ended."""
    return [event for event in read_events(folder) if "launcher" in event.details]


def findings(folder: Path) -> list[RunEvent]:
    """What the watchdog found, in the order in which it did."""
    told = [event for event in read_events(folder) if event.kind in (EventKind.FINDING, EventKind.STALL)]
    return [event for event in told if not event.details.get("over")]


def found(folder: Path, *conditions: str) -> list[RunEvent]:
    return [event for event in findings(folder) if event.details.get("condition") in conditions]


def anomaly(folder: Path) -> str:
    """What the watchdog wrote into `.anomaly_type`; empty without one."""
    path = folder / names.ANOMALY
    return path.read_text(encoding="utf-8") if path.exists() else ""


def stack_dumps(folder: Path) -> dict[str, str]:
    """File name → stacks, of the dumps that say something."""
    texts = {path.name: path.read_text(encoding="utf-8", errors="replace") for path in folder.glob(names.STACKDUMPS)}
    return {name: text for name, text in texts.items() if text}


def checkpoints(folder: Path) -> CheckpointFolder:
    return CheckpointFolder(folder / names.CHECKPOINTS)


def saved_steps(folder: Path) -> list[int]:
    """Checkpoints that are whole; nothing is hashed."""
    return checkpoints(folder).committed_steps()


def newest_good_step(folder: Path) -> int | None:
    """Every file of it compared with its hash."""
    return checkpoints(folder).find_resumable().step


def story(folder: Path) -> Story:
    """Loss and gradient norm of every step, as the last process that did it told them."""
    return {beat.step: (beat.loss, beat.grad_norm) for beat in beats(folder)}


def finite_weights(folder: Path) -> bool:
    import numpy as np
    from safetensors.numpy import load_file

    return all(bool(np.isfinite(values).all()) for values in load_file(folder / names.MODEL_SAFETENSORS).values())


def same_end(folder: Path, calm: Path) -> bool:
    """Whether two runs told the same losses and ended with the same weights, bit for bit."""
    from safetensors.numpy import load_file

    ours, theirs = (load_file(path / names.MODEL_SAFETENSORS) for path in (folder, calm))
    same_weights = ours.keys() == theirs.keys() and all(
        ours[name].tobytes() == theirs[name].tobytes() and ours[name].shape == theirs[name].shape for name in theirs
    )
    return bool(theirs) and same_weights and story(folder) == story(calm)
