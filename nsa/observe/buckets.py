"""Fewer points for the eye, with every extreme kept: a spike of one record among half a million stays a spike."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Bucket(NamedTuple):
    x: float
    """Mean of its points."""
    low: float
    high: float
    mean: float
    """Of the finite values; all three are NaN where there is none."""
    count: int
    not_finite: int


def buckets(x: Sequence[float], y: Sequence[float], n: int, rows: Iterable[int] | None = None) -> list[Bucket]:
    """At most `n`, in the order of x. NaN in y is an absent value; infinite ones are counted, not averaged."""
    chosen = [row for row in (range(len(x)) if rows is None else rows) if not math.isnan(y[row])]
    if not chosen:
        return []
    xs = [x[row] for row in chosen]
    low, high = min(xs), max(xs)
    if len(chosen) <= n or high == low:
        return [_bucket([x[row]], [y[row]]) for row in sorted(chosen, key=lambda row: x[row])][-n:]
    cells: list[tuple[list[float], list[float]]] = [([], []) for _ in range(n)]
    scale = n / (high - low)
    last = n - 1
    for row, at in zip(chosen, xs, strict=True):
        cell = cells[min(last, int((at - low) * scale))]
        cell[0].append(at)
        cell[1].append(y[row])
    return [_bucket(*cell) for cell in cells if cell[0]]


def _bucket(xs: list[float], ys: list[float]) -> Bucket:
    finite = [y for y in ys if math.isfinite(y)]
    at = math.fsum(xs) / len(xs)
    if not finite:
        return Bucket(at, math.nan, math.nan, math.nan, len(ys), len(ys))
    mean = math.fsum(finite) / len(finite)
    return Bucket(at, min(finite), max(finite), mean, len(ys), len(ys) - len(finite))


def nice_step(span: float, most: int) -> float:
    """The smallest of 1, 2, 2.5, 5 × 10ᵏ that cuts `span` into at most `most` parts."""
    if not (span > 0 and math.isfinite(span)):
        return 1.0
    power = 10.0 ** math.floor(math.log10(span / most))
    return next(step * power for step in (1, 2, 2.5, 5, 10, 20) if span / (step * power) <= most * (1 + 1e-9))


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within [low, high]."""
    step = nice_step(high - low, most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


class Range(NamedTuple):
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


def value_range(found: Sequence[Bucket], *, from_zero: bool = False, more: Sequence[float] = ()) -> Range | None:
    """What an axis should span, with some room; None where no value is finite.

    A few values far above all others are left out, so that they do not flatten the rest; whoever draws marks them.
    """
    lows = [bucket.low for bucket in found if not math.isnan(bucket.low)]
    highs = sorted([bucket.high for bucket in found if not math.isnan(bucket.high)])
    extra = [value for value in more if math.isfinite(value)]
    if not highs and not extra:
        return None
    low, high = min([*lows, *extra]), max([*highs[-1:], *extra])
    if len(highs) >= _ENOUGH:
        usual = highs[int(0.95 * (len(highs) - 1))]
        if high > low + _FAR * (usual - low):
            high = low + _FAR / 2 * (usual - low) if usual > low else high
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        room = abs(high) * 0.1 or 1.0
        return Range(low if from_zero and low >= 0 else low - room, high + room)
    room = (high - low) * 0.06
    return Range(low if from_zero and low == 0 else low - room, high + room)


_ENOUGH, _FAR = 20, 4.0
