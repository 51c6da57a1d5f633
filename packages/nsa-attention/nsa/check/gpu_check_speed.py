"""Speed check: attention, decode and memory on the GPU, beside dense attention and the modelled time."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache, partial

from nsa.bench import report
from nsa.bench.case import SHAPES, BenchTask
from nsa.bench.implementations import all_implementations
from nsa.bench.machine import available_cores, describe_device, pinned
from nsa.bench.measurement import BenchMeasurement, choose_implementations, measure
from nsa.bench.memory import measure_memory
from nsa.bench.predictions import predictions
from nsa.bench.roofline import MachinePeaks, measure_peaks
from nsa.check.cases import BACKEND, CheckSizes
from nsa.check.comparison import CheckResult, CheckStatus, fact
from nsa.check.gpu_check_report import GpuCheck, MeasuredTable
from nsa.token_counts import spell

_MEMORY_TIMEOUT_S = 600.0


def checks(sizes: CheckSizes) -> Iterator[GpuCheck]:
    if not sizes.full:
        return
    s, device = sizes.speed, sizes.device.type
    yield GpuCheck("speed", "peaks", partial(_peaks, sizes))
    tasks = [
        BenchTask("attention", s.shape, length, dtype, backward, device=device)
        for dtype in s.dtypes
        for length in s.lengths
        for backward in s.backward
    ]
    tasks += [BenchTask("decode", s.shape, n, dtype, device=device) for dtype in s.dtypes for n in s.decode_lengths]
    for task in tasks:
        yield GpuCheck("speed", _describe(task), partial(_measure, sizes, task))
    for length in s.memory_lengths:
        task = BenchTask("attention", s.shape, length, s.dtypes[0], True, device=device)
        yield GpuCheck("speed", f"memory, {_describe(task)}", partial(_memory, sizes, task))


def _describe(task: BenchTask) -> str:
    return f"{task.op}{' fwd+bwd' * task.backward}, {task.dtype}, {spell(task.length)}"


@cache
def _measured_peaks(sizes: CheckSizes) -> MachinePeaks:
    return measure_peaks(len(available_cores()), sizes.device)


def _peaks(sizes: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    peaks = _measured_peaks(sizes)
    line = report.peaks_line(peaks)
    yield fact("peaks", line.partition(": ")[2])
    yield MeasuredTable(asdict(peaks), [], [line], "peaks")


def _measure(sizes: CheckSizes, task: BenchTask) -> Iterator[CheckResult | MeasuredTable]:
    threads = len(available_cores())
    peaks = _measured_peaks(sizes) if sizes.is_gpu else None
    with pinned(threads):
        measurement = measure(
            task, choose_implementations([BACKEND], with_peers=task.op == "attention"), data="random", threads=threads,
            budget_s=sizes.speed.budget_s, peaks=peaks, log=lambda text: None,
        )  # fmt: skip
    model = modelled(task, describe_device(sizes.device)["name"]) if sizes.is_gpu else None
    record = measurement.to_json() | {"modelled": model}
    rows = [(*row, _modelled_cell(model) if row[3] == BACKEND else "") for row in report.rows(measurement)]
    yield MeasuredTable(record, rows, report.notes(measurement))
    yield _result(measurement, model, sizes)


def _result(measurement: BenchMeasurement, model: dict[str, float] | None, sizes: CheckSizes) -> CheckResult:
    """Holds if the timed implementation is correct; the ratio itself has no limit."""
    ours = next(entry for entry in measurement.entries if entry.name == BACKEND)
    claim = f"{_describe(measurement.task)}, × dense"
    if ours.absent or not ours.agreement.agrees:
        return CheckResult(claim, CheckStatus.FAILS, None, None, ours.absent or ours.agreement.reason)
    if not sizes.is_gpu:
        return CheckResult(
            claim, CheckStatus.HOLDS, None, None, "the output is correct; interpreted kernels are not timed"
        )
    took = report.seconds(ours.time_s.median) if ours.time_s else "–"
    prediction = f"modelled {_modelled_cell(model)}" if model else "not modelled"
    ratio = ours.ratio.median if ours.ratio else None
    return CheckResult(claim, CheckStatus.HOLDS, ratio, None, "; ".join(filter(None, (took, prediction, ours.refused))))


def _modelled_cell(model: dict[str, float] | None) -> str:
    return f"{report.seconds(model['seconds'])}, {model['ratio']:.2f}×" if model else "–"


def _memory(sizes: CheckSizes, task: BenchTask) -> Iterator[CheckResult | MeasuredTable]:
    measured = measure_memory(
        all_implementations()[BACKEND], task, sizes.speed.shape_name, threads=len(available_cores()),
        timeout_s=_MEMORY_TIMEOUT_S,
    )  # fmt: skip
    yield MeasuredTable(measured, [report.memory_row(measured)], [], "memory")
    claim = f"memory above the inputs, {_describe(task)}, MiB"
    verdict = CheckStatus.FAILS if measured["absent"] else CheckStatus.HOLDS
    yield CheckResult(claim, verdict, measured["peak_mib"], None, measured["absent"])


def modelled(task: BenchTask, gpu_name: str) -> dict[str, float] | None:
    """Modelled seconds, dense seconds and ratio from the table; None for a GPU, shape or operation not in it."""
    if task.op != "attention" or task.shape != SHAPES["base"]:
        return None
    for word in re.findall(r"[a-z0-9]+", gpu_name.lower()):
        if prediction := predictions().get((word, task.length, task.dtype, task.backward)):
            return prediction
    return None
