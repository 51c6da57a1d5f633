"""Renames private functions and local variables at random in a copy of the checkout, and shows what breaks.

    python -m proofs.rename_drill                    ten names, those of seed 0
    python -m proofs.rename_drill 30 --seed 7 --tests tests/nsa/core tests/nsa_train/data
    python -m proofs.rename_drill --tests            without tests

Names of functions are replaced wherever they stand in Python and Markdown, those of variables in their function. The
tables of planted bugs stay as they are: no row should name what is renamed. Then ruff, mypy, `mutation_drill --check`
and tests run on the copy, by default those of the modules with a renamed name, or of their folders.

exit code: 0 if nothing broke; 1 otherwise.
"""

import argparse
import ast
import builtins
import os
import random
import re
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from proofs import import_path
from proofs.mutation_drill import copied_checkout
from proofs.planting.source_tree import is_private

PACKAGES = "packages"
_OF_NAMES = ("tests/test_names.py", "tests/test_mutation_tables.py", "tests/test_imports_point_down.py")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Renaming(NamedTuple):
    file: Path
    old: str
    new: str
    lines: tuple[int, int] | None
    """First and last line of a variable's function; None for a function, which is renamed everywhere."""


def candidates(root: Path) -> tuple[list[Renaming], list[Renaming]]:
    """Private functions that are defined once, and variables of functions, without new names."""
    functions: list[Renaming] = []
    variables: list[Renaming] = []
    for file in sorted((root / PACKAGES).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, _FUNCTIONS):
                if is_private(node.name) and len(node.name) > 2:
                    functions.append(Renaming(file, node.name, "", None))
                variables += [Renaming(file, name, "", _lines(node)) for name in _own_variables(node, text)]
    count = Counter(each.old for each in functions)
    return [each for each in functions if count[each.old] == 1], variables


def _lines(node: ast.AST) -> tuple[int, int]:
    return node.lineno, node.end_lineno  # type: ignore[attr-defined]


def _own_variables(function: ast.AST, text: str) -> Iterator[str]:
    """Variables whose name stands for nothing else in the function: no argument, attribute or word of a text."""
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    arguments = {node.arg for node in ast.walk(function) if isinstance(node, ast.arg)}
    shared = {
        name for node in ast.walk(function) if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names
    }
    first, last = _lines(function)
    lines = "\n".join(text.splitlines()[first - 1 : last])
    uses = Counter(node.id for node in nodes)
    for name in sorted({node.id for node in nodes if isinstance(node.ctx, ast.Store)} - arguments - shared):
        if len(name) > 2 and len(re.findall(rf"\b{name}\b", lines)) == uses[name]:
            yield name


def new_name(old: str, generator: random.Random, taken: set[str]) -> str:
    """A name of the same length that is not in use, so that lines keep theirs."""
    begin = "_" if old.startswith("_") else ""
    while True:
        name = begin + "".join(generator.choices(string.ascii_lowercase, k=len(old) - len(begin)))
        if name not in taken:
            taken.add(name)
            return name


def choose(root: Path, count: int, seed: int) -> list[Renaming]:
    generator = random.Random(seed)
    functions, variables = candidates(root)
    words = re.findall(r"\w+", " ".join(file.read_text(encoding="utf-8") for file in _texts(root)))
    taken = {*words, *vars(builtins)}
    half = count // 2
    selected = [*generator.sample(functions, half), *generator.sample(variables, count - half)]
    return [each._replace(new=new_name(each.old, generator, taken)) for each in selected]


def rename(root: Path, renaming: Renaming) -> None:
    word = re.compile(rf"\b{renaming.old}\b")
    if renaming.lines is None:
        for file in _texts(root):
            text = file.read_text(encoding="utf-8")
            if word.search(text):
                file.write_text(word.sub(renaming.new, text), encoding="utf-8")
    else:
        lines = renaming.file.read_text(encoding="utf-8").splitlines(keepends=True)
        for number in range(renaming.lines[0] - 1, renaming.lines[1]):
            lines[number] = word.sub(renaming.new, lines[number])
        renaming.file.write_text("".join(lines), encoding="utf-8")


def _texts(root: Path) -> list[Path]:
    return sorted(path for suffix in ("py", "md") for path in root.rglob(f"*.{suffix}"))


def mirroring_tests(root: Path, renamings: list[Renaming]) -> list[str]:
    """Tests of the modules with a renamed name, by the names of their files, or else of their folders."""
    tests = {root / test for test in _OF_NAMES}
    for renaming in renamings:
        package = renaming.file.parent.relative_to(root).parts[2:]  # below packages/NAME
        mirrored = (root.joinpath("tests", *package[:depth]) for depth in range(len(package), 0, -1))
        folder = next((folder for folder in mirrored if folder.is_dir()), root / "tests")
        tests |= set(folder.rglob(f"test_{renaming.file.stem}*.py")) or {folder}
    return sorted(str(test.relative_to(root)) for test in tests)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m proofs.rename_drill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("count", nargs="?", type=int, default=10, help="how many names (default: 10)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", nargs="*", metavar="WORD", help="arguments of pytest")
    args = parser.parse_args()
    broken = []
    with copied_checkout() as checkout:
        root = checkout.root
        renamings = choose(root, args.count, args.seed)
        for each in renamings:
            rename(root, each)
            place = f" in lines {each.lines[0]}–{each.lines[1]}" if each.lines else ""
            print(f"{each.file.relative_to(root)}: {each.old} is {each.new}{place}")
        tests = mirroring_tests(root, renamings) if args.tests is None else args.tests
        python = [sys.executable, "-m"]
        commands = [
            [*python, "ruff", "check", "--quiet", "--fix", "--select", "I"],
            [*python, "ruff", "check", "--quiet"],
            [*python, "mypy"],
            [*python, "proofs.mutation_drill", "--check"],
        ]
        if tests:
            commands.append([*python, "pytest", "-q", "-p", "no:cacheprovider", *tests])
        for command in commands:
            done = subprocess.run(
                command, cwd=root, env={**os.environ, "PYTHONPATH": import_path(root)}, capture_output=True, text=True
            )
            last = (done.stdout.strip().splitlines() or ["nothing to report"])[-1]
            print(f"{'broken' if done.returncode else 'ok':6} {' '.join(command[2:])}: {last}", flush=True)
            if done.returncode:
                broken.append(f"{' '.join(command[2:])}\n{done.stdout}{done.stderr}")
    print("\n\n".join(["", *broken]) if broken else f"{args.count} names are others, nothing broke")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
