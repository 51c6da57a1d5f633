"""Sphinx extension: docstrings of this package in the API reference.

Arguments are described as `name: text` paragraphs; they become a definition list. Names of tensors with their shape
(`q_BSHK`) stay as they are.
"""

import re
from collections.abc import Iterator

from sphinx.application import Sphinx

_ARGUMENT = re.compile(r"^([a-z_]\w*(?:, [a-z_]\w*)*): (\S.*)$")


def with_definition_lists(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, with `name: text` as the term and the definition of a list entry."""
    in_list = False
    for line in lines:
        if match := _ARGUMENT.match(line):
            if not in_list:
                yield ""
            yield ", ".join(f"``{name}``" for name in match[1].split(", "))
            yield f"    {match[2]}"
            in_list = True
        elif in_list and line.strip() and not line.startswith(" "):
            yield ""
            yield line
            in_list = False
        else:
            yield line


def process(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    lines[:] = with_definition_lists(lines)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", process)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
