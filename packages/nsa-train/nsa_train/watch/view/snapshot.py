"""Snapshot of a run folder for monitor and report: run data, state, findings and goodput."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from nsa_train.record.run_data import RunData, RunFollower, heartbeats
from nsa_train.watch.conditions import HealthFinding, HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.history import HistoryReader
from nsa_train.watch.status import phase
from nsa_train.watch.view.measured_goodput import Goodput, goodput
from nsa_train.watch.watchdog import by_condition


@dataclass
class RunSnapshot:
    run: RunData
    state: str
    findings: Sequence[HealthFinding]
    wall: Goodput | None
    now: float

    def grouped(self) -> list[list[HealthFinding]]:
        """Findings grouped by condition, for all affected ranks."""
        return by_condition(self.findings)


class SnapshotReader:
    """Reads snapshots repeatedly; each reads only what was appended since the last."""

    def __init__(self, folder: Path, limits: HealthLimits | None = None) -> None:
        heartbeats(folder)  # raises for a folder that is not a run folder
        self._follower = RunFollower(folder)
        self._history = HistoryReader(folder)
        self._limits = limits or HealthLimits()
        self._wall: Goodput | None = None
        self._wall_key: tuple[int, int] | None = None

    def read(self) -> RunSnapshot:
        run = self._follower.update()
        history = self._history.update()
        moment = self._history.now
        findings = examine(history, now=moment.steady, limits=self._limits)
        return RunSnapshot(run, str(phase(history, findings)), findings, self._goodput(run), moment.wall)

    def close(self) -> None:
        self._follower.close()
        self._history.close()

    def _goodput(self, run: RunData) -> Goodput | None:
        """Compute the goodput only when there are new records: it goes through all of them."""
        of = (len(run.lead), len(run.events))
        if of != self._wall_key:
            self._wall, self._wall_key = goodput(run.lead, run.events, run.evaluations, self._limits), of
        return self._wall


def take_snapshot(folder: Path) -> RunSnapshot:
    with closing(SnapshotReader(folder)) as reader:
        return reader.read()
