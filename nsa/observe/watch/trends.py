"""Judgements over many numbers: spikes, plateaus, creeping growth, lasting drops. Numbers in, numbers out."""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

_ENOUGH = 30
"""Values before one that say what is usual."""
_LEAST_SPREAD = 0.01
"""Of the usual value; the spread of a calm series may be next to nothing."""


def spikes(values: Sequence[float], sigma: float) -> list[int]:
    """Where a value lies more than `sigma` spreads above the median of those before it.

    Median and median deviation, so that neither an earlier spike nor one that is infinite moves the measure. Values
    that are not finite are somebody else's matter.
    """
    found: list[int] = []
    before: list[float] = []
    for i, value in enumerate(values):
        if not math.isfinite(value):
            continue
        if len(before) >= _ENOUGH:
            middle = median(before)
            spread = 1.4826 * median(abs(past - middle) for past in before)
            if value > middle + sigma * max(spread, _LEAST_SPREAD * abs(middle)):
                found.append(i)
        before.append(value)
    return found


def gain(points: Sequence[tuple[int, float]], steps: int) -> float | None:
    """By which share the mean of the last half of `steps` lies below that of the half before; None if not known yet."""
    finite = [(step, value) for step, value in points if math.isfinite(value)]
    if not finite or finite[-1][0] - finite[0][0] < steps:
        return None
    end = finite[-1][0]
    early = [value for step, value in finite if end - steps <= step < end - steps // 2]
    late = [value for step, value in finite if step >= end - steps // 2]
    before, after = sum(early) / max(1, len(early)), sum(late) / len(late)
    return (before - after) / abs(before) if early and before else None


def creep(values: Sequence[float], least: float) -> float | None:
    """The share by which values grew from the first quarter to the last, if every quarter lies above the one before.

    A step up that stays is no creeping: half of the growth must be on either side of the middle, roughly. Growth below
    `least` in absolute terms is not told.
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
    """(seconds, usual value): how long the last (seconds, value) pairs have been below (1 − share) of what is usual.

    Usual is the larger of two upper quartiles, that of `usual` and that of the pairs: a drop that fills half of what is
    remembered does not become the rule, and a run that was slow for as long as anybody remembers is still slow.
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
