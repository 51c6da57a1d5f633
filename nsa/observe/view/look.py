"""One look at a run folder: its records, what is wrong with it, and how its time was spent."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nsa.observe.view.goodput import Goodput, goodput
from nsa.observe.view.series import Follower, Run, heartbeats
from nsa.observe.watch.conditions import Finding, Limits
from nsa.observe.watch.health import examine, phase
from nsa.observe.watch.history import HistoryReader


@dataclass
class Look:
    run: Run
    state: str
    findings: Sequence[Finding]
    wall: Goodput | None
    now: float

    def grouped(self) -> list[list[Finding]]:
        """Findings of one condition together: what holds for 64 ranks is one thing to know."""
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.name, []).append(finding)
        return list(groups.values())


class Looker:
    """Looks again and again; each look costs what was written since the last."""

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        heartbeats(folder)  # refuses what is no run folder
        self._follower = Follower(folder)
        self._history = HistoryReader(folder)
        self._limits = limits or Limits()
        self._wall: Goodput | None = None
        self._wall_is_of: tuple[int, int] | None = None

    def look(self) -> Look:
        run = self._follower.update()
        history = self._history.update()
        moment = self._history.now
        findings = examine(history, now=moment.steady, limits=self._limits)
        return Look(run, str(phase(history, findings)), findings, self._spent(run), moment.wall)

    def close(self) -> None:
        self._follower.close()
        self._history.close()

    def _spent(self, run: Run) -> Goodput | None:
        """Goes through all records, so only where there are new ones."""
        of = (len(run.lead), len(run.events))
        if of != self._wall_is_of:
            self._wall, self._wall_is_of = goodput(run.lead, run.events, run.evaluations, self._limits), of
        return self._wall


def look_once(folder: Path) -> Look:
    looker = Looker(folder)
    try:
        return looker.look()
    finally:
        looker.close()
