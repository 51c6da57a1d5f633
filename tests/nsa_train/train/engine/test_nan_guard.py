"""The policy: what it says of each step, what it remembers, and what cannot mislead it."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nsa_train.config.schema import TrainConfig
from nsa_train.train.engine.nan_guard import BadStepPolicy, BadStepState, StepAction

NAN, INF = math.nan, math.inf
STEP, SKIP, BACK = StepAction.STEP, StepAction.SKIP, StepAction.ROLL_BACK
FREE = 10**9

finite = st.floats(-1e30, 1e30)
anything = st.one_of(finite, st.sampled_from([NAN, INF, -INF]))


def acts(policy, losses, start=1):
    return [policy.decide(step, loss, 1.0).action for step, loss in enumerate(losses, start)]


@pytest.mark.parametrize(
    ("limits", "losses", "expected"),
    [
        (TrainConfig(), [3.0, 1e30, -5.0], [STEP] * 3),
        (TrainConfig(max_skipped=3), [3, NAN, 3, INF, 3, -INF, NAN], [STEP, SKIP, STEP, SKIP, STEP, SKIP, BACK]),
        (TrainConfig(max_skipped=0), [3, NAN], [STEP, BACK]),
        # Steps long past do not count any more: of any 4 steps only one was bad.
        (
            TrainConfig(max_skipped=1, skip_window=4),
            [NAN, 3, 3, 3, NAN, 3, 3, 3, NAN],
            [SKIP, *[STEP] * 3] * 2 + [SKIP],
        ),
        (TrainConfig(max_skipped=1, skip_window=4), [NAN, 3, 3, NAN], [SKIP, STEP, STEP, BACK]),
    ],
)
def test_table(limits, losses, expected):
    assert acts(BadStepPolicy(limits), losses) == expected


@pytest.mark.parametrize(
    ("loss", "norm", "act"),
    [
        (3.0, 1.0, STEP),
        (NAN, 1.0, SKIP),
        (3.0, NAN, SKIP),
        (3.0, INF, SKIP),
        (3.3, 1.0, STEP),
        (4.0, 1.0, SKIP),
        (3.0, 2.0, SKIP),
        (0.0, 0.0, STEP),
        (-9.0, 0.0, STEP),
    ],
)
def test_either_number_can_make_a_step_bad_and_only_upwards(loss, norm, act):
    policy = BadStepPolicy(TrainConfig(spike_sigma=6, skip_window=16))
    for step in range(1, 17):
        wave = 0.1 * (-1) ** step
        assert policy.decide(step, 3 + wave, 1 + wave).action == STEP
    verdict = policy.decide(17, loss, norm)
    assert verdict.action == act
    assert bool(verdict.reason) == (act != STEP)


def test_spikes_need_half_a_window_to_be_told():
    policy = BadStepPolicy(TrainConfig(spike_sigma=6, skip_window=16))
    assert acts(policy, [3.0, 3.1, 3.0, 3.1, 3.0, 3.1, 3.0, 1000.0]) == [STEP] * 8


def test_a_window_without_spread_tells_no_spike():
    policy = BadStepPolicy(TrainConfig(spike_sigma=6, skip_window=16))
    assert acts(policy, [3.0] * 16 + [3.0001]) == [STEP] * 17


def test_a_spike_does_not_hide_the_next_one():
    policy = BadStepPolicy(TrainConfig(spike_sigma=6, skip_window=16))
    acts(policy, [3.0, 3.1] * 8)
    assert acts(policy, [1e30, 5.0], start=17) == [SKIP, SKIP]


def test_a_lasting_change_of_level_becomes_normal():
    policy = BadStepPolicy(TrainConfig(spike_sigma=6, skip_window=16, max_skipped=FREE))
    acts(policy, [3.0, 3.1] * 8)
    assert STEP in acts(policy, [4.0] * 16, start=17)


@given(st.lists(st.tuples(finite, finite), max_size=60), st.lists(st.integers(0, 60)), st.sampled_from([0.0, 2.0]))
def test_one_nan_changes_nothing_for_the_steps_after_it(numbers, places, sigma):
    limits = TrainConfig(max_skipped=FREE, skip_window=8, spike_sigma=sigma)
    calm, hit = BadStepPolicy(limits), BadStepPolicy(limits)
    for step, (loss, norm) in enumerate(numbers):
        for _ in range(places.count(step)):
            assert hit.decide(step, NAN, INF).action == SKIP
        assert hit.decide(step, loss, norm).action == calm.decide(step, loss, norm).action
    assert (hit.state.losses, hit.state.grad_norms) == (calm.state.losses, calm.state.grad_norms)
    assert hit.state.nonfinite_steps == sum(places.count(step) for step in range(len(numbers)))


@given(st.lists(st.tuples(anything, anything), max_size=60), st.integers(0, 60), st.integers(0, 5), st.integers(1, 9))
def test_it_goes_on_from_json_as_if_never_stopped(numbers, cut, max_skipped, window):
    limits = TrainConfig(max_skipped=max_skipped, skip_window=window, spike_sigma=2)
    whole, first = BadStepPolicy(limits), BadStepPolicy(limits)
    expected = [whole.decide(step, *pair) for step, pair in enumerate(numbers)]
    said = [first.decide(step, *pair) for step, pair in enumerate(numbers[:cut])]
    saved = json.loads(json.dumps([first.state.window(), first.state.left_out], allow_nan=False))
    second = BadStepPolicy(limits, BadStepState.restored(saved[0], [(a, b) for a, b in saved[1]]))
    said += [second.decide(step, *pair) for step, pair in enumerate(numbers[cut:], cut)]
    assert said == expected
    assert second.state == whole.state
    assert len(whole.state.losses) <= window
    assert all(map(math.isfinite, whole.state.losses + whole.state.grad_norms))


def test_going_back_leaves_out_every_batch_since_and_forgives_the_skips():
    policy = BadStepPolicy(TrainConfig(max_skipped=1))
    acts(policy, [3.0, 3.1, NAN])
    then = policy.state
    assert acts(policy, [3.0, NAN], start=4) == [STEP, BACK]
    assert policy.why_not_back_to(3) is None
    assert policy.roll_back(5, 3, then) == (3, 5)
    assert policy.state.losses == [3.0, 3.1]
    assert (policy.state.skipped_steps, policy.state.nonfinite_steps) == (2, 2)
    # Step 4 is batch 5 now. A later checkpoint, a second way back: the ranges lie next to each other.
    assert acts(policy, [3.0, 3.0], start=4) == [STEP, STEP]
    then = policy.state
    assert acts(policy, [NAN, NAN], start=6) == [SKIP, BACK]
    assert policy.roll_back(7, 5, then) == (7, 9)
    assert policy.state.left_out == [(3, 5), (7, 9)]


def test_it_does_not_go_back_without_hope():
    policy = BadStepPolicy(TrainConfig(max_rollbacks=2))
    assert "no checkpoint" in policy.why_not_back_to(None)
    policy.roll_back(9, 5, BadStepState())
    assert "step 5" in policy.why_not_back_to(5)
    policy.roll_back(19, 15, BadStepState())
    assert "max_rollbacks" in policy.why_not_back_to(25)
