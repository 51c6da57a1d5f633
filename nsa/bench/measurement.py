"""One figure: a task, everyone who raced, what they took, and which ratios may be printed."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from nsa.bench import roofline
from nsa.bench.case import TORCH_DTYPES, BenchCase, BenchTask
from nsa.bench.correctness import CorrectnessCheck, judge
from nsa.bench.device import clock_of
from nsa.bench.implementations import DENSE, BenchImplementation, contenders
from nsa.bench.roofline import MachinePeaks
from nsa.bench.runner import BenchRunner
from nsa.bench.timing import Now, TimingSpread, interleave, ratio, spread
from nsa.errors import ConfigError
from nsa.kernels.registry import BACKENDS

Say = Callable[[str], None]

FAILURES_OF_PEERS = (RuntimeError, TypeError, ValueError, AttributeError, AssertionError, ImportError)
"""Somebody else's code must not end a race that is about ours."""

RACED_ON = {"cuda": ("triton",)}
"""Backends that a race on this kind of device is about, also while `auto` does not choose them."""


@dataclass(frozen=True)
class ImplementationResult:
    name: str
    kind: str
    absent: str = ""
    """Why it did not race."""
    agreement: CorrectnessCheck = field(default_factory=lambda: CorrectnessCheck(False))
    samples_s: list[float] = field(default_factory=list)
    ratio: TimingSpread | None = None
    """How many times faster than dense; None where it may not be said."""
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


def chosen_contenders(backends: Iterable[str], with_peers: bool, device: str = "cpu") -> list[BenchImplementation]:
    """Dense, the backends named (or all that are chosen by default there), and peers if wanted."""
    every, wanted = contenders(), list(backends)
    for name in wanted:
        if name not in BACKENDS:
            raise ConfigError(f"--backend is {name!r}: there is no such backend. Use one of: {', '.join(BACKENDS)}.")
    by_default = [name for name, backend in BACKENDS.items() if backend.by_default]
    named = wanted or [*by_default, *(name for name in RACED_ON.get(device, ()) if name not in by_default)]
    peers = [name for name in every if name != DENSE and name not in BACKENDS] if with_peers else []
    return [every[name] for name in (DENSE, *named, *peers)]


def measure(
    task: BenchTask,
    who: list[BenchImplementation],
    *,
    data: str,
    threads: int,
    budget_s: float,
    peaks: MachinePeaks | None,
    say: Say,
    now: Now | None = None,
) -> BenchMeasurement:
    """Judge each contender, then time all of them side by side."""
    device = torch.device(task.device)
    room = min(1024, max(64, task.length // 16)) if task.op == "decode" else 0
    refusals = {c.name: c.refusal(task) for c in who}
    entries, runners = {}, {}
    racing = [c for c in who if not refusals[c.name]]
    case = BenchCase(task.shape, task.length + room, TORCH_DTYPES[task.dtype], data, device=device) if racing else None
    for contender in who:
        if case is None or refusals[contender.name]:
            entries[contender.name] = ImplementationResult(
                contender.name, contender.kind, absent=refusals[contender.name] or ""
            )
            continue
        say(f"judging {contender.name}")
        try:
            runner = contender.make[task.op](case, task)
            agreement = judge(contender, task, case, runner)
        except FAILURES_OF_PEERS as error:
            if contender.name in (DENSE, *BACKENDS):
                raise
            reason = f"it failed here: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
            entries[contender.name] = ImplementationResult(contender.name, contender.kind, absent=reason)
            continue
        runners[contender.name] = runner
        entries[contender.name] = ImplementationResult(
            contender.name, contender.kind, agreement=agreement, note=runner.note
        )
    say(f"timing {', '.join(runners)}")
    samples = interleave(
        {name: _subject(runner, task) for name, runner in runners.items()},
        budget_s=budget_s,
        repeat=task.op == "decode" or device.type == "cuda",
        now=now or clock_of(device),
    ) if runners else {}  # fmt: skip
    bound, allowed = roofline.allowed(task)
    finished = [finish(entry, samples, entries, task, peaks) for entry in entries.values()]
    return BenchMeasurement(task, data, threads, bound, allowed, finished)


def _subject(runner: BenchRunner, task: BenchTask) -> Callable[[], object]:
    return runner.forward_backward if task.backward else runner.forward_only


def finish(
    entry: ImplementationResult,
    samples: dict[str, list[float]],
    entries: dict[str, ImplementationResult],
    task: BenchTask,
    peaks: MachinePeaks | None,
) -> ImplementationResult:
    """Add times, and the ratio if both sides gave the right answer."""
    if entry.name not in samples:
        return entry
    mine, dense = samples[entry.name], entries.get(DENSE)
    times, refused = None, ""
    if entry.kind == "dense" or not entry.agreement.agrees:
        refused = entry.agreement.reason
    elif dense is None or DENSE not in samples:
        refused = f"{DENSE} did not race: {dense.absent if dense else 'it was not asked to'}"
    elif not dense.agreement.agrees:
        refused = f"{DENSE} {dense.agreement.reason}"
    else:
        times = ratio(samples[DENSE], mine)
    reached = None
    if peaks and entry.agreement.agrees:
        reached = roofline.achieved(task, entry.kind, spread(mine).median, peaks)
    return ImplementationResult(
        entry.name, entry.kind, entry.absent, entry.agreement, mine, times, refused, reached, entry.note
    )
