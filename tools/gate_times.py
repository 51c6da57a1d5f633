"""Times of .ci/run and .ci/nightly: steps, tests by folder, fixtures, processes and their imports.

    python -m tools.gate_times                               the table of the last run (artifacts/gate_times.jsonl)
    python -m tools.gate_times FILE --top 40                 another file, longer lists
    python -m tools.gate_times --first-step                  CPU time of a training process up to its first step
    pytest --times=FILE tests/nsa_train/config                         records of any tests

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
import tempfile
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
DEFAULT_FILE = Path("artifacts/gate_times.jsonl")
IMPORTS = {
    "nsa": "import nsa_train.cli.main",
    "nsa train, a rank": "import nsa_train.train.run, nsa_train.cli.train",
    "nsa generate": "import nsa_train.infer.load_model, nsa.hf.modeling",
    "torch alone": "import torch",
}
"""Imports of each kind of test process before it does anything."""
FIRST_STEP = """
import json, os, sys, time
import nsa_train.cli.main
from nsa_train.cli.startup import imports_not_collected
from nsa_train.cli.train import import_exported, resolve

class FirstStep:
    def line(self, text): pass
    def evaluation(self, result): pass
    def beat(self, beat, steps):
        if beat.step == 1:
            print(json.dumps([time.process_time(), torch_s, sorted(sys.modules)]), flush=True)
            os._exit(0)

words = ["configs/cpu_quickstart.yaml", "data.dataset=synthetic", "data.prefetch=false", "train.log_every=1",
         "train.eval_every=0", "train.out_dir=" + sys.argv[1], *sys.argv[2:]]
config = resolve(words)
with imports_not_collected():
    import torch
    torch_s = time.process_time()
    from nsa_train.train.run import train
train(config, None, FirstStep(), import_exported)
"""
"""Trains a rank of configs/cpu_quickstart.yaml, as `nsa train` does, up to its first step."""
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
    """Short name of a command: `nsa train` for `python -m nsa_train.cli train`, `python -m x` for other modules."""
    words = words.split() if isinstance(words, str) else [os.fsdecode(word) for word in words]
    names = [Path(words[0]).name, *words[1:3]] if words else [""]
    if not re.match(r"python[\d.]*$", names[0]):
        return " ".join(names[:2]) if names[0] == "nsa" else names[0]
    if words[1:3] == ["-m", "nsa_train.cli"]:
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


class FirstStepCost(NamedTuple):
    cpu_s: float
    """User and system time of the process from its start to the end of the first step."""
    torch_s: float
    """The part that had passed after `import torch`, which follows the imports of the command line."""
    modules: frozenset[str]
    """Content of sys.modules after the step."""


def first_step_cost(*settings: str) -> FirstStepCost:
    """Cost of a new process that trains one step of configs/cpu_quickstart.yaml on synthetic rows."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", FIRST_STEP, f"{folder}/run", *settings]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    cpu_s, torch_s, modules = json.loads(done.stdout.splitlines()[-1])
    return FirstStepCost(cpu_s, torch_s, frozenset(modules))


def print_first_step(runs: int = 5) -> None:
    costs = sorted(first_step_cost() for _ in range(runs))
    least, median = costs[0], costs[runs // 2]
    print(f"{'CPU s':>7} {'median':>7}  of {runs} processes")
    print(f"{least.torch_s:>7.2f} {median.torch_s:>7.2f}  import torch")
    print(f"{least.cpu_s:>7.2f} {median.cpu_s:>7.2f}  first step done")
    print(f"\n{'wall s':>7}  imported until then, by package (-X importtime, which makes them slower)")
    with tempfile.TemporaryDirectory() as folder:
        _, packages = import_costs(FIRST_STEP, f"{folder}/run")
    for name, seconds in list(packages.items())[:20]:
        print(f"{seconds:>7.2f}  {name}")


def import_costs(code: str, *arguments: str) -> tuple[float, dict[str, float]]:
    """CPU seconds of a new interpreter that runs only `code`, and its seconds per imported package, longest first."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-X", "importtime", "-c", code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
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
    parser.add_argument("--first-step", action="store_true", help="measure a training process, print no table")
    arguments = parser.parse_args()
    if arguments.first_step:
        print_first_step()
        return
    print_table(read_records(arguments.file), arguments.top)


if __name__ == "__main__":
    main()
