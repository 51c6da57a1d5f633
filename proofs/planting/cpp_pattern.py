"""Patterns of C++ tokens: found in a function's tokens and replaced in the text of its file.

A pattern is a run of tokens; `$name` stands for one identifier, the same wherever it stands, `$_` for any. Comments and
white space do not count. Only the tokens that differ between the two patterns are replaced; line numbers stay.
"""

import re
from typing import NamedTuple

from proofs.planting import PlantingError

_TOKEN = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<token>"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|\$?[A-Za-z_]\w*|\.?\d(?:[eEpP][+-]|[\w.'])*
    |<<=|>>=|\.\.\.|->|::|<<|>>|<=|>=|==|!=|&&|\|\||\+\+|--|[-+*/%&|^]=|\#\#|.)""",
    re.DOTALL | re.VERBOSE,
)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")
_PAIRS = {"(": ")", "{": "}", "[": "]"}
_NO_FUNCTIONS = {"if", "for", "while", "switch", "catch", "return", "sizeof", "alignas", "decltype", "defined"}
_TYPES = {"struct", "class", "union", "enum"}
_BEFORE_VARIABLES = {"constexpr", "static", "const", "inline"}


class Token(NamedTuple):
    text: str
    begin: int
    end: int


class CppDefinition(NamedTuple):
    name: str
    """Name of a function after those of its enclosing types: `Grid.by_range`."""
    tokens: list[Token]


def tokens(text: str) -> list[Token]:
    matches = (match for match in _TOKEN.finditer(text) if match["token"])
    return [Token(match["token"], match.start("token"), match.end("token")) for match in matches]


class CppPattern:
    def __init__(self, find: str, replace: str) -> None:
        self._old, self._new = ([token.text for token in tokens(pattern)] for pattern in (find, replace))
        if self._old == self._new:
            raise PlantingError("`replace` is the same as `find`: it changes nothing")
        if unbound := {text for text in self._new if text.startswith("$")} - set(self._old) | {"$_"} & set(self._new):
            raise PlantingError(f"`replace` uses placeholders that `find` does not bind: {', '.join(sorted(unbound))}")

    def matches(self, scope: list[Token]) -> list[list[Token]]:
        """Runs of tokens that the pattern matches, in the order of the source."""
        runs = (scope[begin : begin + len(self._old)] for begin in range(len(scope) - len(self._old) + 1))
        return [run for run in runs if self._bindings(run) is not None]

    def _bindings(self, run: list[Token]) -> dict[str, str] | None:
        bindings: dict[str, str] = {}
        for pattern, token in zip(self._old, run, strict=True):
            if pattern.startswith("$") and not _IDENTIFIER.match(token.text):
                return None
            expected = pattern
            if pattern.startswith("$"):
                expected = token.text if pattern == "$_" else bindings.setdefault(pattern, token.text)
            if token.text != expected:
                return None
        return bindings

    def apply(self, text: str, run: list[Token]) -> str:
        """The text of the file with the match replaced."""
        bindings = self._bindings(run)
        assert bindings is not None
        old, new, begin, end = self._old, self._new, 0, 0
        while begin < min(len(old), len(new)) and old[begin] == new[begin]:
            begin += 1
        while end < min(len(old), len(new)) - begin and old[-1 - end] == new[-1 - end]:
            end += 1
        written = " ".join(bindings.get(token, token) for token in new[begin : len(new) - end])
        replaced = run[begin : len(run) - end]
        if not replaced:
            return f"{text[: run[begin].begin]}{written} {text[run[begin].begin :]}"
        at, stop = replaced[0].begin, replaced[-1].end
        return text[:at] + written + "\n" * text.count("\n", at, stop) + text[stop:]


def definitions(text: str) -> list[CppDefinition]:
    """Functions, types and named constants of a file."""
    every = tokens(text)
    closing = _closing_brackets(every)
    spans = sorted(
        (at, end, token.text)
        for at, token in enumerate(every)
        if _IDENTIFIER.match(token.text) and (end := _end_of_definition(every, closing, at)) is not None
    )
    every_definition = []
    for begin, end, name in spans:
        outer = [other for start, stop, other in spans if start < begin and end <= stop]
        every_definition.append(CppDefinition(".".join([*outer, name]), every[begin : end + 1]))
    return every_definition


def _closing_brackets(every: list[Token]) -> dict[int, int]:
    closing, opened = {}, []
    for at, token in enumerate(every):
        if token.text in _PAIRS:
            opened.append(at)
        elif token.text in _PAIRS.values() and opened:
            closing[opened.pop()] = at
    return closing


def _end_of_definition(every: list[Token], closing: dict[int, int], at: int) -> int | None:
    """The last token of what this identifier begins the definition of."""
    name, after = every[at].text, every[at + 1].text if at + 1 < len(every) else ""
    before = every[at - 1].text if at else ""
    if before in _TYPES:
        return _end_of_body(every, closing, at + 1, {";", "(", ")", ">", ",", "=", "}"})
    if after == "(" and name not in _NO_FUNCTIONS and before not in {".", "->", "return", "new"}:
        if at + 1 not in closing:
            return None
        return _end_of_body(
            every, closing, closing[at + 1] + 1, {";", ")", "}", ",", "=", "]", "+", "-", "*", "?", "."}
        )
    if after == "=":
        begin = at
        while begin and every[begin - 1].text not in {";", "{", "}", ")"}:
            begin -= 1
        if every[begin].text in _BEFORE_VARIABLES:
            return next((end for end in range(at, len(every)) if every[end].text == ";"), None)
    return None


def _end_of_body(every: list[Token], closing: dict[int, int], at: int, stops: set[str]) -> int | None:
    while at < len(every) and every[at].text not in stops:
        if every[at].text == "{":
            return closing.get(at)
        at = closing.get(at, at) + 1
    return None
