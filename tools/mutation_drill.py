"""Mutation tests: plants bugs one at a time and checks that a test fails for each; lists those that were missed.

    python -m tools.mutation_drill                 all of tests/mutations/*.py, two at a time
    python -m tools.mutation_drill core -k ring    one table, mutations whose name contains "ring"

A table is a Python file with MUTATIONS: a list of Mutation(name, file, old, new, tests). Each is applied to a copy of
the repository, so the checkout is never touched.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutations import Mutation

ROOT = Path(__file__).parents[1]


def tables(names: list[str]) -> list[Mutation]:
    found = []
    for path in sorted((ROOT / "tests" / "mutations").glob("[a-z]*.py")):
        if not names or path.stem in names:
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            found += module.MUTATIONS
    return found


def plant(mutation: Mutation) -> tuple[bool, str]:
    """Whether a test failed, and the first one that did."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repo"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", ".*_cache", "__pycache__", "artifacts"))
        file = copy / mutation.file
        source = file.read_text()
        if source.count(mutation.old) != 1:
            return False, f"cannot plant: the text to replace occurs {source.count(mutation.old)} times"
        file.write_text(source.replace(mutation.old, mutation.new))
        environ = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
        if mutation.interpreted:
            environ["TRITON_INTERPRET"] = "1"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutation.tests],
            cwd=copy, capture_output=True, text=True,
            env={**environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 1 and bool(failed), failed[0][:110] if failed else f"pytest ended with {done.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="names of files in tests/mutations (default: all)")
    parser.add_argument("-k", default="", help="only mutations whose name contains this")
    parser.add_argument("-n", type=int, default=2, help="how many at a time")
    args = parser.parse_args()
    mutations = [m for m in tables(args.tables) if args.k in m.name]
    begin, caught = time.monotonic(), 0
    with ThreadPoolExecutor(args.n) as pool:
        for mutation, (red, by) in zip(mutations, pool.map(plant, mutations), strict=True):
            caught += red
            print(f"{'caught' if red else 'MISSED':7} {mutation.name:58} {by}", flush=True)
    print(f"\ncaught {caught} / planted {len(mutations)} in {time.monotonic() - begin:.0f} s")
    sys.exit(caught != len(mutations))


if __name__ == "__main__":
    main()
