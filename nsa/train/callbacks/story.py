"""Rank 0 writes down what happens to the run: first step and saves."""

import time
from dataclasses import dataclass
from pathlib import Path

from olmo_core.aliases import PathOrStr
from olmo_core.train.callbacks import Callback

from nsa.observe.events import EventLog, Kind
from nsa.train.checkpoint import layout


@dataclass
class Story(Callback):
    log: EventLog
    _begun: bool = False

    def add(self, kind: Kind, **details: object) -> None:
        self.log.add(kind, ts=time.time(), step=self.step, **details)

    def post_train_batch(self) -> None:
        if not self._begun:
            self._begun = True
            self.add(Kind.FIRST_STEP)

    def post_checkpoint_saved(self, path: PathOrStr) -> None:
        """In the thread that finished the save, when the run is steps further already."""
        step = layout.step_of(Path(path).name)
        assert step is not None
        self.log.add(Kind.SAVE, ts=time.time(), step=step, path=str(path))

    def on_error(self, exc: BaseException) -> None:
        self.add(Kind.ERROR, error=f"{type(exc).__name__}: {exc}")

    def close(self) -> None:
        self.log.close()
