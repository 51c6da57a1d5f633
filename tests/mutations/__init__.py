"""Bugs that the tests must catch, planted by `python -m proofs.mutation_drill`: one TOML file per table.

A table has `about` (one line, printed by --help), optionally `interpreted` (the tests run under TRITON_INTERPRET=1),
and any number of [[file]] with `path`, `tests` (arguments of pytest, the test likeliest to fail first) and its
[[file.mutation]]: `name` (unique over all tables), `old` (text that occurs exactly once in the file) and `new`.
The same path may have several [[file]], each with its own tests.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    """Text that occurs exactly once in the file."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: tests that should fail, the likeliest first."""
    interpreted: bool = False
    """Whether they run under TRITON_INTERPRET=1."""


class MutationTable(NamedTuple):
    name: str
    about: str
    mutations: list[Mutation]


class MutationTableError(ValueError):
    """A table, or a row of it, has a missing, unknown or mistyped field."""


def load_tables(folder: Path = FOLDER) -> list[MutationTable]:
    return [load_table(path) for path in sorted(folder.glob("*.toml"))]


def load_table(path: Path) -> MutationTable:
    content = _checked(
        tomllib.loads(path.read_text(encoding="utf-8")), path.name, {"about": str, "file": list}, {"interpreted": bool}
    )
    mutations = []
    for number, group in enumerate(content["file"], start=1):
        where = f"{path.name}, [[file]] number {number}"
        group = _checked(group, f"{where} (path {group.get('path')!r})", {"path": str, "tests": list, "mutation": list})
        for row_number, row in enumerate(group["mutation"], start=1):
            what = f"mutation {row_number} (name {row.get('name')!r})"
            row = _checked(row, f"{where} ({group['path']}), {what}", {"name": str, "old": str, "new": str})
            mutations.append(
                Mutation(
                    row["name"],
                    group["path"],
                    row["old"],
                    row["new"],
                    tuple(group["tests"]),
                    content.get("interpreted", False),
                )
            )
    return MutationTable(path.stem, content["about"], mutations)


def _checked(
    given: dict[str, Any], where: str, required: dict[str, type], optional: dict[str, type] | None = None
) -> dict[str, Any]:
    known = {**required, **(optional or {})}
    if missing := [field for field in required if field not in given]:
        raise MutationTableError(f"{where}: no {', '.join(missing)}. Required: {', '.join(required)}.")
    if unknown := [field for field in given if field not in known]:
        raise MutationTableError(f"{where}: unknown field {', '.join(unknown)}. Known: {', '.join(known)}.")
    for field, value in given.items():
        if not isinstance(value, known[field]):
            raise MutationTableError(f"{where}: {field} is {value!r}, expected a {known[field].__name__}.")
    return given
