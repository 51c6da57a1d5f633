"""A frame fits its terminal and says what matters, whatever state the run is in; the live view leaves a clean one."""

import math
import os
import pty
import select
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.record.events import EventKind
from nsa_train.watch.conditions import CONDITIONS, HealthFinding
from nsa_train.watch.view.monitor_frame import frame
from nsa_train.watch.view.summary import SnapshotReader, take_snapshot
from nsa_train.watch.view.terminal_plot import plain_ascii
from proofs import import_path
from tests.nsa_train.record.beats import BEGAN, a_beat, a_run
from tests.nsa_train.record.written import of_ranks, with_layers, write_run

ROOT = Path(__file__).parents[4]
START = (EventKind.START, BEGAN, 0, {"world": 1})


def fresh(folder):
    return write_run(folder, [], [START])


def one_record(folder):
    return write_run(folder, a_run(1), [START])


def healthy(folder):
    """Still running."""
    began = time.time() - 2 * 600 - 25
    saves = [(EventKind.SAVE, began + 25 + 2 * step, step, {}) for step in range(100, 600, 100)]
    events = [(EventKind.START, began, 0, {"world": 1}), *saves]
    return write_run(folder, a_run(600, began=began), events, val=[(300, 3.6, 5.0, began + 620)])


def not_finite(folder):
    bad = {"loss": math.nan, "grad_norm": math.inf}
    return write_run(folder, a_run(60, lambda step: bad if step > 30 else {}, began=time.time() - 141))


def never_finite(folder):
    return write_run(folder, a_run(60, lambda step: {"loss": math.nan, "toks_per_s": None}))


def deep(folder):
    return write_run(folder, with_layers(a_run(20), 48))


def wide(folder):
    return write_run(folder, of_ranks(64, 5))


def finished(folder):
    beats = [*a_run(1000), a_beat(names.DONE, 1000, BEGAN + 2100)]
    return write_run(folder, beats, [START, (EventKind.DONE, BEGAN + 2100, 1000, {})])


def halted(folder):
    beats = [*a_run(50), a_beat(names.HALTED, 50, BEGAN + 130, detail=".HALT: enough")]
    (
        write_run(folder, beats, [START, (EventKind.HALT, BEGAN + 130, 50, {"reason": "enough " * 60})]) / names.HALT
    ).touch()
    return folder


def restarted(folder):
    beats = [*a_run(500), *a_run(300, first=301, began=BEGAN + 2000, pid=2)]
    return write_run(
        folder, beats, [START, (EventKind.RESTART, BEGAN + 2000, 300, {"world": 1, "origin": "a/step300"})]
    )


CASES = [fresh, one_record, healthy, not_finite, never_finite, deep, wide, finished, halted, restarted]


def drawn(make, folder, width=80, height=24) -> list[str]:
    return [line.plain for line in frame(take_snapshot(make(folder)), width, height)]


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (237, 71), (40, 12), (81, 36)])
@pytest.mark.parametrize("make", CASES)
def test_a_frame_fits_its_terminal(make, size, tmp_path):
    lines = frame(take_snapshot(make(tmp_path)), *size)
    assert len(lines) == size[1]
    assert {line.cell_len for line in lines} == {size[0]}
    assert all("\n" not in line.plain for line in lines)


@pytest.mark.parametrize("make", CASES)
def test_the_command_prints_one_frame_of_80_by_24(make, tmp_path):
    result = CliRunner().invoke(app, ["monitor", str(make(tmp_path)), "--once"])
    assert result.exit_code == 0, result.output
    assert "q quit" not in result.output
    lines = result.output.rstrip("\n").split("\n")
    assert len(lines) <= 24
    assert lines[-2].strip(), "no free lines before the last"
    assert max(map(len, lines)) <= 80
    assert "\x1b" not in result.output


def test_at_80_by_24_nothing_is_missing_or_cut(tmp_path):
    text = "\n".join(drawn(healthy, tmp_path / "run"))
    for words in ("loss", "tokens/s", "gates by layer", "compressed", "selected", "sliding", "collapsed 0 %",
                  "entropy", "selected 200/256 keys", "at max", "reads = predicted", "data wait 10 ms",
                  "GPU 29.3 GiB", "lr 3.00e-04", "findings", "events", "save", "q quit", "600 of 1,000",
                  "checkpoint at 500", "● running", "✓ no findings"):  # fmt: skip
        assert words in text, words
    assert "…" not in text


def test_at_80_by_24_what_does_not_fit_is_left_out_rather_than_cut(tmp_path):
    beats = a_run(60, lambda step: {"gate_collapse_frac": 0.0625})
    run = write_run(tmp_path, beats, [START], val=[(30, 3.361, 5.0, BEGAN + 70)], accuracy=0.3048)
    text = "\n".join(line.plain for line in frame(take_snapshot(run), 80, 24))
    assert "o 3.361 held out " in text
    assert "collapsed 6.2 %" in text
    assert "…" not in text.split("findings")[0]
    assert "accuracy 30 %" in "\n".join(line.plain for line in frame(take_snapshot(run), 140, 24))


def test_a_fresh_run_says_that_it_starts(tmp_path):
    text = "\n".join(drawn(fresh, tmp_path))
    assert "○ starting" in text
    assert "no record yet" in text


def test_what_is_not_finite_is_seen(tmp_path):
    text = "\n".join(drawn(not_finite, tmp_path))
    assert "×" in text
    assert "loss not finite" in text
    assert "✗ critical loss_nonfinite" in text


def test_a_restart_is_a_vertical_mark(tmp_path):
    assert sum("┊" in line for line in drawn(restarted, tmp_path)) >= 5
    assert not any("┊" in line for line in drawn(healthy, tmp_path / "h"))


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (finished, ("✓ finished", "step 1,000 of 1,000 · 100 %", "goodput", "this run has ended")),
        (halted, ("■ halted", ".HALT: no reason given")),
        (wide, ("1 critical", "heartbeat_stall (ranks 0, 1, 2, 3")),  # one finding for all ranks
    ],
)
def test_state_totals_and_findings_are_shown(make, shown, tmp_path):
    text = "\n".join(drawn(make, tmp_path))
    assert [words for words in shown if words not in text] == []


def test_many_layers_are_all_shown_where_there_is_room_and_as_a_strip_elsewhere(tmp_path):
    folder = deep(tmp_path)
    (compressed,) = [line.plain for line in frame(take_snapshot(folder), 80, 24) if line.plain.startswith("compressed")]
    assert sum(letter in "▁▂▃▄▅▆▇█" for letter in compressed) == 21  # 48 layers in the cells there are
    tall = [line.plain for line in frame(take_snapshot(folder), 160, 140)]
    assert sum(line.lstrip()[:2].strip().isdigit() and "cccc" in line for line in tall) == 48


def test_the_slowest_of_many_ranks_is_named(tmp_path):
    beats = [replace(beat, forward_s=9.0) if beat.rank == 17 and beat.loss else beat for beat in of_ranks(64, 5)]
    text = "\n".join(line.plain for line in frame(take_snapshot(write_run(tmp_path, beats)), 120, 40))
    assert "64 ranks · slowest 17: 9.0 s / 600 ms" in text


def test_findings_beyond_the_room_are_counted(tmp_path):
    snapshot = take_snapshot(healthy(tmp_path))
    snapshot.findings = [
        HealthFinding(condition, 3, 7, "value 9, limit 3") for condition in list(CONDITIONS.values())[:5]
    ]
    text = "\n".join(line.plain for line in frame(snapshot, 80, 24))
    assert "5 critical" in text
    assert "✗ critical heartbeat_stall (rank 3, step 7): value 9" in text
    assert "and 4 more: process_gone" in text


def test_text_of_files_cannot_control_the_terminal(tmp_path):
    folder = tmp_path / "run\x1b[2J\x07"
    write_run(folder, a_run(3), [START, (EventKind.ERROR, BEGAN + 9, 3, {"error": "\x1b]0;owned\x07\nnext"})])
    text = "".join(line.plain for line in frame(take_snapshot(folder), 80, 24))
    assert text.isprintable()


def test_a_terminal_without_unicode_gets_the_same_picture(tmp_path):
    lines = [plain_ascii(line) for line in frame(take_snapshot(restarted(tmp_path)), 80, 24)]
    assert all(line.plain.isascii() and len(line) == 80 for line in lines), [line.plain for line in lines]
    assert any("***" in line.plain for line in lines)


def test_a_second_frame_shows_new_records(tmp_path):
    reader = SnapshotReader(write_run(tmp_path, a_run(5), [START]))
    assert reader.read().run.lead.last["step"] == 5
    write_run(tmp_path, a_run(9)[6:])
    assert reader.read().run.lead.last["step"] == 9
    reader.close()


def test_the_live_view_sends_little_and_exits_at_q(tmp_path):
    finished(tmp_path)
    parent, child = pty.openpty()
    before = termios.tcgetattr(parent)[3]
    os.set_inheritable(child, True)
    environment = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": import_path(), "COLUMNS": "80", "LINES": "24"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "nsa_train.cli", "monitor", str(tmp_path)],
        stdin=child, stdout=child, stderr=child, env=environment, cwd=ROOT,
    )  # fmt: skip
    os.close(child)
    try:
        first = _read(parent, until=b"its last", patience_s=60) + _read_until_silent(parent)
        quiet = _read(parent, until=b"UTC", patience_s=60) + _read_until_silent(parent)
        os.write(parent, b"q")
        last = _read(parent, until=b"\x1b[?25h", patience_s=60)
        assert process.wait(60) == 0
        assert termios.tcgetattr(parent)[3] == before  # keys are echoed and taken by the line again
    finally:
        process.kill()
        os.close(parent)
    assert b"\x1b[?1049h" in first
    assert "✓ finished".encode() in first
    assert b"UTC" in quiet
    assert len(quiet) < 400, quiet  # the clock, and nothing else
    assert b"\x1b[?1049l" in last


def _read_until_silent(descriptor: int, silence_s: float = 0.3) -> bytes:
    """The rest of a frame: the clock in the next one follows after a second."""
    got = b""
    while more := _read(descriptor, until=None, patience_s=silence_s):
        got += more
    return got


def _read(descriptor: int, until: bytes | None, patience_s: float) -> bytes:
    got, end = b"", time.monotonic() + patience_s
    while (left := end - time.monotonic()) > 0 and not (until and until in got):
        if select.select([descriptor], [], [], left)[0]:
            try:
                got += os.read(descriptor, 65536)
            except OSError:  # the other side has closed
                break
    return got
