"""The drill's programme: which faults, in which order, and how they are played."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from nsa.drill.row import NotSeen, Row
from nsa.drill.scenarios import data, disk, healthy, numbers, pace, processes
from nsa.drill.stage import CalmRuns, Stage
from nsa.errors import ConfigError


@dataclass(frozen=True)
class Scenario:
    title: str
    play: Callable[[Stage, Row], None]


SCENARIOS = {
    "nan_gradient": Scenario("NaN gradient", numbers.nan_gradient),
    "hung_rank": Scenario("hung rank", pace.hung_rank),
    "killed_rank": Scenario("killed rank", processes.killed_rank),
    "killed_trainer": Scenario("killed trainer", processes.killed_trainer),
    "stalled_data": Scenario("stalled data", data.stalled_data),
    "full_disk": Scenario("full disk", disk.full_disk),
    "corrupt_shard": Scenario("corrupt shard", data.corrupt_shard),
    "gate_collapse": Scenario("gate collapse", numbers.gate_collapse),
    "slow_rank": Scenario("slow rank", pace.slow_rank),
    "stale_halt": Scenario("stale halt file", processes.stale_halt),
    "sigterm": Scenario("SIGTERM", processes.sigterm),
    "healthy": Scenario("none: 500 steps, noise", healthy.healthy),
}


def choose(wanted: Iterable[str]) -> list[str]:
    """The scenarios asked for, in the programme's order; all of them if none is named."""
    names = list(wanted)
    if unknown := [name for name in names if name not in SCENARIOS]:
        raise ConfigError(f"--only {unknown[0]}: there is no such scenario. Choose among {', '.join(SCENARIOS)}.")
    return [name for name in SCENARIOS if name in names or not names]


class Drill:
    """`jobs` scenarios are played at a time. Leaving the block ends every process that was started in it."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._folder, self._curtain = folder, threading.Event()
        self._calm = CalmRuns(folder / "calm", self._curtain)
        self._pool = ThreadPoolExecutor(jobs)

    def __enter__(self) -> "Drill":
        return self

    def __exit__(self, *error: object) -> None:
        self._curtain.set()
        self._pool.shutdown(cancel_futures=True)

    def play(self, names: Iterable[str]) -> Iterator[tuple[str, Row]]:
        """Rows in the order in which they are finished."""
        playing = {self._pool.submit(self._play, name): name for name in names}
        for future in as_completed(playing):
            yield playing[future], future.result()

    def _play(self, name: str) -> Row:
        scenario, row, began = SCENARIOS[name], Row(SCENARIOS[name].title), time.monotonic()
        try:
            with Stage(self._folder / name, self._curtain, self._calm) as stage:
                scenario.play(stage, row)
        except (NotSeen, OSError) as problem:
            row.unmet.append(str(problem))
        row.took_s = time.monotonic() - began
        return row
