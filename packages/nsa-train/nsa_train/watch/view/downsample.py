"""Downsampling for charts that keeps the minimum and maximum of every bucket; axis ticks and ranges."""

import math
import operator
from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice, pairwise
from typing import NamedTuple


class ChartBucket(NamedTuple):
    x: float
    """Mean of its points."""
    low: float
    high: float
    mean: float
    """Mean of the finite values; `low`, `high` and `mean` are NaN without any."""
    records: int
    not_finite: int


def buckets(x: Sequence[float], y: Sequence[float], n: int) -> list[ChartBucket]:
    """At most `n` buckets, ordered by x. NaN in y is a missing value; infinite values are counted, not averaged."""
    if not all(map(operator.le, x, islice(x, 1, None))):
        order = sorted(range(len(x)), key=x.__getitem__)
        x, y = [x[place] for place in order], [y[place] for place in order]
    if len(x) <= n or x[0] == x[-1]:
        return [point for at, value in zip(x, y, strict=True) if (point := bucket([at], [value]))][-n:]
    width = (x[-1] - x[0]) / n
    cuts = [bisect_left(x, x[0] + number * width) for number in range(n)] + [len(x)]
    pieces = [(x[begin:end], y[begin:end]) for begin, end in pairwise(cuts) if end > begin]
    return [point for xs, ys in pieces if (point := bucket(xs, ys))]


def bucket(xs: Sequence[float], ys: Sequence[float]) -> ChartBucket | None:
    """Summarize these points in one bucket; None if every value is missing."""
    at, total = sum(xs) / len(xs), sum(ys)
    if math.isfinite(total):
        return ChartBucket(at, min(ys), max(ys), total / len(ys), len(ys), 0)
    present = [value for value in ys if not math.isnan(value)]
    finite = [value for value in present if math.isfinite(value)]
    if not present:
        return None
    if not finite:
        return ChartBucket(at, math.nan, math.nan, math.nan, len(present), len(present))
    mean = sum(finite) / len(finite)
    return ChartBucket(at, min(finite), max(finite), mean, len(present), len(present) - len(finite))


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


class ValueRange(NamedTuple):
    low: float
    high: float

    def __contains__(self, value: object) -> bool:
        return isinstance(value, (int, float)) and self.low <= value <= self.high


def value_range(
    all_buckets: Sequence[ChartBucket], *, from_zero: bool = False, more: Sequence[float] = ()
) -> ValueRange | None:
    """Range of an axis, with a margin; None if no value is finite.

    A few values far above all others are left out, so that they do not flatten the rest; charts mark them instead.
    """
    lows = [bucket.low for bucket in all_buckets if not math.isnan(bucket.low)]
    highs = sorted([bucket.high for bucket in all_buckets if not math.isnan(bucket.high)])
    extra = [value for value in more if math.isfinite(value)]
    if not highs and not extra:
        return None
    low, high = min([*lows, *extra]), max([*highs[-1:], *extra])
    if len(highs) >= _ENOUGH:
        base, usual = min(0.0, low) if from_zero else low, highs[int(0.95 * (len(highs) - 1))]
        if usual > base and high > base + _FAR * (usual - base):
            high = max([base + _FAR / 2 * (usual - base), *extra])
    if from_zero:
        low, high = min(0.0, low), max(0.0, high)
    if high == low:
        room = abs(high) * 0.1 or 1.0
        return ValueRange(low if from_zero and low >= 0 else low - room, high + room)
    room = (high - low) * 0.06
    return ValueRange(low if from_zero and low == 0 else low - room, high + room)


_ENOUGH, _FAR = 20, 4.0
