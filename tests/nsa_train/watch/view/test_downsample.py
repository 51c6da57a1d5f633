import math
import random

import pytest

from nsa_train.terminal_text import duration
from nsa_train.watch.view.downsample import buckets, nice_step, ticks, value_range
from nsa_train.watch.view.formatting import count, number, plain, share, tick


def test_a_spike_of_one_record_survives():
    y = [1.0] * 500_000
    y[123_456] = 99.0
    drawn = buckets(range(500_000), y, 400)
    assert len(drawn) <= 400
    assert max(bucket.high for bucket in drawn) == 99.0
    assert min(bucket.low for bucket in drawn) == 1.0
    assert sum(bucket.records for bucket in drawn) == 500_000


def test_few_points_stay_where_they_are():
    drawn = buckets([1, 5, 7], [2.0, 4.0, 3.0], 100)
    assert [(bucket.x, bucket.mean) for bucket in drawn] == [(1, 2.0), (5, 4.0), (7, 3.0)]


@pytest.mark.parametrize("n", [3, 4, 1000])
def test_what_is_not_finite_is_counted_and_what_is_absent_is_not(n):
    y = [1.0, math.inf, math.nan, 3.0, math.inf, math.nan, 2.0, 2.0]
    drawn = buckets(range(8), y, n)
    assert sum(bucket.not_finite for bucket in drawn) == 2
    assert sum(bucket.records for bucket in drawn) == 6
    assert all(math.isfinite(bucket.mean) or bucket.not_finite == bucket.records for bucket in drawn)


def test_only_absent_values_are_no_bucket():
    assert buckets([1, 2], [math.nan, math.nan], 10) == []
    assert buckets([], [], 10) == []


def test_the_order_of_the_points_does_not_matter():
    points = [(x, math.sin(x)) for x in range(1000)]
    shuffled = random.Random(0).sample(points, len(points))
    assert buckets(*zip(*shuffled, strict=True), 50) == buckets(*zip(*points, strict=True), 50)


def test_all_at_one_place_is_drawn():
    assert [bucket.mean for bucket in buckets([5, 5], [1.0, 2.0], 10)] == [1.0, 2.0]


@pytest.mark.parametrize("low", [0.0, -3.7, 12.3, 1e-5])
@pytest.mark.parametrize("span", [1e-6, 0.03, 1.0, 7.0, 7700.0, 8.19e5, 4e9])
def test_a_label_says_the_number_it_stands_at(low, span):
    low = low * span
    marks = ticks(low, low + span, 5)
    step = nice_step(span, 5)
    assert 2 <= len(marks) <= 6
    for value in marks:
        assert low - 1e-9 * span <= value <= low + span * (1 + 1e-9)
        label = tick(value, step)
        size = {"k": 1e3, "M": 1e6, "G": 1e9}.get(label[-1], 1.0)
        assert float(label.rstrip("kMG")) * size == pytest.approx(value, abs=0.011 * step), label


def test_an_axis_from_zero_begins_at_zero():
    span = value_range(buckets(range(3), [5.0, 6.0, 7.0], 10), from_zero=True)
    assert span is not None
    assert span.low == 0
    assert 7.0 <= span.high < 8.0


@pytest.mark.parametrize("value", [0.0, 3.0, -2.0])
def test_a_constant_has_room_around_it(value):
    span = value_range(buckets(range(3), [value] * 3, 10))
    assert span is not None
    assert span.low < value < span.high


def test_a_far_value_does_not_flatten_the_rest():
    y = [2.0 + 0.01 * (i % 7) for i in range(1000)]
    y[500] = 1e6
    span = value_range(buckets(range(1000), y, 400))
    assert span is not None
    assert span.high < 3.0


def test_without_a_finite_value_there_is_no_axis():
    assert value_range(buckets(range(3), [math.inf] * 3, 10)) is None


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (duration(0), "0 s"), (duration(0.0123), "12 ms"), (duration(3.21), "3.2 s"), (duration(59.6), "1 m 00 s"),
        (duration(3 * 3600 + 5 * 60), "3 h 05 m"), (duration(2 * 86400 + 3600), "2 d 01 h"), (duration(math.nan), "–"),
        (number(2.34567), "2.346"), (number(0), "0"), (number(math.inf), "not finite"), (number(None), "–"),
        (number(12345.6), "12,346"), (number(3e-5), "3e-5"), (number(1e9), "1e9"),
        (share(0.0004), "< 0.1 %"), (share(0.999), "> 99 %"), (share(1.0), "100 %"), (share(0.123), "12 %"),
        (count(1234567), "1,234,567"), (count(12_300_000), "12.3 M"), (count(4.56e9), "4.56 G"),
        (plain("a\x1b[31mb\nc"), r"a\x1b[31mb\nc"), (plain("x" * 900, 5), "xxxx…"),
    ],
)  # fmt: skip
def test_numbers_are_formatted_for_people(said, expected):
    assert said == expected
