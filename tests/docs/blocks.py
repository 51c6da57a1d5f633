"""Fenced shell blocks of a Markdown file, with the word that says what they need."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import typer

from nsa_train.cli.main import app
from proofs import import_path
from tests import fork_server

ROOT = Path(__file__).parents[2]

_FENCE = re.compile(r"^```bash ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    line: int
    needs: str
    """Empty: runs anywhere. gpu, host, install: not in a test."""
    code: str


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    return [Block(text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in _FENCE.finditer(text)]


def run_blocks(
    page: Path,
    folder: Path,
    timeout_s: float,
    *,
    checkout: bool = True,
    replace: Mapping[str, str] | None = None,
    new_interpreters: bool = False,
) -> None:
    """Run every block that runs anywhere, in order, in one shell.

    checkout: in a folder that looks like a checkout, else in one that has nothing of it.
    replace: words of the page, each there once or more, and what to run instead, e.g. to train for fewer steps.
    new_interpreters: start `nsa` and `python` as a user does, else by fork from a process that has imported torch.
    """
    for name in ("configs", "scripts", "tests", "ops") if checkout else ():
        (folder / name).symlink_to(ROOT / name)
    (folder / "bin").mkdir()
    for name, words in (("nsa", ["-m", "nsa_train.cli"]), ("python", [])):
        command = folder / "bin" / name
        started = shlex.join([sys.executable, *words]) if new_interpreters else fork_server.command_for(*words)
        command.write_text(f'#!/bin/sh\nexec {started} "$@"\n')
        command.chmod(0o755)
    script = "set -euo pipefail\n"
    for block in blocks(page):
        if not block.needs:
            script += f"echo '== {page.name} line {block.line}' >&2\n{block.code}\n"
    for printed, instead in (replace or {}).items():
        assert printed in script, printed
        script = script.replace(printed, instead)
    (folder / "page.sh").write_text(script)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
    environ = {
        **inherited,
        "PATH": f"{folder / 'bin'}:{inherited['PATH']}",
        "PYTHONPATH": import_path(),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "page.sh"], cwd=folder, env=environ, text=True, capture_output=True, timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"


def unknown_words(words: list[str]) -> str | None:
    """What of a command, given by the words after `nsa`, does not exist; None if all of it does."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        if not words:
            return "a command is missing"
        if words[0] not in command.commands:
            return f"nsa has no {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {"--help"}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    return f"no such option: {used - known}" if used - known else None


def nsa_commands(code: str) -> list[list[str]]:
    """The words of every `nsa …` in a block, also in $(…); comments, redirections and what follows a pipe left out."""
    joined = code.replace("\\\n", " ")
    commands = []
    for line in joined.splitlines():
        for part in re.split(r"\|\||&&|[|;&)]|\$\(", line.partition(" #")[0]):
            words = part.split()
            if words[:1] == ["nsa"]:
                commands.append(words[1:])
    return commands


def tokenizer_command(path: Path) -> tuple[str, str]:
    """Corpus and file of the one `nsa data tokenizer train` in a text, also in a comment; no other word but a size."""
    text = path.read_text(encoding="utf-8")
    (words,) = re.findall(r"nsa data tokenizer train ([^#\n`]*)", text)
    source, file = re.sub(r" --vocab-size \d+", "", words).split()
    return source, file
