"""Benchmark suite behind `nsa bench`: measures the machine, then every requested length and dtype, into one report.

Each result is printed once it is known, and the report written where it was asked for.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nsa.bench import report as reports
from nsa.bench.case import DTYPES, PARTS, BenchTask, shape_named
from nsa.bench.machine import (
    available_cores,
    describe_device,
    describe_machine,
    pinned,
    real_time_priority,
    require_real_time,
)
from nsa.bench.measurement import BenchMeasurement, Log, choose_implementations, measure
from nsa.bench.memory import measure_memory
from nsa.bench.report import BenchReport
from nsa.bench.roofline import MachinePeaks, measure_peaks
from nsa.bench.train_step import measure_train
from nsa.errors import ConfigError
from nsa.kernels.gpu_versions import device_named
from nsa.token_counts import parse_lengths, spell


@dataclass(frozen=True)
class BenchRequest:
    """One `nsa bench` command, options as they were typed."""

    op: str
    lengths: str
    dtypes: str = "fp32,bf16"
    shape: str = "base"
    backends: tuple[str, ...] = ()
    peers: bool = True
    part: str = "all"
    passes: str = "both"
    data: str = "random"
    threads: int = 0
    budget_s: float = 30.0
    device: str = "cpu"
    real_time: bool = False

    def tasks(self) -> Iterator[BenchTask]:
        if self.part not in PARTS:
            raise ConfigError(f"--part is {self.part!r}: there is no such part. Use one of: {', '.join(PARTS)}.")
        passes = {"forward": (False,), "backward": (True,), "both": (False, True)}
        if self.passes not in passes:
            raise ConfigError(f"--passes is {self.passes!r}. Use one of: {', '.join(passes)}.")
        dtypes = [word.strip() for word in self.dtypes.split(",")]
        for dtype in dtypes:
            if dtype not in DTYPES:
                raise ConfigError(f"--dtype has {dtype!r}: there is no such dtype. Use one of: {', '.join(DTYPES)}.")
        if self.op == "train" and "fp16" in dtypes:
            raise ConfigError(
                "--dtype has 'fp16': a training step in it needs its loss scaled, which is not done. Use bf16."
            )
        shape, lengths = shape_named(self.shape), parse_lengths(self.lengths)
        backward = passes[self.passes] if self.op == "attention" and self.part != "select" else (False,)
        if self.op in ("memory", "train"):
            backward = (True,)
        op = "attention" if self.op == "memory" else self.op
        for dtype in dtypes:
            for length in lengths:
                for b in backward:
                    yield BenchTask(op, shape, length, dtype, b, self.part, self.device)


def bench(
    request: BenchRequest, command: str, log: Log, show: Callable[[str], None],
    show_table: Callable[[tuple[str, ...], list[tuple[str, ...]]], None], *, json: Path | None = None,
    plot: Path | None = None, markdown: Path | None = None,
) -> None:  # fmt: skip
    """Measure, print with the functions given, and write the files that are named."""
    if request.real_time:
        require_real_time()
    device = device_named(request.device)
    machine = describe_machine() | {"real_time": request.real_time}
    report = BenchReport(command, machine if device.type == "cpu" else machine | {"gpu": describe_device(device)})
    show(reports.machine_line(report.machine))
    if warning := reports.busy(report.machine):
        show(warning)
    for result in _run(request, device, report, log):
        if isinstance(result, MachinePeaks):
            show(reports.peaks_line(result))
        elif json is not None:  # an interrupted run keeps what it measured
            _write(json, report.to_json() + "\n")
    for columns, rows in report.tables():
        show_table(columns, rows)
    for note in report.notes():
        show(note)
    for path, text in ((json, lambda: report.to_json() + "\n"), (plot, lambda: reports.draw(report)),
                       (markdown, report.to_markdown)):  # fmt: skip
        if path is not None:
            _write(path, text())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _run(
    request: BenchRequest, device: torch.device, report: BenchReport, log: Log
) -> Iterator[BenchMeasurement | MachinePeaks | dict[str, object]]:
    """Yield each result once it is in the report: the machine's peaks, then a measurement per task."""
    threads = request.threads or len(available_cores())
    if request.op == "machine":
        for n in sorted({1, threads}) if device.type == "cpu" else [threads]:
            log(f"measuring the machine with {n} thread{'s' * (n > 1)}")
            report.peaks.append(measure_peaks(n, device))
            yield report.peaks[-1]
        return
    tasks = list(request.tasks())
    implementations = choose_implementations(request.backends, request.peers, device.type)
    if request.op == "memory":
        for task in tasks:
            for implementation in implementations:
                log(f"{implementation.name}, {task.dtype}, {spell(task.length)}")
                measured = measure_memory(
                    implementation, task, request.shape, threads=threads, timeout_s=max(60.0, 20 * request.budget_s)
                )
                report.memory.append(measured)
                yield measured
        return
    log("measuring the machine")
    with real_time_priority() if request.real_time else nullcontext():
        peaks = measure_peaks(threads, device)
    report.peaks.append(peaks)
    yield peaks
    with pinned(threads):
        for task in tasks:
            options: dict[str, Any] = dict(threads=threads, budget_s=request.budget_s, log=_for_task(task, log))
            if task.op == "train":
                measurement = measure_train(task, implementations, **options)
            else:
                measurement = measure(
                    task, implementations, data=request.data, peaks=peaks, real_time=request.real_time, **options
                )
            report.figures.append(measurement)
            yield measurement


def _for_task(task: BenchTask, log: Log) -> Log:
    what = f"{task.op}{' fwd+bwd' * task.backward}, {task.dtype}, {spell(task.length)}"
    return lambda text: log(f"{what}: {text}")
