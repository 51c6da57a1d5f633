"""Runs a chaos drill: the calm run first, then the same run with the planned faults, then the verdict.

The calm run is not paced and takes minutes. A paced step only sleeps, as a step on a GPU leaves the CPU idle, so both
compute the same numbers.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from nsa.errors import ConfigError
from nsa_train.watch.view.measured_goodput import TimeCause
from nsa_train.watch.view.summary import take_snapshot
from proofs.drill.chaos.cluster import ChaosCluster
from proofs.drill.chaos.fault_classes import LOADER_TIMEOUT_S, PROFILES, TIMEOUT_S, ChaosFault
from proofs.drill.chaos.faults import INJECTORS, FaultStage
from proofs.drill.chaos.observations import RunObserver
from proofs.drill.chaos.operator import ScriptedOperator
from proofs.drill.chaos.schedule import RANKS, ChaosPlan, PlannedFault
from proofs.drill.chaos.services import STORE_FOLDER, ServiceControl
from proofs.drill.chaos.verdict import (
    ChaosVerdict,
    PlayedFault,
    evaluate,
    found_in_calm_run,
    name_faults,
    read_outcome,
)
from proofs.drill.harness import DrillHarness, NotObserved
from proofs.drill.node_network import NodeNetworkError, unshare_options

_TICK_S = 0.2
_REPORT_EVERY_S = 15.0
_LATEST = 2.0
"""The drill gives up after this many times its duration, plus `_MORE_S`."""
_MORE_S = 900.0
_STUCK_S = 300.0
"""It also gives up after this long without a step."""


@dataclass(frozen=True)
class ChaosProgress:
    """Text of the progress line."""

    elapsed_s: float
    step: int
    steps: int
    played: int
    faults: int
    goodput: float | None
    news: str = ""


def unplayable() -> dict[ChaosFault, str]:
    """Classes that cannot be played on this machine, and why."""
    missing = {}
    try:
        unshare_options()
    except ConfigError as problem:
        missing[ChaosFault.NODE_LOST] = str(problem)
    if find_spec("boto3") is None:
        missing[ChaosFault.STORE_ERRORS] = "boto3 is not installed"
    return missing


class ChaosDrill:
    """One chaos drill in a folder: `calm/run` and `chaos/run`. `report` gets a `ChaosProgress` now and then."""

    def __init__(
        self, folder: Path, plan: ChaosPlan, stop_event: threading.Event, report: Callable[[ChaosProgress], None]
    ) -> None:
        self._folder, self._plan, self._stop_event, self._report = folder, plan, stop_event, report

    def run(self) -> ChaosVerdict:
        with DrillHarness(self._folder / "chaos", self._stop_event) as harness:
            nodes = ChaosFault.NODE_LOST not in self._plan.not_played
            cluster = ChaosCluster(harness, self._plan, self._settings(store=True), nodes=nodes)
            calm = self._calm_run(cluster.services)
            play = _ChaosPlay(harness, cluster, self._plan, self._report)
            finished, problem = False, ""
            try:
                play.run()
                finished = True
            except (NotObserved, NodeNetworkError, OSError) as error:
                problem = str(error)
            outcome = read_outcome(self._plan, cluster.run_folder, calm) if finished else None
            verdict = evaluate(
                self._plan, play.played, play.observer.observations, outcome, functools.partial(found_in_calm_run, calm)
            )
            if problem:
                verdict.unmet.insert(0, problem)
            return verdict

    def _settings(self, *, store: bool) -> tuple[str, ...]:
        with_store = store and ChaosFault.STORE_ERRORS not in self._plan.not_played
        return (
            f"train.steps={self._plan.steps}",
            f"train.save_every={self._plan.save_every}",
            "train.max_skipped=2",
            "train.lr=5e-5",  # the loss still falls after an hour, so that no plateau is found
            "data.dataset=local",
            "data.prefetch=true",
            "data.queue_depth=1",
            f"data.loader_timeout_s={LOADER_TIMEOUT_S:g}",
            f"parallel.timeout_s={TIMEOUT_S:g}",
            *([f"train.checkpoint_store={STORE_FOLDER}"] if with_store else []),
        )

    def _calm_run(self, services: ServiceControl) -> Path:
        """Train without faults, from the data's file, on one node."""
        with DrillHarness(self._folder / "calm", self._stop_event) as harness:
            self._report(
                ChaosProgress(0.0, 0, self._plan.steps, 0, len(self._plan.faults), None, "calm run, not paced")
            )
            began = time.monotonic()
            process = harness.launch(*self._settings(store=False), f"data.path={services.data_file}", nproc=RANKS)
            if (code := process.wait()) != 0:
                raise NotObserved(f"the calm run exited with {code}: {process.output()[-300:]}")
            news = f"calm run finished in {time.monotonic() - began:.0f} s"
            self._report(ChaosProgress(0.0, 0, self._plan.steps, 0, len(self._plan.faults), None, news))
            return harness.run_folder


class _ChaosPlay:
    """The run with faults: a loop that observes, lets the operator act, and moves the faults on."""

    def __init__(
        self, harness: DrillHarness, cluster: ChaosCluster, plan: ChaosPlan, report: Callable[[ChaosProgress], None]
    ) -> None:
        self._harness, self._cluster, self._plan, self._report = harness, cluster, plan, report
        self.observer = RunObserver(harness.folder, cluster.run_folder)
        self._operator = ScriptedOperator(harness, cluster, self.observer)
        self._waiting = list(plan.faults)
        self._stages: list[tuple[FaultStage, Iterator[None]]] = []
        self.played: list[PlayedFault] = []
        self._n_reported = 0
        self._repeated = 0
        self._began, self._reported = time.monotonic(), 0.0

    def run(self) -> None:
        self._operator.start()
        latest, began_at = self._began + _LATEST * self._plan.duration_s + _MORE_S, time.time()
        try:
            while not self._operator.finished:
                self._observe()
                self._move_faults()
                self._operator.act(may_start=self._may_start)
                self._start_due()
                self._report_now_and_then()
                self._harness.pause(_TICK_S)
                step = f"step {self.observer.step} of {self._plan.steps}"
                if time.monotonic() > latest:
                    raise NotObserved(f"the run is at {step} after {time.monotonic() - self._began:.0f} s")
                if time.time() > max(began_at, self.observer.progressed_at) + _STUCK_S:
                    raise NotObserved(f"the run is at {step}, and there was no step for {_STUCK_S:.0f} s")
            self._observe()
        finally:
            self.observer.close()

    def _observe(self) -> None:
        self.observer.update()
        new = self.observer.observations[self._n_reported :]
        self._n_reported += len(new)
        name_faults(self.played, new)
        if self.played and self.observer.repeated_steps > self._repeated:
            self.played[-1].repeated_steps += self.observer.repeated_steps - self._repeated
        self._repeated = self.observer.repeated_steps
        for fault in self.played:
            if fault.continued_at is None and fault.restored_at is not None and self._continued(fault):
                fault.continued_at = self.observer.progressed_at

    def _continued(self, fault: PlayedFault) -> bool:
        """A new step was seen after the fault was over, of ranks that are not about to fail from it."""
        assert fault.restored_at is not None
        absorbed = PROFILES[fault.planned.fault].absorbed
        over = max(fault.restored_at, fault.named_at or 0.0) if not absorbed else fault.restored_at
        reported = absorbed or fault.named_at is not None
        return reported and self.observer.progressed_at > over and self.observer.step >= self.observer.furthest_step

    def _move_faults(self) -> None:
        for stage, generator in list(self._stages):
            before = stage.played
            try:
                next(generator)
            except StopIteration:
                assert stage.played is not None
                stage.played.restored_at = time.time()
                self._stages.remove((stage, generator))
            if before is None and stage.played is not None:
                self.played.append(stage.played)
                self._tell(f"{PROFILES[stage.planned.fault].title} ({stage.planned.fault})")

    def _start_due(self) -> None:
        if self._waiting and self._is_due(self._waiting[0]):
            planned = self._waiting.pop(0)
            stage = FaultStage(self._harness, self._cluster, planned)
            self._stages.append((stage, INJECTORS[planned.fault](stage)))

    def _is_due(self, planned: PlannedFault) -> bool:
        if planned.after_s is not None:
            first = self.played[-1] if self.played and not self._stages else None
            return first is not None and first.named_at is not None and time.time() > first.named_at + planned.after_s
        calm_again = not self._stages and all(fault.continued_at is not None for fault in self.played)
        # Exactly this step of a save interval: also after a fault that took longer than planned.
        place, now = planned.step % self._plan.save_every, self.observer.step % self._plan.save_every
        return calm_again and self.observer.step >= planned.step and place <= now < self._plan.save_every - 2

    def _may_start(self) -> bool:
        """Every fault so far has been reported or its limit has passed, and none of them still holds the disk."""
        if any(stage.planned.fault is ChaosFault.DISK_FULL for stage, _ in self._stages):
            return False
        return all(
            fault.named_at is not None or time.time() > fault.at + PROFILES[fault.planned.fault].named_within_s
            for fault in self.played
            if not PROFILES[fault.planned.fault].absorbed
            and fault.planned.fault is not ChaosFault.CHECKPOINT_CORRUPTED  # reported by the restarted run
        )

    def _report_now_and_then(self) -> None:
        if time.monotonic() > self._reported + _REPORT_EVERY_S:
            self._tell("")

    def _tell(self, news: str) -> None:
        self._reported = time.monotonic()
        wall = take_snapshot(self._cluster.run_folder).summary.wall if self.observer.step else None
        goodput = wall.share(TimeCause.PRODUCTIVE) if wall is not None else None
        elapsed = time.monotonic() - self._began
        done, planned = len(self.played), len(self._plan.faults)
        self._report(ChaosProgress(elapsed, self.observer.step, self._plan.steps, done, planned, goodput, news))
