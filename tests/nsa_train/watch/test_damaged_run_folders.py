"""No reader of a run folder raises on records it cannot read: it skips and counts them; other runs are unaffected.

`tests/fuzz/test_run_folders.py` damages folders at random.
"""

import io
import json
import os
import time
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import typer
from prometheus_client import CollectorRegistry, generate_latest

from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.record.events import read_events
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.record_files import parse_record, read_rows
from nsa_train.record.value_checks import fields, whole
from nsa_train.watch.exporter import RunsCollector
from nsa_train.watch.run_reader import RunReader, load
from tests.nsa_train.record.damaged import copy_run

COMMAND = typer.main.get_command(app)  # once: CliRunner makes it anew for every call


def nsa(*words: object) -> tuple[int, str]:
    said = io.StringIO()
    with redirect_stdout(said):
        code = COMMAND.main([str(word) for word in words], prog_name="nsa", standalone_mode=False)
    return code or 0, said.getvalue()


def served(folder: Path) -> str:
    collector = RunsCollector([folder])
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    try:
        return generate_latest(registry).decode()
    finally:
        collector.close()


def read_everywhere(good: Path, bad: Path) -> dict[str, str]:
    """Read the folder with each reader; `watch` last, because it writes into the folder."""
    root = good.parent
    readers = {
        "status": lambda: nsa("status", bad)[1],
        "smoke": lambda: nsa("smoke", bad)[1],
        "monitor": lambda: nsa("monitor", bad, "--once")[1],
        "report": lambda: nsa("report", bad, "--out", root / "r.html")[1] + (root / "r.html").read_text(),
        "compare": lambda: nsa("compare", good, bad, "--out", root / "c.html")[1] + (root / "c.html").read_text(),
        "exporter": lambda: served(root),
        "watch": lambda: nsa("watch", bad, "--once")[1],
    }
    return {name: read() for name, read in readers.items()}


def test_an_undamaged_run_has_nothing_unreadable(tmp_path):
    said = read_everywhere(copy_run(tmp_path / "good"), copy_run(tmp_path / "bad"))
    for name in ("status", "smoke", "monitor", "report", "watch"):
        assert "could not be read" not in said[name], name
        assert "unreadable" not in said[name], name
    assert 'nsa_unreadable_records{run="bad"} 0.0' in said["exporter"]


BAD_LINES = ('{"ts":"x","event":"save","step":3}', '{"ts":17', "[1]", '{"ts":1700000000,"event":"save","step":1e99}')


def test_every_reader_shows_how_many_records_it_skipped(tmp_path):
    good, bad = copy_run(tmp_path / "good"), copy_run(tmp_path / "bad")
    with (bad / names.EVENTS).open("a") as file:
        file.write("\n".join(BAD_LINES) + "\n")
    with (bad / names.heartbeat(0)).open("a") as file:
        file.write('{"ts":17\n{"ts":1e99,"pid":1,"rank":0,"step":30,"msg":"alive"}\n')
    (bad / names.ENV).write_text("[]")
    said = read_everywhere(good, bad)
    words = "7 records could not be read (env.json 1, events.jsonl 4, heartbeat_rank0.jsonl 2)"
    assert words in said["status"]
    assert words in said["watch"]
    assert words in said["report"]
    assert "7 unreadable records" in said["monitor"]
    assert "2 records could not be read (heartbeat_rank0.jsonl 2)" in said["smoke"]
    assert 'nsa_unreadable_records{run="bad"} 7.0' in said["exporter"]
    assert 'nsa_unreadable_records{run="good"} 0.0' in said["exporter"]
    (row,) = [line for line in said["compare"].splitlines() if line.startswith("unreadable records")]
    assert row.split()[-2:] == ["0", "7"]
    assert json.loads(nsa("status", bad, "--json")[1])["unreadable"] == {
        names.ENV: 1, names.EVENTS: 4, names.heartbeat(0): 2,
    }  # fmt: skip


def test_a_field_of_the_wrong_type_costs_the_field_and_not_the_beat(tmp_path):
    """A run that lives is not called silent because one figure of its beats cannot be read."""
    bad = copy_run(tmp_path / "bad")
    *lines, _ = (bad / names.heartbeat(0)).read_text().splitlines()
    last = json.loads(lines[-1]) | {"loss": "x", "gate_shares_by_layer": [[1], 2], "step_s": -1.0, "synthetic": 1}
    (bad / names.heartbeat(0)).write_text("\n".join([*lines[:-1], json.dumps(last)]) + "\n")
    reader = RunReader(bad)
    log = reader.update().ranks[0]
    reader.close()
    assert log.last.step == 24
    assert (log.last.loss, log.last.gate_shares_by_layer, log.last.step_s, log.last.synthetic) == (None,) * 4
    assert log.last.grad_norm == last["grad_norm"]
    assert reader.history.unreadable[names.heartbeat(0)] == 1


def test_a_beat_of_another_rank_or_process_group_is_no_beat_of_this_file(tmp_path):
    bad = copy_run(tmp_path / "bad")
    for wrong in ({"rank": 1}, {"rank": -1}, {"pid": 0}, {"pid": -1}, {"pid": 2**40}, {"step": -1}, {"step": True}):
        beat = HeartbeatRecord.now(ts=time.time(), rank=0, step=30, msg=names.ALIVE).as_dict() | wrong
        with (bad / names.heartbeat(0)).open("a") as file:
            file.write(json.dumps(beat) + "\n")
    run = load(bad)
    assert run.lead.last["step"] == 24
    assert run.unreadable[names.heartbeat(0)] == 7


def test_events_of_a_later_version_are_skipped_without_being_damage(tmp_path):
    (tmp_path / names.EVENTS).write_text('{"ts":1700000000.0,"event":"of a later version","step":3}\n')
    assert read_events(tmp_path) == []
    assert load(tmp_path).unreadable.total() == 0


@pytest.mark.parametrize("how", ["folder", "loop", "pipe", "device"])
@pytest.mark.parametrize("name", [names.heartbeat(0), names.EVENTS, names.ENV, names.VAL_CSV, names.HALT])
def test_a_path_that_is_no_regular_file_does_not_block_a_reader(tmp_path, name, how):
    good, bad = copy_run(tmp_path / "good"), copy_run(tmp_path / "bad")
    path = bad / name
    path.unlink(missing_ok=True)
    if how == "folder":
        path.mkdir()
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(path.name if how == "loop" else "/dev/zero")
    said = read_everywhere(good, bad)
    if name == names.HALT:
        assert "something that cannot be read" in said["status"]
    elif name != names.VAL_CSV:
        assert f"{name} 1" in said["status"]


def test_deep_huge_and_binary_lines_are_no_records():
    for line in ("[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"a":"NaN","b":' + "[" * 900 + "]" * 900 + "}"):
        record, damaged = parse_record(line)
        readable, _ = fields(record or {}, {"b": whole})
        assert damaged or readable == {}


def test_rows_of_a_table_that_are_short_or_long_are_counted(tmp_path):
    (tmp_path / "t.csv").write_text("step,loss\n1,2.5\n2\n3,4,5\n\n4,1.5\n")
    rows, bad = read_rows(tmp_path / "t.csv")
    assert [row["step"] for row in rows] == ["1", "4"]
    assert bad == 2


def test_a_beat_with_a_time_in_the_future_is_rejected(tmp_path):
    """The process has been silent for long, by the modification time of its file."""
    bad = copy_run(tmp_path / "bad")
    ahead = HeartbeatRecord.now(ts=time.time() + 86400, rank=0, step=30, msg=names.ALIVE)
    lines = (bad / names.heartbeat(0)).read_text().splitlines()[:-1]
    (bad / names.heartbeat(0)).write_text("\n".join([*lines, ahead.to_line()]) + "\n")
    code, text = nsa("status", bad)
    assert "clock_skew" in text
    assert code != 0
    long_ago = json.loads(lines[-1])["ts"] + 1
    os.utime(bad / names.heartbeat(0), (long_ago, long_ago))
    code, text = nsa("status", bad)
    assert code == 2
    assert "clock_skew" in text
    assert "heartbeat_stall" in text


def test_a_clock_that_is_a_minute_ahead_is_accepted(tmp_path):
    bad = copy_run(tmp_path / "bad")
    lines = (bad / names.heartbeat(0)).read_text().splitlines()[:-1]
    ahead = HeartbeatRecord.now(ts=time.time() + 30, rank=0, step=30, msg=names.ALIVE)
    (bad / names.heartbeat(0)).write_text("\n".join([*lines, ahead.to_line()]) + "\n")
    assert "clock_skew" not in nsa("status", bad)[1]
