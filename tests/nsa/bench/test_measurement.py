"""The record, the table, the plot, the roof and the command."""

import json
import os
import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from nsa.bench import report, roofline
from nsa.bench.case import SHAPES, BenchTask, shape_named
from nsa.bench.correctness import CorrectnessCheck
from nsa.bench.implementations import DENSE
from nsa.bench.machine import available_cores, describe_machine, pinned, ratio, real_time_priority, require_real_time
from nsa.bench.measurement import BenchMeasurement, ImplementationResult, choose_implementations, finish
from nsa.bench.memory import measure_memory
from nsa.bench.roofline import MachinePeaks
from nsa.bench.train_step import measure_train
from nsa.errors import ConfigError
from tests import fork_server
from tests.ops.needs import root

ROOT = Path(__file__).parents[3]
BASE = SHAPES["base"]
RIGHT, WRONG = (
    CorrectnessCheck(True, {"out": 1e-7}, 1e-4),
    CorrectnessCheck(False, {"out": 0.5}, 1e-4, reason="differs"),
)


def entry(name: str, agreement: CorrectnessCheck = RIGHT) -> ImplementationResult:
    return ImplementationResult(name, "dense" if name == DENSE else "nsa", agreement=agreement)


def figure(length: int, dense_s: list[float], our_s: list[float], ours: CorrectnessCheck = RIGHT) -> BenchMeasurement:
    task = BenchTask("attention", BASE, length, "fp32")
    entries = {DENSE: entry(DENSE), "portable": entry("portable", ours)}
    samples = {DENSE: dense_s, "portable": our_s}
    return BenchMeasurement(
        task, "random", 2, *roofline.allowed(task), [finish(e, samples, entries, task, None) for e in entries.values()]
    )


def test_flops_allowed_are_keys_read_against_keys_before():
    read = sum(BASE.geometry.reads(t) for t in range(1, 3001))
    for backward in (False, True):
        bound, allowed = roofline.allowed(BenchTask("attention", BASE, 3000, "fp32", backward))
        assert (bound, allowed) == ("FLOPs", pytest.approx(3000 * 3001 / 2 / read))


def test_bytes_allow_what_one_token_reads():
    bound, allowed = roofline.allowed(BenchTask("decode", BASE, 64_000, "bf16"))
    assert (bound, allowed) == ("bytes", pytest.approx(64_000 / 5_535, rel=1e-3))


def test_a_round_with_real_time_priority_gives_it_back_and_pauses(monkeypatch):
    root()
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def policies() -> set[int]:
        return {os.sched_getscheduler(int(thread)) for thread in os.listdir("/proc/self/task")}

    torch.ones(1 << 20).sum()  # in several threads
    with real_time_priority():
        assert policies() == {os.SCHED_FIFO}
    assert policies() == {os.SCHED_OTHER}
    assert len(pauses) == 1
    assert 0 < pauses[0] <= 30


def test_real_time_priority_that_is_not_granted_is_refused_before_anything_is_timed(monkeypatch):
    def denied(*_: object) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", denied)
    with pytest.raises(ConfigError, match="--real-time"):
        require_real_time()


@pytest.mark.parametrize(
    ("load", "real_time", "said"), [(0.9, False, None), (3.0, False, "not"), (3.0, True, "before")]
)
def test_a_busy_machine_is_named_and_what_protects_from_it(load, real_time, said):
    remark = report.busy({"load_average": [load, load, load], "cores": 2, "real_time": real_time})
    assert remark is None if said is None else said in remark.split()


def test_achieved_is_the_share_of_the_measured_peak():
    peaks = MachinePeaks(1, fp32_gflops=100.0, bf16_gflops=400.0, copy_gb_s=10.0, read_gb_s=10.0)
    task = BenchTask("attention", BASE, 1000, "fp32")
    dense = 2 * 12 * 128 * 1000 * 1001 / 2
    assert roofline.flops(task, "dense") == dense
    assert roofline.achieved(task, "dense", dense / 50e9, peaks) == pytest.approx(0.5)
    decode = BenchTask("decode", BASE, 1000, "bf16")
    assert roofline.bytes_read(decode, "dense") == 1000 * 2 * 128 * 2
    assert roofline.achieved(decode, "dense", 1000 * 2 * 128 * 2 / 5e9, peaks) == pytest.approx(0.5)


def test_ratio_and_median_of_a_figure():
    shown = {e.name: e for e in figure(2048, [4.0, 6.0, 8.0], [2.0, 2.0, 2.0]).entries}
    assert shown["portable"].ratio == ratio([4.0, 6.0, 8.0], [2.0, 2.0, 2.0])
    assert shown["portable"].ratio.median == 3.0
    assert shown[DENSE].time_s.median == 6.0


def test_the_table_shows_no_ratio_for_a_wrong_answer():
    wrong = figure(2048, [4.0], [2.0], WRONG)
    ours = report.rows(wrong)[1]
    assert "withheld" in ours
    assert not any(re.fullmatch(r"\d+\.\d\d \(.*", cell) for cell in ours)
    assert report.notes(wrong) == ["portable: ratio withheld, differs."]
    assert "2.00 (2.00–2.00)" in report.rows(figure(2048, [4.0], [2.0]))[1]


def test_the_record_has_machine_commit_and_every_sample():
    record = report.BenchReport("nsa bench", describe_machine(), figures=[figure(2048, [4.0, 5.0], [2.0, 2.5])])
    body = json.loads(record.to_json())
    assert body["schema"] == report.SCHEMA
    machine = body["machine"]
    assert {"cpu", "cores", "isa", "torch", "commit", "uncommitted_changes", "load_average", "time"} <= machine.keys()
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    if head.returncode == 0:
        assert machine["commit"] == head.stdout.strip()
    (dense, ours) = body["figures"][0]["entries"]
    assert dense["samples_s"] == [4.0, 5.0]
    assert (ours["rounds"], ours["ratio"]["median"], ours["agreement"]["agrees"]) == (2, 2.0, True)
    assert "portable" in record.to_markdown()
    assert (machine["commit"] or "unknown")[:10] in record.to_markdown()


def test_the_plot_is_svg_and_leaves_withheld_ratios_out():
    figures = [figure(2048, [4.0], [8.0]), figure(4096, [4.0], [2.0]), figure(8192, [4.0], [1.0], WRONG)]
    record = report.BenchReport("nsa bench", describe_machine(), figures=figures)
    assert list(report.lines(record)[0].values()) == [{2048: (0.5, 0.5, 0.5), 4096: (2.0, 2.0, 2.0)}]
    ElementTree.fromstring(report.draw(record))


def test_threads_are_held_to_as_many_cores_and_given_back():
    import torch

    cores, threads = available_cores(), torch.get_num_threads()
    with pinned(1):
        assert (len(available_cores()), torch.get_num_threads()) == (1, 1)
    assert (available_cores(), torch.get_num_threads()) == (cores, threads)
    with pytest.raises(ConfigError, match="--threads"), pinned(len(cores) + 1):
        pass


def test_a_training_step_is_checked_and_timed_against_the_dense_model():
    task = BenchTask("train", SHAPES["tiny"], 64, "bf16", backward=True)
    measured = measure_train(
        task, choose_implementations(["portable"], False), threads=1, budget_s=0.0, log=lambda text: None,
        n_layers=1, dim=24, vocabulary=64,
    )  # fmt: skip
    dense, ours = measured.entries
    assert dense.agreement.agrees, dense.agreement.reason
    assert ours.ratio is not None, ours.refused
    assert "blocks.0.attention.w_k.weight" in ours.agreement.errors


def test_memory_is_measured_above_the_inputs_in_a_child():
    (implementation,) = choose_implementations(["portable"], False)[1:]
    task = BenchTask("attention", BASE, 1024, "fp32", backward=True)
    measured = measure_memory(implementation, task, "base", threads=1, timeout_s=120)
    assert measured["absent"] == ""
    outputs_mib = (2 * 1024 * 768 + 4 * 2 * 1024 * 64) * 4 / 2**20  # outputs and gradients of the largest inputs
    assert outputs_mib < measured["peak_mib"] < 40 * outputs_mib


def test_the_command_prints_a_table_and_writes_record_and_plot(tmp_path):
    words = ["bench", "decode", "--lengths", "100", "--dtype", "fp32", "--shape", "tiny", "--threads", "1",
             "--budget-s", "0", "--json", str(tmp_path / "r.json"), "--plot", str(tmp_path / "r.svg")]  # fmt: skip
    done = fork_server.run(["-m", "nsa_train.cli", *words], cwd=ROOT, env=os.environ, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "× dense" in done.stdout
    assert "portable" in done.stdout
    assert json.loads((tmp_path / "r.json").read_text())["figures"][0]["entries"][1]["ratio"]["median"] > 0
    ElementTree.parse(tmp_path / "r.svg")


def test_an_unknown_value_is_refused_with_the_known_ones():
    words = ["-m", "nsa_train.cli", "bench", "attention", "--shape", "huge"]
    done = fork_server.run(words, cwd=ROOT, env=os.environ, timeout=120)
    assert done.returncode == ConfigError.exit_code
    assert "base, gqa16, paper, tiny" in done.stderr


def test_the_base_shape_keeps_its_former_name():
    assert shape_named("seed") is shape_named("base") is SHAPES["base"]
