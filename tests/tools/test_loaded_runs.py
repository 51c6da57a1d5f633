"""Repeated runs on a busy machine: failures are counted by name, and a run without tests is no success."""

import signal
import sys

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


def loaded(monkeypatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["loaded_runs", "--loops", "1", *map(str, words)])
    return loaded_runs.main()


def test_a_test_that_fails_once_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / "test_some.py").write_text(FLAKY.format(folder=str(tmp_path)))
    assert loaded(monkeypatch, 2, "-n", "0", "-c", "/dev/null", tmp_path) == 1
    first, second, total, name = capsys.readouterr().out.splitlines()
    assert first.startswith("run 1 of 2: 2 tests, 0 failed")
    assert second.startswith("run 2 of 2: 2 tests, 1 failed")
    assert total == "2 runs beside 1 busy loops, 1 failures"
    assert name.split()[0] == "1"
    assert name.endswith("::test_flaky")


def test_no_test_at_all_is_a_failure(tmp_path, monkeypatch):
    assert loaded(monkeypatch, 1, "-n", "0", "-c", "/dev/null", tmp_path) == 1


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
                      '<testcase classname="a.b" name="d"/></testsuite></testsuites>')  # fmt: skip
    assert loaded_runs.read_report(report) == (2, ["a.b::c"])
