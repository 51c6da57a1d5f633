"""Bugs that the tests must catch, planted by `python -m proofs.mutation_drill`: one TOML file per table.

A table has `about` (one line, printed by --help), optionally `interpreted` (its tests run under TRITON_INTERPRET=1) and
any number of [[group]] with `tests` and its [[group.mutation]]:

    name       unique over all tables: what is wrong with the bug planted
    breaks     the property that it breaks, here or in the group
    function   the function, method, class or constant that it is planted in, by name (`NSACache.append`), wherever that
               is; with the name of its module before it where several have that name (`reference.sliding_attention`)
    find       a pattern in it, with placeholders for names: `$age < $w`
    replace    what is there with the bug: `$age <= $w`
    which      2 for the second place that the pattern matches, from the first line on; without it, it must match once

`proofs/planting/python_pattern.py` and `cpp_pattern.py` describe patterns. What a function uses of its module's private
ones (`_name`) is part of it: name the public function that others call. `tests` are arguments of pytest, the test
likeliest to fail first; a file is named as far as it is unique: `test_loss.py`, `model/test_loss.py::test_of_a_chunk`.
"""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).parent


class Mutation(NamedTuple):
    name: str
    breaks: str
    """The property that does not hold any more."""
    function: str
    find: str
    replace: str
    tests: tuple[str, ...]
    """Arguments of pytest: tests that should fail, the likeliest first."""
    which: int = 0
    """The first match of the pattern is 1; 0: there is one."""
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
        tomllib.loads(path.read_text(encoding="utf-8")), path.name, {"about": str, "group": list}, {"interpreted": bool}
    )
    mutations = []
    for number, group in enumerate(content["group"], start=1):
        where = f"{path.name}, [[group]] number {number}"
        group = _checked(group, where, {"tests": list, "mutation": list}, {"breaks": str})
        shared = {"breaks": group["breaks"]} if "breaks" in group else {}
        for row_number, row in enumerate(group["mutation"], start=1):
            what = f"{where}, mutation {row_number} (name {row.get('name')!r})"
            texts = dict.fromkeys(("name", "breaks", "function", "find", "replace"), str)
            row = _checked({**shared, **row}, what, texts, {"which": int})
            mutations.append(
                Mutation(**row, tests=tuple(group["tests"]), interpreted=content.get("interpreted", False))
            )
    return MutationTable(path.stem, content["about"], mutations)


def _checked(
    fields: dict[str, Any], where: str, required: dict[str, type], optional: dict[str, type] | None = None
) -> dict[str, Any]:
    known = {**required, **(optional or {})}
    if missing := [field for field in required if field not in fields]:
        raise MutationTableError(f"{where}: no {', '.join(missing)}. Required: {', '.join(required)}.")
    if unknown := [field for field in fields if field not in known]:
        raise MutationTableError(f"{where}: unknown field {', '.join(unknown)}. Known: {', '.join(known)}.")
    for field, value in fields.items():
        if not isinstance(value, known[field]):
            raise MutationTableError(f"{where}: {field} is {value!r}, expected a {known[field].__name__}.")
    return fields
