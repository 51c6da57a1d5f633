"""SVG chart of a report's speed-ups over length, readable on light and dark pages."""

from math import log2
from pathlib import Path

from nsa.bench.report import BenchReport
from nsa.token_counts import spell

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 320, 52, 200, 22, 44
COLOURS = ("#3b6ea8", "#d98032", "#4f9a5b", "#a35a9c", "#b8484a", "#7a7a3c")

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
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - log2(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for power in range(int(low) - 1, int(high) + 1):
        if low <= power <= high:
            strong, level = ' stroke-width="2"' if power == 0 else "", y(2.0**power)
            parts.append(f'<path d="M{LEFT} {level:.1f}H{WIDTH - RIGHT}" stroke="#8884"{strong}/>')
            parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{2.0**power:g}×</text>')
    parts += [f'<text x="{x(n):.1f}" y="{HEIGHT - 26}" text-anchor="middle">{spell(n)}</text>' for n in lengths]
    legend = TOP + 8
    for number, (name, line) in enumerate(measured.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x(n):.1f},{y(line[n][0]):.1f}" for n in sorted(line))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for n, (middle, low_quartile, high_quartile) in line.items():
            parts.append(f'<path d="M{x(n):.1f} {y(low_quartile):.1f}V{y(high_quartile):.1f}" stroke="{colour}"/>'
                         f'<circle cx="{x(n):.1f}" cy="{y(middle):.1f}" r="3.5" fill="{colour}"/>')  # fmt: skip
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{legend}" class="s" style="fill:{colour}">{name}</text>')
        legend += 16
    for name, points in allowed.items():
        path = " ".join(f"{x(n):.1f},{y(points[n]):.1f}" for n in sorted(points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="#888" stroke-dasharray="5 4"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 10}" y="{legend}" class="s">{name} (dashed)</text>')
        legend += 16
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 8}" text-anchor="middle">{caption}</text>')
    style = "<style>text{font:13px sans-serif;fill:#888}.s{font-size:10px}</style>"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">{style}{"".join(parts)}</svg>\n'


def write(report: BenchReport, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(report), encoding="utf-8")
