"""Benchmark report: the measurements of one command as JSON, as table rows, as Markdown and as a chart (SVG)."""

import json
from dataclasses import asdict, dataclass, field
from math import log2
from typing import Any

from nsa.bench.measurement import BenchMeasurement, ImplementationResult
from nsa.bench.roofline import MachinePeaks
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

    def tables(self) -> list[tuple[tuple[str, ...], list[tuple[str, ...]]]]:
        """Columns and rows of the measurements and of the memory, where there are any."""
        figures = (COLUMNS, [row for measurement in self.figures for row in rows(measurement)])
        memory = (MEMORY_COLUMNS, [memory_row(measured) for measured in self.memory])
        return [figures] * bool(self.figures) + [memory] * bool(self.memory)

    def notes(self) -> list[str]:
        return list(dict.fromkeys(note for measurement in self.figures for note in notes(measurement)))

    def to_markdown(self) -> str:
        lines = [f"`{self.command}`", "", machine_line(self.machine), ""]
        lines += [warning, ""] if (warning := busy(self.machine)) else []
        lines += [*map(peaks_line, self.peaks), ""] if self.peaks else []
        for columns, body in self.tables():
            lines += [*to_markdown_table(columns, body), ""]
        lines += self.notes()
        return "\n".join(lines).rstrip() + "\n"


def machine_line(machine: dict[str, Any]) -> str:
    commit = (machine["commit"] or "unknown")[:10] + (" with changes" if machine["uncommitted_changes"] else "")
    load = machine["load_average"][0]
    gpu = ""
    if has := machine.get("gpu"):
        gpu = (
            f"{has['name']} ({has['capability']}, {has['units']} units, {has['memory_gib']} GiB), driver "
            f"{has['driver']}, {has['runtime']}, triton {has['triton'] or 'not installed'} · "
        )
    return (
        f"{gpu}{machine['cpu']}, {machine['cores']} cores ({' '.join(machine['isa'])}), {machine['memory_gib']} GiB · "
        f"torch {machine['torch']} · commit {commit} · load {load:.1f} at the start · {machine['time']}"
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
            "" if entry.achieved is None else f"{100 * entry.achieved:.0f} %",
            f"{entry.agreement.worst:.1g}" if entry.agreement.errors else "not checked",
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
    if entry.kind == "dense" and not entry.refused:
        return "1"
    ratio = entry.ratio
    return "withheld" if ratio is None else f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f})"


MEMORY_COLUMNS = ("length", "dtype", "implementation", "peak above inputs", "per 1,000 tokens")


def memory_row(measured: dict[str, Any]) -> tuple[str, ...]:
    head = (spell(measured["length"]), measured["dtype"], measured["implementation"])
    if measured["absent"]:
        return (*head, "–", f"absent: {measured['absent']}")
    mib = measured["peak_mib"]
    return (*head, f"{mib:,.0f} MiB", f"{1000 * mib / measured['length']:.1f} MiB")


def to_markdown_table(columns: tuple[str, ...], body: list[tuple[str, ...]]) -> list[str]:
    table = [columns, tuple("---" for _ in columns), *body]
    return [f"| {' | '.join(row)} |" for row in table]


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 760, 320, 52, 200, 22, 44
_COLOURS = ("#3b6ea8", "#d98032", "#4f9a5b", "#a35a9c", "#b8484a", "#7a7a3c")

Line = dict[int, tuple[float, float, float]]
"""Length → median and quartiles of the ratio."""


def lines(report: BenchReport) -> tuple[dict[str, Line], dict[str, dict[int, float]]]:
    """Measured ratios by implementation, operation and dtype; allowed ratios by operation."""
    measured: dict[str, Line] = {}
    allowed: dict[str, dict[int, float]] = {}
    for measurement in report.figures:
        task = measurement.task
        op = task.op + (f" {task.part}" if task.part != "all" else "")
        allowed.setdefault(f"{measurement.bound} allow, {op}", {})[task.length] = measurement.allowed
        for entry in measurement.entries:
            if entry.ratio is not None:
                name = f"{entry.name}, {op}{' fwd+bwd' * task.backward}, {task.dtype}"
                measured.setdefault(name, {})[task.length] = (entry.ratio.median, entry.ratio.low, entry.ratio.high)
    return measured, allowed


def draw(report: BenchReport) -> str:
    commit = (report.machine["commit"] or "unknown")[:10]
    where = report.machine["gpu"]["name"] if report.machine.get("gpu") else report.machine["cpu"]
    caption = f"times faster than dense SDPA, by tokens · {where} · commit {commit}"
    return draw_lines(*lines(report), caption)


def draw_lines(measured: dict[str, Line], allowed: dict[str, dict[int, float]], caption: str) -> str:
    """Ratios over length with their spread, dashed lines to compare them with, and what they are."""
    lengths = sorted({n for points in allowed.values() for n in points})
    tops = [high for line in measured.values() for _, _, high in line.values()]
    tops += [value for points in allowed.values() for value in points.values()]
    bottoms = [low for line in measured.values() for _, low, _ in line.values()]
    low, high = log2(min([0.5, *bottoms])), log2(max([2.0, *tops]) * 1.1)
    first, last = (log2(lengths[0]), log2(lengths[-1])) if lengths else (0.0, 1.0)

    def x(length: float) -> float:
        share = (log2(length) - first) / (last - first) if last > first else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _TOP + (high - log2(value)) / (high - low) * (_HEIGHT - _TOP - _BOTTOM)

    parts = []
    for power in range(int(low) - 1, int(high) + 1):
        if low <= power <= high:
            strong, level = ' stroke-width="2"' if power == 0 else "", y(2.0**power)
            parts.append(f'<path d="M{_LEFT} {level:.1f}H{_WIDTH - _RIGHT}" stroke="#8884"{strong}/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{2.0**power:g}×</text>')
    parts += [f'<text x="{x(n):.1f}" y="{_HEIGHT - 26}" text-anchor="middle">{spell(n)}</text>' for n in lengths]
    legend = _TOP + 8
    for number, (name, line) in enumerate(measured.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        path = " ".join(f"{x(n):.1f},{y(line[n][0]):.1f}" for n in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, (middle, low_quartile, high_quartile) in line.items():
            parts.append(f'<path d="M{x(n):.1f} {y(low_quartile):.1f}V{y(high_quartile):.1f}" stroke="{colour}"/>'
                         f'<circle cx="{x(n):.1f}" cy="{y(middle):.1f}" r="3.5" fill="{colour}"/>')  # fmt: skip
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{legend}" class="s" style="fill:{colour}">{name}</text>')
        legend += 16
    for name, points in allowed.items():
        path = " ".join(f"{x(n):.1f},{y(points[n]):.1f}" for n in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="#888" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 10}" y="{legend}" class="s">{name} (dashed)</text>')
        legend += 16
    parts.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">{caption}</text>')
    style = "<style>text{font:13px sans-serif;fill:#888}.s{font-size:10px}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">{style}{"".join(parts)}</svg>\n'
