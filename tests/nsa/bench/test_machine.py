"""Rounds, medians and ratios, on a clock that only moves when a subject runs."""

from contextlib import contextmanager

import pytest

from nsa.bench.machine import _CALIBRATION_S, interleave, ratio, spread


class FakeClock:
    def __init__(self) -> None:
        self.t = 0.0
        self.log: list[str] = []

    def now(self) -> float:
        return self.t

    def subject(self, name: str, *took: float):
        costs = list(took)

        def run() -> None:
            self.log.append(name)
            self.t += costs.pop(0) if len(costs) > 1 else costs[0]

        return run


def test_subjects_take_turns():
    clock = FakeClock()
    subjects = {name: clock.subject(name, 1.0) for name in "ABC"}
    samples = interleave(subjects, budget_s=100, max_rounds=3, now=clock.now)
    assert "".join(clock.log) == "ABCABCABC"
    assert samples == {name: [1.0] * 3 for name in "ABC"}


def test_every_sample_is_kept_and_the_median_ignores_one_bad_round():
    clock = FakeClock()
    samples = interleave({"a": clock.subject("a", 1.0, 50.0, 1.0, 2.0, 1.5)}, budget_s=1e9, max_rounds=5, now=clock.now)
    assert samples["a"] == [1.0, 50.0, 1.0, 2.0, 1.5]
    measured = spread(samples["a"])
    assert (measured.median, measured.low, measured.high) == (1.5, 1.0, 2.0)
    assert measured.noise == pytest.approx(0.5 / 1.5)


def test_no_round_begins_that_would_exceed_the_budget():
    clock = FakeClock()
    samples = interleave({"a": clock.subject("a", 3.0), "b": clock.subject("b", 1.0)}, budget_s=13, now=clock.now)
    assert len(samples["a"]) == len(samples["b"]) == 3


def test_what_is_done_around_a_round_is_neither_timed_nor_budgeted():
    clock = FakeClock()

    @contextmanager
    def pause():
        clock.log.append("(")
        yield
        clock.t += 1000.0
        clock.log.append(")")

    subjects = {"a": clock.subject("a", 3.0)}
    samples = interleave(subjects, budget_s=6, around_round=pause, now=clock.now)
    assert samples == {"a": [3.0, 3.0]}
    assert "".join(clock.log) == "(a)(a)"


def test_one_round_is_measured_however_long_it_takes():
    clock = FakeClock()
    samples = interleave({"a": clock.subject("a", 500.0)}, budget_s=1, now=clock.now)
    assert samples == {"a": [500.0]}
    only = spread(samples["a"])
    assert only.median == only.low == only.high == 500.0


def test_short_calls_are_repeated_within_a_sample_and_counted_per_call():
    clock = FakeClock()
    samples = interleave({"a": clock.subject("a", 0.001)}, budget_s=1, max_rounds=2, repeat=True, now=clock.now)
    assert samples["a"] == pytest.approx([0.001, 0.001])
    assert len(clock.log) > 2 * _CALIBRATION_S / 0.001


def test_a_ratio_is_taken_within_each_round():
    """The machine slows down tenfold for one round: both sides feel it, the ratio does not."""
    measured = ratio(of=[4.0, 40.0, 4.0], to=[2.0, 20.0, 2.0])
    assert (measured.median, measured.low, measured.high) == (2.0, 2.0, 2.0)
    assert ratio(of=[1.0, 2.0, 3.0], to=[1.0, 1.0, 1.0]).median == 2.0
