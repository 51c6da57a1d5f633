"""Repeated runs on a busy machine: failures are counted by name, earlier runs count, one of no tests is no success."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest

from tools import loaded_runs

FLAKY = """
from pathlib import Path

def test_steady():
    pass

def test_flaky():
    met = Path({folder!r}) / "met"
    first = not met.exists()
    met.touch()
    assert first
"""


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Run the tool on a folder of tests beside one loop; its record is kept for the next call."""
    (tmp_path / "tests").mkdir()

    def run(*words: object) -> int:
        words = ("--loops", 1, "--record", tmp_path / "runs.jsonl", *words, "-n", 0, "-c", "/dev/null")
        monkeypatch.setattr(sys, "argv", ["loaded_runs", *map(str, words), str(tmp_path / "tests")])
        return loaded_runs.main()

    return run


def test_a_test_that_fails_once_is_named(tmp_path, loaded, capsys):
    (tmp_path / "tests/test_some.py").write_text(FLAKY.format(folder=str(tmp_path)))
    assert loaded(2) == 1
    first, second, total, name = capsys.readouterr().out.splitlines()
    assert first.startswith("run 1 of 2: 2 tests, 0 failed")
    assert second.startswith("run 2 of 2: 2 tests, 1 failed")
    assert total.startswith("2 of 2 runs at ")
    assert total.endswith(" beside 1 busy loops, 1 failures")
    assert name.split()[0] == "1"
    assert name.endswith("::test_flaky")


def test_the_next_call_continues_after_the_time_limit(tmp_path, loaded, capsys):
    (tmp_path / "tests/test_some.py").write_text(FLAKY.format(folder=str(tmp_path)))
    assert loaded(2, "--minutes", 0) == 0
    first, total = capsys.readouterr().out.splitlines()
    assert first.startswith("run 1 of 2: 2 tests, 0 failed")
    assert total.startswith("1 of 2 runs at ")
    assert loaded(2, "--minutes", 0) == 1
    second, total, _ = capsys.readouterr().out.splitlines()
    assert second.startswith("run 2 of 2: 2 tests, 1 failed")
    assert total.startswith("2 of 2 runs at ")
    assert loaded(2) == 1  # none is left; the recorded failure still counts
    assert capsys.readouterr().out.splitlines()[0] == total


def test_runs_of_another_commit_or_load_do_not_count(tmp_path):
    run = loaded_runs.LoadedRun("one", ["tests"], 4, 3, [], 1.0, 6.5)
    record = tmp_path / "runs.jsonl"
    others = (run._replace(commit="two"), run._replace(loops=2))
    record.write_text("".join(json.dumps(each._asdict()) + "\n" for each in (run, *others)))
    assert loaded_runs.read_record(record, "one", 4) == [run]


def test_busy_loops_are_seen_as_load():
    sampler = loaded_runs.RunnableSampler()
    with loaded_runs.busy_loops(3) as loops:
        deadline = time.monotonic() + 60
        while not all(is_runnable(loop.pid) for loop in loops):
            assert time.monotonic() < deadline, "the loops do not run"
            time.sleep(0.01)
        sampler.start()
        load = sampler.stop()
    assert load >= 3


def is_runnable(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "R"


def test_no_test_at_all_is_a_failure(loaded):
    assert loaded(1) == 1


def test_the_loops_end_with_the_block():
    with loaded_runs.busy_loops(2) as loops:
        assert [loop.poll() for loop in loops] == [None, None]
    assert [loop.returncode for loop in loops] == [-signal.SIGKILL] * 2


def test_the_process_tests_are_there():
    assert [folder for folder in loaded_runs.PROCESS_TESTS if not (loaded_runs.ROOT / folder).is_dir()] == []


@pytest.mark.parametrize("kind", ["failure", "error"])
def test_failures_and_errors_are_read(tmp_path, kind):
    report = tmp_path / "report.xml"
    report.write_text(f'<testsuites><testsuite><testcase classname="a.b" name="c"><{kind}/></testcase>'
                      '<testcase classname="a.b" name="d"/><testcase classname="a.b" name="e"><skipped/></testcase>'
                      "</testsuite></testsuites>")  # fmt: skip
    assert loaded_runs.read_report(report) == (2, ["a.b::c"])
