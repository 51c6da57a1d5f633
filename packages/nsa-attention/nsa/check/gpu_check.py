"""The GPU check: its subjects, and their runner in a child process, restarted after an exception, crash or hang.

`nsa gpu-check` and `python -m nsa.check --bundle` run it. Subjects select from the table of cases: every kernel against
the reference in fp64 (parity), kernels under autocast, the module against itself, and timings (`timing_checks`). The
child is this module as a program (`nsa.child_process`).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from nsa.bench.case import SHAPES, TORCH_DTYPES
from nsa.bench.implementations import peer_versions
from nsa.bench.machine import describe_device, describe_machine, triton_version
from nsa.check import kernel_checks, module_checks, timing_checks
from nsa.check.cases import BACKEND, CheckSizes, KernelCase, on_gpu, rehearsal
from nsa.check.comparison import CheckResult, CheckStatus, bounded, fact, needs_gpu, worst
from nsa.check.gpu_check_report import GpuCheck, GpuCheckReport, MeasuredTable, cells
from nsa.check.installation import installation_facts
from nsa.check.prove import error_under_autocast
from nsa.child_process import ChildFailed, ChildProcess, answer_parent
from nsa.errors import ConfigError
from nsa.kernels import flash
from nsa.kernels.cpu.build import cache_folder
from nsa.kernels.registry import BACKENDS, BRANCHES
from nsa.kernels.self_check import CheckRequest, RecordStore, clean_environment, key_for, recorded, verify
from nsa.kernels.triton_environment import triton_faults

_REHEARSED_PARTS = ("sliding", "mix, 3 gates per group in float32")  # quick when interpreted
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
    faults = [fault.problem for fault in triton_faults("cuda" if sizes.is_gpu else "cpu")]
    yield bounded("what Triton lacks here", len(faults), 0, "; ".join(faults))
    yield fact("other packages", ", ".join(f"{name} {version}" for name, version in peer_versions().items()))


def _self_check(sizes: CheckSizes) -> Iterator[GpuCheck]:
    """Run again what decides whether `auto` takes the Triton kernels on this GPU, and rewrite the records."""
    yield GpuCheck("self-check", "Triton kernels, before 'auto' takes them", partial(_every_record, sizes))
    yield GpuCheck("self-check", "what 'auto' takes", partial(_installation, sizes))


def _installation(sizes: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    s = SHAPES["base"]
    dtype = "bf16" if sizes.is_gpu else "fp32"
    facts = installation_facts(sizes.device, dtype, s.n_heads, s.n_kv_groups, s.d_k, s.d_v)
    yield MeasuredTable(facts, kind="installation")
    yield fact(f"kernels, {dtype}", facts["kernels"])


def _every_record(sizes: CheckSizes) -> Iterator[CheckResult | MeasuredTable]:
    """The base shape in bf16, and every shape and dtype that was checked on a GPU of this name before."""
    if not sizes.is_gpu:
        key = key_for(sizes.device, torch.float32, sizes.module.shape.kernel, parts=_REHEARSED_PARTS)
        with tempfile.TemporaryDirectory() as scratch:
            yield from _record(CheckRequest(sizes.device, key, Path(scratch)))
        return
    device, folder = torch.device("cuda", torch.cuda.current_device()), cache_folder()
    known = recorded(folder, torch.cuda.get_device_name(device))
    backends = ("triton", "flash") if flash.package_for(device) else ("triton",)
    for dtype, shape, tuned in dict.fromkeys(((torch.bfloat16, SHAPES["base"].kernel, False), *known)):
        for backend in backends:
            key = key_for(device, dtype, shape, tuned=tuned, backend=backend)
            yield from _record(CheckRequest(device, key, folder))


def _record(request: CheckRequest) -> Iterator[CheckResult | MeasuredTable]:
    key = request.key
    groups, heads, d_k, d_v = key.shape
    what = f"{key.dtype}, {heads} heads/group, {groups} groups, {d_k}/{d_v}, blocks {key.geometry}"
    what += f", {key.package}" if key.package else ""
    verdict = verify(request, rerun=True)
    store = RecordStore(request.folder, key)
    record = store.read()
    wrong = sum(not figure.holds for figure in record.figures) if record else 0
    yield bounded(f"figures that do not hold, {what}", max(wrong, int(not verdict.passed)), 0, verdict.reason)
    if record:
        yield fact(f"seconds, {what}", ", ".join(f"{name} {took:g}" for name, took in record.seconds.items()))
        if record.times:
            layer = ", ".join(f"{name} {1e3 * took:.3g} ms" for name, took in record.times.items())
            yield fact(f"layer, forward and backward, {what}", layer)
        yield MeasuredTable(asdict(record), kind="self_check")


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
    Triton's interpreter computes bf16 products wrongly.
    """
    for backend in (BACKEND, "portable"):
        yield GpuCheck("autocast", f"kernels in fp32, {backend}", partial(_kernels_under_autocast, sizes, backend))
    claim = "error under autocast, × PyTorch attention's"
    module = (lambda: error_under_autocast(sizes.module)) if sizes.is_gpu else partial(needs_gpu, claim)
    yield GpuCheck("autocast", "bf16 from fp32 weights", lambda: iter([module()]))


def _kernels_under_autocast(sizes: CheckSizes, backend: str) -> Iterator[CheckResult]:
    parts = (*kernel_checks.ATTENTION, "select")
    result = worst(_compared(sizes.kernels[0], parts, sizes.device, "fp32", backend, autocast=True))
    yield replace(result, claim=f"outputs, gradients and blocks in fp32, {backend}, relative", note=result.claim)


def _long(sizes: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in sizes.module_dtypes:
        run = partial(module_checks.against_portable, replace(sizes.long, dtype=dtype))
        yield GpuCheck("long", f"{sizes.long.length} tokens, {dtype}", run)


_SUBJECTS: dict[str, Callable[[CheckSizes], Iterable[GpuCheck]]] = {
    "environment": lambda sizes: [GpuCheck("environment", "software and hardware", partial(_describe, sizes))],
    "self-check": _self_check,
    "host": timing_checks.host,
    "kernels": timing_checks.kernels,
    "generation": timing_checks.generation,
    "training": partial(_of_module, "training"),
    "parity": _parity,
    "autocast": _autocast,
    "causality": partial(_of_module, "causality"),
    "determinism": partial(_of_module, "determinism"),
    "compile": partial(_of_module, "compile"),
    "decode": partial(_of_module, "decode"),
    "long": _long,
    "devices": lambda sizes: [*_of_module("devices", sizes), *timing_checks.two_ranks(sizes)],
    "speed": timing_checks.speed,
}
"""What says most in the first minutes comes first."""
_ONLY_FULL = ("host", "kernels", "generation", "speed")
SUBJECTS = tuple(_SUBJECTS)

_ENTRY_POINT_GROUP = "nsa.gpu_checks"
"""Subject → function of `CheckSizes` that yields checks of another package, e.g. of a trainer."""
_SILENCE_TIMEOUT_S = 1800.0  # a child without a message for this long hangs
_MOST_LINES = 40


@dataclass(frozen=True)
class GpuCheckRequest:
    """Options of the GPU check that the child needs."""

    rehearse: bool = False
    full: bool = False
    only: tuple[str, ...] = ()

    def checks(self) -> list[GpuCheck]:
        """The checks of the subjects, or of all, in their order, with those that installed packages register."""
        for name in self.only:
            if name not in SUBJECTS:
                raise ConfigError(f"--only is {name!r}: there is no such subject. Use one of: {', '.join(SUBJECTS)}.")
            if name in _ONLY_FULL and not self.full:
                raise ConfigError(
                    f"--only {name} without --full times nothing: timings are what --full adds. Add --full."
                )
        sizes = rehearsal(full=self.full) if self.rehearse else on_gpu(torch.device("cuda"), full=self.full)
        checks: list[GpuCheck] = []
        for subject, its_checks in _SUBJECTS.items():
            if not self.only or subject in self.only:
                checks += its_checks(sizes)
                for entry in entry_points(group=_ENTRY_POINT_GROUP, name=subject):
                    checks += entry.load()(sizes)
        return checks

    @property
    def command(self) -> str:
        """As it may be typed again, without the name of a file."""
        words = ["--full"] * self.full + ["--rehearse"] * self.rehearse
        return " ".join(["nsa gpu-check", *words, *(f"--only {subject}" for subject in self.only)])


@dataclass
class GpuCheckRunner:
    request: GpuCheckRequest
    silence_s: float = _SILENCE_TIMEOUT_S
    traces: dict[str, str] = field(default_factory=dict)
    """By check that ended the child: the last lines of its output."""

    def __post_init__(self) -> None:
        self.checks = self.request.checks()

    def run(self) -> Iterator[GpuCheck | CheckResult | MeasuredTable]:
        """Yield each check as it begins, then its results; a check that ends the child yields a failed result."""
        first, environ = 0, clean_environment(interpret=self.request.rehearse)
        while first < len(self.checks):
            reached, began = -1, time.monotonic()
            with ChildProcess("the process", ("-m", "nsa.check.gpu_check"), environ) as child:
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


_INTERRUPTED = 130  # exit code of a shell for SIGINT


def run_gpu_check(request: GpuCheckRequest, bundle: Path | None) -> int:
    """Run the checks, print each result and keep all so far in the archive; return the exit code."""
    if not (request.rehearse or torch.cuda.is_available()):
        raise ConfigError(
            f"nsa gpu-check needs a GPU and torch {torch.__version__} sees none here: what it proves cannot be proven "
            f"elsewhere. Run it on a machine with one and torch's GPU build, or add --rehearse to run the same checks "
            f"interpreted on this CPU."
        )
    runner, machine, begun = GpuCheckRunner(request), describe_machine(), 0
    record = GpuCheckReport(
        request.command, machine, request.rehearse, request.full, request.only, traces=runner.traces
    )
    stamp = machine["time"].partition("+")[0].replace(":", "")
    file = bundle or Path(f"gpu_check_{stamp}.zip")
    try:
        if file.exists():
            raise ConfigError(f"--bundle is {file}, which exists and may hold another check. Name another file.")
        file.parent.mkdir(parents=True, exist_ok=True)
        record.write(file)
    except OSError as error:
        raise ConfigError(f"--bundle is {file}, which cannot be written ({error.strerror}). Name another.") from None
    try:
        for result in runner.run():
            if isinstance(result, GpuCheck):
                begun += 1
                where = f"[{begun}/{len(runner.checks)}] {result.subject}: {result.name}"
                print(where, file=sys.stderr, flush=True)
                continue
            record.add(result)
            record.write(file)
            if isinstance(result, CheckResult):
                print(_line(result), flush=True)
        record.complete = True
    except KeyboardInterrupt:
        print("interrupted")
    record.write(file)
    print(f"{record.title()}\n{record.summary()}\nwrote {file}")
    return 0 if record.holds else 1 if record.complete else _INTERRUPTED


def _line(row: CheckResult) -> str:
    verdict, subject, claim, measured, limit, seconds, note = cells(row)
    bound = f"{measured:>9} {f'≤ {limit}' if limit else '':8}" if row.verdict != "fact" else f"{measured:18}"
    return f"{verdict:11} {subject:11} {claim:78} {bound} {seconds:>6} s  {note}".rstrip()


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
