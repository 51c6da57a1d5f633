"""Finds definitions of a checkout by name, wherever they are, and plants bugs in them.

A definition is a function, a class, a method (`NSACache.append`) or a constant of a module, in Python or C++. A name
that several have is preceded by that of its module or folder (`reference.sliding_attention`). What a definition uses of
its own module's private functions, methods, classes and constants (with a leading underscore) is part of it, so that no
name in a table of bugs need be a private one.
"""

import ast
import builtins
import itertools
import os
import re
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from proofs.planting import PlantingError
from proofs.planting.cpp_pattern import CppPattern, Token, definitions
from proofs.planting.python_pattern import PythonPattern

_NO_SOURCE = {"tests", "docs", "build", "dist", "artifacts", "__pycache__", "node_modules"}
_CPP = (".h", ".cpp")
_PYTHON_NAME = re.compile(r"^\s*(?:(?:async\s+)?def|class)\s+(\w+)|^(\w+)\s*[:=]", re.MULTILINE)
_CPP_NAME = re.compile(r"\b(?:struct|class|union|enum)\s+(\w+)|\b(\w+)\s*[(={]")
_NESTING = (ast.If, ast.Try, ast.With, ast.For, ast.While)


class Planted(NamedTuple):
    """The file with the bug."""

    path: Path
    """Relative to the checkout."""
    line: int
    """The first that differs."""
    text: str


class PythonModule:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = ast.parse(text)
        self.definitions: dict[str, list[ast.AST]] = {}
        self._collect(self.tree, "")

    def _collect(self, parent: ast.AST, prefix: str) -> None:
        for node in ast.iter_child_nodes(parent):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                self.definitions.setdefault(prefix + node.name, []).append(node)
                self._collect(node, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.Assign, ast.AnnAssign)) and parent is self.tree:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        self.definitions.setdefault(target.id, []).append(node)
            elif isinstance(node, _NESTING):
                self._collect(node, prefix)

    def scope(self, name: str) -> list[ast.AST]:
        """The definitions of this name and the private ones that they use, and so on."""
        scope = list(self.definitions[name])
        for node in scope:
            for private in sorted(_private_names(node)):
                scope += [other for other in self._private_definitions.get(private, ()) if other not in scope]
        return scope

    @cached_property
    def names(self) -> set[str]:
        """Variables, arguments, functions, classes and imports, of whatever scope."""
        names = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Name():
                    names.add(node.id)
                case ast.arg():
                    names.add(node.arg)
                case ast.FunctionDef() | ast.ClassDef():
                    names.add(node.name)
                case ast.alias():
                    names.add((node.asname or node.name).partition(".")[0])
        return names

    @cached_property
    def _private_definitions(self) -> dict[str, list[ast.AST]]:
        private: dict[str, list[ast.AST]] = {}
        for name, nodes in self.definitions.items():
            if is_private(last := name.rpartition(".")[2]):
                private.setdefault(last, []).extend(nodes)
        return private


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def _private_names(scope: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


class SourceTree:
    """Source files of a checkout: Python and C++, without tests and documentation."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def plant(self, name: str, find: str, replace: str, which: int = 0) -> Planted:
        """Replace what the pattern matches in the definition. `which`: the first match is 1; 0 if there is one."""
        path, definition = self._definition(name)
        text = self._texts[path]
        if path.suffix in _CPP:
            cpp = CppPattern(find, replace)
            run = _chosen(cpp.matches(self._cpp_definitions(path)[definition]), which, name)
            planted = cpp.apply(text, run)
        else:
            module, python = self._module(path), PythonPattern(find, replace)
            if unknown := python.names - module.names - set(vars(builtins)):
                raise PlantingError(f"`replace` uses {', '.join(sorted(unknown))}, which {path} does not have")
            bindings = _chosen(python.matches(module.scope(definition)), which, name)
            planted = python.apply(text, bindings)
            _require_syntax(path, planted)
        lines = zip(text.splitlines(), planted.splitlines(), strict=False)
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], lines)
        return Planted(path, sum(1 for _ in same) + 1, planted)

    def _definition(self, name: str) -> tuple[Path, str]:
        last = name.rpartition(".")[2]
        candidates: list[tuple[Path, str]] = []
        for path in self._defining.get(last, ()):
            names = [*(self._cpp_definitions(path) if path.suffix in _CPP else self._module(path).definitions)]
            full = ".".join((*path.parts[:-1], path.stem))
            candidates += [(path, other) for other in names if f".{full}.{other}".endswith(f".{name}")]
        exact = [(path, other) for path, other in candidates if other == name] or candidates
        if not exact:
            raise PlantingError(f"nothing is named {name}")
        if len(exact) > 1:
            listed = ", ".join(f"{path.stem}.{other} ({path})" for path, other in exact)
            raise PlantingError(f"{name} is ambiguous: {listed}. Put the name of its module or folder before it")
        return exact[0]

    @cached_property
    def _defining(self) -> dict[str, list[Path]]:
        """Files that may define a name, by its last part."""
        defining: dict[str, list[Path]] = {}
        for path, text in self._texts.items():
            pattern = _CPP_NAME if path.suffix in _CPP else _PYTHON_NAME
            for name in {match[1] or match[2] for match in pattern.finditer(text)}:
                defining.setdefault(name, []).append(path)
        return defining

    @cached_property
    def _texts(self) -> dict[Path, str]:
        texts = {}
        for folder, folders, files in os.walk(self.root):
            folders[:] = sorted(f for f in folders if f not in _NO_SOURCE and not f.startswith("."))
            for file in sorted(files):
                path = Path(folder, file)
                if path.suffix in (".py", *_CPP):
                    texts[path.relative_to(self.root)] = path.read_text(encoding="utf-8")
        return texts

    @cache  # noqa: B019 - a tree lives as long as the program
    def _module(self, path: Path) -> PythonModule:
        return PythonModule(self._texts[path])

    @cache  # noqa: B019
    def _cpp_definitions(self, path: Path) -> dict[str, list[Token]]:
        scopes: dict[str, list[Token]] = {}
        for definition in definitions(self._texts[path]):
            scopes.setdefault(definition.name, []).extend(definition.tokens)
        return scopes


def _chosen(matches: list[Any], which: int, name: str) -> Any:
    if not which and len(matches) == 1:
        return matches[0]
    if 0 < which <= len(matches):
        return matches[which - 1]
    if which:
        raise PlantingError(f"`find` matches {len(matches)} places in {name}, there is no number {which}")
    raise PlantingError(f"`find` matches {len(matches)} places in {name}, not one")


def _require_syntax(path: Path, text: str) -> None:
    try:
        ast.parse(text)
    except SyntaxError as error:
        raise PlantingError(f"{path} is no Python any more: {error}") from error
