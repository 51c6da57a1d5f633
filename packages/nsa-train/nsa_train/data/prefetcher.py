"""Prefetching: builds batches in a separate process, so that reading and tokenizing overlap with training.

Every batch is queued together with the data cursor after it, so a checkpoint saves the position of the batches the
trainer has consumed, not of those waiting in the queue. They come through a pipe: a queue of `multiprocessing` has
named semaphores, which stay in /dev/shm when a run is killed. This module imports no torch: the worker must start fast
and stay small.
"""

import atexit
import multiprocessing as mp
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection

from nsa.errors import ConfigError, DataError, DataProcessKilled, DataTimeout, NSAError
from nsa_train.data.rows.batch import Batch
from nsa_train.data.rows.row_stream import State
from nsa_train.data.rows.specs import RowData, check_batch
from nsa_train.data.tokenizer import start_tokenizer_worker


@dataclass(frozen=True, slots=True)
class PrefetchSettings:
    """`warmup_batches` are collected before the first step, for at most `warmup_timeout_s`. The first batch and every
    later one must arrive within `timeout_s`."""

    queue_depth: int = 8
    warmup_batches: int = 0
    warmup_timeout_s: float = 60.0
    timeout_s: float = 120.0

    def __post_init__(self) -> None:
        if self.queue_depth < 1 or self.warmup_batches < 0 or self.timeout_s <= 0 or self.warmup_timeout_s < 0:
            raise ConfigError(
                f"queue_depth={self.queue_depth}, warmup_batches={self.warmup_batches}, timeout_s={self.timeout_s:g}, "
                f"warmup_timeout_s={self.warmup_timeout_s:g}: queue_depth and timeout_s must be positive, the "
                "others must not be negative."
            )


class BatchPrefetcher:
    """Iterator over this rank's batches. Use it as a context manager; the worker also exits with its parent."""

    def __init__(
        self,
        data: RowData,
        *,
        global_rows: int,
        rank: int = 0,
        world: int = 1,
        settings: PrefetchSettings | None = None,
        state: State | None = None,
    ) -> None:
        check_batch(data, global_rows, world)
        self._data = data
        self._settings = settings or PrefetchSettings()
        self._state = state
        self._ready: deque[tuple[Batch, State]] = deque()
        self._failed: NSAError | None = None
        self._taken = 0
        context = mp.get_context("spawn")  # a fork would copy held locks and the CUDA context
        self._batches, batches = context.Pipe(duplex=False)
        self._worker = context.Process(
            target=_produce,
            args=(batches, self._settings.queue_depth, os.getpid(), data, global_rows, rank, world, state),
            name="nsa-prefetch",
            daemon=True,
        )
        self._worker.start()
        batches.close()  # the worker has the only writing end: its death is the end of the file
        # The worker ignores SIGTERM, which multiprocessing sends at exit before it waits for the process.
        atexit.register(self._worker.kill)
        self._started = time.monotonic()

    @property
    def worker_pid(self) -> int:
        assert self._worker.pid is not None
        return self._worker.pid

    def warm_up(self) -> int:
        """Collect the warm-up batches and return their number. Raises if the first one does not arrive in time."""
        settings = self._settings
        self._ready.append(self._require_batch("the first batch"))
        until = self._started + settings.warmup_timeout_s
        try:
            while len(self._ready) < settings.warmup_batches and (left := until - time.monotonic()) > 0:
                if (received := self._receive(left, "a warm-up batch")) is None:
                    break
                self._ready.append(received)
        except NSAError as error:
            self._failed = error  # raised once the batches before it are used up
        return len(self._ready)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if not self._ready:
            if self._failed is not None:
                raise self._failed
            self._ready.append(self._require_batch(f"batch {self._taken}" if self._taken else "the first batch"))
        batch, self._state = self._ready.popleft()
        self._taken += 1
        return batch

    def state_dict(self) -> State | None:
        """The cursor after the last batch consumed; before the first one, the cursor that was loaded, or None."""
        return self._state

    def close(self) -> None:
        self._worker.kill()
        self._worker.join()
        atexit.unregister(self._worker.kill)
        self._batches.close()

    def __enter__(self) -> "BatchPrefetcher":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _require_batch(self, what: str) -> tuple[Batch, State]:
        timeout_s = self._settings.timeout_s
        if (received := self._receive(timeout_s, what)) is None:
            raise DataTimeout(
                f"{what} from {self._data} did not come within {timeout_s:g} s (the prefetch process is alive and "
                "waits for its source). Check the source and the network, or raise data.loader_timeout_s."
            )
        return received

    def _receive(self, timeout_s: float, what: str) -> tuple[Batch, State] | None:
        """The next queued batch with its cursor; None if none arrives for `timeout_s`."""
        try:
            if not self._batches.poll(timeout_s):
                return None
            item: tuple[Batch, State] | NSAError = self._batches.recv()
        except (EOFError, ConnectionResetError):
            self._worker.join()
            killed = self._worker.exitcode == -signal.SIGKILL
            raise (DataProcessKilled if killed else DataError)(
                f"the prefetch process of {self._data} died (exit code {self._worker.exitcode}) before {what}. "
                "A negative code is a signal, -9 often the out-of-memory killer. Check the system log."
            ) from None
        if isinstance(item, NSAError):
            raise item
        return item


def _produce(
    out: Connection,
    queue_depth: int,
    parent_pid: int,
    data: RowData,
    global_rows: int,
    rank: int,
    world: int,
    state: State | None,
) -> None:
    """Worker process: send (batch, cursor after it) until the parent is gone, or the error that ends it."""
    start_tokenizer_worker(parent_pid)
    # A signal to the process group requests the trainer to save and stop, for which it may need another batch. The
    # trainer ends this process with SIGKILL, which is safe because it holds no state.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    waiting: queue.Queue[tuple[Batch, State] | NSAError | None] = queue.Queue(queue_depth)
    sender = threading.Thread(target=_send_all, args=(waiting, out))
    sender.start()
    try:
        stream = data.open()
        if state is not None:
            stream.load_state_dict(state)
        while True:
            batch = stream.next_batch(global_rows, rank, world)
            waiting.put((batch, stream.state_dict()))
    except NSAError as error:
        waiting.put(error)
        sys.exit(error.exit_code)
    finally:
        waiting.put(None)


def _send_all(waiting: "queue.Queue[tuple[Batch, State] | NSAError | None]", out: Connection) -> None:
    """Send what is queued, up to None. A pipe holds less than a batch: the queue is what runs ahead of the trainer."""
    with suppress(BrokenPipeError):  # the trainer is gone, and this process goes with it
        while (item := waiting.get()) is not None:
            out.send(item)
