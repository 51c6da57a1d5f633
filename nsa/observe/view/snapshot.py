"""One look at a run folder: its records, what is wrong with it, and how its time was spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.observe.view.goodput import Goodput, goodput
from nsa.observe.view.run_data import RunData, RunFollower, heartbeats
from nsa.observe.watch.conditions import HealthFinding, HealthLimits
from nsa.observe.watch.health import examine, phase
from nsa.observe.watch.history import HistoryReader


@dataclass
class RunSnapshot:
    run: RunData
    state: str
    findings: Sequence[HealthFinding]
    wall: Goodput | None
    now: float

    def grouped(self) -> list[list[HealthFinding]]:
        """Findings of one condition together: what holds for 64 ranks is one thing to know."""
        groups: dict[str, list[HealthFinding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.name, []).append(finding)
        return list(groups.values())


class SnapshotReader:
    """Looks again and again; each look costs what was written since the last."""

    def __init__(self, folder: Path, limits: HealthLimits | None = None) -> None:
        heartbeats(folder)  # refuses what is no run folder
        self._follower = RunFollower(folder)
        self._history = HistoryReader(folder)
        self._limits = limits or HealthLimits()
        self._wall: Goodput | None = None
        self._wall_is_of: tuple[int, int] | None = None

    def look(self) -> RunSnapshot:
        run = self._follower.update()
        history = self._history.update()
        moment = self._history.now
        findings = examine(history, now=moment.steady, limits=self._limits)
        return RunSnapshot(run, str(phase(history, findings)), findings, self._spent(run), moment.wall)

    def close(self) -> None:
        self._follower.close()
        self._history.close()

    def _spent(self, run: RunData) -> Goodput | None:
        """Goes through all records, so only where there are new ones."""
        of = (len(run.lead), len(run.events))
        if of != self._wall_is_of:
            self._wall, self._wall_is_of = goodput(run.lead, run.events, run.evaluations, self._limits), of
        return self._wall


def look_once(folder: Path) -> RunSnapshot:
    looker = SnapshotReader(folder)
    try:
        return looker.look()
    finally:
        looker.close()
