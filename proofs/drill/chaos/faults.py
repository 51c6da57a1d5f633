"""Injects the faults of a chaos drill, one generator per class: injects, yields while it waits, restores.

`FaultStage.begin` notes the time of the injection. A generator that has ended has restored what it broke; what the run
needs then is left to launchers and the operator.
"""

import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from nsa_train import names
from proofs.drill.chaos.cluster import ChaosCluster, send
from proofs.drill.chaos.fault_classes import PROFILES, ChaosFault
from proofs.drill.chaos.rank_commands import CLOCK, NAN, CommandFile
from proofs.drill.chaos.schedule import RANKS, PlannedFault
from proofs.drill.chaos.services import SILENT
from proofs.drill.chaos.verdict import PlayedFault
from proofs.drill.damage import flip_bit
from proofs.drill.harness import DrillHarness, NotObserved
from proofs.drill.small_disk import fill_disk, free_disk

PAUSED_S, FAILING_S, AWAY_S, FULL_S, CLOCK_S = 6.0, 4.0, 5.0, 12.0, 10.0
HOUR_S = 3600.0
_READY_S = 180.0
_FILE_LIMIT_BYTES = 2**14
_T = TypeVar("_T")


class FaultStage:
    """Context of a fault: the run, its plan, and whether it has been reported."""

    def __init__(self, harness: DrillHarness, cluster: ChaosCluster, planned: PlannedFault) -> None:
        self.harness, self.cluster, self.planned = harness, cluster, planned
        self.played: PlayedFault | None = None
        self._began = 0.0

    def begin(self) -> None:
        self.played, self._began = PlayedFault(self.planned, time.time()), time.monotonic()

    def wait(self, seconds: float) -> Iterator[None]:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            yield

    def until(self, what: str, condition: Callable[[], _T | None], within_s: float = _READY_S) -> Iterator[None]:
        """Wait for something that must come; the drill fails otherwise."""
        until = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > until:
                raise NotObserved(f"fault {self.planned.number} ({self.planned.fault}): {what} did not come")
            yield

    def until_named(self) -> Iterator[None]:
        """Wait until the fault was reported, or its limit has passed, which the verdict reports."""
        limit_s = PROFILES[self.planned.fault].named_within_s
        while self.played is None or (self.played.named_at is None and time.monotonic() < self._began + limit_s):
            yield

    def rank(self, rank: int) -> Iterator[None]:
        return self.until(f"the process of rank {rank}", lambda: self.cluster.rank_pid(rank))

    def signal_rank(self, rank: int, number: signal.Signals) -> None:
        if (pid := self.cluster.rank_pid(rank)) is not None:
            send(pid, number)


def _rank_killed(stage: FaultStage) -> Iterator[None]:
    yield from stage.rank(stage.planned.victim)
    stage.begin()
    stage.signal_rank(stage.planned.victim, signal.SIGKILL)


def _trainer_killed(stage: FaultStage) -> Iterator[None]:
    for rank in range(RANKS):
        yield from stage.rank(rank)
    stage.begin()
    for rank in range(RANKS):
        stage.signal_rank(rank, signal.SIGKILL)


def _launcher_killed(stage: FaultStage) -> Iterator[None]:
    place = stage.cluster.place_of_rank(stage.planned.victim)
    return _killed(stage, "the launcher", lambda: stage.cluster.launcher_pid(place))


def _prefetch_killed(stage: FaultStage) -> Iterator[None]:
    return _killed(stage, "the prefetch process", lambda: stage.cluster.worker_pid(stage.planned.victim))


def _killed(stage: FaultStage, what: str, find: Callable[[], int | None]) -> Iterator[None]:
    yield from stage.until(what, find)
    pid = find()
    assert pid is not None
    stage.begin()
    send(pid, signal.SIGKILL)


def _rank_paused(stage: FaultStage) -> Iterator[None]:
    yield from stage.rank(stage.planned.victim)
    stage.begin()
    stage.signal_rank(stage.planned.victim, signal.SIGSTOP)
    yield from stage.wait(PAUSED_S)
    stage.signal_rank(stage.planned.victim, signal.SIGCONT)


def _rank_hung(stage: FaultStage) -> Iterator[None]:
    """The watchdog halts the run; the operator kills the rank that it names, since it cannot see the halt file."""
    yield from stage.rank(stage.planned.victim)
    stage.begin()
    stage.signal_rank(stage.planned.victim, signal.SIGSTOP)
    yield from stage.until_named()
    yield from stage.until("the halt file", (stage.cluster.run_folder / names.HALT).exists, within_s=60)
    stage.signal_rank(stage.planned.victim, signal.SIGKILL)


def _disk_full(stage: FaultStage) -> Iterator[None]:
    """A full tmpfs, freed by the operator; where it cannot be mounted, a limit on file size for both ranks."""
    for rank in range(RANKS):
        yield from stage.rank(rank)
    stage.begin()
    if stage.cluster.mounted:
        fill_disk(stage.harness)
    else:
        for rank in range(RANKS):
            if (pid := stage.cluster.rank_pid(rank)) is not None:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_FILE_LIMIT_BYTES, _FILE_LIMIT_BYTES))
    yield from stage.until_named()
    yield from stage.wait(FULL_S)  # the launcher tries again meanwhile
    if stage.cluster.mounted:
        free_disk(stage.harness)


def _checkpoint_corrupted(stage: FaultStage) -> Iterator[None]:
    """The ranks are stopped first, so that no newer checkpoint appears before they are killed."""
    for rank in range(RANKS):
        yield from stage.rank(rank)
    yield from stage.until("a checkpoint", stage.cluster.newest_checkpoint)
    for rank in range(RANKS):
        stage.signal_rank(rank, signal.SIGSTOP)
    yield from stage.wait(0.5)
    newest = stage.cluster.newest_checkpoint()
    assert newest is not None
    stage.begin()
    flip_bit(max(newest.rglob("*.distcp"), key=lambda path: path.stat().st_size))
    for rank in range(RANKS):
        stage.signal_rank(rank, signal.SIGKILL)


def _data_errors(stage: FaultStage) -> Iterator[None]:
    stage.begin()
    stage.cluster.services.set_mode(data=stage.planned.variant)
    yield from stage.wait(FAILING_S)
    stage.cluster.services.set_mode()


def _data_silent(stage: FaultStage) -> Iterator[None]:
    stage.begin()
    stage.cluster.services.set_mode(data=SILENT)
    yield from stage.until_named()
    stage.cluster.services.set_mode()


def _nan_gradient(stage: FaultStage) -> Iterator[None]:
    """Make gradients NaN in one life of a process only: the run skips, rolls back and stops; resumed, it repeats the
    steps without NaN."""
    command = CommandFile.write(stage.cluster.commands, stage.planned.number, stage.planned.victim, NAN)
    yield from stage.until("the first NaN", lambda: command.taken)
    stage.begin()
    launcher = stage.cluster.launchers[stage.cluster.place_of_rank(stage.planned.victim)]
    yield from stage.until("the end of the run", lambda: not launcher.running)


def _clock(seconds: float) -> Callable[[FaultStage], Iterator[None]]:
    def jump(stage: FaultStage) -> Iterator[None]:
        planned = stage.planned
        command = CommandFile.write(stage.cluster.commands, planned.number, planned.victim, CLOCK, seconds, CLOCK_S)
        yield from stage.until("the clock's change", lambda: command.taken)
        stage.begin()
        yield from stage.until("the clock's return", lambda: command.over)

    return jump


def _halt_requested(stage: FaultStage) -> Iterator[None]:
    folder = str(stage.cluster.run_folder)
    stage.begin()
    halting = stage.harness.start("nsa_train.cli", "halt", folder, "--reason", "chaos drill")
    yield from stage.until("the end of nsa halt", lambda: not halting.running)


def _store_errors(stage: FaultStage) -> Iterator[None]:
    stage.begin()
    stage.cluster.services.set_mode(store_fails=True)
    yield from stage.until_named()
    stage.cluster.services.set_mode()


def _node_lost(stage: FaultStage) -> Iterator[None]:
    node = stage.cluster.node(stage.planned.victim)
    assert node is not None
    stage.begin()
    node.kill()
    yield from stage.wait(AWAY_S)
    node.boot()


INJECTORS: dict[ChaosFault, Callable[[FaultStage], Iterator[None]]] = {
    ChaosFault.RANK_KILLED: _rank_killed,
    ChaosFault.TRAINER_KILLED: _trainer_killed,
    ChaosFault.LAUNCHER_KILLED: _launcher_killed,
    ChaosFault.PREFETCH_KILLED: _prefetch_killed,
    ChaosFault.RANK_PAUSED: _rank_paused,
    ChaosFault.RANK_HUNG: _rank_hung,
    ChaosFault.DISK_FULL: _disk_full,
    ChaosFault.CHECKPOINT_CORRUPTED: _checkpoint_corrupted,
    ChaosFault.DATA_ERRORS: _data_errors,
    ChaosFault.DATA_SILENT: _data_silent,
    ChaosFault.NAN_GRADIENT: _nan_gradient,
    ChaosFault.CLOCK_AHEAD: _clock(HOUR_S),
    ChaosFault.CLOCK_BEHIND: _clock(-HOUR_S),
    ChaosFault.HALT_REQUESTED: _halt_requested,
    ChaosFault.STORE_ERRORS: _store_errors,
    ChaosFault.NODE_LOST: _node_lost,
}
