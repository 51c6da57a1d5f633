"""Mutation tests: plants bugs in the source one at a time and checks that the tests named for each fail.

    python -m proofs.mutation_drill                 every table, two mutations at a time
    python -m proofs.mutation_drill core -k ring    one table, mutations whose name contains "ring"
    python -m proofs.mutation_drill --file nsa/geometry.py    mutations of one file, of any table

Each mutation is planted in a copy of the checkout, which stays as it is; pytest stops at the first failure. One line
per mutation: how many are done, the result, the seconds it took, its name, what caught it, the time left.

All tables take about 40 minutes of CPU time (core 11, cpu 10, drill 10, triton 7): about 20 minutes with -n 2 on two
idle cores. Importing torch and collecting the tests is most of it, for cpu also the compiler.

results:
  caught     a test named in the row failed, as it should
  SURVIVED   every test named in the row passed: a test is missing, write it (or correct the row)
  INVALID    not planted or not tested: the text to replace is not in the file exactly once, or pytest ended otherwise

exit code: 0 if every mutation was caught; 1 otherwise, with the list of the others at the end; 2 for wrong arguments.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.mutations import FOLDER, Mutation, load_tables

ROOT = Path(__file__).parents[1]
CPP_SUFFIXES = (".h", ".cpp")
BOTH_TIERS = "not cuda"  # tests of .ci/run and of .ci/nightly
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"


class MutationResult(NamedTuple):
    mutation: Mutation
    verdict: str
    reason: str
    """The first test that failed, or why none did."""
    seconds: float


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """A copy of the checkout to plant in. It serves many mutations: their tests find its modules compiled."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "artifacts"))
        yield copy


def plant(mutation: Mutation, copy: Path) -> MutationResult:
    """Run the mutation's tests on the copy in which it is planted, and take it out again."""
    begin = time.monotonic()
    file = copy / mutation.file
    source = file.read_text(encoding="utf-8")
    if (count := source.count(mutation.old)) != 1:
        verdict, reason = INVALID, f"the text to replace occurs {count} times in {mutation.file}"
    else:
        try:
            _write(file, source.replace(mutation.old, mutation.new))
            verdict, reason = _test(mutation, copy)
        finally:
            _write(file, source)
    return MutationResult(mutation, verdict, reason, time.monotonic() - begin)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    if file.suffix == ".py":  # bytecode of the same second and size would pass as that of the new text
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _test(mutation: Mutation, copy: Path) -> tuple[str, str]:
    environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    if mutation.interpreted:
        environ["TRITON_INTERPRET"] = "1"
    if Path(mutation.file).suffix in CPP_SUFFIXES:
        _build_faster(copy)
        environ["HOME"] = str(copy.parent)  # libraries with bugs do not stay in the user's cache
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", BOTH_TIERS, *mutation.tests],
        cwd=copy, capture_output=True, text=True, env=environ,
    )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode == 1 and failed:
        return CAUGHT, failed[0][:110]
    if done.returncode == 0:
        return SURVIVED, "all tests of the row passed"
    return INVALID, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}"


def _build_faster(copy: Path) -> None:
    """Compile the copy's C++ kernels with -O1: half the time of -O3, and a mutation is compiled once and run once."""
    build = copy / "nsa" / "kernels" / "cpu" / "build.py"
    build.write_text(build.read_text(encoding="utf-8").replace('"-O3"', '"-O1"'), encoding="utf-8")


def chosen(names: list[str], part_of_name: str, files: Collection[str] = ()) -> list[Mutation]:
    """Mutations of the named tables (all if none is named) whose name contains the text, of these files or of all."""
    tables = {table.name: table.mutations for table in load_tables()}
    if unknown := [name for name in names if name not in tables]:
        raise ValueError(f"no table {', '.join(unknown)} in {FOLDER.relative_to(ROOT)}; there are {', '.join(tables)}")
    found = [m for name in names or tables for m in tables[name] if part_of_name in m.name]
    if not found:
        raise ValueError(f"no mutation's name contains {part_of_name!r}")
    return [m for m in found if not files or m.file in files]


def run(mutations: list[Mutation], workers: int) -> list[MutationResult]:
    """Plant all, printing a line for each as it ends."""
    begin = time.monotonic()
    results: list[MutationResult] = []
    copies: SimpleQueue[Path] = SimpleQueue()

    def plant_in_a_free_copy(mutation: Mutation) -> MutationResult:
        copy = copies.get()
        try:
            return plant(mutation, copy)
        finally:
            copies.put(copy)

    with ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            copies.put(stack.enter_context(copied_checkout()))
        for future in as_completed([pool.submit(plant_in_a_free_copy, mutation) for mutation in mutations]):
            results.append(result := future.result())
            left_s = (time.monotonic() - begin) / len(results) * (len(mutations) - len(results))
            print(
                f"[{len(results):3}/{len(mutations)}] {result.verdict:8} {result.seconds:4.0f} s  "
                f"{result.mutation.name}  ({result.reason}; about {left_s / 60:.0f} min left)",
                flush=True,
            )
    return results


def main() -> None:
    fields = f"{FOLDER.relative_to(ROOT)}/*.toml; tests/mutations/__init__.py describes the fields"
    listed = "\n".join(f"  {t.name:8} {len(t.mutations):3} mutations. {t.about}" for t in load_tables())
    parser = argparse.ArgumentParser(
        prog="python -m proofs.mutation_drill",
        description=__doc__,
        epilog=f"tables ({fields}):\n{listed}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tables", nargs="*", help="names of tables, see below (default: all)")
    parser.add_argument("-k", default="", metavar="TEXT", help="only mutations whose name contains this")
    parser.add_argument("--file", action="append", default=[], metavar="PATH", help="only of this file; repeatable")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="how many at a time (default: 2)")
    args = parser.parse_args()
    try:
        mutations = chosen(args.tables, args.k, args.file)
    except ValueError as error:
        parser.error(str(error))
    begin = time.monotonic()
    results = run(mutations, args.n)
    rest = [result for result in results if result.verdict != CAUGHT]
    cpu_s = os.times().children_user + os.times().children_system
    print(
        f"\ncaught {len(results) - len(rest)} of {len(results)} in {time.monotonic() - begin:.0f} s "
        f"({cpu_s:.0f} s of CPU time)"
    )
    for result in rest:
        print(f"{result.verdict}: {result.mutation.name} ({result.mutation.file}; {' '.join(result.mutation.tests)})")
    sys.exit(bool(rest))


if __name__ == "__main__":
    main()
