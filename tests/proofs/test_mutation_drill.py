"""The mutation drill reports what its tests catch, what survives, and what could not be planted."""

import json
import os
import platform
import re
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proofs import import_path, mutation_drill
from proofs.planting.warm_pytest import WarmPytest
from tests.mutations import Mutation, MutationTable

VALUES = ("test_errors.py::test_the_values_never_change",)
CODES = "exit codes keep their values"
BUGS = [
    Mutation("errors: another value", CODES, "ExitCode", "PREEMPTED = 10, $$text", "PREEMPTED = 99, $$text", VALUES),
    Mutation("errors: another text", CODES, "ExitCode", 'DONE = $$n, "finished"', 'DONE = $$n, "ended"', VALUES),
    Mutation("errors: a code that is not there", CODES, "ExitCode", "GONE = $$n, $$text", "pass", VALUES),
]


@pytest.fixture(autouse=True)
def _tables(monkeypatch):
    monkeypatch.setattr(mutation_drill, "load_tables", lambda: [MutationTable("errors", "Bugs.", BUGS)])


def drill(monkeypatch, *args: str) -> int:
    monkeypatch.setattr("sys.argv", ["mutation_drill", *args])
    with pytest.raises(SystemExit) as ended:
        mutation_drill.main()
    return int(ended.value.code or 0)


def test_a_line_for_each_and_the_survivors_at_the_end(monkeypatch, capsys):
    source = (mutation_drill.ROOT / "packages/nsa-attention/nsa/errors.py").read_bytes()
    assert drill(monkeypatch, "-n", "1") == 1
    progress, _, summary = capsys.readouterr().out.partition("\n\n")
    lines = progress.splitlines()
    assert [line.split()[1:3] for line in lines] == [["1/3]", "caught"], ["2/3]", "SURVIVED"], ["3/3]", "INVALID"]]
    assert all("min left" in line for line in lines)
    assert [line.split(" (")[0] for line in summary.splitlines()[1:]] == [
        "SURVIVED: errors: another text",
        "INVALID: errors: a code that is not there",
    ]
    assert (mutation_drill.ROOT / "packages/nsa-attention/nsa/errors.py").read_bytes() == source


def test_exit_code_0_if_all_are_caught(monkeypatch):
    assert drill(monkeypatch, "errors", "-k", "another value") == 0


def test_check_lists_stale_rows_and_show_the_lines(monkeypatch, capsys):
    assert drill(monkeypatch, "--check") == 1
    stale, count = capsys.readouterr().out.splitlines()
    assert stale == "INVALID: errors: a code that is not there: `find` matches 0 places in ExitCode, not one"
    assert count == "2 of 3 can be planted"
    mutation_drill.show(BUGS[:1])
    assert '+    PREEMPTED = 99, "stopped' in capsys.readouterr().out


def test_rows_of_a_file_with_those_that_fit_nowhere(monkeypatch):
    assert mutation_drill.chosen([], "", ["packages/nsa-attention/nsa/errors.py"]) == BUGS
    assert mutation_drill.chosen([], "", ["packages/nsa-attention/nsa/geometry.py"]) == BUGS[2:]


@pytest.mark.parametrize("args", [["no_such_table"], ["-k", "no such name"]])
def test_a_choice_of_nothing_is_an_error(monkeypatch, args):
    assert drill(monkeypatch, *args) == 2


def test_help_describes_tables_results_and_exit_codes(monkeypatch, capsys):
    assert drill(monkeypatch, "--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("errors", "3 mutations", "caught", "SURVIVED", "INVALID", "exit code"))


def test_programs_that_tests_start_import_the_tree_of_the_tests():
    """With the folder of a copy alone in PYTHONPATH a program imports the installed packages, which have no bug."""
    tests = (mutation_drill.ROOT / "tests").rglob("*.py")
    wrong = [path.name for path in tests if re.search(r'"PYTHONPATH": (str\(|["\'])', path.read_text(encoding="utf-8"))]
    assert wrong == [], "import_path() of proofs has the packages too"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags of x86")
def test_kernels_with_bugs_fuse_products_and_sums_as_without(tmp_path):
    """With -O1 alone three bugs of rounding survived, which the tests catch in what users compile."""
    (text,) = mutation_drill.faster_builds(mutation_drill.ROOT).values()
    (tmp_path / "build.py").write_text(text)
    build = runpy.run_path(str(tmp_path / "build.py"))
    (tmp_path / "fused.cpp").write_text("float fused(float a, float b, float c) { return a * b - c; }")
    command = [build["_compiler"](), *build["FLAGS"], *build["X86_FLAGS"]["isa_avx2"], "-S", "-o", "-", "fused.cpp"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "-O3" not in command
    assert "vfmsub" in done.stdout


LEAVES_A_CHILD = """
import os, time
from pathlib import Path

def test_it():
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            Path("pid").write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not (Path("pid").exists() and Path("pid").read_text()):
        time.sleep(0.01)
    while Path("wait").exists():
        time.sleep(0.01)
    assert False
"""
WORDS = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "test_some.py"]


def test_no_process_of_a_run_outlives_it(tmp_path):
    """Such as ranks that wait for each other without end because of the planted bug."""
    (tmp_path / "test_some.py").write_text(LEAVES_A_CHILD)
    warm = WarmPytest(tmp_path, {**os.environ, "PYTHONPATH": import_path()}, preloaded=())
    try:
        code, output = warm.run(WORDS)
        pid = (tmp_path / "pid").read_text()
        assert (code, Path("/proc", pid).exists()) == (1, False), output
    finally:
        warm.close()


def test_no_process_outlives_a_drill_that_is_killed(tmp_path):
    (tmp_path / "test_some.py").write_text(LEAVES_A_CHILD)
    (tmp_path / "wait").touch()
    environ = {**os.environ, "PYTHONPATH": import_path()}
    program = (
        "import json, os, sys, pathlib\n"
        "from proofs.planting.warm_pytest import WarmPytest\n"
        "WarmPytest(pathlib.Path(sys.argv[1]), dict(os.environ), preloaded=()).run(json.loads(sys.argv[2]))\n"
    )
    pid = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", program, str(tmp_path), json.dumps(WORDS)], env=environ) as drill:
        wait_until(lambda: pid.exists() and pid.read_text())
        drill.kill()
    wait_until(lambda: not Path("/proc", pid.read_text()).exists())


def wait_until(holds) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
