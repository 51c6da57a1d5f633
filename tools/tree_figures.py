"""How much there is in both packages: lines, modules, importers, public names, words.

python -m tools.tree_figures                 one table
python -m tools.tree_figures --single 130    also the modules below 130 lines that one module imports, with that one
"""

import argparse
import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1] / "packages"
PACKAGES = {"nsa": ROOT / "nsa-attention" / "nsa", "nsa_train": ROOT / "nsa-train" / "nsa_train"}
NO_NOUNS = re.compile(r"^\s*(?:for )?(?:found|made|given|kept)\b[^=\n(]*(?: = | in )", re.MULTILINE)
OPENING = re.compile(r"(?:Of|The same|And)\b")


def read_modules() -> dict[str, Path]:
    """Dotted name → file; a package has the name of its folder."""
    return {
        ".".join((name, *file.relative_to(folder).with_suffix("").parts)).removesuffix(".__init__"): file
        for name, folder in PACKAGES.items()
        for file in sorted(folder.rglob("*.py"))
    }


def imported(module: str, file: Path, tree: ast.Module) -> Iterator[str]:
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def public_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module defines at its top level, without a leading underscore."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield ast.get_docstring(node) or ""


def count_lines(folder: Path, *suffixes: str) -> int:
    files = (file for suffix in suffixes for file in folder.rglob(f"*{suffix}"))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--single", type=int, metavar="LINES", help="list modules below this length with one importer")
    args = parser.parse_args()
    modules = read_modules()
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in modules.items()}
    importers: dict[str, set[str]] = {name: set() for name in modules}
    for name, tree in trees.items():
        for target in imported(name, modules[name], tree):
            if target in importers and target != name:
                importers[target].add(name)
    runs = {name for name, file in modules.items() if file.name in ("__init__.py", "__main__.py")}
    single = sorted(name for name, who in importers.items() if len(who) <= 1 and name not in runs)
    print(f"{'':34}{'nsa':>8}{'nsa_train':>11}{'both':>8}")

    def row(title: str, numbers: list[int]) -> None:
        print(f"{title:34}{numbers[0]:8,}{numbers[1]:11,}{sum(numbers):8,}")

    def count(title: str, of: dict[str, int]) -> None:
        row(title, [sum(n for name, n in of.items() if name.split(".")[0] == package) for package in PACKAGES])

    row("lines of Python", [count_lines(folder, ".py") for folder in PACKAGES.values()])
    row("lines of C++", [count_lines(folder, ".cpp", ".h", ".hpp") for folder in PACKAGES.values()])
    count("modules", dict.fromkeys(modules, 1))
    count("modules with at most one importer", dict.fromkeys(single, 1))
    names = {name: [n for n in public_names(tree) if not n.startswith("_")] for name, tree in trees.items()}
    count("public names of modules", {name: len(public) for name, public in names.items()})
    texts = {name: [text for text in docstrings(tree) if OPENING.match(text)] for name, tree in trees.items()}
    count("docstrings with Of, The same, And", {name: len(openings) for name, openings in texts.items()})
    locals_ = {name: len(NO_NOUNS.findall(file.read_text(encoding="utf-8"))) for name, file in modules.items()}
    count("locals found, made, given, kept", locals_)
    if args.single:
        lengths = {name: len(modules[name].read_text(encoding="utf-8").splitlines()) for name in single}
        for name in single:
            if lengths[name] < args.single:
                print(f"{lengths[name]:4} {name}  ← {', '.join(importers[name]) or 'nobody'}")


if __name__ == "__main__":
    main()
