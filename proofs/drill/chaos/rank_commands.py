"""Commands to running ranks of a chaos drill: files that the drill writes and the rank follows at its next step.

NaN gradients last until the process ends and begin right after a save: a checkpoint with a skipped step in it would
make the run differ from a calm one. A changed clock is this process's `time.time` alone.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from nsa.files import write_atomic

NAN, CLOCK = "nan", "clock"


@dataclass(frozen=True)
class CommandFile:
    """One command: its file, and the files that say that it was taken and that it is over."""

    path: Path

    @classmethod
    def write(
        cls, folder: Path, number: int, rank: int, kind: str, seconds: float = 0.0, for_s: float = 0.0
    ) -> "CommandFile":
        command = cls(folder / f"{number}-rank{rank}.command")
        write_atomic(command.path, json.dumps({"kind": kind, "seconds": seconds, "for_s": for_s}))
        return command

    @property
    def taken(self) -> bool:
        return self.path.with_suffix(".taken").exists()

    @property
    def over(self) -> bool:
        return self.path.with_suffix(".over").exists()

    def mark(self, suffix: str) -> None:
        write_atomic(self.path.with_suffix(suffix), "")


class CommandFollower:
    """The rank's side: looks for new commands at every step."""

    def __init__(self, folder: Path, rank: int, save_every: int) -> None:
        self._folder, self._rank, self._save_every = folder, rank, save_every
        self.nan_gradients = False
        self._clock: tuple[CommandFile, float] | None = None
        self._true_time = time.time

    def follow(self, step: int) -> None:
        if self._clock is not None and time.monotonic() > self._clock[1]:
            time.time = self._true_time
            self._clock[0].mark(".over")
            self._clock = None
        for path in self._folder.glob(f"*-rank{self._rank}.command"):
            command = CommandFile(path)
            if not command.taken:
                self._take(command, step)

    def _take(self, command: CommandFile, step: int) -> None:
        request = json.loads(command.path.read_text(encoding="utf-8"))
        if request["kind"] == NAN:
            if step % self._save_every != 1:
                return
            self.nan_gradients = True
        else:
            true_time, seconds = self._true_time, float(request["seconds"])
            time.time = lambda: true_time() + seconds
            self._clock = command, time.monotonic() + float(request["for_s"])
        command.mark(".taken")
