"""Ask a run that hangs where it hangs: stacks of every thread, and the last collectives of every process group.

One signal asks for both (`nsa.train.callbacks.signals`). It goes only to a process that has the file for its stacks
open: it ends a process that does not handle it, and a number alone may be somebody else's by now.
"""

import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nsa.observe import names, records
from nsa.observe.watch.history import RankLog
from nsa.observe.watch.processes import send, state_of, writes_to

_POLL_S = 0.1
_LAST = "last_enqueued_collective"
_CLOCK_TICK_NS = 20_000_000  # file times are those of the kernel's last tick


class HangDiagnosis:
    """`wait_s` is how long answers are waited for, all ranks together."""

    def __init__(
        self, folder: Path, logs: Sequence[RankLog], wait_s: float = 5.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._folder, self._wait_s, self._sleep = folder, wait_s, sleep
        self._logs = [log for log in logs if not log.ended]

    def ask(self) -> Iterator[str]:
        """What came of it, in lines for people."""
        asked: dict[int, tuple[int, int]] = {}
        began = time.time_ns()
        for log in self._logs:
            rank, pid = log.rank, log.last.pid
            dump = self._folder / names.stackdump(rank, pid)
            if writes_to(pid, (dump,)) is not True:
                yield f"rank {rank}: process {pid} is not there to be asked for stacks"
                continue
            size = dump.stat().st_size
            if send(pid, signal.SIGUSR1):
                asked[rank] = (pid, size)
        silent = self._wait(asked)
        for rank, (pid, _) in asked.items():
            if rank in silent:
                yield f"rank {rank}: process {pid} did not write its stacks; it is {state_of(pid)}"
            else:
                yield f"rank {rank}: stacks of process {pid} are in {names.stackdump(rank, pid)}"
        of_ranks = dict(self._records(asked, began))
        if of_ranks:
            yield f"the last collectives of ranks {sorted(of_ranks)} are in {names.COLLECTIVES}"
        yield from who_is_behind(of_ranks)

    def _wait(self, asked: Mapping[int, tuple[int, int]]) -> set[int]:
        """Ranks whose stacks have not come in time."""
        left = self._wait_s
        while True:
            sizes = {rank: _size(self._folder / names.stackdump(rank, pid)) for rank, (pid, _) in asked.items()}
            silent = {rank for rank, (_, before) in asked.items() if sizes[rank] <= before}
            if not silent or left <= 0:
                break
            left -= _POLL_S
            self._sleep(_POLL_S)
        if asked:
            self._sleep(10 * _POLL_S)  # the collectives are written a moment after the stacks
        return silent

    def _records(self, asked: Mapping[int, tuple[int, int]], since_ns: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for rank, (pid, _) in asked.items():
            path = self._folder / names.collectives(rank, pid)
            # One process alone has none, and one that cannot answer an older one at best.
            if path.exists() and path.stat().st_mtime_ns >= since_ns - _CLOCK_TICK_NS:
                record, _ = records.read_section(path)
                if record is not None:
                    yield rank, record


def who_is_behind(of_ranks: Mapping[int, dict[str, Any]]) -> Iterator[str]:
    """Per process group, the ranks that have not come to the collective where the others wait."""
    for backend in ("gloo", "nccl"):
        groups = {rank: _part(_part(record, backend), "pg_status") for rank, record in of_ranks.items()}
        for group in sorted({name for status in groups.values() for name in status}):
            told = {rank: str(_part(status, group).get(_LAST)) for rank, status in groups.items() if group in status}
            reached = {rank: int(number) for rank, number in told.items() if re.fullmatch(r"[0-9]{1,18}", number)}
            if not reached:
                continue
            furthest = max(reached.values())
            if behind := sorted(rank for rank, number in reached.items() if number < furthest):
                waiting = sorted(set(reached) - set(behind))
                yield (
                    f"{backend} group {group}: ranks {waiting} are at collective {furthest}, ranks {behind} have not "
                    f"come to it"
                )


def _part(record: dict[str, Any], name: str) -> dict[str, Any]:
    found = record.get(name)
    return found if isinstance(found, dict) else {}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
