"""A run of figures as JSON (the record), as rows of a table, and as Markdown."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nsa.bench.measurement import BenchMeasurement, ImplementationResult
from nsa.bench.roofline import MachinePeaks
from nsa.bench.shapes import spell
from nsa.bench.timing import TimingSpread

SCHEMA = 1
COLUMNS = ("op", "dtype", "length", "contender", "median", "spread", "rounds", "× dense", "allowed", "of peak", "error")


@dataclass
class BenchReport:
    """What a command measured, with where and how."""

    command: str
    machine: dict[str, Any]
    peaks: list[MachinePeaks] = field(default_factory=list)
    figures: list[BenchMeasurement] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)

    def to_json(self) -> str:
        body = asdict(self) | {"schema": SCHEMA, "figures": [figure.to_json() for figure in self.figures]}
        return json.dumps(body, indent=1, ensure_ascii=False)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json() + "\n", encoding="utf-8")

    def to_markdown(self) -> str:
        lines = [f"`{self.command}`", "", machine_line(self.machine), ""]
        lines += [warning, ""] if (warning := busy(self.machine)) else []
        lines += [*map(peaks_line, self.peaks), ""] if self.peaks else []
        if self.figures:
            lines += to_markdown_table(COLUMNS, [row for figure in self.figures for row in rows(figure)])
            lines += ["", *dict.fromkeys(note for figure in self.figures for note in notes(figure))]
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


def rows(figure: BenchMeasurement) -> list[tuple[str, ...]]:
    """One row per contender that raced, as text; ours beside what the least work allows."""
    task = figure.task
    op = task.op + (f" {task.part}" if task.part != "all" else "") + (" fwd+bwd" if task.backward else "")
    body: list[tuple[str, ...]] = []
    for entry in figure.entries:
        allowed = f"{figure.allowed:.2f}× ({figure.bound})" if entry.kind == "nsa" else ""
        head = (op, task.dtype, spell(task.length), entry.name)
        if entry.time_s is None:
            continue
        body.append((
            *head, seconds(entry.time_s.median), f"{seconds(entry.time_s.low)}–{seconds(entry.time_s.high)}",
            str(len(entry.samples_s)), _ratio(entry), allowed,
            "" if entry.achieved is None else f"{100 * entry.achieved:.0f} %", _error(entry),
        ))  # fmt: skip
    return body


def notes(figure: BenchMeasurement) -> list[str]:
    """What a reader must know besides the numbers: who did not race, which ratio is withheld, and why."""
    absent = [f"{entry.name} did not race: {entry.absent}." for entry in figure.entries if entry.absent]
    withheld = [f"{entry.name}: ratio withheld, {entry.refused}." for entry in figure.entries if entry.refused]
    return absent + withheld


def busy(machine: dict[str, Any]) -> str | None:
    """A warning if other work shared the machine when the run began."""
    if machine["load_average"][0] < 0.5 * machine["cores"]:
        return None
    return f"The machine was busy (load {machine['load_average'][0]:.1f}): these figures are not for quoting."


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
    return f"{entry.agreement.worst:.1g}" if entry.agreement.errors else "not judged"


MEMORY_COLUMNS = ("length", "dtype", "contender", "peak above inputs", "per 1,000 tokens")


def memory_row(measured: dict[str, Any]) -> tuple[str, ...]:
    head = (spell(measured["length"]), measured["dtype"], measured["contender"])
    if measured["absent"]:
        return (*head, "–", f"absent: {measured['absent']}")
    mib = measured["peak_mib"]
    return (*head, f"{mib:,.0f} MiB", f"{1000 * mib / measured['length']:.1f} MiB")


def to_markdown_table(columns: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    table = [columns, tuple("---" for _ in columns), *body]
    return [f"| {' | '.join(row)} |" for row in table]
