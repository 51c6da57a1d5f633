"""Mutation tests: plants bugs in the source one at a time and checks that the tests named for each fail.

    python -m proofs.mutation_drill                 every table, two mutations at a time
    python -m proofs.mutation_drill core -k ring    one table, mutations whose name contains "ring"
    python -m proofs.mutation_drill --file proofs/soak.py    mutations planted in one file, of any table
    python -m proofs.mutation_drill --check         run no test: list the rows that cannot be planted, in seconds
    python -m proofs.mutation_drill --show -k ring  run no test: show where and what is planted

Each mutation is planted in a copy of the checkout, which stays as it is; pytest stops at the first failure. One line
per mutation: how many are done, the result, the seconds it took, its name, what caught it, the time left.

Importing torch, collecting the tests and, for cpu, the compiler take most of the time. The process that runs pytest has
imported torch and is forked for each mutation.

results:
  caught     a test named in the row failed, as it should
  SURVIVED   every test named in the row passed: a test is missing, write it (or correct the row)
  INVALID    not planted or not tested: the pattern does not match the function once, a file that it names is not there,
             the planted bug does not compile, or pytest ended otherwise

exit code: 0 if every mutation was caught; 1 otherwise, with the list of the others at the end; 2 for wrong arguments.
"""

import argparse
import difflib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from proofs import import_path
from proofs.planting import PlantingError
from proofs.planting.find_tests import TestFiles
from proofs.planting.source_tree import Planted, SourceTree
from proofs.planting.warm_pytest import PRELOADED, WarmPytest
from tests.mutations import FOLDER, Mutation, load_tables

ROOT = Path(__file__).parents[1]
CPP_SUFFIXES = (".h", ".cpp")
BOTH_TIERS = "not cuda"  # tests of .ci/run and of .ci/nightly
_FEW = 3
CAUGHT, SURVIVED, INVALID = "caught", "SURVIVED", "INVALID"
_NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", "artifacts")
_COMPILER_ERROR = re.compile(r"\.(?:h|cpp):\d+:\d+: (?:fatal )?error: .*")


class MutationResult(NamedTuple):
    mutation: Mutation
    verdict: str
    reason: str
    """The first test that failed, or why none did."""
    seconds: float


class Checkout:
    """A folder with the source and the tests, and a process per environment that runs them."""

    def __init__(self, root: Path, preloaded: Collection[str] = ()) -> None:
        self.root = root
        self._preloaded = preloaded
        self._running: dict[tuple[bool, bool], WarmPytest] = {}

    @cached_property
    def source(self) -> SourceTree:
        return SourceTree(self.root)

    @cached_property
    def tests(self) -> TestFiles:
        return TestFiles(self.root)

    def planted(self, mutation: Mutation) -> Planted:
        return self.source.plant(mutation.function, mutation.find, mutation.replace, mutation.which)

    def pytest(self, words: list[str], *, interpreted: bool, compiles: bool) -> tuple[int, str]:
        """compiles: libraries with bugs do not stay in the user's cache."""
        if (interpreted, compiles) not in self._running:
            environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
            environ |= {"PYTHONPATH": import_path(self.root), "OMP_NUM_THREADS": "1"}
            environ |= {"TRITON_INTERPRET": "1"} if interpreted else {}
            environ |= {"HOME": str(self.root.parent)} if compiles else {}
            self._running[interpreted, compiles] = WarmPytest(self.root, environ, self._preloaded)
        return self._running[interpreted, compiles].run(words)

    def close(self) -> None:
        for process in self._running.values():
            process.close()


@contextmanager
def copied_checkout(n_mutations: int = 1) -> Iterator[Checkout]:
    """A copy of the checkout to plant in. It serves many mutations: their tests find its modules compiled.

    For more than a few, large packages are imported once for all.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*_NOT_COPIED))
        checkout = Checkout(copy, PRELOADED if n_mutations > _FEW else ())
        try:
            yield checkout
        finally:
            checkout.close()


def plant(mutation: Mutation, checkout: Checkout) -> MutationResult:
    """Run the mutation's tests on the copy in which it is planted, and take it out again."""
    begin = time.monotonic()
    try:
        planted = checkout.planted(mutation)
        words = checkout.tests.arguments(mutation.tests)
    except PlantingError as error:
        return MutationResult(mutation, INVALID, str(error), time.monotonic() - begin)
    texts = {checkout.root / planted.path: planted.text}
    compiles = planted.path.suffix in CPP_SUFFIXES
    if compiles:
        texts |= faster_builds(checkout.root)
    originals = {file: file.read_text(encoding="utf-8") for file in texts}
    try:
        for file, text in texts.items():
            _write(file, text)
        verdict, reason = _test(mutation, checkout, words, compiles)
    finally:
        for file, text in originals.items():
            _write(file, text)
    return MutationResult(mutation, verdict, reason, time.monotonic() - begin)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    if file.suffix == ".py":  # bytecode of the same second and size would pass as that of the new text
        Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def _test(mutation: Mutation, checkout: Checkout, words: list[str], compiles: bool) -> tuple[str, str]:
    code, output = checkout.pytest(
        ["-x", "-q", "-p", "no:cacheprovider", "-m", BOTH_TIERS, *words],
        interpreted=mutation.interpreted, compiles=compiles,
    )  # fmt: skip
    if compiles and (error := _COMPILER_ERROR.search(output)):
        return INVALID, f"the bug does not compile: {error[0]}"
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if code == 1 and failed:
        return CAUGHT, failed[0][:110]
    if code == 0:
        return SURVIVED, "all tests of the row passed"
    return INVALID, f"pytest ended with {code}: {output.strip()[-300:]}"


def faster_builds(root: Path) -> dict[Path, str]:
    """Compile the C++ kernels with -O1: half the time of -O3, and a mutation is compiled once and run once.

    Products and sums are fused as with -O3: GCC fuses them with this flag or -O2, and rounding depends on it.
    """
    files = (path for path in root.rglob("kernels/cpu/build.py") if "tests" not in path.relative_to(root).parts)
    flags = '"-O1", "-fexpensive-optimizations"'
    return {file: file.read_text(encoding="utf-8").replace('"-O3"', flags) for file in files}


def chosen(names: list[str], part_of_name: str, files: Collection[str] = ()) -> list[Mutation]:
    """Mutations of the named tables (all if none is named) whose name contains the text, of these files or of all.

    With files, those too that cannot be planted: a change of these files may be the reason.
    """
    tables = {table.name: table.mutations for table in load_tables()}
    if unknown := [name for name in names if name not in tables]:
        raise ValueError(f"no table {', '.join(unknown)} in {FOLDER.relative_to(ROOT)}; there are {', '.join(tables)}")
    of_tables = [m for name in names or tables for m in tables[name] if part_of_name in m.name]
    if not of_tables:
        raise ValueError(f"no mutation's name contains {part_of_name!r}")
    if not files:
        return of_tables
    checkout = Checkout(ROOT)
    return [mutation for mutation in of_tables if _concerns(mutation, checkout, files)]


def _concerns(mutation: Mutation, checkout: Checkout, files: Collection[str]) -> bool:
    try:
        return str(checkout.planted(mutation).path) in files
    except PlantingError:
        return True


def obstacles(mutations: list[Mutation], root: Path = ROOT) -> list[str]:
    """Reasons why rows cannot be planted, or their tests not be run, in this checkout."""
    checkout, reasons = Checkout(root), []
    for mutation in mutations:
        try:
            checkout.planted(mutation)
            if not any(".py" in word for word in checkout.tests.arguments(mutation.tests)):
                raise PlantingError("it names no test")
        except PlantingError as error:
            reasons.append(f"{INVALID}: {mutation.name}: {error}")
    return reasons


def show(mutations: list[Mutation]) -> None:
    """Print the lines that each mutation changes, and the property that it breaks."""
    checkout = Checkout(ROOT)
    for mutation in mutations:
        try:
            planted = checkout.planted(mutation)
        except PlantingError as error:
            print(f"{INVALID}: {mutation.name}: {error}\n")
            continue
        print(f"{planted.path}:{planted.line}: {mutation.name}; breaks: {mutation.breaks}")
        source = (ROOT / planted.path).read_text(encoding="utf-8")
        lines = difflib.unified_diff(source.splitlines(), planted.text.splitlines(), lineterm="", n=0)
        print("\n".join(line for line in list(lines)[2:] if not line.startswith("@@")), end="\n\n")


def run(mutations: list[Mutation], workers: int) -> list[MutationResult]:
    """Plant all, printing a line for each as it ends."""
    begin = time.monotonic()
    results: list[MutationResult] = []
    copies: SimpleQueue[Checkout] = SimpleQueue()

    def plant_in_a_free_copy(mutation: Mutation) -> MutationResult:
        copy = copies.get()
        try:
            return plant(mutation, copy)
        finally:
            copies.put(copy)

    with ExitStack() as stack, ThreadPoolExecutor(workers) as pool:
        for _ in range(workers):
            copies.put(stack.enter_context(copied_checkout(len(mutations))))
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
    parser.add_argument("--file", action="append", default=[], metavar="PATH", help="only in this file; repeatable")
    parser.add_argument("--check", action="store_true", help="list the rows that cannot be planted; run no test")
    parser.add_argument("--show", action="store_true", help="show what is planted where; run no test")
    parser.add_argument("-n", type=int, default=2, metavar="N", help="how many at a time (default: 2)")
    args = parser.parse_args()
    try:
        mutations = chosen(args.tables, args.k, args.file)
    except ValueError as error:
        parser.error(str(error))
    if args.show:
        show(mutations)
        return
    if args.check:
        stale = obstacles(mutations)
        print("\n".join([*stale, f"{len(mutations) - len(stale)} of {len(mutations)} can be planted"]))
        sys.exit(bool(stale))
    begin = time.monotonic()
    results = run(mutations, args.n)
    rest = [result for result in results if result.verdict != CAUGHT]
    cpu_s = os.times().children_user + os.times().children_system
    print(
        f"\ncaught {len(results) - len(rest)} of {len(results)} in {time.monotonic() - begin:.0f} s "
        f"({cpu_s:.0f} s of CPU time)"
    )
    for result in rest:
        mutation = result.mutation
        print(f"{result.verdict}: {mutation.name} (breaks: {mutation.breaks}; {' '.join(mutation.tests)})")
    sys.exit(bool(rest))


if __name__ == "__main__":
    main()
