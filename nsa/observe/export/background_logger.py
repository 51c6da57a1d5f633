"""Records on their way to somebody else's service. A service that is slow or down costs records, never a step.

Each service has a thread of its own: client libraries wait for minutes, and the run must not. What could not be
delivered is in the run folder all the same.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from nsa.files import write_atomic
from nsa.observe.names import TRACKERS

_WAITING = 1024
"""Records that may wait; further ones are dropped."""
_RETRY_S = 60.0
"""Between attempts to reach a service that could not be reached."""
_LAST_WORDS_S = 30.0
"""How long the end of a run waits for the rest to be delivered."""
_PASSWORD = re.compile(r"//[^/@\s]*@")

Record = tuple[int, dict[str, float]]


class TrackingService(Protocol):
    name: str
    errors: tuple[type[Exception], ...]
    """What its client raises when the service is at fault; complete once `open` has loaded the client."""

    def open(self) -> None: ...
    def send(self, step: int, numbers: dict[str, float]) -> None: ...
    def close(self) -> None: ...


class BackgroundLogger:
    def __init__(self, service: TrackingService, warn: Callable[[str], None]) -> None:
        self._service, self._warn = service, warn
        self._records: queue.Queue[Record | None] = queue.Queue(_WAITING)
        self._open = self._warned = False
        self._not_before = 0.0
        self._thread = threading.Thread(target=self._deliver, name=f"courier {service.name}", daemon=True)
        self._thread.start()

    def take(self, step: int, numbers: dict[str, float]) -> None:
        """Never waits."""
        try:
            self._records.put_nowait((step, numbers))
        except queue.Full:
            self._complain(f"{_WAITING} records wait")

    def close(self) -> None:
        """Deliver what waits, within reason; the rest dies with the process."""
        try:
            self._records.put(None, timeout=1.0)
        except queue.Full:
            return
        self._thread.join(_LAST_WORDS_S)

    def _deliver(self) -> None:
        while (record := self._records.get()) is not None:
            try:
                self._hand_over(*record)
            except self._service.errors as error:
                self._complain(f"{type(error).__name__}: {_PASSWORD.sub('//', str(error))[:300]}")
        if self._open:
            try:
                self._service.close()
            except self._service.errors as error:
                self._complain(type(error).__name__)

    def _hand_over(self, step: int, numbers: dict[str, float]) -> None:
        if not self._open:
            if time.monotonic() < self._not_before:
                return
            self._not_before = time.monotonic() + _RETRY_S
            self._service.open()
            self._open = True
        self._service.send(step, numbers)

    def _complain(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(
                f"WARNING: {self._service.name} does not take records ({why}). The run goes on; its folder has them."
            )


class TrackerIds:
    """trackers.json: which W&B and MLflow run belongs to a run folder, so that a restart continues it.

    Shared by the threads of all trackers. A run that does not resume begins without ids.
    """

    def __init__(self, run_folder: Path, *, resuming: bool) -> None:
        self._path = run_folder / TRACKERS
        self._lock = threading.Lock()
        if not resuming:
            self._path.unlink(missing_ok=True)
        self._ids = self._read()

    def get(self, tracker: str) -> str | None:
        return self._ids.get(tracker)

    def put(self, tracker: str, run_id: str) -> None:
        with self._lock:
            self._ids[tracker] = run_id
            write_atomic(self._path, json.dumps(self._ids, indent=2) + "\n")

    def _read(self) -> dict[str, str]:
        """Without ids where the file is missing or damaged: then a tracker gets a second run, and nothing else."""
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {str(k): v for k, v in found.items() if isinstance(v, str)} if isinstance(found, dict) else {}
