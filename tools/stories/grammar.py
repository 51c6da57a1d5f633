"""Template grammar of the story corpus: files of rules, variables and plots, and their expansion to English text.

A template holds `[one|of these]`, `<rule>` (expanded anew wherever it stands), `{variable}` (one value per document)
and `{the_variable}` (its value with `the` for its article). A file has rules, `<rule>` with one alternative a line
below it, and variables, `name, name2 = a / b | c / d`, whose parts go to the names in order. `== title` starts a
section, whose other lines are its text.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

_CHOICE = re.compile(r"\[([^\[\]]*)\]")
_RULE = re.compile(r"<([^<>]*)>")
_SLOT = re.compile(r"\{(\w+)\}")
_DEFINITION = re.compile(r"([a-z]\w*(?:, *\w+)*) = (.*)")
_SENTENCE_START = re.compile(r'(?:^|[.!?] |[.]" |\n)"?[a-z]')
_ARTICLE = re.compile(r'\b([Aa]) (?=(?!(?:use|uni|one|eu|ewe)[a-z]*)[aeiou]|hour|honest)')  # fmt: skip
_SENTENCE = re.compile(r'(?:[^.!?"\n]|"[^"\n]*")+[.!?]*')

Variables = Mapping[str, str]


@dataclass
class Section:
    """One plot or one kind of text: definitions of variables, and lines."""

    title: str
    definitions: dict[tuple[str, ...], list[tuple[str, ...]]] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)


@dataclass
class Grammar:
    """Rules by name, variables of every document, and sections, from the text of one or more files."""

    rules: dict[str, list[str]] = field(default_factory=dict)
    world: Section = field(default_factory=lambda: Section("world"))
    sections: list[Section] = field(default_factory=list)

    def read(self, file: Path) -> list[Section]:
        """Add what a file defines and return its sections."""
        section, new = self.world, []
        entries = re.sub(r"\n[ \t]+\|", " |", file.read_text(encoding="utf-8"))
        rule: list[str] | None = None
        for line in entries.splitlines():
            if line.startswith("== "):
                section, rule = Section(line[3:]), None
                new.append(section)
            elif match := re.fullmatch(r"<([^<>]*)>", line):
                rule = self.rules.setdefault(match[1], [])
            elif line.startswith("  ") and rule is not None:
                rule.append(line.strip())
            elif match := _DEFINITION.fullmatch(line):
                names = tuple(name.strip() for name in match[1].split(","))
                values = [tuple(split_outside(part, "/")) for part in split_outside(match[2], "|")]
                if wrong := [value for value in values if len(value) != len(names)]:
                    raise ValueError(f"{file.name}: {', '.join(names)} needs {len(names)} parts each, not {wrong[0]}")
                section.definitions[names] = values
            elif line.strip() and not line.startswith("#"):
                section.lines.append(line)
        self.sections += new
        return new

    def bind(self, section: Section, variables: Variables, random: Random) -> dict[str, str]:
        """Draw the variables of a document: the world's, where the section does not define them, then the section's."""
        values = dict(variables)
        for names, alternatives in {**self.world.definitions, **section.definitions}.items():
            drawn = random.choice(alternatives)
            values.update(zip(names, [self.expand(part, values, random) for part in drawn], strict=True))
        return values

    def expand(self, template: str, variables: Variables, random: Random) -> str:
        """One text of a template."""
        text = template
        while True:
            if match := _CHOICE.search(text):
                new = random.choice(match[1].split("|"))
            elif match := _RULE.search(text):
                new = random.choice(self.rules[_fill(match[1], variables)])
            else:
                return _fill(text, variables)
            text = text[: match.start()] + new + text[match.end() :]


def split_outside(text: str, separator: str) -> list[str]:
    """Split at a separator between spaces that is not inside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if character == separator and not depth and parts[-1].endswith(" "):
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _fill(text: str, variables: Variables) -> str:
    """Put values in their places; `{the_name}` is a value with `the` for its article, as a second mention needs."""

    def value(match: re.Match[str]) -> str:
        name = match[1].removeprefix("the_")
        return variables[name] if name == match[1] else re.sub(r"^(?:an?|some) ", "the ", variables[name])

    return _SLOT.sub(value, text)


def tidy(text: str) -> str:
    """Single spaces, capitals at the start of sentences, and `an` before a vowel."""
    text = re.sub(r" +", " ", text).strip().replace(" .", ".").replace(" ,", ",")
    text = _SENTENCE_START.sub(lambda match: match[0][:-1] + match[0][-1].upper(), text)
    return _ARTICLE.sub(r"\1n ", text)


def sentences(text: str) -> list[str]:
    """The sentences of a text, each with the speech in it."""
    return [sentence for sentence in map(str.strip, _SENTENCE.findall(text)) if sentence]


def draw_new(draw: Callable[[], str], used: set[str], attempts: int = 20) -> str:
    """A text none of whose sentences is in `used`, to which they are added. Empty if every attempt repeats one."""
    for _ in range(attempts):
        text = draw()
        if text and used.isdisjoint(new := sentences(text)) and len(set(new)) == len(new):
            used.update(new)
            return text
    return ""
