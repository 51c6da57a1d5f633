"""Charts of reports: curves of one run or of several, gates as heat maps, timeline of events."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS, MetricFormat
from nsa_train.record.run_data import RANK_COLUMNS, SHARES, RunData
from nsa_train.terminal_text import duration
from nsa_train.watch.conditions import AlertLevel, HealthLimits
from nsa_train.watch.view.downsample import buckets, nice_step
from nsa_train.watch.view.formatting import (
    EVENT_MARKS,
    PLACED_METRICS,
    EventMark,
    accuracy_text,
    clock,
    count,
    event_text,
    memory,
    metric_format,
    number,
    plain,
    share,
)
from nsa_train.watch.view.measured_goodput import Goodput
from nsa_train.watch.view.svg_chart import MOST_POINTS, ChartLine, ChartMark, SvgChart

STYLES = ("c1", "c2", "c3", "c4", "c5", "c6")
_COMPARED_POINTS = 250
_LOG_FROM = 1000.0
"""Ratio of largest to smallest gradient norm above which the axis is logarithmic."""
_COLUMNS = 240
"""Maximum number of steps in the gate heat map."""
_INK = (59, 110, 168)
_NOT_FINITE = (200, 30, 30, 255)
_FAINTEST = 20
"""Opacity of the smallest share, of 255: it stays distinguishable from a missing value."""
_OF_TOKENS = "share of the tokens that are the most likely ones"
_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def charts(run: RunData) -> list[SvgChart]:
    """Charts of one run."""
    on_gpu, several = run.uses_gpu, len(run.ranks) > 1
    memory_lines = [_worst_line(run, "host_mem_rss", "c3" if on_gpu else "c1")]
    if on_gpu:
        memory_lines = [_worst_line(run, "gpu_mem_reserved"), _line(run, "gpu_mem_alloc", "c2"), *memory_lines]
    shares = [_line(run, *each) for each in zip(SHARES, STYLES, GATE_BRANCHES, strict=False)]
    gates = [_line(run, "gate_entropy_mean"), _line(run, "gate_max_mean", "c2")]
    gates.append(_line(run, "gate_collapse_frac", "c3"))
    critical = HealthLimits.entropy_critical
    limits = [(math.log(3), "uniform: ln 3"), (critical, f"entropy critical below {critical:g}")]
    selected = [_line(run, "sel_k_mean"), _line(run, "sel_k_max", "c2")]
    accuracy = _held_out_line(run, "val_accuracy", "held-out accuracy")
    return [
        _loss(run),
        *([_chart(run, "held-out accuracy", _OF_TOKENS, [accuracy], share)] if accuracy.buckets else []),
        _one(run, "toks_per_s"),
        _grad_norm(run),
        _one(run, "lr"),
        _chart(run, "gate shares", "mean over layers", shares, share),
        _chart(run, "gate health", "entropy in nats, shares", gates, number, limits=limits),
        _chart(run, "selected keys", "tokens per query, from the selected blocks", selected, number),
        _one(run, "sel_pct_at_max"),
        _chart(run, "memory", f"MiB{' · maximum over ranks' if several else ''}", memory_lines, memory),
        _one(run, "dt_fetch_s"),
        _one(run, "forward_s"),
        *(_one(run, name) for name in _drawn_metrics([run]) if name not in PLACED_METRICS),
        _progress(run),
    ]


def compared_charts(runs: Sequence[RunData], labels: Sequence[str]) -> list[SvgChart]:
    """Charts of several runs, a line for each."""
    styled = list(zip(runs, STYLES, labels, strict=False))
    span = (0.0, float(max((max(run.lead.step) for run in runs if len(run.lead)), default=1)))

    def over_steps(name: str, **more: Any) -> SvgChart:
        lines = [_line(run, name, style, label, _COMPARED_POINTS) for run, style, label in styled]
        return SvgChart(METRICS[name].title, METRICS[name].unit, lines, span, format=metric_format(name), **more)

    column, what = (
        ("gpu_mem_reserved", "GPU, reserved") if any(run.uses_gpu for run in runs) else ("host_mem_rss", "host")
    )
    held_out, accuracies = (
        [_held_out_line(run, value, label, style, _COMPARED_POINTS) for run, style, label in styled]
        for value in ("val_loss", "val_accuracy")
    )
    memory_lines = [_worst_line(run, column, style, label) for run, style, label in styled]
    of_memory = [name for name in PLACED_METRICS if METRICS[name].format == MetricFormat.MEMORY]
    return [
        over_steps("loss", from_zero=False),
        _loss_over_tokens(styled),
        _loss_over_time(styled),
        SvgChart("held-out loss", "nats per token", held_out, span, from_zero=False),
        *([SvgChart("held-out accuracy", _OF_TOKENS, accuracies, span, format=share)]
          if any(line.buckets for line in accuracies) else []),
        *(over_steps(name) for name in _drawn_metrics(runs) if name not in ("loss", *of_memory)),
        SvgChart("memory", f"MiB, {what}, maximum over ranks", memory_lines, span, format=memory),
    ]  # fmt: skip


def _drawn_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics that have a title and of which a run has values."""
    return [
        name
        for name, metric in METRICS.items()
        if metric.title and any(not math.isnan(value) for run in runs for value in run.lead.column(name))
    ]


def _line(run: RunData, name: str, style: str = "c1", label: str = "", most: int = MOST_POINTS) -> ChartLine:
    values = buckets(run.lead.counted("step"), run.lead.counted(name), most)
    return ChartLine(label or METRICS[name].title, values, style)


def _worst_line(run: RunData, name: str, style: str = "c1", label: str = "") -> ChartLine:
    """Line of the largest value of any rank."""
    assert name in RANK_COLUMNS
    if len(run.ranks) <= 1:
        return _line(run, name, style, label)
    x: list[float] = []
    y: list[float] = []
    for series in run.ranks.values():
        for bucket in buckets(series.counted("step"), series.counted(name), MOST_POINTS):
            x.append(bucket.x)
            y.append(bucket.high if math.isfinite(bucket.high) else math.inf)
    return ChartLine(label or METRICS[name].title, buckets(x, y, MOST_POINTS), style)


def _held_out_line(run: RunData, value: str, label: str, style: str = "c1", most: int = MOST_POINTS) -> ChartLine:
    """Line of a field of the evaluations during training."""
    evaluations = run.counted_evaluations()
    steps = [float(each.step) for each in evaluations]
    return ChartLine(label, buckets(steps, [getattr(each, value) for each in evaluations], most), style)


def _chart(
    run: RunData, title: str, unit: str, lines: list[ChartLine], format_value: Callable[[float], str], **more: Any
) -> SvgChart:
    """Chart over the steps of a run, with its restarts and rollbacks."""
    steps = run.lead.step
    first, last = (min(steps), max(steps)) if len(steps) else (0, 1)
    span = (0.0 if first <= last / 2 else float(first), float(last))
    marks = [
        ChartMark(event.step, "↻", f"restart from step {event.step:,}")
        if event.kind == EventKind.RESTART
        else ChartMark(event.step, "↶", f"rollback at step {event.step:,}")
        for event in run.events
        if event.kind in (EventKind.RESTART, EventKind.ROLLBACK)
    ]
    return SvgChart(title, unit, lines, span, marks=marks, format=format_value, **more)


def _one(run: RunData, name: str) -> SvgChart:
    """Draw a metric alone, as its row of the table says."""
    metric, slowest = METRICS[name], METRICS[name].every_rank and len(run.ranks) > 1
    line = _worst_line(run, name) if slowest else _line(run, name)
    unit = f"{metric.unit}, largest of {len(run.ranks)} ranks" if slowest else metric.unit
    return _chart(run, metric.title, unit, [line], metric_format(name))


def _loss(run: RunData) -> SvgChart:
    points = [
        (float(each.step), each.val_loss if math.isfinite(each.val_loss) else math.inf,
         f"held-out loss {number(each.val_loss)}{accuracy_text(each.val_accuracy)} at step {each.step:,}")
        for each in run.counted_evaluations()
    ]  # fmt: skip
    bad = [
        (float(event.step), f"step {event.step:,} was skipped: {plain(event.details.get('reason', 'not finite'))}")
        for event in run.events
        if event.kind == EventKind.SKIPPED_STEP
    ]
    lines = [*_superseded(run, "loss"), _line(run, "loss")]
    return _chart(run, "loss", "nats per token", lines, number, points=points, bad=bad, from_zero=False)


def _superseded(run: RunData, name: str) -> list[ChartLine]:
    """Rows of steps that were repeated later, one faint line per stretch."""
    lead = run.lead
    stretches: list[list[int]] = []
    for row, gone in enumerate(lead.superseded):
        if gone and stretches and stretches[-1][-1] == row - 1 and lead.step[row] > lead.step[row - 1]:
            stretches[-1].append(row)
        elif gone:
            stretches.append([row])
    column = lead.column(name)
    return [
        ChartLine(
            "repeated later", buckets(*_at_rows(lead.step, column, rows), 100), "gone", band=False, in_hover=False
        )
        for rows in stretches[-20:]
    ]


def _at_rows(x: Sequence[float], y: Sequence[float], rows: Sequence[int]) -> tuple[list[float], list[float]]:
    return [x[row] for row in rows], [y[row] for row in rows]


def _grad_norm(run: RunData) -> SvgChart:
    line = _line(run, "grad_norm")
    finite = [bucket for bucket in line.buckets if bucket.low > 0]
    log = bool(finite) and max(b.high for b in finite) / min(b.low for b in finite) > _LOG_FROM
    return _chart(run, "gradient norm", f"before clipping{', log scale' if log else ''}", [line], number, log=log)


def _progress(run: RunData) -> SvgChart:
    """Step over wall time: flat during downtime, falling where steps are repeated."""
    lead = run.lead
    seconds, unit = _time_unit(lead.ts[-1] - lead.ts[0] if len(lead) else 0.0)
    times = [(ts - lead.ts[0]) / seconds for ts in lead.ts]
    line = ChartLine("step", buckets(times, lead.step, MOST_POINTS), "c1", band=False)
    return SvgChart("progress", "steps over wall time", [line], (0.0, times[-1] if times else 1.0), unit, format=count)


def _loss_over_tokens(styled: Sequence[tuple[RunData, str, str]]) -> SvgChart:
    """Draw the loss over tokens, for runs with different batch sizes."""
    lines, last = [], 0.0
    for run, style, label in styled:
        pairs = zip(run.lead.counted("tokens_seen"), run.lead.counted("loss"), strict=True)
        known = [(tokens, loss) for tokens, loss in pairs if math.isfinite(tokens)]
        tokens, losses = [tokens for tokens, _ in known], [loss for _, loss in known]
        last = max([last, *tokens[-1:]])
        lines.append(ChartLine(label, buckets(tokens, losses, _COMPARED_POINTS), style))
    return SvgChart("loss over tokens", "nats per token", lines, (0.0, last or 1.0), "tokens", from_zero=False)


def _loss_over_time(styled: Sequence[tuple[RunData, str, str]]) -> SvgChart:
    """Draw the loss over time, for runs of different speed."""
    seconds, unit = _time_unit(
        max((run.lead.ts[-1] - run.lead.ts[0] for run, *_ in styled if len(run.lead)), default=0.0)
    )
    lines, last = [], 0.0
    for run, style, label in styled:
        times = [(ts - run.lead.ts[0]) / seconds for ts in run.lead.counted("ts")]
        last = max([last, *times[-1:]])
        lines.append(ChartLine(label, buckets(times, run.lead.counted("loss"), _COMPARED_POINTS), style))
    title = "loss over time, from the first record"
    return SvgChart(title, "nats per token", lines, (0.0, last or 1.0), unit, from_zero=False)


def _time_unit(total: float) -> tuple[float, str]:
    """A suitable time unit for a span: its seconds and name."""
    return next(((size, name) for size, name in _TIME_UNITS if total >= 2 * size), (1.0, "seconds"))


def gate_pictures(run: RunData) -> tuple[list[tuple[str, str]], float, float, int, tuple[int, int]] | None:
    """Heat maps as (branch, image) per branch, smallest and largest share, number of layers, first and last step."""
    gates = run.lead.gates()
    if not gates:
        return None
    layers = min(len(each.shares) for each in gates)
    finite = [value for each in gates for layer in each.shares for value in layer if math.isfinite(value)]
    if not layers or not finite:
        return None
    chosen = gates if len(gates) <= _COLUMNS else [gates[i * len(gates) // _COLUMNS] for i in range(_COLUMNS)]
    low, high = min(finite), max(finite)
    pictures = []
    for place, branch in enumerate(GATE_BRANCHES):
        cells = [[_at(each.shares[layer], place) for each in chosen] for layer in range(layers)]
        pictures.append((branch, _png_uri(cells, low, high)))
    return pictures, low, high, layers, (chosen[0].step, chosen[-1].step)


def _at(shares: Sequence[float], place: int) -> float:
    return shares[place] if place < len(shares) else math.nan


def _png_uri(cells: Sequence[Sequence[float]], low: float, high: float) -> str:
    """Heat map of rows of values as a PNG data URI, one pixel per value (smaller than SVG rectangles).

    Larger values are more opaque, missing ones transparent.
    """
    rows = b"".join(b"\0" + b"".join(bytes(_pixel(value, low, high)) for value in row) for row in cells)
    width, height = len(cells[0]), len(cells)
    header = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0)
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows, 9)) + _chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


def _pixel(value: float, low: float, high: float) -> tuple[int, int, int, int]:
    if math.isnan(value):
        return (0, 0, 0, 0)
    if math.isinf(value):
        return _NOT_FINITE
    density = (min(high, max(low, value)) - low) / (high - low) if high > low else 0.5
    return (*_INK, _FAINTEST + round(density * (255 - _FAINTEST)))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


_WIDTH, _LEFT, _RIGHT, _LANE, _TOP = 1100, 132, 14, 24, 6
_TOGETHER = 7.0
"""Pixels; closer symbols of the same kind are merged into one."""


_LANES = ("processes", "starts and ends", "checkpoints", "evaluations", "problems", "findings")


def timeline(events: Sequence[RunEvent], wall: Goodput) -> str:
    height = _TOP + _LANE * len(_LANES) + 26
    bottom = _TOP + _LANE * len(_LANES)
    end = max([wall.end, *(event.ts for event in events)])
    total = max(1e-9, end - wall.begin)

    def x(ts: float) -> float:
        return _LEFT + min(1.0, max(0.0, (ts - wall.begin) / total)) * (_WIDTH - _LEFT - _RIGHT)

    parts = [f'<svg class="wide" viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of the run">']
    for row, lane in enumerate(_LANES):
        y = _TOP + _LANE * (row + 0.5)
        parts.append(f'<text class="lane" x="{_LEFT - 10}" y="{y + 4:.1f}">{lane}</text>')
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>')
    parts += _axis(total, bottom, x, wall.begin)
    for life in wall.lives:
        y, tall = _TOP + 4, _LANE - 8
        words = f"{clock(life.begin)} to {clock(life.end)} UTC, {life.ending or 'no final record'}"
        parts.append(
            f"<g><title>{escape(words)}</title>"
            f'<rect class="startup" x="{x(life.begin):.1f}" y="{y}" height="{tall}" '
            f'width="{max(1.0, x(life.first_step) - x(life.begin)):.1f}"/>'
            f'<rect class="alive" x="{x(life.first_step):.1f}" y="{y}" height="{tall}" '
            f'width="{max(1.0, x(life.end) - x(life.first_step)):.1f}"/></g>'
        )
    for kind_group in _grouped(events, x):
        mark = _mark(kind_group)
        at = sum(x(event.ts) for event in kind_group) / len(kind_group)
        y = _TOP + _LANE * (_LANES.index(mark.lane) + 0.5) + 5
        texts = [
            f"{clock(event.ts)} UTC, step {event.step:,}: {event.kind.value} {event_text(event)}".rstrip()
            for event in kind_group
        ]
        tooltip = "\n".join(texts if len(texts) <= 12 else [*texts[:5], f"and {len(texts) - 10} more", *texts[-5:]])
        parts.append(
            f'<text class="sign {mark.style}" x="{at:.1f}" y="{y:.1f}">{mark.symbol}<title>{escape(tooltip)}</title>'
            "</text>"
        )
    return "".join(parts) + "</svg>"


def _mark(group: Sequence[RunEvent]) -> EventMark:
    mark = EVENT_MARKS[group[0].kind]
    if group[0].kind != EventKind.FINDING:
        return mark
    if any(event.details.get("level") == AlertLevel.CRITICAL for event in group):
        return mark._replace(style="crit")
    return mark._replace(symbol="△", style="calm") if all(event.details.get("over") for event in group) else mark


def _grouped(events: Sequence[RunEvent], x: Callable[[float], float]) -> list[list[RunEvent]]:
    groups: list[list[RunEvent]] = []
    newest: dict[EventKind, list[RunEvent]] = {}
    for event in events:
        if event.kind not in EVENT_MARKS:
            continue
        group = newest.get(event.kind)
        if group is not None and x(event.ts) - x(group[0].ts) < _TOGETHER:
            group.append(event)
        else:
            newest[event.kind] = [event]
            groups.append(newest[event.kind])
    return groups


def _axis(total: float, bottom: int, x: Callable[[float], float], begin: float) -> list[str]:
    unit = _time_unit(total)[0]
    step = nice_step(total / unit, 8) * unit
    parts = []
    for place in range(int(total / step) + 1):
        at = x(begin + place * step)
        anchor = ' style="text-anchor:end"' if at > _WIDTH - 50 else ""
        words = duration(place * step) if place else "0"
        parts.append(f'<path class="tick" d="M{at:.1f} {bottom}v5"/>')
        parts.append(f'<text class="x" x="{at:.1f}" y="{bottom + 19}"{anchor}>{words}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>')
    return parts
