"""A command's worth of figures: hold the threads, measure the machine, race at each length, keep the record."""

from collections.abc import Iterator
from dataclasses import dataclass

from nsa.bench.case import BenchTask
from nsa.bench.device import describe_device, device_named
from nsa.bench.machine import available_cores, describe_machine, pinned
from nsa.bench.measurement import BenchMeasurement, Say, chosen_contenders, measure
from nsa.bench.memory import measure_memory
from nsa.bench.report import BenchReport
from nsa.bench.roofline import MachinePeaks, measure_peaks
from nsa.bench.shapes import DTYPES, PARTS, parse_lengths, shape_named, spell
from nsa.bench.train_step import measure_train
from nsa.errors import ConfigError


@dataclass(frozen=True)
class BenchRequest:
    """What the user asked for, in the command line's words."""

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


def run(
    wish: BenchRequest, report: BenchReport, say: Say
) -> Iterator[BenchMeasurement | MachinePeaks | dict[str, object]]:
    """Yield each result once it is in the report: the machine's peaks, then a figure per task."""
    threads, device = wish.threads or len(available_cores()), device_named(wish.device)
    if wish.op == "machine":
        for n in sorted({1, threads}) if device.type == "cpu" else [threads]:
            say(f"measuring the machine with {n} thread{'s' * (n > 1)}")
            report.peaks.append(measure_peaks(n, device))
            yield report.peaks[-1]
        return
    tasks = list(wish.tasks())
    who = chosen_contenders(wish.backends, wish.peers, device.type)
    if wish.op == "memory":
        for task in tasks:
            for contender in who:
                say(f"{contender.name}, {task.dtype}, {spell(task.length)}")
                measured = measure_memory(
                    contender, task, wish.shape, threads=threads, timeout_s=max(60.0, 20 * wish.budget_s)
                )
                report.memory.append(measured)
                yield measured
        return
    say("measuring the machine")
    peaks = measure_peaks(threads, device)
    report.peaks.append(peaks)
    yield peaks
    with pinned(threads):
        for task in tasks:
            tell = _about(task, say)
            if task.op == "train":
                figure = measure_train(task, who, threads=threads, budget_s=wish.budget_s, say=tell)
            else:
                figure = measure(
                    task, who, data=wish.data, threads=threads, budget_s=wish.budget_s, peaks=peaks, say=tell
                )
            report.figures.append(figure)
            yield figure


def _about(task: BenchTask, say: Say) -> Say:
    what = f"{task.op}{' fwd+bwd' * task.backward}, {task.dtype}, {spell(task.length)}"
    return lambda text: say(f"{what}: {text}")


def new_report(command: str, device: str = "cpu") -> BenchReport:
    machine, where = describe_machine(), device_named(device)
    return BenchReport(command, machine if where.type == "cpu" else machine | {"gpu": describe_device(where)})
