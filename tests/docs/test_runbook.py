"""The runbook is executed: every block in order, in one shell, in a folder that looks like a checkout."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from nsa.cli.main import app
from nsa.observe.watch.conditions import CONDITIONS
from tests.docs.blocks import blocks, nsa_commands

ROOT = Path(__file__).parents[2]
RUNBOOK = ROOT / "docs" / "RUNBOOK.md"
BLOCKS = blocks(RUNBOOK)
NEEDS = {"", "gpu", "host", "install"}


def test_blocks_say_what_they_need_in_words_we_know():
    assert {block.needs for block in BLOCKS} <= NEEDS
    assert sum(not block.needs for block in BLOCKS) >= 12


@pytest.mark.timeout(600)
def test_every_block_that_can_run_here_does(tmp_path):
    for name in ("configs", "scripts", "tests", "ops"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    for name, words in (("nsa", "-m nsa.cli"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        command.chmod(0o755)
    script = "set -euo pipefail\n"
    for block in BLOCKS:
        if not block.needs:
            script += f"echo '== RUNBOOK.md line {block.line}' >&2\n{block.code}\n"
    (tmp_path / "runbook.sh").write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NSA_") and name != "CONFIG"}
    environ = {**kept, "PATH": f"{tmp_path / 'bin'}:{kept['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "runbook.sh"], cwd=tmp_path, env=environ, text=True, capture_output=True, timeout=580,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n--- stderr\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.needs], ids=lambda b: f"line{b.line}-{b.needs}")
def test_blocks_for_other_machines_parse(block):
    subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)


COMMANDS = [(block.line, words) for block in BLOCKS for words in nsa_commands(block.code)]


@pytest.mark.parametrize(("line", "words"), COMMANDS, ids=lambda x: " ".join(x) if isinstance(x, list) else str(x))
def test_commands_and_options_exist(line, words):
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        assert words, f"line {line}: a command is missing"
        assert words[0] in command.commands, f"line {line}: nsa has no {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert used <= known, f"line {line}: no such option: {used - known}"


def test_every_condition_has_its_place_and_its_advice():
    text = RUNBOOK.read_text(encoding="utf-8")
    for name in CONDITIONS:
        assert f'<a id="{name}"></a>' in text, f"run python -m tools.docs.regenerate: {name} is missing"
