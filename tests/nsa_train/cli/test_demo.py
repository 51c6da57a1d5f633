"""`nsa demo` stops at Ctrl-C and continues, finished work is not repeated; maps of the selection fit the terminal.

What it trains, writes and draws is checked in tests/docs/test_user_pages.py: it is a block of README.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa_train.infer.selection_map import _SelectionMap, _share_of_groups, _text_rows, side_by_side
from tests import fork_server
from tests.nsa_train.train.runs import environment

COMMAND = [sys.executable, "-m", "nsa_train.cli", "demo", "d", "--steps"]


def run_demo(folder: Path, steps: int) -> str:
    done = fork_server.run([*COMMAND[1:], str(steps)], cwd=folder, env=environment(), timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_demo_stops_and_continues(tmp_path):
    started = subprocess.Popen([*COMMAND, "2000"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 300
    for line in started.stdout:
        assert time.monotonic() < end
        if line.startswith("step "):
            break
    os.kill(started.pid, signal.SIGINT)
    rest, _ = started.communicate(timeout=200)
    assert started.returncode == 10
    assert "run the same command again" in rest
    stopped_at = max(int(path.name.removeprefix("step")) for path in (tmp_path / "d/run/checkpoints").glob("step*"))
    output = run_demo(tmp_path, stopped_at + 2)
    assert "--resume" in output
    assert "nsa data prepare d/text" not in output  # it was done before


def test_a_map_shows_the_share_of_groups_that_chose_a_block():
    idx_SGN = torch.tensor([[[0, -1], [0, -1]], [[0, 1], [0, -1]]])
    share = _share_of_groups(idx_SGN, 2)
    assert share.tolist() == [[1.0, 0.0], [1.0, 0.5]]
    assert _text_rows(_SelectionMap(0, share, 1)) == ["██  ", "██▒▒"]


@pytest.mark.parametrize(("columns", "lines"), [(80, 2), (40, 4), (10, 8)])
def test_maps_are_not_wider_than_the_terminal(columns, lines):
    maps = [_SelectionMap(layer, torch.ones(1, 8), 16) for layer in range(4)]
    shown = list(side_by_side(maps, columns))
    assert len(shown) == lines
    assert all(len(line) <= max(columns, 16) for line in shown)
    assert sum(line.count("layer") for line in shown) == 4
