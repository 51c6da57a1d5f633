"""Callback that appends first step, saves and errors of a run to events.jsonl. On rank 0."""

import time
from dataclasses import dataclass
from pathlib import Path

from nsa import names
from nsa.observe.events import EventKind, add_event
from nsa.observe.failure_codes import code_of_exception
from nsa.train.engine import Callback, PathOrStr


@dataclass
class EventLogCallback(Callback):
    run_folder: Path
    _started: bool = False

    def add(self, kind: EventKind, **details: object) -> None:
        self.add_at(self.step, kind, **details)

    def add_at(self, step: int, kind: EventKind, **details: object) -> None:
        add_event(self.run_folder, kind, ts=time.time(), step=step, **details)

    def post_train_batch(self) -> None:
        if not self._started:
            self._started = True
            self.add(EventKind.FIRST_STEP)

    def post_checkpoint_saved(self, path: PathOrStr) -> None:
        """Called in the thread that finished the save, when the run may be some steps further."""
        step = names.step_of(Path(path).name)
        assert step is not None
        self.add_at(step, EventKind.SAVE, path=str(path))

    def on_error(self, exc: BaseException) -> None:
        self.add(EventKind.ERROR, error=f"{type(exc).__name__}: {exc}", failure_code=code_of_exception(exc))
