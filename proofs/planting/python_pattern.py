"""Patterns of Python syntax: found in a function's syntax tree and replaced in the text of its file.

A pattern is an expression, or one or more statements that follow one another, with placeholders:

    $name     one identifier: a variable, attribute, argument or function. The same name, the same identifier
    $$name    any expression
    $*name    any number of elements or arguments
    ...       as a statement: any number of statements

`$_`, `$$_` and `$*_` stand for something else every time. Comments, line breaks, quotes and brackets without meaning do
not count. Only what differs between the two patterns is replaced, in its own place: the rest of the file keeps its text
and its line numbers.
"""

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from proofs.planting import PlantingError

_PLACEHOLDER = re.compile(r"\$(\$|\*|)([A-Za-z_]\w*)")
_NAME, _ANY, _MANY = "PLACEHOLDER_name_", "PLACEHOLDER_any_", "PLACEHOLDER_many_"
_PREFIXES = {"": _NAME, "$": _ANY, "*": _MANY}
_NOT_COMPARED = {"ctx", "kind", "type_comment"}
_UNBRACKETED = (ast.Name, ast.Call, ast.Attribute, ast.Subscript, ast.JoinedStr)

Bindings = dict[Any, Any]
"""Values of placeholders by name, and source nodes by the `id` of the pattern's."""


class Edit(NamedTuple):
    """Nodes of the pattern that follow one another, and what replaces them."""

    old: list[ast.AST]
    new: list[ast.AST]


class PythonPattern:
    def __init__(self, find: str, replace: str) -> None:
        old, new = _parse(find), _parse(replace)
        if len(old) == len(new) == 1 and isinstance(old[0], ast.Expr) and isinstance(new[0], ast.Expr):
            self._old: list[ast.AST] = [old[0].value]
            edits = _edits(old[0].value, new[0].value)
            self._of_statements = False
        else:
            self._old = [*old]
            edits = _edits_of_statements(old, new)
            self._of_statements = True
        if edits is None:
            raise PlantingError(
                f"what changes between {find!r} and {replace!r} is no expression or statement of its own"
            )
        if not edits:
            raise PlantingError("`replace` is the same as `find`: it changes nothing")
        self._edits = edits
        _require_bound(old, edits)

    def matches(self, scopes: list[ast.AST]) -> list[Bindings]:
        """Places that the pattern matches, in the order of the source."""
        places: dict[tuple[int, int, int, int], Bindings] = {}
        for scope in scopes:
            for node in (ast.Module([scope], []), *ast.walk(scope)):  # type: ignore[list-item]
                for place, bindings in self._matches_at(node):
                    end = -place.end_lineno, -place.end_col_offset
                    places.setdefault((place.lineno, place.col_offset, *end), bindings)
        return [places[place] for place in sorted(places)]

    def _matches_at(self, node: ast.AST) -> Iterator[tuple[Any, Bindings]]:
        if not self._of_statements:
            bindings = next(_unify(self._old[0], node, {}), None) if isinstance(node, ast.expr) else None
            if bindings is not None:
                yield node, bindings
            return
        for _, body in ast.iter_fields(node):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for begin in range(len(body)):
                    bindings = next(_unify_list([*self._old, _REST], body[begin:], {}), None)
                    if bindings is not None:
                        yield body[begin], bindings

    def apply(self, text: str, bindings: Bindings) -> str:
        """The text of the file with the edits made at a match."""
        splices = []
        for edit in self._edits:
            old = [bindings[id(node)] for node in edit.old]
            new = [part for node in edit.new for part in _substituted(node, bindings)]
            if [*map(ast.dump, old)] == [*map(ast.dump, new)]:
                raise PlantingError("it changes nothing: the placeholders stand for the same")
            splices.append((old[0], old[-1], new))
        for first, last, new in sorted(splices, key=lambda splice: (splice[0].lineno, splice[0].col_offset))[::-1]:
            text = _spliced(text, first, last, new)
        return text

    @property
    def names(self) -> set[str]:
        """Variables and functions that the new text uses by name."""
        nodes = [part for edit in self._edits for node in edit.new for part in ast.walk(node)]
        names = {node.id for node in nodes if isinstance(node, ast.Name) and not node.id.startswith("PLACEHOLDER_")}
        return names - {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


def _parse(pattern: str) -> list[ast.stmt]:
    try:
        return ast.parse(_PLACEHOLDER.sub(lambda match: _PREFIXES[match[1]] + match[2], pattern.strip("\n"))).body
    except SyntaxError as error:
        raise PlantingError(f"{pattern!r} is no Python: {error}") from error


def _fields(node: ast.AST) -> tuple[str, ...]:
    return tuple(field for field in node._fields if field not in _NOT_COMPARED)


def _placeholder(node: object, prefix: str) -> str | None:
    """The name behind the prefix if the node is such a placeholder."""
    return node.id.removeprefix(prefix) if isinstance(node, ast.Name) and node.id.startswith(prefix) else None


def _many(item: object) -> str | None:
    """The name of a placeholder for any number of items; `...` for statements."""
    if isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) and item.value.value is ...:
        return "_"
    return _placeholder(item.value if isinstance(item, ast.keyword) and item.arg is None else item, _MANY)


_REST = ast.Expr(ast.Constant(...))
"""Last statement of a pattern after which anything may follow in the body."""


def _bind(name: str, key: Any, value: Any, bindings: Bindings) -> Iterator[Bindings]:
    if name == "_":
        yield bindings
    elif key not in bindings:
        yield {**bindings, key: value}
    elif _dump(bindings[key]) == _dump(value):
        yield bindings


def _dump(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_dump, value))
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def _unify(pattern: Any, node: Any, bindings: Bindings) -> Iterator[Bindings]:
    """Bindings under which the pattern is the node."""
    if isinstance(pattern, list):
        if isinstance(node, list):
            yield from _unify_list(pattern, node, bindings)
    elif isinstance(pattern, ast.AST):
        if (name := _placeholder(pattern, _ANY)) is not None:
            if isinstance(node, ast.expr):
                yield from _bind(name, _ANY + name, node, {**bindings, id(pattern): node})
        elif type(pattern) is type(node):
            yield from _unify_fields(pattern, node, _fields(pattern), {**bindings, id(pattern): node})
    elif isinstance(pattern, str) and pattern.startswith(_NAME):
        if isinstance(node, str):
            yield from _bind(pattern.removeprefix(_NAME), pattern, node, bindings)
    elif type(pattern) is type(node) and pattern == node:
        yield bindings


def _unify_fields(pattern: ast.AST, node: ast.AST, fields: tuple[str, ...], bindings: Bindings) -> Iterator[Bindings]:
    if not fields:
        yield bindings
        return
    for more in _unify(getattr(pattern, fields[0], None), getattr(node, fields[0], None), bindings):
        yield from _unify_fields(pattern, node, fields[1:], more)


def _unify_list(pattern: list[Any], nodes: list[Any], bindings: Bindings) -> Iterator[Bindings]:
    if not pattern:
        if not nodes:
            yield bindings
    elif (name := _many(pattern[0])) is not None:
        for length in range(len(nodes) + 1):
            for more in _bind(name, _MANY + name, nodes[:length], {**bindings, id(pattern[0]): nodes[:length]}):
                yield from _unify_list(pattern[1:], nodes[length:], more)
    elif nodes:
        for more in _unify(pattern[0], nodes[0], bindings):
            yield from _unify_list(pattern[1:], nodes[1:], more)


def _edits(old: Any, new: Any) -> list[Edit] | None:
    """The smallest replacements of whole expressions and statements that turn the one into the other.

    None if there are none: what differs, say an operator, belongs to a larger expression.
    """
    if isinstance(old, list) and isinstance(new, list):
        if len(old) == len(new):
            return _all_edits(zip(old, new, strict=True))
        return _edits_of_statements(old, new) if isinstance((old or new)[0], ast.stmt) else None
    if not isinstance(old, ast.AST):
        return [] if type(old) is type(new) and old == new else None
    if _many(old) is not None:
        return [] if _dump(old) == _dump(new) else None
    edits = None
    if type(old) is type(new) and not isinstance(old, ast.JoinedStr):  # positions in it are wrong before Python 3.12
        edits = _all_edits((getattr(old, field, None), getattr(new, field, None)) for field in _fields(old))
    elif isinstance(old, ast.JoinedStr) and _dump(old) == _dump(new):
        return []
    for kind in (ast.expr, ast.stmt):
        if edits is None and isinstance(old, kind) and isinstance(new, kind):
            return [Edit([old], [new])] if _has_place(old) and _has_place(new) else None
    return edits


def _all_edits(pairs: Any) -> list[Edit] | None:
    every: list[Edit] = []
    for old, new in pairs:
        if (edits := _edits(old, new)) is None:
            return None
        every += edits
    return every


def _edits_of_statements(old: list[Any], new: list[Any]) -> list[Edit] | None:
    if len(old) == len(new) and (edits := _all_edits(zip(old, new, strict=True))) is not None:
        return edits
    begin, end = 0, 0
    while begin < min(len(old), len(new)) and _dump(old[begin]) == _dump(new[begin]):
        begin += 1
    while end < min(len(old), len(new)) - begin and _dump(old[-1 - end]) == _dump(new[-1 - end]):
        end += 1
    if begin + end == len(old):  # an insertion is made at a statement
        begin, end = (begin - 1, end) if begin else (begin, end - 1)
    replaced, replacing = old[begin : len(old) - end], new[begin : len(new) - end]
    if any(_many(node) is not None for node in (*replaced, *replacing)):
        return None
    return [Edit(replaced, replacing or [ast.Pass()])]


def _has_place(node: ast.AST) -> bool:
    """Whether brackets may be put around the node and the text between its ends be replaced."""
    if isinstance(node, ast.Tuple):
        return not any(isinstance(part, ast.Slice) for part in node.elts)
    return not isinstance(node, (ast.Slice, ast.Starred, ast.FormattedValue))


def _substituted(node: ast.AST, bindings: Bindings) -> list[ast.AST]:
    """A copy of the node with what its placeholders stand for; several nodes for `$*name`."""
    if (name := _many(node)) is not None:
        return list(bindings[_MANY + name])
    if (name := _placeholder(node, _ANY)) is not None:
        return [bindings[_ANY + name]]
    values = {}
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            value = [part for item in value for part in _substituted_value(item, bindings)]
        else:
            (value,) = _substituted_value(value, bindings)
        values[field] = value
    return [type(node)(**values)]


def _substituted_value(value: Any, bindings: Bindings) -> list[Any]:
    if isinstance(value, ast.AST):
        return list(_substituted(value, bindings))
    return [bindings[value] if isinstance(value, str) and value.startswith(_NAME) else value]


def _require_bound(old: list[ast.stmt], edits: list[Edit]) -> None:
    def placeholders(nodes: list[Any]) -> set[str]:
        dumps = " ".join(ast.dump(node) for node in nodes)
        return set(re.findall(rf"(?:{_NAME}|{_ANY}|{_MANY})\w+", dumps))

    if any(_many(part) == "_" for edit in edits for node in edit.new for part in ast.walk(node)):
        raise PlantingError("what `replace` changes contains `...`: the statements there are not known")
    unbound = placeholders([node for edit in edits for node in edit.new]) - placeholders(list(old))
    anonymous = {_NAME + "_", _ANY + "_", _MANY + "_"} & placeholders([node for edit in edits for node in edit.new])
    if unbound | anonymous:
        names = ", ".join(sorted(re.sub(r"PLACEHOLDER_[a-z]+_", "", name) for name in unbound | anonymous))
        raise PlantingError(f"`replace` uses placeholders that `find` does not bind: {names}")


def _spliced(text: str, first: Any, last: Any, new: list[ast.AST]) -> str:
    """The text with that of these nodes replaced; as many line breaks as before, where there were more."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: first.lineno - 1])) + first.col_offset
    end = sum(map(len, lines[: last.end_lineno - 1])) + last.end_col_offset
    written = [ast.unparse(ast.fix_missing_locations(node)) for node in new]
    if isinstance(first, ast.stmt):
        replacement = "\n".join(written).replace("\n", "\n" + " " * first.col_offset)
        replacement += "\n" * (last.end_lineno - first.lineno - replacement.count("\n"))
    else:
        padding = "\n" * (last.end_lineno - first.lineno)
        bare = isinstance(new[0], _UNBRACKETED) or _is_word(new[0], text.encode()[end : end + 1])
        replacement = written[0] if bare and not padding else f"({written[0]}{padding})"
    return (text.encode()[:begin] + replacement.encode() + text.encode()[end:]).decode()


def _is_word(node: ast.AST, after: bytes) -> bool:
    """Whether the node is a constant that needs no brackets before this character."""
    return isinstance(node, ast.Constant) and (after != b"." or not isinstance(node.value, (int, float, complex)))
