"""Progress of a run: one line in a real terminal, a line per record in a pipe, and the next command at the end."""

import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from nsa_train.cli.main import app
from nsa_train.cli.train import _progress, _RunPace
from proofs import import_path

RUN = """
from types import SimpleNamespace
from nsa_train.cli.train import console_reporter
from nsa_train.record.heartbeat_record import HeartbeatRecord

def beat(step, ts, msg="progress", **more):
    reporter.beat(HeartbeatRecord.now(
        ts=ts, rank=0, step=step, msg=msg, loss=3.25, toks_per_s=1234.0, lr=3e-4, grad_norm=0.5, **more), 100)

def evaluation(step):
    reporter.evaluation(SimpleNamespace(step=step, val_loss=3.5, tokens=32640, val_accuracy=0.25))

reporter = console_reporter()
reporter.line("the data")
beat(1, 100.0)
beat(25, 112.0)
beat(30, 115.0, "alive")
beat(50, 125.0)
evaluation(50)
beat(51, 126.0, "skipped_step", detail="loss is nan")
beat(75, 137.0)
beat(100, 150.0)
evaluation(100)
reporter.line("done")
reporter.close()
"""
PERMANENT = [
    "the data",
    "step 50 · held-out loss 3.5000 nats/token over 32,640 tokens · accuracy 25.00%",
    "skipped_step at step 51: loss is nan",
    "step 100 · held-out loss 3.5000 nats/token over 32,640 tokens · accuracy 25.00%",
    "done",
]


def in_a_terminal(columns: int) -> str:
    """Everything that a process with this terminal wrote."""
    here, terminal = pty.openpty()
    environ = os.environ | {"PYTHONPATH": import_path(), "COLUMNS": str(columns), "TERM": "xterm", "LINES": "50"}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], env=environ, stdin=terminal, stdout=terminal, stderr=terminal
    )
    os.close(terminal)
    written = b""
    while True:
        try:
            written += (piece := os.read(here, 4096))
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
    os.close(here)
    assert process.wait(timeout=120) == 0, written.decode()
    return written.decode()


def frames(written: str) -> list[list[str]]:
    """The lines on the screen after every control sequence: text, carriage return, line feed, erase, cursor up."""
    lines, row, column, shown = [""], 0, 0, []
    for part in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", written):
        if part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif part == "\x1b[2K":
            lines[row] = ""
        elif re.fullmatch(r"\x1b\[\d*A", part):
            row -= int(part[2:-1] or 1)
        elif not part.startswith("\x1b"):
            lines[row] = lines[row][:column].ljust(column) + part + lines[row][column + len(part) :]
            column += len(part)
        shown.append([line.rstrip() for line in lines if line.strip()])
    return shown


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_a_terminal_shows_a_bar_on_one_line(columns):
    shown = frames(in_a_terminal(columns))
    records = [[line for line in lines if re.search(r"step \d+/100", line)] for lines in shown]
    assert max(map(len, records)) == 1
    assert max(len(line) for lines in records for line in lines) <= columns
    (last,) = records[-1]
    assert "step 100/100 · loss 3.2500 nats/token" in last
    assert [line for line in shown[-1] if line != last] == PERMANENT
    if columns >= 80:
        assert re.match(r"━{6,30} step 100/100", last)
        assert "1,234 tokens/s" in last
        assert "left" in last


def test_a_pipe_gets_plain_lines():
    environ = os.environ | {"PYTHONPATH": import_path()}
    done = subprocess.run([sys.executable, "-c", RUN], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert "\r" not in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if "/100" not in line] == PERMANENT
    records = [line for line in lines if "/100" in line]
    assert [re.match(r"step (\d+)", line)[1] for line in records] == ["1", "25", "50", "75", "100"]
    assert records[0] == "step 1/100 · loss 3.2500 nats/token · lr 3.00e-04 · grad 0.500"
    left = [line.rpartition(" · ")[2] for line in records[1:]]
    assert left == ["38 s left", "26 s left", "12 s left", "0 s left"]


def record(step: int, ts: float) -> SimpleNamespace:
    return SimpleNamespace(step=step, ts=ts)


def test_time_left_excludes_the_preparations_of_the_first_step_and_includes_evaluations():
    pace = _RunPace()
    assert pace.seconds_left(record(1, 60.0), 101) is None
    assert pace.seconds_left(record(21, 80.0), 101) == 80.0
    assert pace.seconds_left(record(41, 140.0), 101) == 120.0, "an evaluation of 40 s between them"


def test_time_left_after_a_rollback_or_with_a_clock_set_back_is_a_time():
    pace = _RunPace()
    times = [pace.seconds_left(record(*each), 101) for each in ((11, 0.0), (21, 10.0), (31, 20.0), (21, 40.0))]
    assert times == [None, 80.0, 70.0, 320.0]
    assert pace.seconds_left(record(31, -500.0), 101) == 0.0


def test_the_unit_of_the_loss_stays_on_every_width_that_shows_the_loss():
    beat = SimpleNamespace(step=12, loss=3.14159, toks_per_s=1234567.0, lr=3e-4, grad_norm=1.25)
    for width in range(20, 120):
        line = _progress(beat, 500, 12.5, width)
        assert ("loss" in line) == ("nats/token" in line)


@pytest.mark.parametrize("with_text", [True, False])
def test_training_ends_with_the_next_command(with_text, tmp_path, monkeypatch):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    monkeypatch.setattr("nsa_train.train.run.train", lambda *_: 0)
    folder = tmp_path / "my run"
    folder.mkdir()
    if with_text:
        (folder / "tokenizer.json").write_text("{}")
    words = ["train", "configs/cpu_quickstart.yaml", "data.dataset=synthetic", f"train.out_dir={folder}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    generate = f"nsa generate '{folder}' --prompt \"The\", or " if with_text else ""
    assert result.stdout.splitlines()[-1] == f"next: {generate}nsa report '{folder}'"


@pytest.mark.parametrize("code", [10, 11])
def test_a_run_that_stopped_offers_no_model(code, tmp_path, monkeypatch):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    monkeypatch.setattr("nsa_train.train.run.train", lambda *_: code)
    words = ["train", "configs/cpu_quickstart.yaml", "data.dataset=synthetic", f"train.out_dir={tmp_path}"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == code
    assert "next:" not in result.stdout
