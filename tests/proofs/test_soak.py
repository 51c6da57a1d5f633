"""The soak: slopes, and a short one of real processes that notices what ends and what grows."""

import os
import signal
import subprocess
import sys

import pytest

from nsa_train.record.events import EventKind, add_event
from proofs import soak


def test_a_slope_is_that_of_the_second_half():
    times = [float(s) for s in range(100)]
    assert soak.slope(times, [5.0] * 100) == 0.0
    assert soak.slope(times, [min(t, 50.0) for t in times]) == pytest.approx(0.0)  # a warm-up is no growth
    assert soak.slope(times, [2.0 * t for t in times]) == pytest.approx(2.0)
    assert soak.slope([1.0], [1.0]) == 0.0


_FAMILY = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(60)"],
                         stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_process_is_sampled_with_its_descendants():
    parent = subprocess.Popen([sys.executable, "-c", _FAMILY], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        alone, both = soak.ProcessSeries("child", child), soak.ProcessSeries("both", parent.pid)
        alone.sample(0.0)
        both.sample(0.0)
    finally:
        os.kill(child, signal.SIGKILL)
        parent.kill()
        parent.wait()
    assert alone.values["processes"] == [1]
    assert both.values["processes"] == [2]
    assert both.values["MiB"][0] > alone.values["MiB"][0] > 1
    both.sample(1.0)
    assert both.times == [0.0]  # nothing is recorded of a process that is gone


def rows_of(grows: float) -> tuple[list[soak.ProcessSeries], list[dict[str, float]]]:
    series = soak.ProcessSeries("nsa watch", 1)
    for second in range(200):
        series.times.append(float(second))
        for name, values in series.values.items():
            values.append(10.0 + (grows * second if name == "open files" else 0.0))
    files = [{"s": float(s), "checkpoints": 3.0, "heartbeat_rank0.jsonl": 100.0 * s} for s in range(200)]
    files.append({**files[-1], "step": 199.0})
    return [series], files


@pytest.mark.parametrize(("grows", "expected"), [(0.0, []), (0.1, ["nsa watch: open files grows by 12.0 per hour"])])
def test_growth_is_named_per_compressed_hour(tmp_path, grows, expected):
    series, files = rows_of(grows)
    table = soak._table(series, files, 30.0, [], tmp_path)
    assert table["grew"] == expected
    assert table["bytes per step"] == {"heartbeat_rank0.jsonl": 100.0}
    assert table["compressed hours"] == 1.66
    assert table["findings"] == []


def test_a_finding_of_the_watchdog_is_named(tmp_path):
    (tmp_path / "run").mkdir()
    add_event(tmp_path / "run", EventKind.FINDING, ts=1.0, step=3, condition="loss_plateau")
    assert soak._table(*rows_of(0.0), 30.0, [], tmp_path)["findings"] == ["loss_plateau"]


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_short_soak_of_real_processes(tmp_path):
    pytest.importorskip("olmo_core", reason="the engine is in the train extra")
    table = soak.soak(tmp_path, minutes=2.0, speed=30.0)
    assert table["ended"] == []
    assert table["steps"] > 20
    assert [row["process"] for row in table["processes"]] == [
        "nsa train", "nsa watch", "nsa exporter", "nsa monitor", "prometheus",
    ]  # fmt: skip
