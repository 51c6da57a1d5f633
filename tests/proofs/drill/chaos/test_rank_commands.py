"""Orders to a running rank: taken by that rank alone, at the right step, and over when they should be."""

import time

import pytest

from proofs.drill.chaos.rank_commands import CLOCK, NAN, CommandFile, CommandFollower

HOUR_S = 3600.0


@pytest.fixture(autouse=True)
def _same_clock_afterwards(monkeypatch):
    monkeypatch.setattr(time, "time", time.time)


def test_nan_gradients_begin_right_after_a_save_and_last(tmp_path):
    follower = CommandFollower(tmp_path, rank=1, save_every=10)
    command = CommandFile.write(tmp_path, 3, 1, NAN)
    for step in range(35, 41):
        follower.follow(step)
        assert not follower.nan_gradients
    assert not command.taken
    for step in (41, 42, 50):
        follower.follow(step)
        assert follower.nan_gradients
    assert command.taken


def test_a_process_that_starts_later_does_not_follow_an_old_command(tmp_path):
    CommandFile.write(tmp_path, 3, 1, NAN)
    CommandFollower(tmp_path, rank=1, save_every=10).follow(41)
    again = CommandFollower(tmp_path, rank=1, save_every=10)
    again.follow(41)
    assert not again.nan_gradients


def test_another_rank_does_not_follow(tmp_path):
    command = CommandFile.write(tmp_path, 3, 1, NAN)
    follower = CommandFollower(tmp_path, rank=0, save_every=10)
    follower.follow(41)
    assert not follower.nan_gradients
    assert not command.taken


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
def test_the_clock_jumps_and_returns(tmp_path, seconds):
    true_time = time.time
    follower = CommandFollower(tmp_path, rank=0, save_every=10)
    command = CommandFile.write(tmp_path, 4, 0, CLOCK, seconds, for_s=0.2)
    follower.follow(5)
    assert command.taken
    assert abs(time.time() - true_time() - seconds) < HOUR_S / 2
    assert not command.over
    time.sleep(0.25)
    follower.follow(6)
    assert command.over
    assert abs(time.time() - true_time()) < HOUR_S / 2
