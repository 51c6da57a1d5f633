import json
import math

import pytest

from nsa_train import names
from nsa_train.record.events import EventKind, add_event, read_events
from nsa_train.record.heartbeat_record import HeartbeatRecord, last_beat, read_beats
from nsa_train.record.record_files import JsonLines
from nsa_train.record.run_folder import RunFolder


def beat(step: int, **more) -> HeartbeatRecord:
    return HeartbeatRecord.now(ts=1e9 + step, rank=0, step=step, msg=names.PROGRESS, **more)


def write(path, *beats: HeartbeatRecord) -> None:
    lines = JsonLines(path)
    for each in beats:
        lines.append(each.to_line())
    lines.close()


def test_written_records_are_read_back(tmp_path):
    written = [beat(1, loss=2.5, gate_branch_shares=(0.25, 0.25, 0.5)), beat(2, kernel_sliding="portable")]
    write(tmp_path / "h.jsonl", *written)
    assert list(read_beats(tmp_path / "h.jsonl")) == written
    assert last_beat(tmp_path / "h.jsonl") == written[1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_survives_strict_json(tmp_path, value):
    write(tmp_path / "h.jsonl", beat(1, loss=value))
    line = (tmp_path / "h.jsonl").read_text()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    (record,) = read_beats(tmp_path / "h.jsonl")
    assert record.loss is not None
    assert math.isnan(record.loss) if math.isnan(value) else record.loss == value


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_torn_line_costs_one_record_and_not_the_next(tmp_path, cut):
    path = tmp_path / "h.jsonl"
    write(path, beat(1), beat(2))
    path.write_bytes(path.read_bytes()[:-cut])
    write(path, beat(3))
    steps = [record.step for record in read_beats(path)]
    assert steps == ([1, 2, 3] if cut == 1 else [1, 3])


def test_a_field_of_a_later_version_is_passed_over(tmp_path):
    path = tmp_path / "h.jsonl"
    path.write_text(beat(1).to_line()[:-1] + ',"new_field":3}\n{"step":2}\n[1]\nnull\n\xff\n')
    assert [record.step for record in read_beats(path)] == [1]


def test_events_of_several_starts_are_read_in_order(tmp_path):
    for start in (EventKind.START, EventKind.RESTART):
        add_event(tmp_path, start, ts=1.0, step=0, world=2)
    with (tmp_path / names.EVENTS).open("a") as file:
        file.write('{"ts":1,"event":"unheard of","step":1}\n{"ts": 2, "eve')
    events = read_events(tmp_path)
    assert [event.kind for event in events] == [EventKind.START, EventKind.RESTART]
    assert events[0].details == {"world": 2}


def test_a_halt_file_gives_its_reason(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.halt_reason() is None
    (tmp_path / names.HALT).touch()
    assert folder.halt_reason() == "no reason given"
    (tmp_path / names.HALT).write_text("halt: manual_stop\n")
    assert folder.halt_reason() == "manual_stop"


def test_the_last_step_is_the_furthest_of_any_rank(tmp_path):
    assert RunFolder(tmp_path).last_step() == 0
    write(tmp_path / names.heartbeat(0), beat(4))
    write(tmp_path / names.heartbeat(1), beat(7), HeartbeatRecord.now(ts=1.0, rank=1, step=9, msg=names.HALTED))
    assert RunFolder(tmp_path).last_step() == 7
