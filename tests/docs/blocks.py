"""Fenced shell blocks of a Markdown file, with the word that says what they need."""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^```bash ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    needs: str
    """Empty: runs anywhere. gpu, host (another machine, a network), install: cannot run in a test."""
    code: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in _FENCE.finditer(text)]


def nsa_commands(code: str) -> list[list[str]]:
    """The words of every `nsa …` in a block, also in $(…); comments, redirections and what follows a pipe left out."""
    joined = code.replace("\\\n", " ")
    found = []
    for line in joined.splitlines():
        for part in re.split(r"\|\||&&|[|;&)]|\$\(", line.partition(" #")[0]):
            words = part.split()
            if words[:1] == ["nsa"]:
                found.append(words[1:])
    return found


def tokenizer_command(path: Path) -> tuple[str, str]:
    """Corpus and file of the one `nsa data tokenizer train` in a text, also in a comment; it has no other words."""
    text = path.read_text(encoding="utf-8")
    (words,) = re.findall(r"nsa data tokenizer train ([^#\n`]*)", text)
    source, file = words.split()
    return source, file
