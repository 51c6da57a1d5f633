"""Status of a run: its phase in one word, its findings in lines, and one record with the exit code of `nsa status`."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record import halt_file
from nsa_train.watch.conditions import AlertLevel, HealthFinding
from nsa_train.watch.history import RunHistory
from nsa_train.watch.run_reader import RunReader
from nsa_train.watch.trends import smoothed_last


class RunPhase(StrEnum):
    EMPTY = "no run"
    STARTING = "starting"
    RUNNING = "running"
    HUNG = "hung"
    GONE = "gone"
    FINISHED = "finished"
    HALTED = "halted"
    STOPPED = "stopped"
    FAILED = "failed"


_ENDED = {names.FAILED: RunPhase.FAILED, names.HALTED: RunPhase.HALTED, names.STOPPED: RunPhase.STOPPED}
"""Last heartbeat of any rank → phase, in this order."""
_MAX_RANKS = 8
_BAD = (RunPhase.FAILED, RunPhase.HUNG, RunPhase.EMPTY)
_ATTENTION = (RunPhase.GONE, RunPhase.HALTED, RunPhase.STOPPED)


def phase(history: RunHistory, findings: Sequence[HealthFinding]) -> RunPhase:
    """The state of the run, as one word."""
    logs = list(history.present.values())
    if history.failure is not None:
        return RunPhase.FAILED
    if not logs:
        return RunPhase.STARTING if history.started_at is not None else RunPhase.EMPTY
    words = {log.last.msg for log in logs}
    for word, ended in _ENDED.items():
        if word in words:
            return ended
    if all(log.ended for log in logs):
        return RunPhase.FINISHED
    if history.gone & history.present.keys():
        return RunPhase.GONE
    if any(finding.name in ("heartbeat_stall", "throughput_zero") for finding in findings):
        return RunPhase.HUNG
    return RunPhase.RUNNING if any(log.progress for log in logs) else RunPhase.STARTING


@dataclass(frozen=True)
class RunStatus:
    phase: RunPhase
    step: int
    steps: int | None
    loss: float | None
    """Smoothed: the mean of the last `loss_records` records."""
    loss_records: int
    toks_per_s: float | None
    left_s: float | None
    """Estimated seconds to the last step."""
    beat_age_s: float | None
    """Age of the oldest last heartbeat of any rank."""
    ranks: int
    world: int | None
    checkpoint: str | None
    checkpoint_step: int | None
    halt: str | None
    findings: tuple[HealthFinding, ...]
    unreadable: dict[str, int]
    """Number of unreadable records, by file."""

    @property
    def exit_code(self) -> int:
        """Exit code: 0 healthy or finished, 1 needs attention, 2 critical, failed or hung."""
        critical = any(finding.level == AlertLevel.CRITICAL for finding in self.findings)
        if critical or self.phase in _BAD:
            return 2
        if self.phase == RunPhase.FINISHED:
            return 0
        return 1 if self.findings or self.phase in _ATTENTION or self.halt is not None else 0

    def as_dict(self) -> dict[str, Any]:
        values = asdict(self) | {"phase": self.phase.value, "exit_code": self.exit_code}
        values["findings"] = [
            {
                "condition": f.name, "level": f.level.value, "rank": f.rank, "step": f.step, "message": f.message,
                "advice": f.condition.advice,
            }
            for f in self.findings
        ]  # fmt: skip
        return values


def status_of(reader: RunReader, findings: Sequence[HealthFinding]) -> RunStatus:
    """Summarize a run as it was at the reader's last update."""
    folder, history, now = reader.folder, reader.history, reader.now
    present, first = history.present, history.first
    last = first.progress[-1] if first is not None and first.progress else None
    loss, loss_records = smoothed_last([value for _, value in first.losses] if first is not None else [])
    steps, halt = history.facts.steps, halt_file.read(folder)
    state, checkpoint = phase(history, findings), _newest_checkpoint(folder)
    step_s = first.step_s if first is not None and state == RunPhase.RUNNING else 0.0
    return RunStatus(
        phase=state,
        step=history.step,
        steps=steps,
        loss=loss if loss_records else None,
        loss_records=loss_records,
        toks_per_s=last.toks_per_s if last is not None else None,
        left_s=(steps - history.step) * step_s if steps is not None and step_s else None,
        beat_age_s=max((now.steady - log.last_at for log in present.values()), default=None),
        ranks=len(present),
        world=history.facts.world,
        checkpoint=checkpoint,
        checkpoint_step=names.step_of(checkpoint) if checkpoint is not None else None,
        halt=halt.describe(now.wall) if halt is not None else None,
        findings=tuple(findings),
        unreadable={name: count for name, count in history.unreadable.items() if count},
    )


def _newest_checkpoint(folder: Path) -> str | None:
    """Name of the checkpoint that `latest` points to."""
    try:
        name = (folder / names.CHECKPOINTS / names.LATEST).readlink().name
    except OSError:  # none yet, or not in this folder
        return None
    return None if names.step_of(name) is None else name


def group_findings(findings: Sequence[HealthFinding]) -> list[list[HealthFinding]]:
    """Group findings of the same condition on several ranks."""
    groups: dict[str, list[HealthFinding]] = {}
    for finding in findings:
        groups.setdefault(finding.name, []).append(finding)
    return list(groups.values())


def ranks_of(same: Sequence[HealthFinding]) -> list[int]:
    return [finding.rank for finding in same if finding.rank is not None]


def describe_findings(same: Sequence[HealthFinding]) -> str:
    """One line for findings of the same condition."""
    return f"{same[0].name}{where_found(same)}: {same[0].message}"


def where_found(same: Sequence[HealthFinding]) -> str:
    ranks = ranks_of(same)
    if not ranks:
        return f" (step {same[0].step})"
    few = ", ".join(map(str, ranks[:_MAX_RANKS])) + (
        f" and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else ""
    )
    return f" (rank{'s' * (len(ranks) > 1)} {few}, step {same[0].step})"
