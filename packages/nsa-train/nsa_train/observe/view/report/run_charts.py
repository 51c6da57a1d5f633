"""Charts of a run report: loss, throughput, gradient norm, gates (heat map), memory and others."""

import base64
import math
import struct
import zlib
from collections.abc import Callable, Sequence

from nsa_train.observe.events import EventKind
from nsa_train.observe.view.downsample import ChartBucket, buckets
from nsa_train.observe.view.formatting import accuracy_text, count, duration, memory, number, plain, share
from nsa_train.observe.view.report.svg_chart import MOST_POINTS, ChartLine, ChartMark, SvgChart
from nsa_train.observe.view.run_data import BRANCHES, RANK_COLUMNS, SHARES, RunData

_LOG_FROM = 1000.0
"""Ratio of largest to smallest gradient norm above which the axis is logarithmic."""
_COLUMNS = 240
"""Maximum number of steps in the gate heat map."""
_INK = (59, 110, 168)
_NOT_FINITE = (200, 30, 30, 255)
_FAINTEST = 20
"""Opacity of the smallest share, of 255: it stays distinguishable from a missing value."""
OF_TOKENS = "share of the tokens that are the most likely ones"


def charts(run: RunData) -> list[SvgChart]:
    made = [
        _loss(run),
        *_accuracy(run),
        _one(run, "toks_per_s", "throughput", "tokens per second, all ranks", count),
        _grad_norm(run),
        _one(run, "lr", "learning rate", "", number),
        _shares(run),
        _gate_health(run),
        _selected(run),
        _one(run, "sel_pct_at_max", "queries at maximum keys", "share of the queries", share),
        _memory(run),
        _of_ranks(run, "dt_fetch_s", "wait for data", "seconds for the last batch", duration),
        _of_ranks(run, "forward_s", "forward pass", "seconds of forward passes per step", duration),
        _progress(run),
    ]
    return made


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


def x_range(run: RunData) -> tuple[float, float]:
    steps = run.lead.step
    last = max(steps) if len(steps) else 1
    first = min(steps) if len(steps) else 0
    return (0.0 if first <= last / 2 else float(first), float(last))


def marks(run: RunData) -> list[ChartMark]:
    found = []
    for event in run.events:
        if event.kind == EventKind.RESTART:
            found.append(ChartMark(event.step, "↻", f"restart from step {event.step:,}"))
        elif event.kind == EventKind.ROLLBACK:
            found.append(ChartMark(event.step, "↶", f"rollback at step {event.step:,}"))
    return found


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
    return SvgChart(title, unit, lines, x_range(run), marks=marks(run), format=format_value, **more)  # type: ignore[arg-type]


def _line(run: RunData, name: str, label: str, style: str = "c1", most: int = MOST_POINTS) -> ChartLine:
    return ChartLine(label, buckets(run.lead.counted("step"), run.lead.counted(name), most), style)


def _one(run: RunData, name: str, title: str, unit: str, format_value: Callable[[float], str]) -> SvgChart:
    return _chart(run, title, unit, [_line(run, name, title)], format_value)


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
    lines = [*_superseded(run, "loss"), _line(run, "loss", "training loss")]
    return _chart(run, "loss", "nats per token", lines, number, points=points, bad=bad, from_zero=False)


def _accuracy(run: RunData) -> list[SvgChart]:
    """Of evaluations; no chart if none has recorded it."""
    line = accuracy_line(run, "held-out accuracy", "c1")
    return [_chart(run, "held-out accuracy", OF_TOKENS, [line], share)] if line.buckets else []


def accuracy_line(run: RunData, label: str, style: str) -> ChartLine:
    found = run.counted_evaluations()
    values = buckets([float(each.step) for each in found], [each.val_accuracy for each in found], MOST_POINTS)
    return ChartLine(label, values, style)


def _grad_norm(run: RunData) -> SvgChart:
    line = _line(run, "grad_norm", "gradient norm")
    finite = [bucket for bucket in line.buckets if bucket.low > 0]
    log = bool(finite) and max(b.high for b in finite) / min(b.low for b in finite) > _LOG_FROM
    return _chart(run, "gradient norm", f"before clipping{', log scale' if log else ''}", [line], number, log=log)


def _shares(run: RunData) -> SvgChart:
    lines = [
        _line(run, name, branch, f"c{place + 1}")
        for place, (name, branch) in enumerate(zip(SHARES, BRANCHES, strict=True))
    ]
    return _chart(run, "gate shares", "mean over layers", lines, share)


def _gate_health(run: RunData) -> SvgChart:
    lines = [
        _line(run, "gate_entropy_mean", "entropy, nats", "c1"),
        _line(run, "gate_max_mean", "largest gate, share", "c2"),
        _line(run, "gate_collapse_frac", "collapsed, share of gates", "c3"),
    ]
    limits = [(math.log(3), "uniform: ln 3"), (0.2, "entropy critical below 0.2")]
    return _chart(run, "gate health", "entropy in nats, shares", lines, number, limits=limits)


def _selected(run: RunData) -> SvgChart:
    lines = [
        _line(run, "sel_k_mean", "mean", "c1"),
        _line(run, "sel_k_max", "maximum", "c2"),
    ]
    return _chart(run, "selected keys", "tokens per query, from the selected blocks", lines, number)


def _memory(run: RunData) -> SvgChart:
    lines = []
    on_gpu = any(value > 0 for value in run.lead.column("gpu_mem_reserved"))
    if on_gpu:
        lines.append(ChartLine("GPU reserved", worst(run, "gpu_mem_reserved"), "c1"))
        lines.append(_line(run, "gpu_mem_alloc", "GPU allocated, first rank", "c2"))
    lines.append(ChartLine("host", worst(run, "host_mem_rss"), "c3" if on_gpu else "c1"))
    of = " · maximum over ranks" if len(run.ranks) > 1 else ""
    return _chart(run, "memory", f"MiB{of}", lines, memory)


def _of_ranks(run: RunData, name: str, title: str, unit: str, format_value: Callable[[float], str]) -> SvgChart:
    of = f", slowest of {len(run.ranks)} ranks" if len(run.ranks) > 1 else ""
    return _chart(run, title, f"{unit}{of}", [ChartLine(title, worst(run, name), "c1")], format_value)


def worst(run: RunData, name: str) -> list[ChartBucket]:
    """Largest value of any rank."""
    assert name in RANK_COLUMNS
    if len(run.ranks) <= 1:
        return _line(run, name, name).buckets  # type: ignore[return-value]
    x: list[float] = []
    y: list[float] = []
    for series in run.ranks.values():
        for bucket in buckets(series.counted("step"), series.counted(name), MOST_POINTS):
            x.append(bucket.x)
            y.append(bucket.high if math.isfinite(bucket.high) else math.inf)
    return buckets(x, y, MOST_POINTS)


def gate_pictures(run: RunData) -> tuple[list[tuple[str, str]], float, float, int, tuple[int, int]] | None:
    """(branch, image) per branch, smallest and largest share, number of layers, first and last step."""
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
    for place, branch in enumerate(BRANCHES):
        cells = [[_at(each.shares[layer], place) for each in chosen] for layer in range(layers)]
        pictures.append((branch, png_uri(cells, low, high)))
    return pictures, low, high, layers, (chosen[0].step, chosen[-1].step)


def _at(shares: Sequence[float], place: int) -> float:
    return shares[place] if place < len(shares) else math.nan


def png_uri(cells: Sequence[Sequence[float]], low: float, high: float) -> str:
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
