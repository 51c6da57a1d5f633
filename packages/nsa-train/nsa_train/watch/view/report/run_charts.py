"""Charts of a run report: loss, throughput, gradient norm, gates (heat map), memory and others."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence

from nsa_train.record.events import EventKind
from nsa_train.record.heartbeat_record import GATE_BRANCHES, METRICS
from nsa_train.record.run_data import RANK_COLUMNS, SHARES, RunData
from nsa_train.watch.view.downsample import ChartBucket, buckets
from nsa_train.watch.view.formatting import accuracy_text, count, memory, metric_format, number, plain, share
from nsa_train.watch.view.report.svg_chart import MOST_POINTS, ChartLine, ChartMark, SvgChart

_LOG_FROM = 1000.0
"""Ratio of largest to smallest gradient norm above which the axis is logarithmic."""
_COLUMNS = 240
"""Maximum number of steps in the gate heat map."""
_INK = (59, 110, 168)
_NOT_FINITE = (200, 30, 30, 255)
_FAINTEST = 20
"""Opacity of the smallest share, of 255: it stays distinguishable from a missing value."""
OF_TOKENS = "share of the tokens that are the most likely ones"


_PLACED = (
    "loss", "toks_per_s", "grad_norm", "lr", "gate_entropy_mean", "gate_max_mean", "gate_collapse_frac", "sel_k_mean",
    "sel_k_max", "sel_pct_at_max", "host_mem_rss", "gpu_mem_alloc", "gpu_mem_reserved", "dt_fetch_s", "forward_s",
)  # fmt: skip
"""Metrics with a place in `charts`; every other one that has a title follows in a chart of its own."""


def charts(run: RunData) -> list[SvgChart]:
    return [
        _loss(run),
        *_accuracy(run),
        _one(run, "toks_per_s"),
        _grad_norm(run),
        _one(run, "lr"),
        _shares(run),
        _gate_health(run),
        _selected(run),
        _one(run, "sel_pct_at_max"),
        _memory(run),
        _one(run, "dt_fetch_s"),
        _one(run, "forward_s"),
        *(_one(run, name) for name in drawn_metrics([run]) if name not in _PLACED),
        _progress(run),
    ]


def drawn_metrics(runs: Sequence[RunData]) -> list[str]:
    """Return the metrics that have a title and of which a run has values."""
    return [
        name
        for name, metric in METRICS.items()
        if metric.title and any(not math.isnan(value) for run in runs for value in run.lead.column(name))
    ]


def _progress(run: RunData) -> SvgChart:
    """Step over wall time: flat during downtime, falling where steps are repeated."""
    lead = run.lead
    seconds, unit = time_unit(lead.ts[-1] - lead.ts[0] if len(lead) else 0.0)
    hours = [(ts - lead.ts[0]) / seconds for ts in lead.ts]
    line = ChartLine("step", buckets(hours, lead.step, MOST_POINTS), "c1", band=False)
    span = (0.0, hours[-1] if hours else 1.0)
    return SvgChart("progress", "steps over wall time", [line], span, x_unit=unit, format=count)


def time_unit(total: float) -> tuple[float, str]:
    """A suitable time unit for a span: its seconds and name."""
    return next(((size, name) for size, name in _TIME_UNITS if total >= 2 * size), (1.0, "seconds"))


_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))


def _x_range(run: RunData) -> tuple[float, float]:
    steps = run.lead.step
    last = max(steps) if len(steps) else 1
    first = min(steps) if len(steps) else 0
    return (0.0 if first <= last / 2 else float(first), float(last))


def marks(run: RunData) -> list[ChartMark]:
    drawn = []
    for event in run.events:
        if event.kind == EventKind.RESTART:
            drawn.append(ChartMark(event.step, "↻", f"restart from step {event.step:,}"))
        elif event.kind == EventKind.ROLLBACK:
            drawn.append(ChartMark(event.step, "↶", f"rollback at step {event.step:,}"))
    return drawn


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


def _chart(
    run: RunData, title: str, unit: str, lines: list[ChartLine], format_value: Callable[[float], str], **more: object
) -> SvgChart:
    return SvgChart(title, unit, lines, _x_range(run), marks=marks(run), format=format_value, **more)  # type: ignore[arg-type]


def _line(run: RunData, name: str, style: str = "c1") -> ChartLine:
    values = buckets(run.lead.counted("step"), run.lead.counted(name), MOST_POINTS)
    return ChartLine(METRICS[name].title, values, style)


def _one(run: RunData, name: str) -> SvgChart:
    """Draw a metric alone, as its row of the table says."""
    metric, slowest = METRICS[name], METRICS[name].every_rank and len(run.ranks) > 1
    line = ChartLine(metric.title, worst(run, name)) if slowest else _line(run, name)
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


def _accuracy(run: RunData) -> list[SvgChart]:
    """Draw the held-out accuracy; no chart if no evaluation has recorded it."""
    line = accuracy_line(run, "held-out accuracy", "c1")
    return [_chart(run, "held-out accuracy", OF_TOKENS, [line], share)] if line.buckets else []


def accuracy_line(run: RunData, label: str, style: str) -> ChartLine:
    evaluations = run.counted_evaluations()
    values = buckets(
        [float(each.step) for each in evaluations], [each.val_accuracy for each in evaluations], MOST_POINTS
    )
    return ChartLine(label, values, style)


def _grad_norm(run: RunData) -> SvgChart:
    line = _line(run, "grad_norm")
    finite = [bucket for bucket in line.buckets if bucket.low > 0]
    log = bool(finite) and max(b.high for b in finite) / min(b.low for b in finite) > _LOG_FROM
    return _chart(run, "gradient norm", f"before clipping{', log scale' if log else ''}", [line], number, log=log)


def _shares(run: RunData) -> SvgChart:
    lines = [
        ChartLine(branch, buckets(run.lead.counted("step"), run.lead.counted(name), MOST_POINTS), f"c{place + 1}")
        for place, (name, branch) in enumerate(zip(SHARES, GATE_BRANCHES, strict=True))
    ]
    return _chart(run, "gate shares", "mean over layers", lines, share)


def _gate_health(run: RunData) -> SvgChart:
    lines = [
        _line(run, "gate_entropy_mean", "c1"),
        _line(run, "gate_max_mean", "c2"),
        _line(run, "gate_collapse_frac", "c3"),
    ]
    limits = [(math.log(3), "uniform: ln 3"), (0.2, "entropy critical below 0.2")]
    return _chart(run, "gate health", "entropy in nats, shares", lines, number, limits=limits)


def _selected(run: RunData) -> SvgChart:
    lines = [
        _line(run, "sel_k_mean", "c1"),
        _line(run, "sel_k_max", "c2"),
    ]
    return _chart(run, "selected keys", "tokens per query, from the selected blocks", lines, number)


def _memory(run: RunData) -> SvgChart:
    lines = []
    on_gpu = any(value > 0 for value in run.lead.column("gpu_mem_reserved"))
    if on_gpu:
        lines.append(ChartLine(METRICS["gpu_mem_reserved"].title, worst(run, "gpu_mem_reserved"), "c1"))
        lines.append(_line(run, "gpu_mem_alloc", "c2"))
    lines.append(ChartLine(METRICS["host_mem_rss"].title, worst(run, "host_mem_rss"), "c3" if on_gpu else "c1"))
    of = " · maximum over ranks" if len(run.ranks) > 1 else ""
    return _chart(run, "memory", f"MiB{of}", lines, memory)


def worst(run: RunData, name: str) -> list[ChartBucket]:
    """Largest value of any rank."""
    assert name in RANK_COLUMNS
    if len(run.ranks) <= 1:
        return _line(run, name).buckets  # type: ignore[return-value]
    x: list[float] = []
    y: list[float] = []
    for series in run.ranks.values():
        for bucket in buckets(series.counted("step"), series.counted(name), MOST_POINTS):
            x.append(bucket.x)
            y.append(bucket.high if math.isfinite(bucket.high) else math.inf)
    return buckets(x, y, MOST_POINTS)


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
