"""`nsa status`, `watch`, `halt` and `smoke` as commands: what they show, write and return."""

import json
import random
import re
import time
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.record.events import EventKind, add_event, read_events
from nsa_train.record.halt_file import read
from nsa_train.record.record_files import JsonLines
from nsa_train.train.metric_writers import TRAINING_COLUMNS, CsvFile
from nsa_train.watch.conditions import CONDITIONS
from nsa_train.watch.run_reader import RunReader
from tests.nsa_train.record.beats import a_beat, a_run
from tests.nsa_train.watch.recorded import UNWELL, Recording, finished, noisy, record

CONFIG = {"train": {"steps": 50_000, "log_every": 1, "save_every": 200}, "nsa": {"l_sel": 64}}


def write(folder, recording: Recording, *, end: float | None = None, host: str = "another"):
    """Write a run folder as a run would have, if it were evaluated now (or at `end`)."""
    shift = (time.time() if end is None else end) - recording.end
    for rank, beats in recording.beats.items():
        lines = JsonLines(folder / names.heartbeat(rank))
        for beat in beats:
            lines.append(replace(beat, ts=beat.ts + shift).to_line())
        lines.close()
    for event in recording.events:
        add_event(folder, event.kind, ts=event.ts + shift, step=event.step)
    env = {"host": host, "world_size": 1, "config": CONFIG}
    (folder / names.ENV).write_text(json.dumps(env))
    rows = CsvFile(folder / names.TRAINING_CSV, TRAINING_COLUMNS)
    for beat in recording.beats[0]:
        if beat.msg == names.PROGRESS:
            rows.add(beat.as_dict())
    rows.close()
    (folder / names.METRICS).write_text("{}")
    return folder


def nsa(*words) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.exit_code, result.output


def test_status_of_a_run_that_is_well(tmp_path):
    code, text = nsa("status", write(tmp_path, noisy()))
    assert code == 0
    assert text.splitlines()[0].startswith("running")
    assert "step       500 of 50,000 (1.0%)" in text
    assert "tokens/s, 1 d 03 h left" in text
    assert "s ago, 1 rank\n" in text
    assert not any(name in text for name in CONDITIONS)


@pytest.mark.parametrize(
    ("name", "code", "word"),
    [
        ("heartbeat_stall", 2, "hung"),
        ("run_failed", 2, "failed"),
        ("data_slow", 1, "running"),
        ("loss_spike", 1, "running"),
    ],
)
def test_status_reports_conditions_in_words_and_by_its_exit_code(tmp_path, name, code, word):
    exit_code, text = nsa("status", write(tmp_path, UNWELL[name][0]()))
    assert exit_code == code
    assert text.startswith(word)
    assert name in text


def test_status_of_a_finished_run_is_good_however_old(tmp_path):
    assert nsa("status", write(tmp_path, finished(), end=1e9))[0] == 0


def test_status_of_an_empty_folder_is_no_success(tmp_path):
    code, text = nsa("status", tmp_path)
    assert code == 2
    assert text.startswith("no run")


def test_status_as_json_and_as_a_line_of_the_health_log(tmp_path):
    code, text = nsa("status", write(tmp_path, UNWELL["data_slow"][0]()), "--json", "--log")
    status = json.loads(text)
    assert (status["phase"], status["exit_code"], code) == ("running", 1, 1)
    assert [finding["condition"] for finding in status["findings"]] == ["data_slow"]
    (line,) = (tmp_path / names.HEALTH_LOG).read_text().splitlines()
    assert "] WARNING running at step 70, loss" in line
    assert "data_slow (rank 0, step 70): waited 2.1 s" in line


def test_a_limit_can_be_changed_and_a_wrong_one_is_refused(tmp_path):
    write(tmp_path, UNWELL["data_slow"][0]())
    assert nsa("status", tmp_path, "--limit", "fetch_s=3")[0] == 0
    for wrong in ("fetch=3", "fetch_s=soon", "fetch_s"):
        with pytest.raises(ConfigError, match="--limit"):
            nsa("status", tmp_path, "--limit", wrong)


def test_a_folder_that_is_none_is_refused(tmp_path):
    for command in ("status", "watch", "halt", "smoke"):
        with pytest.raises(ConfigError):
            nsa(command, tmp_path / "absent")
    with pytest.raises(ConfigError):
        nsa("watch")


def test_watch_once_reports_a_stall_and_does_not_halt(tmp_path):
    write(tmp_path, UNWELL["heartbeat_stall"][0]())
    code, text = nsa("watch", "--dir", tmp_path, "--halt", 1, "--once")
    assert code == 2
    assert "CRITICAL heartbeat_stall" in text
    assert not (tmp_path / names.HALT).exists()


def test_watch_once_halts_for_conditions_that_need_no_clock(tmp_path):
    code, _ = nsa("watch", write(tmp_path, UNWELL["loss_nonfinite"][0]()), "--halt", 1, "--once")
    assert code == 2
    assert (tmp_path / names.ANOMALY).read_text() == "loss_nonfinite\n"
    asked = read(tmp_path)
    assert asked is not None
    assert asked.reason.startswith("loss_nonfinite: loss nan at step 150")
    assert EventKind.HALT_ASKED in [event.kind for event in read_events(tmp_path)]


def test_watch_ends_when_the_run_has(tmp_path):
    assert nsa("watch", write(tmp_path, finished()))[0] == 0
    beats = a_run(20)
    halted = tmp_path / "halted"
    halted.mkdir()
    write(halted, record([*beats, a_beat(names.HALTED, 20, beats[-1].ts)]))
    assert nsa("watch", halted)[0] == 11


def test_watch_once_reads_the_run_folder_once(tmp_path, monkeypatch):
    update, reads = RunReader.update, []
    monkeypatch.setattr(RunReader, "update", lambda reader: reads.append(reader) or update(reader))
    assert nsa("watch", write(tmp_path, noisy()), "--once")[0] == 0
    assert len(reads) == 1


def test_halt_asks_once_and_says_who_did(tmp_path):
    write(tmp_path, noisy())
    assert nsa("halt", tmp_path, "--reason", "maintenance")[0] == 0
    _, text = nsa("halt", tmp_path)
    assert re.search(r"\.HALT exists already: maintenance; written \S+ m?s ago by nsa halt, process", text)
    assert nsa("status", tmp_path)[0] == 1
    code, text = nsa("halt", tmp_path, "--wait", "--timeout", 0)
    assert code == 1
    assert "not halted within 0 s" in text


def test_waiting_for_a_halt_ends_with_the_halt_record(tmp_path):
    beats = a_run(20)
    write(tmp_path, record([*beats, a_beat(names.HALTED, 20, beats[-1].ts, detail=".HALT: enough")]))
    code, text = nsa("halt", tmp_path, "--wait")
    assert code == 0
    assert "halted at step 20: .HALT: enough" in text


def test_smoke_passes_a_run_that_trained(tmp_path):
    write(tmp_path, noisy())
    code, text = nsa("smoke", tmp_path, "--min-steps", 500)
    assert (code, "FAILED" in text) == (0, False)
    files = ("--csv", tmp_path / names.TRAINING_CSV, "--heartbeat", tmp_path / names.heartbeat(0))
    assert nsa("smoke", *files, "--min-steps", 500)[0] == 0
    assert nsa("smoke", *files, "--min-steps", 501)[0] == 1


def failed_checks(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("FAILED")]


def spoil_csv(folder) -> None:
    path = folder / names.TRAINING_CSV
    path.write_text(path.read_text().replace("\n7,", "\n8,"))


@pytest.mark.parametrize(
    ("spoil", "check"),
    [
        (lambda folder: (folder / names.TRAINING_CSV).unlink(), "csv_rows"),
        (lambda folder: (folder / names.heartbeat(0)).write_text(""), "progress_records"),
        (lambda folder: (folder / names.ENV).unlink(), "files"),
        (lambda folder: (folder / names.HALT).touch(), "halt_file"),
        (spoil_csv, "csv_agrees"),
    ],
)
def test_smoke_finds_what_is_missing_or_spoiled(tmp_path, spoil, check):
    spoil(write(tmp_path, noisy()))
    code, text = nsa("smoke", tmp_path)
    assert code == 1
    assert check in failed_checks(text)


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda step: {"loss": 2.0 + step / 100}, "loss_falling"),
        (lambda step: {"loss": float("nan") if step == 9 else 3 - step / 100}, "loss_finite"),
        (lambda step: {"reads_act_total": 1} if step == 9 else {}, "key_reads"),
        (lambda step: {"toks_per_s": 0.0} if step == 9 else {}, "throughput"),
    ],
)
def test_smoke_finds_a_run_that_did_not_train(tmp_path, change, check):
    code, text = nsa("smoke", write(tmp_path, record(a_run(60, change))))
    assert code == 1
    assert failed_checks(text)[0] == check


def test_smoke_accepts_steps_told_twice_after_a_rollback(tmp_path):
    beats = a_run(60)
    back = a_beat(names.ROLLED_BACK, 30, beats[-1].ts + 1)
    again = a_run(40, lambda step: {"loss": 2.0 - step / 100}, first=31, began=beats[-1].ts)[1:]
    write(tmp_path, record([*beats, back, *again]))
    assert nsa("smoke", tmp_path)[0] == 0


@pytest.mark.parametrize("seed", range(8))
def test_smoke_does_not_take_noise_for_learning(tmp_path, seed):
    """The mean of the last quarter lies below that of the first in half of all runs that learn nothing."""
    rng = random.Random(seed)
    nothing = record(a_run(60, lambda step: {"loss": 5.0 + rng.gauss(0, 0.1)}))
    little = record(a_run(60, lambda step: {"loss": 5.0 - 0.006 * step + rng.gauss(0, 0.1)}))
    for name, recording, learned in (("nothing", nothing, False), ("little", little, True)):
        (tmp_path / name).mkdir()
        text = nsa("smoke", write(tmp_path / name, recording), "--min-steps", 10)[1]
        (line,) = (line for line in text.splitlines() if "loss_falling" in line)
        assert line.startswith("ok" if learned else "FAILED"), line
