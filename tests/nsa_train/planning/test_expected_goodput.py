"""Goodput against the table of figures worked out by hand for 64, 1,024 and 4,096 GPUs."""

import pytest

from nsa_train.planning.layout_plan import LLAMA3_GPU_HOURS, FailureModel, RunGoodput


def best(gpus, save_s, restart_s):
    mtbf_s = FailureModel().mtbf_s(gpus)
    any_interval = RunGoodput(mtbf_s, save_s, restart_s, interval_s=1.0)
    return RunGoodput(mtbf_s, save_s, restart_s, interval_s=any_interval.best_interval_s)


@pytest.mark.parametrize(
    ("gpus", "save_s", "restart_s", "minutes", "lost"),
    [(64, 5, 600, 89, 0.002), (1024, 5, 600, 22, 0.011), (1024, 60, 600, 77, 0.029), (4096, 5, 180, 11, 0.019)],
)
def test_interval_and_loss_at_the_optimum(gpus, save_s, restart_s, minutes, lost):
    optimum = best(gpus, save_s, restart_s)
    assert optimum.interval_s / 60 == pytest.approx(minutes, abs=1)
    assert optimum.lost == pytest.approx(lost, abs=6e-4)
    assert optimum.lost_at(2 * optimum.interval_s) > optimum.lost < optimum.lost_at(optimum.interval_s / 2)


def test_the_default_rate_is_llama_3s():
    assert pytest.approx(50_677, abs=1) == LLAMA3_GPU_HOURS
    assert FailureModel().mtbf_s(1024) / 3600 == pytest.approx(49.5, abs=0.05)


def test_a_save_in_the_background_stops_training_for_the_copy_alone():
    model = FailureModel(storage_gb_s=2.0)
    waits = model.save_s(80e9, 1024, 8, 1, background=False)
    copies = model.save_s(80e9, 1024, 8, 1, background=True)
    assert (waits, copies) == (pytest.approx(42), pytest.approx(3))
    assert model.save_s(80e9, 1024, 1024, 128, background=True) == pytest.approx(2, abs=0.01)


def test_the_lost_share_is_at_most_one():
    assert RunGoodput(mtbf_s=10, save_s=5, restart_s=600, interval_s=10).lost == 1.0
