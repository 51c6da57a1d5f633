"""Repeats tests on a busy machine: they run again and again beside loops that take all the CPU time they get.

    python -m tools.loaded_runs 10                         the process tests, ten times beside four loops
    python -m tools.loaded_runs 3 --loops 8 tests/nsa_train/train/launch     other tests; words go to pytest

Prints a line per run, then how often each test failed. The exit code is 1 if one did, or if no test was run.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PROCESS_TESTS = tuple(
    f"tests/{folder}"
    for folder in ("nsa_train/train", "proofs/drill", "nsa_train/record", "nsa_train/watch", "nsa_train/checkpoint")
)
"""Tests of processes, signals, files and clocks."""
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Ends with the process that started it, however that ends."""


class LoadedRun(NamedTuple):
    tests: int
    failed: list[str]
    wall_s: float


@contextmanager
def busy_loops(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(number)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_tests(words: Sequence[str]) -> LoadedRun:
    """Run pytest once, two processes as in .ci/run. What it prints is shown if a test failed."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        tests, failed = read_report(report) if report.exists() else (0, ["pytest itself"])
    if failed:
        sys.stderr.write(done.stdout + done.stderr)
    return LoadedRun(tests, failed, time.monotonic() - began)


def read_report(report: Path) -> tuple[int, list[str]]:
    """Number of tests, and the names of those that failed; a module that cannot be imported is one."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return len(cases), sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, nargs="?", default=10)
    parser.add_argument("--loops", type=int, default=4, help="busy loops beside the tests")
    arguments, words = parser.parse_known_args()
    runs: list[LoadedRun] = []
    with busy_loops(arguments.loops):
        for number in range(1, arguments.runs + 1):
            runs.append(run_tests(words or PROCESS_TESTS))
            tests, failed, wall_s = runs[-1]
            print(f"run {number} of {arguments.runs}: {tests} tests, {len(failed)} failed, {wall_s:.0f} s", flush=True)
    failures = Counter(name for run in runs for name in run.failed)
    print(f"{len(runs)} runs beside {arguments.loops} busy loops, {failures.total()} failures")
    for name, count in failures.most_common():
        print(f"{count:>4}  {name}")
    return int(bool(failures) or not all(run.tests for run in runs))


if __name__ == "__main__":
    sys.exit(main())
