"""Commands as real processes on damaged inputs and nonsense: a documented exit code, a message, never a traceback."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from nsa.errors import ExitCode
from nsa_train import names
from nsa_train.cli.main import app
from tests import fork_server
from tests.nsa_train.data.shard_sets import documents, write_set
from tests.nsa_train.record.damaged import copy_run
from tests.nsa_train.train.runs import environment, write_config
from tests.trained_runs import write_run


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config, a run, a prepared set, a trained model and an exported folder, each with something wrong."""
    root = tmp_path_factory.mktemp("damaged")
    (root / "run.yaml").write_bytes(b"train:\n\tsteps: 5\n\xff")
    run = copy_run(root / "run")
    with (run / names.EVENTS).open("ab") as file:
        file.write(b'{"ts": NaN, "event": ["save"]}\n\xff\xfe\n{"ts": 17')
    (run / names.heartbeat(1)).write_bytes(b"[" * 5000 + b"\n")
    write_set(root / "set", documents(20))
    tokens = root / "set/train/00000-00000.tok"
    tokens.write_bytes(tokens.read_bytes()[:-3])
    trained = write_run(root / "trained", dim=16, n_layers=1)
    (trained / names.CHECKPOINTS / "step10" / names.STATE).write_text("[]")
    (root / "exported").mkdir()
    (root / "exported" / "config.json").write_text('{"model_type": "nsa", "hidden_size": 1e999}')
    return root


COMMANDS = {
    "config show run.yaml": ExitCode.CONFIG,
    "config show run.yaml train.steps=\udcff": ExitCode.CONFIG,
    "report run --out page.html": ExitCode.DONE,
    "monitor run --once": ExitCode.DONE,
    "watch run --once": None,
    "data verify set": ExitCode.DATA,
    "checkpoint verify trained": ExitCode.CHECKPOINT,
    "generate trained -p x": ExitCode.CHECKPOINT,
    "generate exported -p x": ExitCode.CHECKPOINT,
}
"""Words → exit code; None where several are right."""


@pytest.mark.parametrize("words", COMMANDS)
def test_a_command_on_damaged_input_ends_without_a_traceback(damaged: Path, words: str) -> None:
    ended = fork_server.run(["-m", "nsa_train.cli", *words.split()], cwd=damaged, env=environment(), timeout=300)
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said, said
    assert said.strip()
    expected = COMMANDS[words]
    assert (
        ended.returncode in set(ExitCode) - {ExitCode.FAILED} if expected is None else ended.returncode == expected
    ), said


def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Every command of the tree by its words."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, (*path, name))


LEAVES = dict(leaves(typer.main.get_command(app)))
PIPE, NO_UTF8 = "pipe", "\udcff"
NONSENSE = {int: "1" + "0" * 30, float: "nan"}
"""By type; a pipe for texts and paths. No device: a command that replaces its output would replace the machine's."""
GOOD = {
    "CONFIG KEY=VALUE": "run.yaml", "FILE KEY=VALUE": "run.yaml", "FILE": "run.yaml", "RUN": "run", "RUN RUN": "run",
    "DIR": "run", "MODEL": "trained", "RUN|CHECKPOINT": "trained", "SET": "set", "SRC": "text",
    "checkpoint": "trained", "source": "text", "gpus": "h100-80gb:8",
}  # fmt: skip
"""Arguments by metavar or name, so that a command reaches its options; anything else is a path that does not exist."""
SHORT_WORK = {
    "monitor": "--once", "watch": "--once", "gpu-check": "--rehearse --only x",
    "launch": "--allow x",
}  # fmt: skip
"""Options of commands that would otherwise work for minutes on good arguments."""
SLOW_OPTIONS = ("--lm-eval", "--allowed-host")
"""Not called: importing the harness takes 20 s of CPU time, and every name may be that of a host to serve for."""
CLOCK_S = 300.0


def calls(name: str, *, by_day: bool) -> Iterator[list[str]]:
    """One command with one argument or option replaced by nonsense, the others good.

    By day one option for each kind of nonsense, because options of a type are read alike; and one command with a word
    that is no text, which is refused before the command is looked up.
    """
    parameters = [each for each in LEAVES[name].params if not getattr(each, "is_flag", False)]
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    good = {each.name: GOOD.get(each.metavar) or GOOD.get(each.name) or "absent" for each in parameters}
    needed = [f"{each.opts[0]}={good[each.name]}" for each in parameters if each.required and each not in arguments]
    words = [*name.split(), *SHORT_WORK.get(name, "").split(), *needed]
    if not by_day or name == min(LEAVES):
        yield [*words, NO_UTF8]
    met: set[str] = set()
    for each in parameters:
        value = NONSENSE.get(each.type_descriptor.annotation, PIPE)
        if each in arguments:
            yield [*words, "--", *(value if other is each else good[other.name] for other in arguments)]
        elif each.opts[0] not in SLOW_OPTIONS and not (by_day and value in met):
            met.add(value)
            yield [*words, *(good[other.name] for other in arguments), f"{each.opts[0]}={value}"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Undamaged inputs of commands, and a pipe without a writer."""
    root = tmp_path_factory.mktemp("sound")
    write_config(root)
    copy_run(root / "run")
    write_set(root / "set", documents(20))
    write_run(root / "trained", dim=16, n_layers=1)
    (root / "text").mkdir()
    (root / "text" / "a.txt").write_text("plain words " * 500)
    os.mkfifo(root / PIPE)
    return root


@pytest.mark.parametrize("by_day", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", LEAVES)
def test_nonsense_ends_a_command_in_time_and_without_a_traceback(sound: Path, name: str, by_day: bool) -> None:
    for words in calls(name, by_day=by_day):
        try:
            ended = fork_server.run(["-m", "nsa_train.cli", *words], cwd=sound, env=environment(), timeout=CLOCK_S)
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{words} hangs: {late.stderr!r}") from None
        said = ended.stdout + ended.stderr
        assert "Traceback" not in said, (words, said)
        assert ended.returncode in set(ExitCode), (words, said)
        assert ended.returncode == 0 or said.strip(), words
