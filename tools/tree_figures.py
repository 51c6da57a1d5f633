"""Figures of both packages: lines, modules, importers, public names, words, circles, commands.

python -m tools.tree_figures                 one table
python -m tools.tree_figures --single 130    also the modules below 130 lines that one module imports, with that one
"""

import argparse
import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import typer

from nsa_train.cli.main import app
from tests.test_imports_point_down import imports, is_for_type_checkers, sources
from tests.test_names import refused_words
from tools.docs.reference_pages import leaf_commands

PACKAGES = ("nsa", "nsa_train")
ROOT = Path(__file__).parents[1] / "packages"


class RuntimeImports(ast.NodeTransformer):
    """Removes what only type checkers import."""

    def visit_If(self, node: ast.If) -> ast.AST:
        return ast.Pass() if is_for_type_checkers(node) else self.generic_visit(node)


def imported_modules(module: str, source: str, modules: set[str]) -> set[str]:
    """The modules of both packages that this one names; `a.b.name` is a.b if that is no module itself."""
    targets = set()
    for name in imports(module, source):
        while name and name not in modules:
            name = f"{name}.__init__" if f"{name}.__init__" in modules else name.rpartition(".")[0]
        targets.add(name)
    return targets - {"", module}


def circle(modules: dict[str, str]) -> str:
    """Find one circle of imports, lazy ones included, or none. A package is no importer of what lies in it."""
    graph = {
        name: {
            other
            for other in imported_modules(name, ast.unparse(RuntimeImports().visit(ast.parse(source))), set(modules))
            if not name.startswith(other.removesuffix("__init__"))
        }
        for name, source in modules.items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " → ".join(error.args[1])
    return "none"


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines at its top level, without a leading underscore."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [target.id for target in targets if isinstance(target, ast.Name)]
        else:
            continue
        yield from (name for name in names if not name.startswith("_"))


def print_row(title: str, by_module: dict[str, int]) -> None:
    numbers = [sum(n for name, n in by_module.items() if name.split(".")[0] == package) for package in PACKAGES]
    print(f"{title:34}{numbers[0]:8,}{numbers[1]:11,}{sum(numbers):8,}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single", type=int, metavar="LINES", help="list modules below this length with one importer")
    args = parser.parse_args()
    texts = {name: file.read_text(encoding="utf-8") for name, file in sources().items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    importers: dict[str, set[str]] = {name: set() for name in texts}
    for name, text in texts.items():
        for target in imported_modules(name, text, set(texts)):
            importers[target].add(name)
    programs = ("__init__", "__main__")
    single = [name for name, who in importers.items() if len(who) <= 1 and name.split(".")[-1] not in programs]
    compiled = [file for suffix in ("cpp", "h") for file in ROOT.rglob(f"*.{suffix}")]

    print(f"{'':34}{'nsa':>8}{'nsa_train':>11}{'both':>8}")
    print_row("lines of Python", lines)
    print_row("lines of C++", {"nsa": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in compiled)})
    print_row("modules", dict.fromkeys(texts, 1))
    print_row("modules with at most one importer", dict.fromkeys(single, 1))
    print_row("public names of modules", {name: len([*public_names(tree)]) for name, tree in trees.items()})
    print_row("names and docstrings refused", {name: len([*refused_words(tree)]) for name, tree in trees.items()})
    commands = [command for _, command in leaf_commands(typer.main.get_command(app), "nsa")]
    options = [each for command in commands for each in command.params if each.param_type_name == "option"]
    print(f"commands: {len(commands)} with {len(options)} options; circle of imports: {circle(texts)}")
    for name in single if args.single else ():
        if lines[name] < args.single:
            print(f"{lines[name]:4} {name}  ← {', '.join(importers[name]) or 'nobody'}")


if __name__ == "__main__":
    main()
