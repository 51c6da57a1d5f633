"""Trend statistics for health checks: spikes, plateaus, divergence, memory growth, throughput drops. Pure functions."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, variance
from typing import NamedTuple

_ENOUGH = 30
"""Earlier values needed before a value can be called a spike."""
_MOST_SMOOTHED = 20
_LEAST_SPREAD = 0.01
"""Lower bound of the spread, relative to the median: a constant series has none."""


def spikes(values: Sequence[float], sigma: float) -> list[int]:
    """Indices of values more than `sigma` spreads above the median of the values before them.

    Median and median absolute deviation, so that earlier spikes do not shift the measure. Non-finite values are
    ignored; other conditions report them.
    """
    outliers: list[int] = []
    before: list[float] = []
    for i, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if len(before) >= _ENOUGH:
            middle = median(before)
            spread = 1.4826 * median(abs(past - middle) for past in before)
            if value > middle + sigma * max(spread, _LEAST_SPREAD * abs(middle)):
                outliers.append(i)
        before.append(value)
    return outliers


def gain(points: Sequence[tuple[int, float]], steps: int) -> float | None:
    """Relative decrease of the mean from the first to the second half of the last `steps`; None if too few points."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite or finite[-1][0] - finite[0][0] < steps:
        return None
    end = finite[-1][0]
    early = [value for step, value in finite if end - steps <= step < end - steps // 2]
    late = [value for step, value in finite if step >= end - steps // 2]
    before, after = sum(early) / max(1, len(early)), sum(late) / len(late)
    return (before - after) / abs(before) if early and before else None


def smoothed_last(values: Sequence[float]) -> tuple[float, int]:
    """The current loss as the mean of the last records, and their number; (NaN, 0) without any.

    The last tenth of all records, at least 1 and at most 20: one batch is noisy, and a mean over more of a short run is
    outdated. Non-finite values are left out, unless the last one is non-finite: then that is the result.
    """
    if not values:
        return math.nan, 0
    if not math.isfinite(values[-1]):
        return values[-1], 1
    recent = [value for value in values[-min(_MOST_SMOOTHED, max(1, len(values) // 10)) :] if math.isfinite(value)]
    return fmean(recent), len(recent)


def spread(values: Sequence[float]) -> float:
    """Standard deviation of the noise around a trend; 0 for fewer than 3 values.

    From second differences, which have 6 times the variance of one independent value, whatever the slope; their median,
    so that a few jumps do not count.
    """
    bends = [abs(a - 2 * b + c) for a, b, c in zip(values, values[1:], values[2:], strict=False)]
    return 1.4826 * median(bends) / math.sqrt(6) if bends else 0.0


class _SustainedRise(NamedTuple):
    lowest: float
    """The lowest mean of earlier values."""
    now: float
    """The mean of the last values."""
    sigma: float
    """Their difference in units of the noise."""

    @property
    def share(self) -> float:
        return (self.now - self.lowest) / abs(self.lowest) if self.lowest else math.inf


def rise(values: Sequence[float], size: int) -> _SustainedRise | None:
    """Compare the mean of the last `size` values with the lowest mean of earlier blocks of `size` values.

    None with fewer than two blocks, or without a rise. The noise is the larger of the standard error of the two means
    and the spread of the means of earlier blocks, which is larger where the noise of records is correlated.
    """
    finite = [value for value in values if math.isfinite(value)]
    blocks = [finite[end - size : end] for end in range(len(finite), size - 1, -size)]
    if len(blocks) < 2:
        return None
    last, lowest = blocks[0], min(blocks[1:], key=fmean)
    difference = fmean(last) - fmean(lowest)
    if difference <= 0:
        return None
    between = math.sqrt(2) * spread([fmean(block) for block in blocks[1:]])
    noise = max(math.sqrt((variance(last) + variance(lowest)) / size), between)
    return _SustainedRise(fmean(lowest), fmean(last), difference / noise if noise else math.inf)


def creep(values: Sequence[float], least: float) -> float | None:
    """Relative growth from the first to the last quarter, if every quarter lies above the previous one; else None.

    A single step up does not count: each quarter must contribute at least a tenth of the growth. Absolute growth below
    `least` is ignored.
    """
    size = len(values) // 4
    if size < 3:
        return None
    quarters = [median(values[i * size : (i + 1) * size]) for i in range(3)] + [median(values[-size:])]
    rise = quarters[-1] - quarters[0]
    rises = [later - earlier for earlier, later in pairwise(quarters)]
    if rise < least or quarters[0] <= 0 or min(rises) < 0.1 * rise:
        return None
    return rise / quarters[0]


def lasting_drop(values: Sequence[tuple[float, float]], usual: Sequence[float], share: float) -> tuple[float, float]:
    """The seconds that the last (seconds, value) pairs have been below (1 − share) of the usual value, and that value.

    The usual value is the larger of the upper quartiles of `usual` (the first values of the run) and of the pairs: a
    drop that fills half of the remembered window does not become the norm, nor does one that fills all of it.
    """
    if not usual or not values:
        return 0.0, 0.0
    usually = max(_upper_quartile(usual), _upper_quartile([value for _, value in values]))
    seconds = 0.0
    for length, value in reversed(values):
        if value >= (1 - share) * usually:
            break
        seconds += length
    return seconds, usually


def _upper_quartile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) * 3 // 4]
