"""Benchmark report: the measurements of one command as JSON, as table rows and as Markdown."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsa.bench.measurement import BenchMeasurement, ImplementationResult
from nsa.bench.roofline import MachinePeaks
from nsa.bench.timing import TimingSpread
from nsa.token_counts import spell

SCHEMA = 1
COLUMNS = (
    "op",
    "dtype",
    "length",
    "implementation",
    "median",
    "spread",
    "rounds",
    "× dense",
    "allowed",
    "of peak",
    "error",
)


@dataclass
class BenchReport:
    """Measurements of one command, with the machine and the command line."""

    command: str
    machine: dict[str, Any]
    peaks: list[MachinePeaks] = field(default_factory=list)
    figures: list[BenchMeasurement] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        body = asdict(self) | {"schema": SCHEMA, "figures": [measurement.to_json() for measurement in self.figures]}
        return json.dumps(body, indent=1, ensure_ascii=False)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_markdown(self) -> str:
        lines = [f"`{self.command}`", "", machine_line(self.machine), ""]
        lines += [warning, ""] if (warning := busy(self.machine)) else []
        lines += [*map(peaks_line, self.peaks), ""] if self.peaks else []
        if self.figures:
            lines += to_markdown_table(COLUMNS, [row for measurement in self.figures for row in rows(measurement)])
            lines += ["", *dict.fromkeys(note for measurement in self.figures for note in notes(measurement))]
        if self.memory:
            lines += to_markdown_table(MEMORY_COLUMNS, [memory_row(measured) for measured in self.memory])
        return "\n".join(lines).rstrip() + "\n"


def machine_line(machine: dict[str, Any]) -> str:
    commit = (machine["commit"] or "unknown")[:10] + (" with changes" if machine["uncommitted_changes"] else "")
    load = machine["load_average"][0]
    gpu = f"{gpu_words(machine['gpu'])} · " if machine.get("gpu") else ""
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['isa'])}), {machine['memory_gib']} GiB · "
        f"torch {machine['torch']} · commit {commit} · load {load:.1f} at the start · {machine['time']}"
    )


def gpu_words(gpu: dict[str, Any]) -> str:
    return (
        f"{gpu['name']} ({gpu['capability']}, {gpu['units']} units, {gpu['memory_gib']} GiB), driver {gpu['driver']}, "
        f"{gpu['runtime']}, triton {gpu['triton'] or 'not installed'}"
    )


def peaks_line(peaks: MachinePeaks) -> str:
    where = "GPU" if peaks.device == "cuda" else f"{peaks.threads} thread{'s' * (peaks.threads > 1)}"
    fp16 = f"fp16 {peaks.fp16_gflops:.0f} GFLOP/s, " if peaks.fp16_gflops else ""
    return (
        f"peak, {where}: fp32 {peaks.fp32_gflops:.0f} GFLOP/s, bf16 {peaks.bf16_gflops:.0f} GFLOP/s, {fp16}"
        f"copy {peaks.copy_gb_s:.1f} GB/s, read {peaks.read_gb_s:.1f} GB/s"
    )


def rows(measurement: BenchMeasurement) -> list[tuple[str, ...]]:
    """One table row per implementation that was timed, with the ratio that the least work allows."""
    task = measurement.task
    op = task.op + (f" {task.part}" if task.part != "all" else "") + (" fwd+bwd" if task.backward else "")
    body: list[tuple[str, ...]] = []
    for entry in measurement.entries:
        allowed = f"{measurement.allowed:.2f}× ({measurement.bound})" if entry.kind == "nsa" else ""
        head = (op, task.dtype, spell(task.length), entry.name)
        if entry.time_s is None:
            continue
        body.append((
            *head, seconds(entry.time_s.median), f"{seconds(entry.time_s.low)}–{seconds(entry.time_s.high)}",
            str(len(entry.samples_s)), _ratio(entry), allowed,
            "" if entry.achieved is None else f"{100 * entry.achieved:.0f} %", _error(entry),
        ))  # fmt: skip
    return body


def notes(measurement: BenchMeasurement) -> list[str]:
    """Lines below the table: implementations that were not timed, ratios that are withheld, and why."""
    absent = [f"{entry.name} was not timed: {entry.absent}." for entry in measurement.entries if entry.absent]
    withheld = [f"{entry.name}: ratio withheld, {entry.refused}." for entry in measurement.entries if entry.refused]
    return absent + withheld


def busy(machine: dict[str, Any]) -> str | None:
    """A remark if other work shared the machine when the run began: a warning, unless it could not disturb."""
    if machine["load_average"][0] < 0.5 * machine["cores"]:
        return None
    if machine.get("real_time"):
        return "Other work shared the machine; each round ran with real-time priority, before all of it."
    return f"The machine was busy (load {machine['load_average'][0]:.1f}): do not quote these measurements."


def seconds(value: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _ratio(entry: ImplementationResult) -> str:
    if entry.kind == "dense":
        return "withheld" if entry.refused else "1"
    return "withheld" if entry.ratio is None else _spread(entry.ratio)


def _spread(spread: TimingSpread) -> str:
    return f"{spread.median:.2f} ({spread.low:.2f}–{spread.high:.2f})"


def _error(entry: ImplementationResult) -> str:
    return f"{entry.agreement.worst:.1g}" if entry.agreement.errors else "not checked"


MEMORY_COLUMNS = ("length", "dtype", "implementation", "peak above inputs", "per 1,000 tokens")


def memory_row(measured: dict[str, Any]) -> tuple[str, ...]:
    head = (spell(measured["length"]), measured["dtype"], measured["contender"])
    if measured["absent"]:
        return (*head, "–", f"absent: {measured['absent']}")
    mib = measured["peak_mib"]
    return (*head, f"{mib:,.0f} MiB", f"{1000 * mib / measured['length']:.1f} MiB")


def to_markdown_table(columns: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    table = [columns, tuple("---" for _ in columns), *body]
    return [f"| {' | '.join(row)} |" for row in table]
