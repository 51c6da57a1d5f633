"""Scripted operator of a chaos drill, who does what the runbook says: starts dead launchers again, clears a halt.

A launcher that died is started again once its fault was reported: nobody acts on what nobody reports.
"""

import time
from collections.abc import Callable

from nsa.errors import ExitCode
from nsa_train import names
from proofs.drill.chaos.cluster import ChaosCluster
from proofs.drill.chaos.fault_classes import GONE_S, STALL_S, STARTUP_S
from proofs.drill.chaos.observations import RunObserver
from proofs.drill.harness import DrillHarness, DrillProcess

_ALL_STOP_S = 25.0
"""Seconds that the other launchers may take to end after a halt."""
_WATCH_AGAIN_S = 4.0


class ScriptedOperator:
    def __init__(self, harness: DrillHarness, cluster: ChaosCluster, observer: RunObserver) -> None:
        self._harness, self._cluster, self._observer = harness, cluster, observer
        self._ended: dict[int, tuple[int, float]] = {}
        """Launcher → exit code, and when it was seen."""
        self._watchdog: DrillProcess | None = None
        self._watched_at = 0.0

    def start(self) -> None:
        for place in self._cluster.places:
            self._cluster.launch(place, "--resume")

    @property
    def finished(self) -> bool:
        return all(self._ended.get(place, (1, 0.0))[0] == ExitCode.DONE for place in self._cluster.places)

    def act(self, *, may_start: Callable[[], bool]) -> None:
        """Act once on the state of the run. `may_start`: whether the faults so far have been reported and the disk
        has room."""
        for place, launcher in self._cluster.launchers.items():
            if place not in self._ended and not launcher.running:
                code = launcher.wait()
                self._ended[place] = code, time.monotonic()
                if code != ExitCode.DONE:
                    self._observer.add("exit", f"launcher {place} exited with {code}")
        down = [place for place, (code, _) in self._ended.items() if code != ExitCode.DONE]
        if down and may_start():
            self._start_again(down)
        self._keep_watching()

    def _start_again(self, down: list[int]) -> None:
        halted = (self._cluster.run_folder / names.HALT).exists()
        waited_s = time.monotonic() - max(self._ended[place][1] for place in down)
        if halted and len(down) < len(self._cluster.places) and waited_s < _ALL_STOP_S:
            return
        for place in down:
            node = self._cluster.node(place)
            if node is not None and not node.running:
                continue
            del self._ended[place]
            self._cluster.launch(place, "--resume", *(["--clear-halt"] if halted else []))
            halted = False  # the first launcher moves the file aside

    def _keep_watching(self) -> None:
        """A watchdog ends with a run that is halted; it is started again with it."""
        if self._watchdog is not None and self._watchdog.running:
            self._watched_at = time.monotonic()
        elif len(self._ended) < len(self._cluster.places) and time.monotonic() > self._watched_at + _WATCH_AGAIN_S:
            self._watched_at = time.monotonic()
            self._watchdog = self._harness.start_watch(stall_s=STALL_S, gone_s=GONE_S, startup_s=STARTUP_S)
