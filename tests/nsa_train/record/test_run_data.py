import math
from dataclasses import replace
from itertools import pairwise

import pytest

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.record.run_data import _NOT_FINITE, ABSENT, RankSeries, _ThinnedSeries
from nsa_train.watch.run_reader import RunReader, load
from tests.nsa_train.record.beats import BEGAN, a_beat, a_run
from tests.nsa_train.record.written import of_ranks, write_run


def fed(*beats) -> RankSeries:
    series = RankSeries(0, ("loss", "dt_fetch_s"))
    for beat in beats:
        series.add(beat.as_dict())
    return series


def test_what_a_restart_does_again_is_superseded():
    first, second = a_run(8), a_run(6, first=6, began=BEGAN + 100, pid=2000)
    series = fed(*first, *second)
    assert list(series.step) == [1, 2, 3, 4, 5, 6, 7, 8, 6, 7, 8, 9, 10, 11]
    assert list(series.superseded) == [0] * 5 + [1] * 3 + [0] * 6
    assert list(series.counted("step")) == list(range(1, 12))
    assert [(process.step, process.first_row) for process in series.processes] == [(0, 0), (5, 8)]
    assert set(series.steps) == {1}


def test_a_second_restart_may_go_back_further_than_the_first():
    series = fed(*a_run(8), *a_run(2, first=7, pid=2), *a_run(3, first=3, pid=3))
    assert list(series.counted("step")) == [1, 2, 3, 4, 5]


def test_a_rollback_supersedes_within_a_process():
    back = a_beat(names.ROLLED_BACK, 4, BEGAN + 60)
    series = fed(*a_run(8), back, *[replace(beat, pid=1000) for beat in a_run(2, first=5)[1:]])
    assert list(series.counted("step")) == [1, 2, 3, 4, 5, 6]
    assert len(series.processes) == 1


def test_a_start_from_nothing_supersedes_everything():
    assert list(fed(*a_run(5), *a_run(2, pid=2)).counted("step")) == [1, 2]


def test_steps_between_records_are_counted_from_the_checkpoint():
    series = fed(*a_run(20, every=5), *a_run(7, first=13, every=5, pid=2))
    assert list(series.step) == [1, 5, 10, 15, 20, 13, 15]
    assert list(series.steps) == [1, 4, 5, 5, 5, 1, 2]


def test_absent_and_non_finite_values_are_distinguished():
    series = fed(*a_run(4, lambda step: {"loss": [1.5, None, math.nan, -math.inf][step - 1]}))
    loss = series.column("loss")
    assert loss[0] == 1.5
    assert math.isnan(loss[1])
    assert math.isnan(ABSENT)
    assert loss[2] == loss[3] == _NOT_FINITE


def test_the_last_message_of_a_process_is_kept():
    series = fed(*a_run(2), a_beat(names.HALTED, 2, BEGAN + 99, detail=".HALT: enough"))
    (process,) = series.processes
    assert (process.ending, process.detail, process.last) == (names.HALTED, ".HALT: enough", BEGAN + 99)


def test_following_finds_what_reading_at_once_finds(tmp_path):
    beats = [*a_run(30), *a_run(20, first=21, began=BEGAN + 500, pid=7)]
    whole = load(write_run(tmp_path / "whole", beats))
    follower = RunReader(write_run(tmp_path / "live", beats[:10]), whole=True)
    follower.update()
    write_run(tmp_path / "live", beats[10:25])
    follower.update()
    write_run(tmp_path / "live", beats[25:])
    follower.update()
    live = follower.data
    follower.close()
    assert live.lead.step == whole.lead.step
    assert live.lead.superseded == whole.lead.superseded
    assert {name: column.tobytes() for name, column in live.lead.columns.items()} == {
        name: column.tobytes() for name, column in whole.lead.columns.items()
    }
    assert live.lead.gates() == whole.lead.gates()


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    folder = write_run(tmp_path, a_run(3))
    with (folder / names.heartbeat(0)).open("a") as file:
        file.write('{"step": 9}\n[1]\n{"ts":1,"pid":1,"step":"x","msg":"progress"}\n{"ts": 12, "pi')
    (folder / "heartbeat_rankx.jsonl").write_text("{}\n")
    (folder / names.VAL_CSV).write_text("step,val_loss,tokens,seconds,ts\n3,2.5,100,1.0,5\n4,2.")
    run = load(folder)
    assert list(run.ranks) == [0]
    assert list(run.lead.step) == [1, 2, 3]
    assert [each.step for each in run.evaluations] == [3]


def test_an_accuracy_that_is_none_makes_a_row_unreadable(tmp_path):
    folder = write_run(tmp_path, a_run(3))
    rows = [f"{step},2.5,100,1.0,5,{accuracy}" for step, accuracy in enumerate(("0.5", "", "1.5", "-1", "inf", "x"))]
    (folder / names.VAL_CSV).write_text("\n".join(["step,val_loss,tokens,seconds,ts,val_accuracy", *rows, ""]))
    run = load(folder)
    assert [(each.step, each.val_accuracy) for each in run.evaluations] == [
        (0, 0.5), (1, pytest.approx(math.nan, nan_ok=True)),
    ]  # fmt: skip
    assert run.unreadable[names.VAL_CSV] == 4


def test_every_rank_is_read_and_the_first_leads(tmp_path):
    run = load(write_run(tmp_path, of_ranks(12, 3)))
    assert sorted(run.ranks) == list(range(12))
    assert run.lead.rank == 0
    assert "loss" not in run.ranks[3].columns
    assert len(run.ranks[11].column("forward_s")) == 3


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError):
        load(tmp_path)
    with pytest.raises(ConfigError):
        load(tmp_path / "nowhere")


@pytest.mark.parametrize("n", [0, 1, 5, 16, 17, 1000, 4096])
def test_thinning_keeps_few_evenly_and_the_newest(n):
    thinned = _ThinnedSeries(most=16)
    for item in range(n):
        thinned.add((item,))
    items = [item for (item,) in thinned.items()]
    assert len(items) <= 18
    assert items == sorted(set(items))
    if n:
        assert items[0] == 0
        assert items[-1] == n - 1
        gaps = [b - a for a, b in pairwise(items[:-1])]
        assert len(set(gaps)) <= 1
