"""Where one fault is played out: a folder of its own, and real processes, none of which outlives it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from nsa.config.env import without_settings
from nsa.drill import artifacts
from nsa.drill.fault import FaultKind, PlantedFault
from nsa.drill.result import NotObserved
from nsa.observe import names

PATIENCE_S = 240.0
"""Without any sign of life, before a wait is given up; how fast something must be is each scenario's own demand."""
LOOK_S = 0.5
"""Between two looks of the watchdog."""
_SLACK_S = 15.0
STEPS, SAVE_EVERY = 40, 4
SEQ_LEN, BATCH_ROWS = 96, 4

# As small as a run can be and still be one; l_sel=16 keeps the queries at their most keys below a tenth.
_CONFIG = f"""\
model: {{dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}}
nsa: {{l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16}}
runtime: {{device: cpu, precision: fp32, threads: 1}}
train:
  {{steps: {STEPS}, seq_len: {SEQ_LEN}, batch_size: {BATCH_ROWS}, lr: 3e-3, lr_schedule: constant, warmup_steps: 2,
    log_every: 1, eval_every: 0, save_every: {SAVE_EVERY}}}
data: {{dataset: synthetic, synthetic_task: copy, prefetch: false}}
parallel: {{timeout_s: 60}}
"""
_T = TypeVar("_T")


class DrillProcess:
    """A command of ours in a session of its own, its words in a log."""

    def __init__(self, command: list[str], log: Path, curtain: threading.Event) -> None:
        self.log, self._curtain, self._patience = log, curtain, ProgressTimeout(log.parent)
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "nsa.drill.child", str(os.getpid()), *command],
                env={**without_settings(), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """The exit code; negative if a signal ended it."""
        self._patience.renew()
        while (code := self._process.poll()) is None:
            pause(self._curtain)
            if self._patience.exhausted():
                raise NotObserved(f"{self.log.stem} did not end, and nothing has moved for {PATIENCE_S:.0f} s")
        return code

    def kill(self) -> None:
        """It and what it started, also if it is gone itself; ranks of a launcher die with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class ProgressTimeout:
    """Waiting for a run is given up when nothing under a folder has grown for `PATIENCE_S`, not when it is slow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.renew()

    def renew(self) -> None:
        self._size, self._until = self._written(), time.monotonic() + PATIENCE_S

    def exhausted(self) -> bool:
        if time.monotonic() <= self._until:
            return False
        before = self._size
        self.renew()
        return self._size == before

    def _written(self) -> int:
        """Bytes of logs, heartbeats and events."""
        return sum(path.stat().st_size for name in ("*.log", "run/*.jsonl") for path in self._folder.glob(name))


class DrillHarness:
    """`run` is the run folder. When the curtain falls, whatever waits gives up."""

    def __init__(self, folder: Path, curtain: threading.Event, calm: "UndisturbedRuns | None" = None) -> None:
        self.folder, self.run = folder, folder / "run"
        self._curtain, self._calm = curtain, calm
        self._processes: list[DrillProcess] = []
        self._first_step_s = 0.0
        self._closing: list[Callable[[], object]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._marker = folder / "run.yaml", folder / "injected_at"
        self._config.write_text(_CONFIG, encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
        for close in reversed(self._closing):
            close()

    def at_end(self, close: Callable[[], object]) -> None:
        """Called when the scenario is over and its processes are gone."""
        self._closing.append(close)

    def train(self, *words: str, fault: PlantedFault | None = None) -> DrillProcess:
        """`nsa train`, or the same with a fault planted in it."""
        if fault is not None:
            return self.start("nsa.drill.faulty_rank", "train", fault.to_json(), "1", *self._words(words))
        return self.start("nsa.cli", "train", *self._words(words))

    def launch(self, *words: str, nproc: int = 2, fault: PlantedFault | None = None) -> DrillProcess:
        if fault is not None:
            return self.start("nsa.drill.faulty_rank", "launch", fault.to_json(), str(nproc), *self._words(words))
        return self.start("nsa.cli", "launch", "--nproc", str(nproc), *self._words(words))

    def watch(self, **limits: float) -> DrillProcess:
        """`nsa watch` that may halt, looking twice a second; limits that are not given are the normal ones."""
        self.run.mkdir(parents=True, exist_ok=True)
        words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value:g}")]
        log = self.run / names.HEALTH_LOG
        process = self.start("nsa.cli", "watch", str(self.run), "--halt", "1", "--interval", f"{LOOK_S:g}", *words)
        self.wait_for("the watchdog's first word", log.exists, process)
        return process

    def start(self, *command: str) -> DrillProcess:
        log = self.folder / f"{len(self._processes)}-{command[1]}.log"
        self._processes.append(DrillProcess(list(command), log, self._curtain))
        return self._processes[-1]

    def wait_for(self, what: str, look: Callable[[], _T], process: DrillProcess | None = None) -> _T:
        """What `look` finds, as soon as it finds something; not if the process ends first."""
        patience = ProgressTimeout(self.folder)
        while True:
            ended = process is not None and not process.running  # asked first: it may end right after the look
            if found := look():
                return found
            if ended:
                assert process is not None
                raise NotObserved(
                    f"{process.log.stem} ended with {process.end()} before {what}: {_tail(process.said())}"
                )
            if patience.exhausted():
                raise NotObserved(f"{what} did not come, and nothing has moved for {PATIENCE_S:.0f} s")
            pause(self._curtain)

    def wait_for_step(self, step: int, process: DrillProcess, rank: int = 0) -> int:
        """Until a rank has told of a step and there is a whole checkpoint; returns its process id."""

        def look() -> int:
            told = [beat for beat in artifacts.beats(self.run, rank) if beat.step >= step]
            return told[-1].pid if told and artifacts.saved_steps(self.run) else 0

        began = time.monotonic()
        pid = self.wait_for(f"step {step} of rank {rank}", look, process)
        self._first_step_s = max(self._first_step_s, time.monotonic() - began)
        return pid

    @property
    def slack_s(self) -> float:
        """What this machine may add to the time in which something must be found: more, if runs start slowly on it."""
        return max(_SLACK_S, self._first_step_s)

    def fault(self, kind: FaultKind, **more: Any) -> PlantedFault:
        return PlantedFault(kind=kind, marker=str(self._marker), **more)

    def injected_at(self) -> float:
        """When the planted fault first acted."""
        if not self._marker.exists():
            raise NotObserved("the planted fault never acted")
        return float(self._marker.read_text())

    def calm(self, ranks: int) -> Path:
        """The run folder of a run of the same settings to which nothing happened."""
        assert self._calm is not None
        return self._calm.of(ranks)

    def _words(self, words: tuple[str, ...]) -> list[str]:
        return [str(self._config), f"train.out_dir={self.run}", *words]


class UndisturbedRuns:
    """Made when first asked for, once for all scenarios."""

    def __init__(self, folder: Path, curtain: threading.Event) -> None:
        self._folder, self._curtain = folder, curtain
        self._turns = {1: threading.Lock(), 2: threading.Lock()}
        self._made: dict[int, Path] = {}

    def of(self, ranks: int) -> Path:
        with self._turns[ranks]:
            if ranks not in self._made:
                with DrillHarness(self._folder / f"{ranks}_ranks", self._curtain) as stage:
                    process = stage.train() if ranks == 1 else stage.launch(nproc=ranks)
                    if (code := process.end()) != 0:
                        raise NotObserved(f"a calm run of {ranks} ranks ended with {code}: {_tail(process.said())}")
                    self._made[ranks] = stage.run
            return self._made[ranks]


def pause(curtain: threading.Event) -> None:
    """Between two looks."""
    if curtain.wait(0.02):
        raise NotObserved("the drill was broken off")


def _tail(text: str, lines: int = 3) -> str:
    return " / ".join(json.dumps(line)[1:-1] for line in text.strip().splitlines()[-lines:]) or "it said nothing"
