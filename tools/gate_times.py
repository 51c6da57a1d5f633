"""Where the time of .ci/run and .ci/nightly goes: steps, tests by folder, fixtures, processes and their imports.

    python -m tools.gate_times                               the table of the last run (artifacts/gate_times.jsonl)
    python -m tools.gate_times FILE --top 40                 another file, longer lists
    pytest --times=FILE tests/config                         records of any tests

The file has one JSON object per line: `.ci/steps.sh` appends the steps, and this module, as a plugin of pytest, the
tests, fixtures and processes. CPU time is that of the test process and of the processes that it waited for, those of
tests/fork_server.py (`run`, `start`) among them; unlike wall time it hardly depends on what else the machine does.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DEFAULT_FILE = Path("artifacts/gate_times.jsonl")
IMPORTS = {
    "nsa": "import nsa.cli.main",
    "nsa train, a rank": "import nsa.train.run, nsa.cli.train",
    "nsa generate": "import nsa.infer.load_model, nsa.hf.modeling",
    "torch alone": "import torch",
}
"""What processes of the tests import before they do anything, by what they are."""
IMPORTED = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\w+)")


class TimeRecord(NamedTuple):
    kind: str
    """step, test, fixture or process."""
    name: str
    wall_s: float
    cpu_s: float = 0.0


class TimeRecorder:
    """Plugin of pytest that appends a record per test, per fixture set up and per process started to a file."""

    def __init__(self, path: Path) -> None:
        self._forked_s = 0.0
        self._active = True
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)  # whole lines: the processes of xdist append to the same file
        sys.addaudithook(self._audit)

    def close(self) -> None:
        self._active = False  # an audit hook stays until the process ends
        self._file.close()

    def _write(self, record: TimeRecord) -> None:
        self._file.write(json.dumps(record._asdict()) + "\n")

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._active:
            return
        if event == "subprocess.Popen":
            self._write(TimeRecord("process", program(arguments[1]), 0.0))
        elif event == "tests.fork_server":
            words, cpu_s = arguments
            self._forked_s += cpu_s
            self._write(TimeRecord("process", f"{program(['python', *words])}, forked", 0.0, cpu_s))

    def _cpu_s(self) -> float:
        usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in usage) + self._forked_s

    def _measured(self, kind: str, name: str) -> Generator[None, Any, Any]:
        wall_s, cpu_s = time.perf_counter(), self._cpu_s()
        try:
            return (yield)
        finally:
            self._write(TimeRecord(kind, name, time.perf_counter() - wall_s, self._cpu_s() - cpu_s))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._measured("test", item.nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, Any, Any]:
        return (yield from self._measured("fixture", f"{fixturedef.baseid}::{fixturedef.argname}"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--times", type=Path, metavar="FILE", help="append times for python -m tools.gate_times")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--times"):
        recorder = TimeRecorder(path)
        config.pluginmanager.register(recorder)
        config.add_cleanup(recorder.close)


def program(words: Iterable[Any] | str) -> str:
    """Short name of a command: `nsa train` for `python -m nsa.cli train`, `python -m x` for other modules."""
    words = words.split() if isinstance(words, str) else [os.fsdecode(word) for word in words]
    names = [Path(words[0]).name, *words[1:3]] if words else [""]
    if not re.match(r"python[\d.]*$", names[0]):
        return " ".join(names[:2]) if names[0] == "nsa" else names[0]
    if words[1:3] == ["-m", "nsa.cli"]:
        return " ".join(["nsa", *words[3:4]])
    return " ".join(["python", *names[1:]]) if names[1:2] == ["-m"] else " ".join(["python", *names[1:2]])


def read_records(path: Path) -> list[TimeRecord]:
    return [TimeRecord(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def totals(records: Iterable[TimeRecord], depth: int | None = None) -> list[tuple[str, int, float, float]]:
    """Name, number, wall and CPU seconds, longest first; tests by the first `depth` parts of their path."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for record in records:
        parts = record.name.partition("::")[0].split("/")
        entry = sums["/".join(parts[:depth]) if depth else record.name]
        for index, value in enumerate((1, record.wall_s, record.cpu_s)):
            entry[index] += value
    rows = [(name, int(number), wall_s, cpu_s) for name, (number, wall_s, cpu_s) in sums.items()]
    return sorted(rows, key=lambda row: (row[2], row[3], row[1]), reverse=True)


def import_costs(code: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of a new interpreter that runs only `code`, and its seconds per imported package, longest first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    sums: dict[str, float] = defaultdict(float)
    for microseconds, package in IMPORTED.findall(done.stderr):
        sums[package] += int(microseconds) / 1e6
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu_s, dict(sorted(sums.items(), key=lambda item: -item[1]))


def print_table(records: list[TimeRecord], top: int) -> None:
    kinds = {
        kind: [record for record in records if record.kind == kind] for kind in dict.fromkeys(r.kind for r in records)
    }
    tests = kinds.get("test", [])
    parts = [
        ("steps", totals(kinds.get("step", []))),
        ("tests by folder", totals(tests, depth=2)),
        ("tests by file", totals(tests, depth=9)[:top]),
        ("tests", totals(tests)[:top]),
        ("fixtures (part of the tests)", totals(kinds.get("fixture", []))[:top]),
        ("processes started by tests; CPU of forked ones", totals(kinds.get("process", []))[:top]),
    ]
    for title, rows in parts:
        if rows:
            print(f"\n{'number':>7} {'wall s':>8} {'CPU s':>8}  {title}")
        for name, number, wall_s, cpu_s in rows:
            print(f"{number:>7} {wall_s:>8.1f} {cpu_s:>8.1f}  {name}")
    print(f"\n{'CPU s':>7}  a process that only imports, now and on this machine; wall seconds of its largest packages")
    for name, code in IMPORTS.items():
        cpu_s, packages = import_costs(code)
        most = ", ".join(f"{package} {seconds:.1f}" for package, seconds in list(packages.items())[:5])
        print(f"{cpu_s:>7.1f}  {name}: {most}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=DEFAULT_FILE)
    parser.add_argument("--top", type=int, default=25, help="rows of the lists of files, tests, fixtures, processes")
    arguments = parser.parse_args()
    print_table(read_records(arguments.file), arguments.top)


if __name__ == "__main__":
    main()
