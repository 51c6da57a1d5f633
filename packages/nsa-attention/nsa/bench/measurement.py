"""One benchmark result: the case, each implementation's time, and the speed-up ratios."""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from nsa.bench import roofline
from nsa.bench.case import TORCH_DTYPES, BenchCase, BenchTask
from nsa.bench.correctness import CorrectnessCheck, check_correctness
from nsa.bench.implementations import DENSE, BenchImplementation, all_implementations
from nsa.bench.machine import Now, TimingSpread, clock_of, interleave, ratio, real_time_priority, spread
from nsa.bench.roofline import MachinePeaks
from nsa.errors import ConfigError
from nsa.kernels.registry import BACKENDS

Log = Callable[[str], None]

_FAILURES_OF_PEERS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)
"""Errors of third-party packages that exclude them from a benchmark instead of ending it."""

_ALSO_TIMED_ON = {"cuda": ("triton",)}
"""Backends timed by default on a kind of device although `auto` does not choose them there."""


@dataclass(frozen=True)
class ImplementationResult:
    name: str
    kind: str
    absent: str = ""
    """Why it was not timed."""
    agreement: CorrectnessCheck = field(default_factory=lambda: CorrectnessCheck(False))
    samples_s: list[float] = field(default_factory=list)
    ratio: TimingSpread | None = None
    """Speed-up over dense; None if it is withheld."""
    refused: str = ""
    """Why the ratio is withheld."""
    achieved: float | None = None
    note: str = ""

    @property
    def time_s(self) -> TimingSpread | None:
        return spread(self.samples_s) if self.samples_s else None


@dataclass(frozen=True)
class BenchMeasurement:
    task: BenchTask
    data: str
    threads: int
    bound: str
    """What bounds the allowed ratio: FLOPs or bytes."""
    allowed: float
    entries: list[ImplementationResult]

    def to_json(self) -> dict[str, Any]:
        rows = []
        for entry in self.entries:
            time_s = entry.time_s
            rows.append(
                asdict(entry)
                | {"time_s": asdict(time_s) | {"noise": time_s.noise} if time_s else None}
                | {"rounds": len(entry.samples_s)}
            )
        return asdict(self) | {"entries": rows}


def choose_implementations(backends: Iterable[str], with_peers: bool, device: str = "cpu") -> list[BenchImplementation]:
    """Dense, the backends named (or the default ones of the device), and third-party packages if requested."""
    every, wanted = all_implementations(), list(backends)
    for name in wanted:
        if name not in BACKENDS:
            raise ConfigError(f"--backend is {name!r}: there is no such backend. Use one of: {', '.join(BACKENDS)}.")
    by_default = [name for name, backend in BACKENDS.items() if backend.by_default]
    named = wanted or [*by_default, *(name for name in _ALSO_TIMED_ON.get(device, ()) if name not in by_default)]
    peers = [name for name in every if name != DENSE and name not in BACKENDS] if with_peers else []
    return [every[name] for name in (DENSE, *named, *peers)]


def measure(
    task: BenchTask,
    implementations: list[BenchImplementation],
    *,
    data: str,
    threads: int,
    budget_s: float,
    peaks: MachinePeaks | None,
    log: Log,
    real_time: bool = False,
    now: Now | None = None,
) -> BenchMeasurement:
    """Check each implementation for correctness, then time all of them in interleaved rounds."""
    device = torch.device(task.device)
    room = min(1024, max(64, task.length // 16)) if task.op == "decode" else 0
    entries = {i.name: ImplementationResult(i.name, i.kind, i.refusal(task) or "") for i in implementations}
    present = [i for i in implementations if not entries[i.name].absent]
    case = BenchCase(task.shape, task.length + room, TORCH_DTYPES[task.dtype], data, device=device) if present else None
    runners = {}
    for implementation in present:
        name = implementation.name
        log(f"checking {name}")
        try:
            assert case is not None
            runner = implementation.make[task.op](case, task)
            agreement = check_correctness(implementation, task, case, runner)
        except _FAILURES_OF_PEERS as error:
            if name == DENSE or (name in BACKENDS and BACKENDS[name].is_whole):
                raise
            reason = f"it failed here: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            entries[name] = replace(entries[name], absent=reason)
            continue
        runners[name] = runner
        entries[name] = replace(entries[name], agreement=agreement, note=runner.note)
    log(f"timing {', '.join(runners)}")
    samples = interleave(
        {name: r.forward_backward if task.backward else r.forward_only for name, r in runners.items()},
        budget_s=budget_s,
        repeat=task.op == "decode" or device.type == "cuda",
        around_round=real_time_priority if real_time else nullcontext,
        now=now or clock_of(device),
    ) if runners else {}  # fmt: skip
    bound, allowed = roofline.allowed(task)
    finished = [finish(entry, samples, entries, task, peaks) for entry in entries.values()]
    return BenchMeasurement(task, data, threads, bound, allowed, finished)


def finish(
    entry: ImplementationResult,
    samples: dict[str, list[float]],
    entries: dict[str, ImplementationResult],
    task: BenchTask,
    peaks: MachinePeaks | None,
) -> ImplementationResult:
    """Add times, and the ratio if both sides are correct."""
    if entry.name not in samples:
        return entry
    mine, dense = samples[entry.name], entries.get(DENSE)
    times, refused = None, ""
    if entry.kind == "dense" or not entry.agreement.agrees:
        refused = entry.agreement.reason
    elif dense is None or DENSE not in samples:
        refused = f"{DENSE} was not timed: {dense.absent if dense else 'it was not requested'}"
    elif not dense.agreement.agrees:
        refused = f"{DENSE} {dense.agreement.reason}"
    else:
        times = ratio(samples[DENSE], mine)
    reached = None
    if peaks and entry.agreement.agrees:
        reached = roofline.achieved(task, entry.kind, spread(mine).median, peaks)
    return replace(entry, samples_s=mine, ratio=times, refused=refused, achieved=reached)
