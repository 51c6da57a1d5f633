"""Pool of spawned processes that run the tasks of a preparation.

Tasks, counts and errors go through pipes: locks, queues and arrays of `multiprocessing` have named semaphores, which
stay in /dev/shm when every process of a preparation is killed at once.
"""

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from nsa_train.data.tokenizer import start_tokenizer_worker

Counts = tuple[int, int, int]
"""Documents, tokens and units since the last ones."""
TaskFunction = Callable[[Any, int, Callable[[Counts], None]], None]
"""Runs task `rank` of a job and reports what it counts on the way."""


class WorkerLost(Exception):
    """A worker process ended within a task."""


@dataclass(frozen=True, slots=True)
class _TaskEnd:
    error: Exception | None


class WorkerPool:
    """At most `workers` processes that run tasks, and at most one per task.

    Leaving the context kills them: a task that did not end is run again by the next preparation.
    """

    def __init__(self, workers: int, tasks: Sequence[int], run_task: TaskFunction, job: Any) -> None:
        context = get_context("spawn")
        self._waiting = list(reversed(tasks))
        self._processes: dict[Connection, SpawnProcess] = {}
        self._working: set[Connection] = set()
        for _ in range(min(workers, len(tasks))):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, os.getpid(), run_task, job), daemon=True)
            process.start()
            theirs.close()  # the worker has the only other end: its death is the end of the file
            self._processes[ours] = process
            self._give_task(ours)

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            process.kill()
        for connection, process in self._processes.items():
            process.join()
            connection.close()

    def progress(self, every_s: float) -> Iterator[tuple[int, Counts]]:
        """Yield the tasks that ended, and counts, since the last yield, until all tasks have ended.

        Raises the first error of a task, and `WorkerLost`.
        """
        while self._working:
            ended, counts = 0, [0, 0, 0]
            for connection in wait(list(self._working), every_s):
                assert isinstance(connection, Connection)
                message = self._receive(connection)
                if isinstance(message, _TaskEnd):
                    if message.error is not None:
                        raise message.error
                    ended += 1
                    self._give_task(connection)
                else:
                    counts = [total + count for total, count in zip(counts, message, strict=True)]
            yield ended, (counts[0], counts[1], counts[2])

    def _give_task(self, connection: Connection) -> None:
        if not self._waiting:
            self._working.discard(connection)
            return
        self._working.add(connection)
        with suppress(BrokenPipeError):  # it is dead: the next receive says so
            connection.send(self._waiting.pop())

    def _receive(self, connection: Connection) -> Any:
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError) as error:
            process = self._processes[connection]
            process.join()
            raise WorkerLost(f"worker process {process.pid} ended with exit code {process.exitcode}") from error


def _work(connection: Connection, parent_pid: int, run_task: TaskFunction, job: Any) -> None:
    """Run the tasks that are sent until the pool ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    start_tokenizer_worker(parent_pid)
    with open(os.devnull, "w") as log, redirect_stderr(log):  # datatrove copies its log there; errors are sent
        while True:
            error: Exception | None = None
            try:
                run_task(job, connection.recv(), connection.send)
            except Exception as raised:  # noqa: BLE001 - the pool raises it again
                error = raised
            connection.send(_TaskEnd(error))
