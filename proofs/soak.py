"""A run with watchdog, exporter, monitor and Prometheus attached, for as long as wanted: does anything grow?

    python -m proofs.soak --minutes 10                  ten minutes, a table of slopes at the end
    python -m proofs.soak --minutes 240 --speed 1       four hours in real time

Time is compressed: with `--speed 30` the watchdog checks every second instead of every 30 and Prometheus scrapes twice
a second instead of every 15, so that eight minutes are as many checks and scrapes as four hours; steps take
milliseconds, and a checkpoint is saved every 200 of them. What grows with the clock itself is not found so. The monitor
has its own terminal and draws every second.

Every process is sampled (resident memory, open files, threads, children), and so are the sizes of the run's files. A
slope is that of a straight line through the samples of the second half, per hour of compressed time. Heartbeats and
events grow by design; their bytes per step are given instead.
"""

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nsa_train import names
from nsa_train.record.events import EventKind, read_events
from proofs.drill.chaos.cluster import descendants
from proofs.load.process_figures import FIGURES, process_figures

_CONFIG = """\
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}
nsa: {l: 8, d: 4, l_sel: 16, n_sel: 3, w: 16}
runtime: {device: cpu, precision: fp32, threads: 1}
train:
  {steps: 100000000, seq_len: 96, batch_size: 4, lr: 1e-3, lr_schedule: constant, warmup_steps: 2, log_every: 1,
    eval_every: 0, save_every: 200, keep_checkpoints: 3}
data: {dataset: synthetic, synthetic_task: copy, prefetch: true}
"""
_WATCH_S, _SCRAPE_S = 30.0, 15.0  # in production
_LIMITS = {"MiB": 4.0, "open files": 0.5, "threads": 0.5, "processes": 0.5}
"""Largest slope per compressed hour that passes as flat."""


@dataclass
class ProcessSeries:
    """Samples of one process and its descendants."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def sample(self, now: float) -> None:
        figures = process_figures([self.pid, *descendants(self.pid)])
        if figures["processes"]:
            self.times.append(now)
            for name, value in figures.items():
                self.values[name].append(value)


def slope(times: list[float], values: list[float]) -> float:
    """Return the slope per second of the least squares line through the second half of the samples."""
    half = len(times) // 2
    t, v = times[half:], values[half:]
    if len(t) < 2:
        return 0.0
    mean_t, mean_v = sum(t) / len(t), sum(v) / len(v)
    spread = sum((x - mean_t) ** 2 for x in t)
    return sum((x - mean_t) * (y - mean_v) for x, y in zip(t, v, strict=True)) / spread if spread else 0.0


def soak(folder: Path, minutes: float, speed: float) -> dict[str, Any]:
    """Run everything, sample it, stop it; the table of slopes, and what is not flat."""
    run, config = folder / "run", folder / "run.yaml"
    config.write_text(_CONFIG, encoding="utf-8")
    with ExitStack() as stack:
        allowed = [f"--allow={rule}" for rule in ("precision", "toy_model", "toy_sequence", "synthetic_data")]
        started = [_start(stack, folder, "train", str(config), f"train.out_dir={run}", *allowed)]
        _wait_for(run / names.heartbeat(0), started[0][1])
        watch = ("watch", str(run), "--interval", f"{max(0.1, _WATCH_S / speed):g}")
        started += [
            _start(stack, folder, *watch),
            _start(stack, folder, "exporter", str(run), "--port", "0", "--file-sd", str(folder / "target.json")),
            _start(stack, folder, "monitor", str(run), terminal=True),
        ]
        _wait_for(folder / "target.json", started[2][1])
        started.append(_start_prometheus(stack, folder, speed))
        series = [ProcessSeries(name, process.pid) for name, process in started]
        files = _sample(series, started, run, minutes)
        ended = [name for name, process in started if process.poll() is not None]
    return _table(series, files, speed, ended, folder)


def _sample(
    series: list[ProcessSeries], started: list[tuple[str, "subprocess.Popen[bytes]"]], run: Path, minutes: float
) -> list[dict[str, float]]:
    """Sample until the time is over or a process ends; sizes of the run's files with the step."""
    files: list[dict[str, float]] = []
    began = time.monotonic()
    while (now := time.monotonic() - began) < minutes * 60 and all(process.poll() is None for _, process in started):
        for one in series:
            one.sample(now)
        sizes = _file_sizes(run)
        checkpoints = float(len(list((run / names.CHECKPOINTS).glob("step*"))))
        files.append({"s": now, "checkpoints": checkpoints, **sizes})
        if len(files) % 30 == 0:
            print(f"{now / 60:.1f} of {minutes:g} min, {_step(run)} steps", file=sys.stderr, flush=True)
        time.sleep(1)
    files.append({**files[-1], "step": float(_step(run))})
    return files


def _file_sizes(folder: Path) -> dict[str, float]:
    sizes = {}
    for entry in os.scandir(folder):
        with suppress(FileNotFoundError):  # a temporary file that was renamed meanwhile
            if entry.is_file():
                sizes[entry.name] = float(entry.stat().st_size)
    return sizes


def _table(
    series: list[ProcessSeries], files: list[dict[str, float]], speed: float, ended: list[str], folder: Path
) -> dict[str, Any]:
    rows = []
    for one in series:
        row: dict[str, Any] = {"process": one.name, "samples": len(one.times)}
        for name, values in one.values.items():
            row[name] = {"last": round(values[-1], 1), "slope per h": round(slope(one.times, values) * 3600 / speed, 2)}
        rows.append(row)
    steps = files[-1].pop("step")
    times = [sample["s"] for sample in files]
    logs = {name: round(files[-1][name] / steps, 1) for name in (names.heartbeat(0), names.EVENTS) if name in files[-1]}
    health = [sample.get(names.HEALTH_LOG, 0.0) for sample in files]
    run = folder / "run"
    events = [event for event in read_events(run) if event.kind in (EventKind.FINDING, EventKind.STALL)]
    findings = [str(event.details.get("condition")) for event in events]
    grew = [
        f"{row['process']}: {name} grows by {row[name]['slope per h']} per hour"
        for row in rows
        for name, limit in _LIMITS.items()
        if row[name]["slope per h"] > limit
    ]
    return {
        "compressed hours": round(times[-1] * speed / 3600, 2),
        "minutes": round(times[-1] / 60, 1),
        "steps": int(steps),
        "processes": rows,
        "bytes per step": logs,
        "health log bytes per h": round(slope(times, health) * 3600 / speed),
        "checkpoints kept": files[-1]["checkpoints"],
        "ended": ended,
        "findings": findings[:3],
        "grew": grew,
    }


def _start(
    stack: ExitStack, folder: Path, *words: str, terminal: bool = False
) -> tuple[str, "subprocess.Popen[bytes]"]:
    """An `nsa` command with its output in a file, or on a terminal of its own that is read and thrown away."""
    command = [sys.executable, "-m", "nsa_train.cli", *words]
    out: Any = (folder / f"{words[0]}.log").open("wb")
    stack.callback(out.close)
    if terminal:
        ours, out = pty.openpty()
        threading.Thread(target=_drain, args=(ours,), daemon=True).start()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    process = subprocess.Popen(
        command, stdin=out if terminal else subprocess.DEVNULL, stdout=out, stderr=out, env=environment
    )
    stack.callback(_stop, process)
    return f"nsa {words[0]}", process


def _start_prometheus(stack: ExitStack, folder: Path, speed: float) -> tuple[str, "subprocess.Popen[bytes]"]:
    interval = f"{max(100, round(1000 * _SCRAPE_S / speed))}ms"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "scrape_configs": [{"job_name": "nsa", "file_sd_configs": [{"files": [str(folder / "target.json")]}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    log = (folder / "prometheus.log").open("wb")
    stack.callback(log.close)
    words = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    process = subprocess.Popen([*words, "--web.listen-address=127.0.0.1:0"], stdout=log, stderr=log)
    stack.callback(_stop, process)
    return "prometheus", process


def _drain(descriptor: int) -> None:
    try:
        while os.read(descriptor, 65536):
            pass
    except OSError:  # the other end was closed
        pass


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait_for(path: Path, process: "subprocess.Popen[bytes]", seconds: float = 180.0) -> None:
    until = time.monotonic() + seconds
    while not path.exists():
        if process.poll() is not None or time.monotonic() > until:
            raise RuntimeError(f"{path.name} was not written: the process ended or took longer than {seconds:g} s")
        time.sleep(0.1)


def _step(run: Path) -> int:
    lines = _lines(run / names.heartbeat(0))
    return int(json.loads(lines[-2])["step"]) if len(lines) > 1 else 0


def _lines(path: Path) -> list[str]:
    """Return the lines in the last 64 KiB."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65536))
        return file.read().decode("utf-8", "replace").splitlines()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--speed", type=float, default=30.0, help="how many times shorter than in production intervals are"
    )
    parser.add_argument("--keep", type=Path, help="new folder in which to keep run and logs")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as text:
        folder = options.keep or Path(text)
        folder.mkdir(parents=True, exist_ok=True)
        results = soak(folder, options.minutes, options.speed)
    print(json.dumps(results, indent=1))
    return 1 if results["grew"] or results["ended"] or results["findings"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
