"""The drill's programme: which faults, in which order, and how they are played."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nsa.drill.harness import DrillHarness, UndisturbedRuns
from nsa.drill.result import DrillResult, NotObserved
from nsa.drill.scenarios import data, disk, healthy, numbers, pace, processes
from nsa.errors import ConfigError


@dataclass(frozen=True)
class DrillScenario:
    title: str
    play: Callable[[DrillHarness, DrillResult], None]


SCENARIOS = {
    "nan_gradient": DrillScenario("NaN gradient", numbers.nan_gradient),
    "hung_rank": DrillScenario("hung rank", pace.hung_rank),
    "killed_rank": DrillScenario("killed rank", processes.killed_rank),
    "killed_trainer": DrillScenario("killed trainer", processes.killed_trainer),
    "stalled_data": DrillScenario("stalled data", data.stalled_data),
    "full_disk": DrillScenario("full disk", disk.full_disk),
    "corrupt_shard": DrillScenario("corrupt shard", data.corrupt_shard),
    "gate_collapse": DrillScenario("gate collapse", numbers.gate_collapse),
    "slow_rank": DrillScenario("slow rank", pace.slow_rank),
    "stale_halt": DrillScenario("stale halt file", processes.stale_halt),
    "sigterm": DrillScenario("SIGTERM", processes.sigterm),
    "healthy": DrillScenario("none: 500 steps, noise", healthy.healthy),
}


def choose(wanted: Iterable[str]) -> list[str]:
    """The scenarios asked for, in the programme's order; all of them if none is named."""
    names = list(wanted)
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise ConfigError(f"--only {unknown[0]}: there is no such scenario. Choose among {', '.join(SCENARIOS)}.")
    return [name for name in SCENARIOS if name in names or not names]


class DrillSuite:
    """`jobs` scenarios are played at a time. Leaving the block ends every process that was started in it."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder, self._curtain = folder, threading.Event()
        self._calm = UndisturbedRuns(folder / "calm", self._curtain)
        self._pool = ThreadPoolExecutor(jobs)

    def __enter__(self) -> "DrillSuite":
        return self

    def __exit__(self, *error: object) -> None:
        self._curtain.set()
        self._pool.shutdown(cancel_futures=True)

    def play(self, names: Iterable[str]) -> Iterator[tuple[str, DrillResult]]:
        """Rows in the order in which they are finished."""
        playing = {self._pool.submit(self._play, name): name for name in names}
        for future in as_completed(playing):
            yield playing[future], future.result()

    def _play(self, name: str) -> DrillResult:
        scenario, row, began = SCENARIOS[name], DrillResult(SCENARIOS[name].title), time.monotonic()
        try:
            with DrillHarness(self._folder / name, self._curtain, self._calm) as stage:
                scenario.play(stage, row)
        except (NotObserved, OSError) as problem:
            row.unmet.append(str(problem))
        row.took_s = time.monotonic() - began
        return row
