"""Repeats tests on a busy machine: they run again and again beside loops that take all the CPU time they get.

    python -m tools.loaded_runs 10                  the process tests, a folder at a time, ten times beside four loops
    python -m tools.loaded_runs 10 --minutes 30     no further folder after half an hour; the next call continues
    python -m tools.loaded_runs 3 --loops 8 tests/nsa_train/train/launch     other tests; words go to pytest

Every run is recorded with its commit in artifacts/loaded_runs.jsonl (--record), and counts towards the number asked for
as long as commit, tests and loops are the same. Prints a line per run, with the mean number of processes that had a
processor or waited for one, those of other work included; then how often each test failed in all recorded runs. The
exit code is 1 if one did, or if a run had no tests.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from nsa.files import git_commit

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "artifacts" / "loaded_runs.jsonl"
PROCESS_TESTS = tuple(
    f"tests/{folder}"
    for folder in ("nsa_train/train", "proofs/drill", "nsa_train/record", "nsa_train/watch", "nsa_train/checkpoint")
)
"""Tests of processes, signals, files and clocks."""
LOOP = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"
"""Ends with the process that started it, however that ends."""
LOAD = Path("/proc/loadavg")


class LoadedRun(NamedTuple):
    commit: str
    words: list[str]
    loops: int
    tests: int
    failed: list[str]
    wall_s: float
    runnable: float
    """Mean number of processes that had a processor or waited for one."""


class RunnableSampler(threading.Thread):
    """Reads the number of runnable processes of the machine every half second until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._samples: list[int] = []
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._samples or not self._stopped.wait(0.5):
            runnable = LOAD.read_text().split()[3].partition("/")[0]
            self._samples.append(int(runnable) - 1)  # without this thread

    def stop(self) -> float:
        """Return the mean."""
        self._stopped.set()
        self.join()
        return sum(self._samples) / len(self._samples)


@contextmanager
def busy_loops(number: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(number)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_tests(words: list[str], commit: str, loops: int) -> LoadedRun:
    """Run pytest once, three processes as in .ci/run. What it prints is shown if a test failed."""
    began = time.monotonic()
    sampler = RunnableSampler()
    sampler.start()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "3", "--dist", "loadfile", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        tests, failed = read_report(report) if report.exists() else (0, ["pytest itself"])
    if failed:
        sys.stderr.write(done.stdout + done.stderr)
    wall_s = round(time.monotonic() - began, 1)
    return LoadedRun(commit, words, loops, tests, failed, wall_s, round(sampler.stop(), 1))


def read_report(report: Path) -> tuple[int, list[str]]:
    """Number of tests that ran, and the names of those that failed; a module that cannot be imported is one."""
    cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    return len(cases), sorted({f"{case.get('classname')}::{case.get('name')}" for case in failed})


def read_record(record: Path, commit: str, loops: int) -> list[LoadedRun]:
    """Earlier runs of this commit beside as many loops."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    runs = [LoadedRun(**json.loads(line)) for line in lines]
    return [run for run in runs if (run.commit, run.loops) == (commit, loops)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=int, nargs="?", default=10, help="of each folder, earlier ones included")
    parser.add_argument("--loops", type=int, default=4, help="busy loops beside the tests")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after the run that passes this time")
    parser.add_argument("--record", type=Path, default=RECORD, metavar="FILE", help="where runs are recorded")
    arguments, words = parser.parse_known_args()
    pieces = [words] if words else [[folder] for folder in PROCESS_TESTS]
    commit, changed = git_commit(Path(__file__)) or ("no checkout", False)
    commit = commit[:12] + "+" * changed
    runs = [run for run in read_record(arguments.record, commit, arguments.loops) if run.words in pieces]
    left = [words for number in range(1, arguments.runs + 1) for words in pieces if number > runs_of(runs, words)]
    arguments.record.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with busy_loops(arguments.loops), arguments.record.open("a", encoding="utf-8") as record:
        for words in left:
            runs.append(run := run_tests(words, commit, arguments.loops))
            record.write(json.dumps(run._asdict()) + "\n")
            record.flush()
            print(f"run {runs_of(runs, words)} of {arguments.runs}: {describe(run)}", flush=True)
            if time.monotonic() - began > 60 * arguments.minutes:
                break
    failures = Counter(name for run in runs for name in run.failed)
    print(f"{len(runs)} of {arguments.runs * len(pieces)} runs at {commit} beside {arguments.loops} busy loops, "
          f"{failures.total()} failures")  # fmt: skip
    for name, count in failures.most_common():
        print(f"{count:>4}  {name}")
    return int(bool(failures) or not all(run.tests for run in runs))


def runs_of(runs: list[LoadedRun], words: list[str]) -> int:
    return sum(run.words == words for run in runs)


def describe(run: LoadedRun) -> str:
    return (
        f"{run.tests} tests, {len(run.failed)} failed, {run.wall_s:.0f} s, {run.runnable:.1f} runnable processes: "
        f"{' '.join(run.words)}"
    )


if __name__ == "__main__":
    sys.exit(main())
