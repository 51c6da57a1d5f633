"""Summary of a run for monitor, report and comparison: its figures, its state and findings at one moment, and how
several runs differ.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase

from nsa_train.config.layer import flatten
from nsa_train.record.events import EventKind
from nsa_train.record.run_data import RunData
from nsa_train.terminal_text import duration
from nsa_train.watch.conditions import HealthFinding, HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.run_reader import RunReader, require_run
from nsa_train.watch.status import group_findings, phase
from nsa_train.watch.trends import smoothed_last
from nsa_train.watch.view.formatting import count, number, plain, share
from nsa_train.watch.view.measured_goodput import Goodput, TimeCause, goodput


@dataclass(frozen=True)
class _RunSummary:
    """Figures of a run; NaN is unknown, infinite stands for a non-finite value."""

    step: int
    target: int | None
    loss: float
    """Smoothed, see `smoothed_last`: the mean of the last `loss_records` records."""
    loss_records: int
    loss_step: int
    """Step of the last of them."""
    best_loss: float
    """Lowest loss of a single record."""
    best_step: int
    held_out: float
    held_out_step: int
    held_out_accuracy: float
    best_held_out: float
    best_held_out_step: int
    tokens: float
    toks_per_s: float
    """Median, without repeated steps."""
    mfu: float
    """Model FLOPs utilization, median; NaN if it was not recorded."""
    tokens_per_usd: float
    """Median while it trained."""
    restarts: int
    rollbacks: int
    lost_steps: int
    skipped: int
    wall: Goodput | None
    unreadable: int
    """Number of unreadable records."""

    @property
    def goodput(self) -> float:
        return self.wall.share(TimeCause.PRODUCTIVE) if self.wall is not None and self.wall.total > 0 else math.nan

    @property
    def tokens_per_usd_of_all(self) -> float:
        """Tokens per dollar of the whole time, which is paid for while nothing is trained too."""
        if self.wall is None or self.wall.total <= 0 or not self.toks_per_s:
            return math.nan
        return self.tokens_per_usd * self.tokens / (self.toks_per_s * self.wall.total)


def summarize(run: RunData) -> _RunSummary:
    lead = run.lead
    recorded = zip(lead.counted("loss"), lead.counted("step"), strict=True)
    losses = [pair for pair in recorded if not math.isnan(pair[0])]
    loss, loss_records = smoothed_last([value for value, _ in losses])
    finite = [pair for pair in losses if math.isfinite(pair[0])]
    best, best_step = min(finite, default=(math.nan, 0))
    evaluations = run.counted_evaluations()
    scored = [(each.val_loss, each.step) for each in evaluations if math.isfinite(each.val_loss)]
    best_held_out, best_held_out_step = min(scored, default=(math.nan, 0))
    kinds = [event.kind for event in run.events]
    lost = [event.details.get("steps") for event in run.events if event.kind == EventKind.LOST_STEPS]
    return _RunSummary(
        step=int(lead.last.get("step", 0)),
        target=run.target_steps,
        loss=loss,
        loss_records=loss_records,
        loss_step=int(losses[-1][1]) if losses else 0,
        best_loss=best,
        best_step=int(best_step),
        held_out=evaluations[-1].val_loss if evaluations else math.nan,
        held_out_accuracy=evaluations[-1].val_accuracy if evaluations else math.nan,
        held_out_step=evaluations[-1].step if evaluations else 0,
        best_held_out=best_held_out,
        best_held_out_step=best_held_out_step,
        tokens=lead.column("tokens_seen")[-1] if len(lead) else math.nan,
        toks_per_s=_median(lead.counted("toks_per_s")),
        mfu=_median(lead.counted("mfu")),
        tokens_per_usd=_median(lead.counted("tokens_per_usd")),
        restarts=kinds.count(EventKind.RESTART),
        rollbacks=kinds.count(EventKind.ROLLBACK),
        lost_steps=sum(steps for steps in lost if steps is not None),
        skipped=kinds.count(EventKind.SKIPPED_STEP),
        wall=goodput(lead, run.events, run.evaluations),
        unreadable=run.unreadable.total(),
    )


def _median(values: Iterable[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


_LETTERS = ascii_uppercase
_IGNORED_SETTINGS = ("train.out_dir",)
"""Always different and never of interest."""


def run_labels(runs: Sequence[RunData]) -> list[str]:
    """A letter and the folder name of each run, with the parent folder where names repeat."""
    names = [run.name for run in runs]
    resolved = [run.named_folder for run in runs]
    shown = [
        f"{path.parent.name}/{name}" if names.count(name) > 1 else name
        for name, path in zip(names, resolved, strict=True)
    ]
    return [f"{letter} {plain(name, 60)}" for letter, name in zip(_LETTERS, shown, strict=False)]


def differing_settings(runs: Sequence[RunData]) -> list[tuple[str, list[object]]]:
    """Settings that differ between runs; None for a setting that a run does not have."""
    all_settings = [flatten(run.config) for run in runs]
    keys = dict.fromkeys(key for settings in all_settings for key in settings)
    differing = []
    for key in keys:
        values = [settings.get(key) for settings in all_settings]
        if key not in _IGNORED_SETTINGS and any(value != values[0] for value in values[1:]):
            differing.append((key, values))
    return differing


def figures(summaries: Sequence[_RunSummary]) -> list[tuple[str, list[str]]]:
    """Rows of the comparison table: name, and one value per run."""

    def at(value: float, step: int) -> str:
        return f"{number(value)} at {step:,}" if value == value else number(value)

    return [
        ("steps", [f"{each.step:,}" for each in summaries]),
        ("loss, mean of the last records", [_last_loss(each) for each in summaries]),
        ("lowest loss of a record", [at(each.best_loss, each.best_step) for each in summaries]),
        ("held-out loss, last", [at(each.held_out, each.held_out_step) for each in summaries]),
        ("held-out accuracy, last", [share(each.held_out_accuracy) for each in summaries]),
        ("held-out loss, best", [at(each.best_held_out, each.best_held_out_step) for each in summaries]),
        ("tokens", [count(each.tokens) for each in summaries]),
        ("tokens per second, median", [count(each.toks_per_s) for each in summaries]),
        ("MFU, median", [share(each.mfu) for each in summaries]),
        ("tokens per dollar, all time", [count(each.tokens_per_usd_of_all) for each in summaries]),
        ("goodput", [share(each.goodput) for each in summaries]),
        ("wall time", [duration(each.wall.total) if each.wall else number(None) for each in summaries]),
        ("restarts", [str(each.restarts) for each in summaries]),
        ("steps repeated", [f"{each.lost_steps:,}" for each in summaries]),
        ("steps skipped", [str(each.skipped) for each in summaries]),
        ("unreadable records", [str(each.unreadable) for each in summaries]),
    ]


def _last_loss(of: _RunSummary) -> str:
    return f"{number(of.loss)} ({of.loss_records} up to {of.loss_step:,})" if of.loss_records else number(None)


@dataclass
class RunSnapshot:
    """A run at one moment: its data, figures, state and findings."""

    run: RunData
    summary: _RunSummary
    state: str
    findings: Sequence[HealthFinding]
    now: float

    def grouped(self) -> list[list[HealthFinding]]:
        """Findings grouped by condition, for all affected ranks."""
        return group_findings(self.findings)


class SnapshotReader:
    """Reads snapshots repeatedly; each reads only what was appended since the last."""

    def __init__(self, folder: Path) -> None:
        require_run(folder)
        self._reader = RunReader(folder, whole=True)
        self._summary: _RunSummary | None = None
        self._summarized = (0, 0, 0)

    def read(self) -> RunSnapshot:
        history, run, now = self._reader.update(), self._reader.data, self._reader.now
        findings = examine(history, now=now.steady, limits=HealthLimits())
        records = (len(run.lead), len(run.events), len(run.evaluations))
        if self._summary is None or records != self._summarized:  # it goes through all of them
            self._summary, self._summarized = summarize(run), records
        return RunSnapshot(run, self._summary, str(phase(history, findings)), findings, now.wall)

    def close(self) -> None:
        self._reader.close()


def take_snapshot(folder: Path) -> RunSnapshot:
    with closing(SnapshotReader(folder)) as reader:
        return reader.read()
