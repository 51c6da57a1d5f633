"""Interleaved timing of several callables (A B C A B C …), so that other load on the machine affects all of them alike.

Every sample is kept and reported. A time is the median, its spread the quartiles. A ratio is the median of the ratios
within each round, whose two sides ran next to each other.
"""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from statistics import median, quantiles

MAX_ROUNDS = 100
CALIBRATION_S = 0.02  # a sample lasts at least this long: short calls are repeated inside it

Now = Callable[[], float]


@dataclass(frozen=True)
class TimingSpread:
    median: float
    low: float
    high: float
    """Quartiles; both equal the median where there is one sample."""

    @property
    def noise(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high - self.low) / 2 / self.median if self.median else 0.0


def spread(samples: list[float]) -> TimingSpread:
    if len(samples) == 1:
        return TimingSpread(samples[0], samples[0], samples[0])
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return TimingSpread(median(samples), low, high)


def ratio(of: list[float], to: list[float]) -> TimingSpread:
    """`of` divided by `to`, round by round."""
    return spread([a / b for a, b in zip(of, to, strict=True)])


def interleave(
    subjects: Mapping[str, Callable[[], object]],
    *,
    budget_s: float,
    min_rounds: int = 1,
    max_rounds: int = MAX_ROUNDS,
    repeat: bool = False,
    around_round: Callable[[], AbstractContextManager[object]] = nullcontext,
    now: Now = time.perf_counter,
) -> dict[str, list[float]]:
    """Seconds per call of each subject, one sample per round, in rounds until the next one would exceed the budget.

    Subjects must be warm. `repeat` lets a sample hold many calls of a short subject. What `around_round` does before
    and after each round is neither in a sample nor in the budget.
    """
    begin = now()
    calls = {name: _calls_per_sample(subject, now) if repeat else 1 for name, subject in subjects.items()}
    samples: dict[str, list[float]] = {name: [] for name in subjects}
    spent = now() - begin
    for done in range(1, max_rounds + 1):
        with around_round():
            round_begin = now()
            for name, subject in subjects.items():
                start = now()
                for _ in range(calls[name]):
                    subject()
                samples[name].append((now() - start) / calls[name])
            took = now() - round_begin
        spent += took
        if done >= min_rounds and spent + took > budget_s:
            break
    return samples


def _calls_per_sample(subject: Callable[[], object], now: Now) -> int:
    calls = 1
    while True:
        start = now()
        for _ in range(calls):
            subject()
        if now() - start >= CALIBRATION_S or calls >= 1 << 16:
            return calls
        calls *= 2
