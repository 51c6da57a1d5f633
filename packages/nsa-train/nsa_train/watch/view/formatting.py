"""Text of numbers, durations, memory, shares, counts and events for monitor and report. Unknown is a dash."""

import math
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from nsa_train.record.events import EventKind, RunEvent
from nsa_train.record.heartbeat_record import METRICS, MetricFormat
from nsa_train.terminal_text import UNKNOWN, duration, printable

_NOT_FINITE = "not finite"
PLACED_METRICS = (
    "loss", "toks_per_s", "grad_norm", "lr", "gate_entropy_mean", "gate_max_mean", "gate_collapse_frac", "sel_k_mean",
    "sel_k_max", "sel_pct_at_max", "host_mem_rss", "gpu_mem_alloc", "gpu_mem_reserved", "dt_fetch_s", "forward_s",
)  # fmt: skip
"""Metrics with a place of their own in monitor and report; every other one that has a title follows them."""


STATE_MARKS = {
    "running": ("●", "good"), "starting": ("○", ""), "finished": ("✓", "good"), "halted": ("■", "warn"),
    "stopped": ("■", "warn"), "failed": ("✗", "crit"), "gone": ("✗", "crit"), "hung": ("▲", "crit"),
    "no run": ("○", ""),
}  # fmt: skip
"""Symbol and style of each phase of a run."""


class EventMark(NamedTuple):
    lane: str
    symbol: str
    style: str


EVENT_MARKS = {
    EventKind.START: EventMark("starts and ends", "▶", "good"),
    EventKind.RESTART: EventMark("starts and ends", "↻", "warn"),
    EventKind.DONE: EventMark("starts and ends", "✓", "good"),
    EventKind.WAITING: EventMark("starts and ends", "…", "warn"),
    EventKind.STOP: EventMark("starts and ends", "■", "warn"),
    EventKind.HALT: EventMark("starts and ends", "■", "warn"),
    EventKind.ERROR: EventMark("starts and ends", "✗", "crit"),
    EventKind.SAVE: EventMark("checkpoints", "◆", "calm"),
    EventKind.COPY_FAILED: EventMark("checkpoints", "✗", "warn"),
    EventKind.CHECKPOINT_REJECTED: EventMark("checkpoints", "✗", "crit"),
    EventKind.EVALUATION: EventMark("evaluations", "○", "calm"),
    EventKind.EVALUATION_FAILED: EventMark("evaluations", "✗", "warn"),
    EventKind.SKIPPED_STEP: EventMark("problems", "×", "warn"),
    EventKind.ROLLBACK: EventMark("problems", "↶", "warn"),
    EventKind.STALL: EventMark("problems", "▲", "crit"),
    EventKind.FINDING: EventMark("findings", "▲", "warn"),
    EventKind.HALT_ASKED: EventMark("findings", "■", "warn"),
}
"""How an event is shown: lane of the timeline, symbol and style."""


def number(value: float | None, digits: int = 4) -> str:
    """Format with significant digits and thousands separators; exponents only below 1e-4 and from 1e7."""
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return _NOT_FINITE
    if value == 0:
        return "0"
    size = abs(value)
    if size < 1e-4 or size >= 1e7:
        mantissa, _, exponent = f"{value:.{max(0, min(digits, 3) - 1)}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    decimals = max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}"


def tick(value: float, step: float) -> str:
    """Label of an axis tick; ticks are `step` apart."""
    if value == 0:
        return "0"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size and step >= size / 100:
            return _round(value / size, step / size) + letter
    if abs(value) < 1e-3 or step < 1e-4:
        digits = max(0, math.floor(math.log10(abs(value))) - math.floor(math.log10(step) + 1e-9) + 1)
        mantissa, _, exponent = f"{value:.{digits}e}".partition("e")
        return f"{mantissa.rstrip('0').rstrip('.') if '.' in mantissa else mantissa}e{int(exponent)}"
    return _round(value, step)


def _round(value: float, step: float) -> str:
    """Print the decimals that a multiple of the step needs: one more than its order of magnitude, for steps of 2.5."""
    decimals = max(0, -math.floor(math.log10(step) + 1e-9)) + 1
    return f"{value:.{decimals}f}".rstrip("0").rstrip(".")


def count(value: float | None) -> str:
    """Format a count: 1,234,567 · 12.3 M · 4.56 G"""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e7, "M")):
        if abs(value) >= size:
            return f"{value / (size if letter != 'M' else 1e6):.3g} {letter}"
    return f"{value:,.0f}"


def mean_of_last(n: int) -> str:
    """Describes a smoothed value: last record · mean of the last 20 records"""
    return "last record" if n == 1 else f"mean of the last {n} records"


def share(value: float | None) -> str:
    if value is None or math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return _NOT_FINITE
    if 0 < value < 0.0995:
        return f"{100 * value:.1f} %" if value >= 0.0005 else "< 0.1 %"
    return f"{100 * value:.0f} %" if value < 0.995 or value >= 1 else "> 99 %"


def memory(mib: float | None) -> str:
    if mib is None or not math.isfinite(mib):
        return UNKNOWN
    return f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"


_FORMATS: Mapping[MetricFormat, Callable[[float | None], str]] = {
    MetricFormat.NUMBER: number,
    MetricFormat.SHARE: share,
    MetricFormat.COUNT: count,
    MetricFormat.DURATION: duration,
    MetricFormat.MEMORY: memory,
}


def metric_format(name: str) -> Callable[[float | None], str]:
    """Return the function that formats the values of a metric."""
    return _FORMATS[METRICS[name].format]


def clock(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).strftime("%H:%M:%S")


def moment(ts: float) -> str:
    return datetime.fromtimestamp(ts, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def plain(text: object, most: int = 500) -> str:
    """One printable line of bounded length, whatever the file contained."""
    return printable(text, most)


def as_float(value: object) -> float:
    """A number of a record; NaN if it is not a number."""
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def accuracy_text(accuracy: float) -> str:
    """Text that follows a held-out loss; empty if the accuracy was not recorded (NaN)."""
    return "" if math.isnan(accuracy) else f", accuracy {share(accuracy)}"


def event_text(event: RunEvent) -> str:
    """Details of an event beyond its kind and step, as one short line."""
    details = event.details
    if event.kind == EventKind.EVALUATION:
        loss, accuracy = (as_float(details.get(name)) for name in ("val_loss", "val_accuracy"))
        return f"held-out loss {number(loss)}{accuracy_text(accuracy)}"
    if event.kind == EventKind.LOST_STEPS:
        return f"{details.get('steps', '?')} steps to repeat"
    if event.kind in (EventKind.START, EventKind.RESTART):
        origin = str(details.get("origin") or "").rpartition("/")[2]
        return plain(f"{details.get('world', '?')} rank(s){' from ' + origin if origin else ''}")
    if condition := details.get("condition"):
        message = "resolved" if details.get("over") else details.get("message") or details.get("reason") or ""
        return plain(f"{condition}: {message}", 200)
    for name in ("reason", "error", "problem", "why", "message"):
        if details.get(name):
            return plain(details[name], 200)
    return ""
