"""Times of the gate: what pytest records of tests, fixtures and processes, and how it is summed up."""

import subprocess
import sys
from pathlib import Path

import pytest

from tools.gate_times import TimeRecord, program, read_records, totals

ROOT = Path(__file__).parents[2]
TESTS = """
import subprocess, sys, pytest

@pytest.fixture(scope="module")
def prepared():
    subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)

def test_one(prepared): pass
def test_two(prepared): pass
"""


def test_tests_fixtures_and_processes_are_recorded(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    words = ["-p", "tools.gate_times", "--times", str(tmp_path / "times.jsonl"), str(tmp_path / "test_it.py")]
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", *words], cwd=ROOT, check=True)
    records = read_records(tmp_path / "times.jsonl")
    fixture, (first, second) = (
        next(record for record in records if record.name.endswith("::prepared")),
        [record for record in records if record.kind == "test"],
    )
    assert fixture.kind == "fixture"
    assert 0 < fixture.cpu_s <= first.cpu_s, "a process that was waited for counts"
    assert second.cpu_s < first.cpu_s
    assert [record.name for record in records if record.kind == "process"] == ["python -c"]


def test_sums_by_folder_are_sorted_by_wall_time():
    records = [TimeRecord("test", f"tests/{name}/test_x.py::test_y", 1.0, 0.5) for name in ("a", "b", "b")]
    assert totals(records, depth=2) == [("tests/b", 2, 2.0, 1.0), ("tests/a", 1, 1.0, 0.5)]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["/venv/bin/python3.11", "-m", "nsa_train.cli", "train", "x.yaml"], "nsa train"),
        (["/venv/bin/nsa", "report", "run"], "nsa report"),
        ([b"python", b"-m", b"proofs.soak"], "python -m proofs.soak"),
        (["/usr/bin/git", "status"], "git"),
        ("true", "true"),
    ],
)
def test_a_command_has_a_short_name(command, name):
    assert program(command) == name
