"""The checks of `nsa gpu-check`, and their runner: a child process, restarted after an exception, crash or hang.

Subjects select from the table of cases: every kernel against the reference in fp64 (parity), kernels under autocast,
the module against itself, and speed beside dense attention and the modelled time. The child is this module as a program
(`nsa.child_process`).
"""

import re
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from nsa.bench import report
from nsa.bench.case import SHAPES, TORCH_DTYPES, BenchTask
from nsa.bench.implementations import all_implementations
from nsa.bench.machine import available_cores, describe_device, describe_machine, pinned, triton_version
from nsa.bench.measurement import BenchMeasurement, choose_implementations, measure
from nsa.bench.memory import measure_memory
from nsa.bench.predictions import predictions
from nsa.bench.roofline import MachinePeaks, measure_peaks
from nsa.check import kernel_checks, module_checks
from nsa.check.cases import BACKEND, CheckSizes, KernelCase, on_gpu, rehearsal
from nsa.check.comparison import CheckResult, CheckStatus, bounded, fact, needs_gpu, worst
from nsa.check.gpu_check_report import GpuCheck, MeasuredTable
from nsa.check.prove import error_under_autocast
from nsa.child_process import ChildFailed, ChildProcess, answer_parent
from nsa.errors import ConfigError
from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.registry import BACKENDS, BRANCHES
from nsa.kernels.self_check import CheckRequest, RecordStore, key_for, recorded, verify
from nsa.token_counts import spell

_AUTOCAST_BACKENDS = (BACKEND, "portable")
_REHEARSED_PARTS = ("sliding", "mix, 3 gates per group in float32")  # quick when interpreted
_MEMORY_TIMEOUT_S = 600.0
_EVERY, _FIRST, _LAST = slice(None), slice(1), slice(-1, None)

_MODULE_CHECKS: tuple[tuple[str, str, module_checks.ModuleCheck, slice], ...] = (
    ("causality", "forward", module_checks.causal_outputs, _EVERY),
    ("causality", "backward", module_checks.causal_gradients, _EVERY),
    ("determinism", "runs again", module_checks.second_run, _EVERY),
    ("determinism", "compression of overlapping blocks", module_checks.overlapping_blocks, _FIRST),
    ("compile", "one graph", module_checks.compiled, _EVERY),
    ("compile", "host waits", partial(module_checks.host_waits, packed=False), _LAST),
    ("compile", "host waits, packed documents", partial(module_checks.host_waits, packed=True), _LAST),
    ("decode", "token by token", module_checks.token_by_token, _EVERY),
    ("decode", "ragged batch", module_checks.ragged_batch, _EVERY),
    ("decode", "CUDA graph", module_checks.graph_replay, _LAST),
    ("devices", "second device", module_checks.second_device, _FIRST),
    ("training", "selective checkpointing", module_checks.selective_checkpointing, _LAST),
)
"""Subject, name, check, and which of the dtypes it runs in."""


def _of_module(subject: str, sizes: CheckSizes) -> Iterator[GpuCheck]:
    for its_subject, name, check, which in _MODULE_CHECKS:
        for dtype in sizes.module_dtypes[which] if its_subject == subject else ():
            yield GpuCheck(subject, f"{name}, {dtype}", partial(check, replace(sizes.module, dtype=dtype)))


def _environment(sizes: CheckSizes) -> Iterator[GpuCheck]:
    yield GpuCheck("environment", "software and hardware", partial(_describe, sizes))


def _describe(sizes: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    machine = describe_machine()
    commit = (machine["commit"] or "unknown")[:10] + (" with changes" if machine["uncommitted_changes"] else "")
    if sizes.is_gpu:
        gpu = describe_device(sizes.device)
        yield MeasuredTable(gpu, [], [], "gpu")
        yield fact("GPU", f"{gpu['name']}, {gpu['units']} units, {gpu['memory_gib']} GiB")
        yield fact("capability, driver", f"{gpu['capability']}, {gpu['driver']}")
        yield fact("runtime", gpu["runtime"])
    else:
        yield needs_gpu("GPU, capability, driver")
    yield fact("torch, triton", f"{torch.__version__}, {triton_version()}")
    yield fact("nsa, commit", f"{machine['nsa']}, {commit}")
    refused = [
        f"{branch}, {dtype}, {case}: {reason}"
        for case in sizes.kernels
        for branch in BRANCHES
        for dtype in case.dtypes
        if (reason := BACKENDS[BACKEND].why_not(branch, sizes.device, TORCH_DTYPES[dtype], case.shape))
    ]
    yield bounded("kernels that cannot run here", len(refused), 0, "; ".join(refused[:2]))


def _self_check(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Run again what decides whether `auto` takes the Triton kernels on this GPU, and rewrite the records."""
    run = _every_record if sizes.is_gpu else _rehearsed_record
    yield GpuCheck("self-check", "Triton kernels, before 'auto' takes them", partial(run, sizes))


def _rehearsed_record(sizes: CheckSizes) -> Iterator[CheckResult]:
    key = key_for(sizes.device, torch.float32, sizes.module.shape.kernel, parts=_REHEARSED_PARTS)
    with tempfile.TemporaryDirectory() as folder:
        yield from _record(CheckRequest(sizes.device, key, Path(folder)))


def _every_record(sizes: CheckSizes) -> Iterator[CheckResult]:
    """The base shape in bf16, and every shape and dtype that was checked on a GPU of this name before."""
    device, folder = torch.device("cuda", torch.cuda.current_device()), cache_folder()
    known = recorded(folder, torch.cuda.get_device_name(device))
    for dtype, shape, tuned in dict.fromkeys(((torch.bfloat16, SHAPES["base"].kernel, False), *known)):
        yield from _record(CheckRequest(device, key_for(device, dtype, shape, tuned=tuned), folder))


def _record(request: CheckRequest) -> Iterator[CheckResult]:
    key = request.key
    groups, heads, d_k, d_v = key.shape
    what = f"{key.dtype}, {heads} heads/group, {groups} groups, {d_k}/{d_v}, blocks {key.geometry}"
    verdict = verify(request, rerun=True)
    store = RecordStore(request.folder, key)
    record = store.read()
    wrong = sum(not figure.holds for figure in record.figures) if record else 0
    yield bounded(f"figures that do not hold, {what}", max(wrong, int(not verdict.passed)), 0, verdict.reason)
    if record:
        yield fact(f"seconds, {what}", ", ".join(f"{name} {took:g}" for name, took in record.seconds.items()))
        yield fact(f"record, {what}", store.path.name)


def _parity(sizes: CheckSizes) -> Iterator[GpuCheck]:
    parts_of: dict[str, tuple[str, ...]] = {branch: (branch,) for branch in kernel_checks.ATTENTION}
    parts_of["compressed and select"] = ("compressed_and_select", "select")
    for dtype in dict.fromkeys(dtype for case in sizes.kernels for dtype in case.dtypes):
        for what, parts in parts_of.items():
            yield GpuCheck("parity", f"{what}, {dtype}", partial(_against_reference, sizes, what, parts, dtype))


def _against_reference(sizes: CheckSizes, what: str, parts: tuple[str, ...], dtype: str) -> Iterator[CheckResult]:
    """The worst output and gradient of all cases, and choice of blocks."""
    from triton.runtime.errors import OutOfResources

    kinds: dict[str, list[CheckResult]] = {"output": [], "gradients": [], "blocks": []}
    too_large = []
    for case in sizes.kernels:
        try:
            results = _compared(case, parts, sizes.device, dtype, BACKEND) if dtype in case.dtypes else []
        except OutOfResources as error:  # nothing was launched, so the other cases can still be checked
            too_large.append(f"{case}: {error}")
            continue
        for result in results:
            name = result.claim.rpartition(" ")[2]
            kind = "output" if name in ("out", "lse") else "blocks" if name == "blocks" else "gradients"
            kinds[kind].append(replace(result, note=f"{result.claim}: {case}"))
    for kind in kinds if "select" in parts else ("output", "gradients"):
        claim = f"{what} {kind}, {dtype}, relative {'scores' if kind == 'blocks' else 'RMS'}"
        if kinds[kind]:
            yield replace(worst(kinds[kind]), claim=claim)
        else:
            yield bounded(claim, torch.inf, 0, "nothing could be checked")
    yield bounded(f"{what}, {dtype}, sizes that do not fit on the GPU", len(too_large), 0, "; ".join(too_large))


def _compared(
    case: KernelCase, parts: tuple[str, ...], device: torch.device, dtype: str, backend: str, *, autocast: bool = False
) -> list[CheckResult]:
    results = []
    for part in kernel_checks.parts(case, device, TORCH_DTYPES[dtype], backend, exact=torch.float64):
        if part.name in parts:
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                got = part.run()
            results += part.compare(got)
    return results


def _autocast(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Kernels compute in their inputs' dtype under autocast, and a module is as accurate as PyTorch's.

    The portable backend is checked too: it runs where Triton does not, and autocast would change its matrix products.
    """
    for backend in _AUTOCAST_BACKENDS:
        yield GpuCheck("autocast", f"kernels in fp32, {backend}", partial(_kernels_under_autocast, sizes, backend))
    yield GpuCheck("autocast", "bf16 from fp32 weights", partial(_module_under_autocast, sizes))


def _kernels_under_autocast(sizes: CheckSizes, backend: str) -> Iterator[CheckResult]:
    parts = (*kernel_checks.ATTENTION, "select")
    result = worst(_compared(sizes.kernels[0], parts, sizes.device, "fp32", backend, autocast=True))
    yield replace(result, claim=f"outputs, gradients and blocks in fp32, {backend}, relative", note=result.claim)


def _module_under_autocast(sizes: CheckSizes) -> Iterator[CheckResult]:
    if sizes.is_gpu:
        yield error_under_autocast(sizes.module)
    else:  # Triton's interpreter computes bf16 products wrongly
        yield needs_gpu("error under autocast, × PyTorch attention's")


def _long(sizes: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in sizes.module_dtypes:
        run = partial(module_checks.against_portable, replace(sizes.long, dtype=dtype))
        yield GpuCheck("long", f"{sizes.long.length} tokens, {dtype}", run)


def _speed(sizes: CheckSizes) -> Iterator[GpuCheck]:
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
        yield GpuCheck("speed", _described(task), partial(_measure, sizes, task))
    for length in s.memory_lengths:
        task = BenchTask("attention", s.shape, length, s.dtypes[0], True, device=device)
        yield GpuCheck("speed", f"memory, {_described(task)}", partial(_memory, sizes, task))


def _described(task: BenchTask) -> str:
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
    model = _modelled(task, describe_device(sizes.device)["name"]) if sizes.is_gpu else None
    record = measurement.to_json() | {"modelled": model}
    rows = [(*row, _modelled_cell(model) if row[3] == BACKEND else "") for row in report.rows(measurement)]
    yield MeasuredTable(record, rows, report.notes(measurement))
    yield _result(measurement, model, sizes)


def _result(measurement: BenchMeasurement, model: dict[str, float] | None, sizes: CheckSizes) -> CheckResult:
    """Holds if the timed implementation is correct; the ratio itself has no limit."""
    ours = next(entry for entry in measurement.entries if entry.name == BACKEND)
    claim = f"{_described(measurement.task)}, × dense"
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
    claim = f"memory above the inputs, {_described(task)}, MiB"
    verdict = CheckStatus.FAILS if measured["absent"] else CheckStatus.HOLDS
    yield CheckResult(claim, verdict, measured["peak_mib"], None, measured["absent"])


def _modelled(task: BenchTask, gpu_name: str) -> dict[str, float] | None:
    """Modelled seconds, dense seconds and ratio from the table; None for a GPU, shape or operation not in it."""
    if task.op != "attention" or task.shape != SHAPES["base"]:
        return None
    for word in re.findall(r"[a-z0-9]+", gpu_name.lower()):
        if prediction := predictions().get((word, task.length, task.dtype, task.backward)):
            return prediction
    return None


_SUBJECTS: dict[str, Callable[[CheckSizes], Iterator[GpuCheck]]] = {
    "environment": _environment,
    "self-check": _self_check,
    "parity": _parity,
    "autocast": _autocast,
    "causality": partial(_of_module, "causality"),
    "determinism": partial(_of_module, "determinism"),
    "compile": partial(_of_module, "compile"),
    "decode": partial(_of_module, "decode"),
    "long": _long,
    "devices": partial(_of_module, "devices"),
    "training": partial(_of_module, "training"),
    "speed": _speed,
}
SUBJECTS = tuple(_SUBJECTS)

_ENTRY_POINT_GROUP = "nsa.gpu_checks"
"""Subject → function of `CheckSizes` that yields checks of another package, e.g. of a trainer."""
_SILENCE_TIMEOUT_S = 1800.0  # a child without a message for this long hangs
_MOST_LINES = 40


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of `nsa gpu-check` that the child needs."""

    rehearse: bool = False
    full: bool = False
    only: tuple[str, ...] = ()

    def checks(self) -> list[GpuCheck]:
        """The checks of the subjects, or of all, in their order, with those that installed packages register."""
        for name in self.only:
            if name not in SUBJECTS:
                raise ConfigError(f"--only is {name!r}: there is no such subject. Use one of: {', '.join(SUBJECTS)}.")
        if "speed" in self.only and not self.full:
            raise ConfigError(
                "--only speed without --full times nothing: the benchmark is what --full adds. Add --full."
            )
        sizes = rehearsal(full=self.full) if self.rehearse else on_gpu(torch.device("cuda"), full=self.full)
        checks: list[GpuCheck] = []
        for subject, its_checks in _SUBJECTS.items():
            if not self.only or subject in self.only:
                checks += its_checks(sizes)
                for entry in entry_points(group=_ENTRY_POINT_GROUP, name=subject):
                    checks += entry.load()(sizes)
        return checks


@dataclass
class GpuCheckRunner:
    request: GpuCheckRequest
    environ: Mapping[str, str]
    """Environment of the child; Triton reads TRITON_INTERPRET when it is imported."""
    silence_s: float = _SILENCE_TIMEOUT_S
    traces: dict[str, str] = field(default_factory=dict)
    """By check that ended the child: the last lines of its output."""

    def __post_init__(self) -> None:
        self.checks = self.request.checks()

    def run(self) -> Iterator[GpuCheck | CheckResult | MeasuredTable]:
        """Yield each check as it begins, then its results; a check that ends the child yields a failed result."""
        first = 0
        while first < len(self.checks):
            reached, began = -1, time.monotonic()
            with ChildProcess("the process", ("-m", "nsa.check.gpu_check"), self.environ) as child:
                child.send(first=first, **vars(self.request))
                try:
                    for message in child.messages(silence_s=self.silence_s):
                        if message["kind"] == "begin":
                            reached, began = message["number"], time.monotonic()
                            yield self.checks[reached]
                        elif message["kind"] == "result":
                            result = message["result"]
                            yield CheckResult(**result | {"verdict": CheckStatus(result["verdict"])})
                        elif message["kind"] == "measured":
                            yield MeasuredTable(**message["measured"])
                        else:
                            return
                except ChildFailed as error:
                    check = self.checks[max(reached, first)]
                    self.traces[f"{check.subject}: {check.name}"] = "\n".join(child.output_lines()[-_MOST_LINES:])
                    yield CheckResult(check.name, CheckStatus.FAILS, note=str(error), subject=check.subject,
                                      seconds=time.monotonic() - began)  # fmt: skip
            if reached < first:  # the child cannot even start
                return
            first = reached + 1


def _answer(write: Callable[..., None], first: int, **options: Any) -> None:
    """Answer in the child: run the checks from the first one on and send each result at once."""
    torch.set_float32_matmul_precision("highest")  # no TF32 in what kernels are compared with
    for number, check in enumerate(GpuCheckRequest(**options).checks()[first:], start=first):
        write(kind="begin", number=number)
        begin = time.perf_counter()
        for result in check.run():
            if isinstance(result, CheckResult):
                now = time.perf_counter()
                write(kind="result", result=asdict(replace(result, subject=check.subject, seconds=now - begin)))
                begin = now
            else:
                write(kind="measured", measured=asdict(result))
    write(kind="done")


if __name__ == "__main__":
    answer_parent(_answer)
