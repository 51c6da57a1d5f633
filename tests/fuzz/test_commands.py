"""Commands as real processes on damaged inputs: a documented exit code, a message, and never a traceback."""

from pathlib import Path

import pytest

from nsa import names
from nsa.errors import ExitCode
from tests import fork_server
from tests.data.shard_sets import documents, write_set
from tests.observe.damaged import copy_run
from tests.train.runs import environment
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
    ended = fork_server.run(["-m", "nsa.cli", *words.split()], cwd=damaged, env=environment(), timeout=300)
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said, said
    assert said.strip()
    expected = COMMANDS[words]
    assert (
        ended.returncode in set(ExitCode) - {ExitCode.FAILED} if expected is None else ended.returncode == expected
    ), said
