"""Test harness for one drill scenario: temporary folder and supervised processes.

As a program (`python -m proofs.drill.harness PID MODULE WORD …`) it runs `python -m MODULE WORD …` so that the kernel
kills it when the drill (process id PID) ends: a killed drill leaves no run behind.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar

from nsa_train import names
from nsa_train.config.env import without_settings
from proofs import with_checkout
from proofs.drill import artifacts, inject
from proofs.drill.inject import FaultKind, PlantedFault
from proofs.drill.node_network import NetworkNode

PROGRESS_TIMEOUT_S = 240.0
"""A wait fails after this long without progress; how fast something must happen is required by each scenario."""
WATCH_INTERVAL_S = 0.5
"""Seconds between two checks of the watchdog."""
_SLACK_S = 15.0
STEPS, SAVE_EVERY = 40, 4
SEQ_LEN, BATCH_ROWS = 96, 4

# A very small run; l_sel=16 keeps the queries at their most keys below a tenth.
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


class NotObserved(Exception):
    """Something that had to happen did not; the scenario ends."""


class DrillProcess:
    """A Python module as a program in its own session, here or on a node, with its output in a log file."""

    def __init__(
        self,
        command: list[str],
        log: Path,
        stop_event: threading.Event,
        node: NetworkNode | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.log, self._stop_event, self._timeout = log, stop_event, ProgressTimeout(log.parent)
        variables = {**with_checkout(without_settings()), "OMP_NUM_THREADS": "1", **(environment or {})}
        with log.open("ab") as out:
            self._process = self._start(command, node, variables, out)

    @staticmethod
    def _start(
        command: list[str], node: NetworkNode | None, variables: dict[str, str], out: BinaryIO
    ) -> "subprocess.Popen[bytes]":
        here = [sys.executable, "-m", "proofs.drill.harness", str(os.getpid()), *command]
        return subprocess.Popen(
            here if node is None else node.command([sys.executable, "-m", *command]),
            env=variables,
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

    def wait(self) -> int:
        """Wait for the process to exit and return its code; negative if a signal ended it."""
        self._timeout.renew()
        while (code := self._process.poll()) is None:
            pause(self._stop_event)
            if self._timeout.expired():
                raise NotObserved(
                    f"{self.log.stem} did not exit, and there was no progress for {PROGRESS_TIMEOUT_S:.0f} s"
                )
        return code

    def kill(self) -> None:
        """Kill it and its process group, also if it has exited itself; ranks of a launcher die with it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")


class ProgressTimeout:
    """Expires when no file under a folder has grown for `PROGRESS_TIMEOUT_S`; a slow run does not expire."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.renew()

    def renew(self) -> None:
        self._size, self._until = self._written(), time.monotonic() + PROGRESS_TIMEOUT_S

    def expired(self) -> bool:
        if time.monotonic() <= self._until:
            return False
        before = self._size
        self.renew()
        return self._size == before

    def _written(self) -> int:
        """Bytes of logs, heartbeats and events."""
        return sum(path.stat().st_size for name in ("*.log", "run/*.jsonl") for path in self._folder.glob(name))


class DrillHarness:
    """One scenario's folder and processes. Setting `stop_event` ends every wait with `NotObserved`."""

    def __init__(self, folder: Path, stop_event: threading.Event, undisturbed: "UndisturbedRuns | None" = None) -> None:
        self.folder, self.run_folder = folder, folder / "run"
        self._stop_event, self._undisturbed = stop_event, undisturbed
        self._processes: list[DrillProcess] = []
        self._first_step_s = 0.0
        self.environment: dict[str, str] = {}
        """Variables for processes started from now on."""
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
        """Register a callback for when the scenario is over and its processes have exited."""
        self._closing.append(close)

    def train(self, *words: str, fault: PlantedFault | None = None) -> DrillProcess:
        """`nsa train`, or the same with a fault injected."""
        if fault is not None:
            return self.start(inject.MODULE, "train", fault.to_json(), "1", *self.arguments(words))
        return self.start("nsa_train.cli", "train", *self.arguments(words))

    def launch(self, *words: str, nproc: int = 2, fault: PlantedFault | None = None) -> DrillProcess:
        if fault is not None:
            return self.start(inject.MODULE, "launch", fault.to_json(), str(nproc), *self.arguments(words))
        return self.start("nsa_train.cli", "launch", "--nproc", str(nproc), *self.arguments(words))

    def watch(self, **limits: float) -> DrillProcess:
        """`nsa watch --halt 1` with two checks per second; limits not given have their defaults."""
        process = self.start_watch(**limits)
        log = self.run_folder / names.HEALTH_LOG
        self.wait_for("the watchdog's first record", lambda: log.exists() and log.stat().st_size > 0, process)
        return process

    def start_watch(self, **limits: float) -> DrillProcess:
        """Start a run without waiting for its first record."""
        self.run_folder.mkdir(parents=True, exist_ok=True)
        words = [word for name, value in limits.items() for word in ("--limit", f"{name}={value:g}")]
        return self.start(
            "nsa_train.cli", "watch", str(self.run_folder), "--halt", "1", "--interval", f"{WATCH_INTERVAL_S:g}", *words
        )

    def start(self, *command: str, node: NetworkNode | None = None) -> DrillProcess:
        """Start a module with arguments, here or on a node."""
        where = "" if node is None else f"{node.name}-"
        log = self.folder / f"{len(self._processes)}-{where}{command[1]}.log"
        self._processes.append(DrillProcess(list(command), log, self._stop_event, node, self.environment))
        return self._processes[-1]

    def wait_for(self, what: str, condition: Callable[[], _T], process: DrillProcess | None = None) -> _T:
        """Wait until `condition()` is true and return its value; fails if the process exits first."""
        timeout = ProgressTimeout(self.folder)
        while True:
            ended = process is not None and not process.running  # before the condition: it may exit right after it
            if value := condition():
                return value
            if ended:
                assert process is not None
                raise NotObserved(
                    f"{process.log.stem} exited with {process.wait()} before {what}: {_tail(process.output())}"
                )
            if timeout.expired():
                raise NotObserved(f"{what} did not happen, and there was no progress for {PROGRESS_TIMEOUT_S:.0f} s")
            pause(self._stop_event)

    def wait_for_step(self, step: int, process: DrillProcess, rank: int = 0) -> int:
        """Wait until a rank has reached a step and there is a complete checkpoint; returns the rank's process id."""

        def reached() -> int:
            beats = [beat for beat in artifacts.beats(self.run_folder, rank) if beat.step >= step]
            return beats[-1].pid if beats and artifacts.saved_steps(self.run_folder) else 0

        began = time.monotonic()
        pid = self.wait_for(f"step {step} of rank {rank}", reached, process)
        self._first_step_s = max(self._first_step_s, time.monotonic() - began)
        return pid

    @property
    def slack_s(self) -> float:
        """Allowance for this machine in time limits: larger if runs start slowly here."""
        return max(_SLACK_S, self._first_step_s)

    def fault(self, kind: FaultKind, **more: Any) -> PlantedFault:
        return PlantedFault(kind=kind, marker=str(self._marker), **more)

    def injected_at(self) -> float:
        """Time at which the injected fault first took effect."""
        if not self._marker.exists():
            raise NotObserved("the injected fault never took effect")
        return float(self._marker.read_text())

    def undisturbed(self, ranks: int, *words: str) -> Path:
        """The folder of a run without a fault, with the same settings if `words` are those of the scenario."""
        assert self._undisturbed is not None
        return self._undisturbed.of(ranks, *words)

    def pause(self, seconds: float) -> None:
        """Sleep; raises if the drill was stopped."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pause(self._stop_event)

    def arguments(self, words: tuple[str, ...]) -> list[str]:
        """Config and settings of this scenario's run, as arguments of `nsa train` or `nsa launch`."""
        return [str(self._config), f"train.out_dir={self.run_folder}", *words]


class UndisturbedRuns:
    """Runs without a fault, for comparison: made on first use, once for all scenarios."""

    def __init__(self, folder: Path, stop_event: threading.Event) -> None:
        self._folder, self._stop_event = folder, stop_event
        self._guard = threading.Lock()
        self._locks: dict[tuple[int, tuple[str, ...]], threading.Lock] = {}
        self._folders: dict[tuple[int, tuple[str, ...]], Path] = {}

    def of(self, ranks: int, *words: str) -> Path:
        key = ranks, words
        with self._guard:
            lock = self._locks.setdefault(key, threading.Lock())
            folder = self._folder / f"{ranks}_ranks{'' if not words else f'_{len(self._locks)}'}"
        with lock:
            if key not in self._folders:
                with DrillHarness(folder, self._stop_event) as harness:
                    process = harness.train(*words) if ranks == 1 else harness.launch(*words, nproc=ranks)
                    if (code := process.wait()) != 0:
                        raise NotObserved(
                            f"an undisturbed run of {ranks} ranks exited with {code}: {_tail(process.output())}"
                        )
                    self._folders[key] = harness.run_folder
            return self._folders[key]


def pause(stop_event: threading.Event) -> None:
    """Sleep between two checks; raises if the drill was stopped."""
    if stop_event.wait(0.02):
        raise NotObserved("the drill was stopped")


def _tail(text: str, lines: int = 3) -> str:
    return " / ".join(json.dumps(line)[1:-1] for line in text.strip().splitlines()[-lines:]) or "no output"


if __name__ == "__main__":
    from nsa_train.train.launch.agent import die_with_parent

    die_with_parent(int(sys.argv[1]))  # survives exec
    os.execv(sys.executable, [sys.executable, "-m", *sys.argv[2:]])
