"""Shell completion, output without escape sequences, and help that fits into 80 columns."""

import contextlib
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer
from typer.testing import CliRunner

from nsa_train.cli.eval import _show as print_results
from nsa_train.cli.main import app
from proofs import import_path
from tests import fork_server
from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.test_evaluations import cell, far
from tests.nsa_train.record.written import write_run

ROOT = Path(__file__).parents[3]
ESCAPE = "\x1b"


def commands(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


ALL_COMMANDS = list(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_help_fits_into_80_columns(path):
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}, prog_name="nsa")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    # An option or a type that does not fit ends with an ellipsis; in an example it is text ("mail …", "vllm …").
    cut = [line for line in result.stdout.splitlines() if re.search(r"[\w-]…\s*(│|$)", line)]
    assert not cut


def test_help_groups_the_commands_by_what_a_person_does():
    text = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}).stdout
    panels = re.findall(r"^╭─ ([\w ]+?) ─", text, re.MULTILINE)
    assert panels == ["Options", "Start", "Train", "Watch", "Use a model", "Share a model", "Check"]


@pytest.mark.parametrize("command", ["train", "launch", "preflight", "estimate", "plan", "config show"])
@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--lr", "1e-3"], "train.lr=1e-3"),
        (["--lr=1e-3"], "train.lr=1e-3"),
        (["--batch-size", "4"], "train.batch_size=4"),
        (["--train.seq_len=512"], "train.seq_len=512"),
        (["--weight-decay"], "train.weight_decay=VALUE"),
        (["--no-such-thing", "1"], None),
    ],
)
def test_a_setting_written_as_an_option_is_answered_with_the_word_to_type(command, words, answer):
    result = CliRunner().invoke(app, [*command.split(), "configs/cpu_quickstart.yaml", *words])
    assert result.exit_code == 2
    assert "No such option" in result.output
    settings = re.findall(r"\w+\.\w+=\S+", result.output)
    assert settings == ([answer] if answer else [])


def environment(**more: str) -> dict[str, str]:
    inherited = {name: text for name, text in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "CONFIG")}
    return inherited | {"PYTHONPATH": import_path()} | more


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name in ("a", "b"):
        write_run(folder / name, a_run(30))
    return folder


COMMANDS = [
    "--help",
    "--version",
    "train --help",
    "config show configs/train_50k.yaml",
    "config check configs/train_50k.yaml pyproject.toml",
    "doctor --dtype fp32",
    "estimate configs/train_50k.yaml --target a100-80gb",
    "status {runs}/a",
    "monitor {runs}/a --once",
    "compare {runs}/a {runs}/b",
    "checkpoint ls {runs}/a",
    "checkpoint verify nowhere",
    "data stats nowhere",
    "train nowhere.yaml",
    "eval",
]


@pytest.mark.parametrize("words", COMMANDS)
def test_nothing_is_coloured_when_piped(words, runs):
    command = ["-m", "nsa_train.cli", *words.format(runs=runs).split()]
    done = fork_server.run(command, cwd=ROOT, env=environment(), timeout=120)
    assert done.stdout + done.stderr
    assert ESCAPE not in done.stdout + done.stderr


def said_in_a_terminal(command: list[str], variables: dict[str, str]) -> str:
    here, terminal = pty.openpty()
    process = fork_server.start(command, cwd=ROOT, env=variables, stdin=terminal, stdout=terminal, stderr=terminal)
    os.close(terminal)
    said = b""
    with open(here, "rb", buffering=0) as reader, contextlib.suppress(OSError):  # EIO: the other end is closed
        while text := reader.read(1024):
            said += text
    process.wait(timeout=120)
    return said.decode()


@pytest.mark.parametrize("words", COMMANDS)
def test_no_color_holds_on_a_terminal(words, runs):
    """Colours only: rich moves the cursor to hide it, which NO_COLOR says nothing about."""
    command = ["-m", "nsa_train.cli", *words.format(runs=runs).split()]
    said = said_in_a_terminal(command, environment(NO_COLOR="1", TERM="xterm-256color"))
    colours = re.findall(r"\x1b\[[0-9;]*m", said)
    assert [code for code in colours if re.search(r"\b(3[0-7]|38|4[0-7]|48|9[0-7])\b", code)] == []
    assert said


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")
@pytest.mark.parametrize(
    ("typed", "offered"), [("nsa checkpoint v", {"verify"}), ("nsa doc", {"doctor"}), ("nsa doctor --js", {"--json"})]
)
def test_completion_in_bash(typed, offered, tmp_path):
    """The script that `nsa --show-completion bash` prints, in a real bash."""
    nsa = tmp_path / "nsa"
    nsa.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nsa_train.cli "$@"\n')
    nsa.chmod(0o755)
    script = f"""
        source <(nsa --show-completion bash)
        COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
        $(complete -p nsa | grep -o '_nsa_completion') nsa
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", script], env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"),
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_table_of_far_tasks_is_whole_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    print_results({"needle": far(cell(1024, 0.5)), "associative_recall": far(cell(131072, 1.0))})
    said = capsys.readouterr().out
    assert "…" not in said
    assert "associative_recall" in said
    assert "131,072" in said
