"""The plan of a chaos drill: the same for the same seed, with every class, at steps where a fault can be evaluated."""

import pytest

from nsa.errors import ConfigError
from proofs.drill.chaos.fault_classes import PROFILES, ChaosFault
from proofs.drill.chaos.faults import INJECTORS
from proofs.drill.chaos.schedule import LONG_S, make_plan, parse_duration

SEEDS = range(15)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_seed_decides(seed):
    assert make_plan(seed, 300) == make_plan(seed, 300)
    assert make_plan(seed, 300) != make_plan(seed + 1, 300)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_hour_has_every_class_and_pairs(seed):
    plan = make_plan(seed, 3600)
    assert {fault.fault for fault in plan.faults} == set(ChaosFault)
    assert len(plan.faults) == len(ChaosFault)
    assert sum(fault.after_s is not None for fault in plan.faults) in (1, 2)
    expected_s = plan.steps * plan.pace_s
    assert 0.85 * 3600 < expected_s < 3600, "with the expected losses about an hour"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_clock_that_measures_goodput_is_never_changed(seed):
    clocks = [fault for fault in make_plan(seed, 3600).faults if fault.fault.value.startswith("clock_")]
    assert len(clocks) == 2
    assert all(fault.victim > 0 for fault in clocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_five_minutes_have_different_classes(seed):
    plan = make_plan(seed, 300)
    assert len({fault.fault for fault in plan.faults}) == len(plan.faults) == 5


@pytest.mark.parametrize("seconds", [120, 300, 3600])
@pytest.mark.parametrize("seed", SEEDS)
def test_steps_rise_and_keep_away_from_saves_and_from_the_end(seed, seconds):
    plan = make_plan(seed, seconds)
    steps = [fault.step for fault in plan.faults if fault.after_s is None]
    assert steps == sorted(steps)
    assert steps[0] > 2 * plan.save_every, "two checkpoints, so that one may be corrupt"
    assert steps[-1] < plan.steps - plan.save_every
    assert all(2 < step % plan.save_every < plan.save_every - 2 for step in steps)


def test_a_second_fault_follows_one_that_allows_it():
    plans = [make_plan(seed, 3600) for seed in SEEDS]
    pairs = [
        (first.fault, second.fault)
        for plan in plans
        for first, second in zip(plan.faults, plan.faults[1:], strict=False)
        if second.after_s is not None
    ]
    assert all(PROFILES[first].may_be_followed and PROFILES[second].may_follow for first, second in pairs)
    assert len({first for first, _ in pairs}) > 3


def test_what_cannot_be_played_is_left_out_with_its_reason():
    plan = make_plan(3, 3600, {ChaosFault.NODE_LOST: "no namespaces"})
    assert ChaosFault.NODE_LOST not in {fault.fault for fault in plan.faults}
    assert plan.not_played == {ChaosFault.NODE_LOST: "no namespaces"}


def test_goodput_is_required_of_long_runs_only():
    assert make_plan(1, LONG_S).required_goodput == 0.85
    assert make_plan(1, LONG_S - 1).required_goodput is None


@pytest.mark.parametrize(("text", "seconds"), [("5m", 300), ("1h", 3600), ("1h30m", 5400), ("150s", 150)])
def test_durations(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m5", "1d", "30s", "5 m", "-5m"])
def test_other_durations_are_refused(text):
    with pytest.raises(ConfigError, match="--chaos"):
        parse_duration(text)


def test_every_class_has_a_profile_and_an_injector():
    assert set(PROFILES) == set(INJECTORS) == set(ChaosFault)
