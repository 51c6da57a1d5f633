"""A path that cannot be read or written ends a command with a message and a code, never with a traceback."""

import errno
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import OutputError
from nsa_train.cli import main as cli
from tests.nsa_train.record.beats import a_run
from tests.nsa_train.record.written import write_run
from tests.nsa_train.train.runs import write_config

KINDS = ("below_file", "far_below_file", "read_only", "absent", "folder", "file", "long_name", "loop", "empty_folder")

# P is the path in question, R a good run folder, C a good config file.
COMMANDS = (
    "config show P", "config check P",
    "train C train.out_dir=P --steps 0", "train P", "launch P",
    "estimate C train.out_dir=P", "estimate C data.dataset=local data.path=P",
    "estimate C data.dataset=prepared data.path=P", "estimate C data.tokenizer=P", "estimate C profile=P",
    "preflight C train.out_dir=P --no-dry-run",
    "report R --out P", "report P", "compare R R --out P", "compare P P",
    "watch P --once", "status P", "status P --log", "status P --json", "halt P", "smoke P",
    "smoke --csv P --heartbeat P", "monitor P --once",
    "checkpoint ls P", "checkpoint verify P", "checkpoint verify P --key-file P", "checkpoint export P --out P",
    "checkpoint export R --out P --key-file P", "checkpoint push P s3://bucket/x", "checkpoint pull s3:///nothing P",
    "bench machine --device nothing --json P", "bench attention --lengths 0 --json P --plot P --markdown P",
    "bench model --gpu nothing --json P", "gpu-check --rehearse --only nothing --bundle P",
)  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory, read_only) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("places")
    (base / "file").write_text("neither YAML: [nor a run\n")
    (base / "loop").symlink_to(base / "loop")
    write_run(base / "folder", a_run(30))
    (base / "empty").mkdir()
    return {
        "R": write_run(base / "good", a_run(30)),
        "C": write_config(base),
        "below_file": base / "file" / "x",
        "far_below_file": base / "file" / "x" / "y.z",
        "read_only": read_only / "run",
        "absent": base / "no" / "such" / "thing",
        "folder": base / "folder",
        "file": base / "file",
        "long_name": base / ("x" * 300),
        "loop": base / "loop",
        "empty_folder": base / "empty",
    }


@pytest.fixture
def nsa(monkeypatch, capfd, tmp_path):
    """The command, in this process; what it raises instead of ending is a traceback to its user."""

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["nsa", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        code = ended.value.code
        return (0 if code is None else int(code)), capfd.readouterr().err

    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return run


@pytest.mark.parametrize("command", COMMANDS)
def test_no_path_ends_a_command_with_a_traceback(command, nsa, places):
    for kind in KINDS:
        known = {"R": places["R"], "C": places["C"], "P": places[kind]}
        words = [str(known.get(word, word)).replace("=P", f"={places[kind]}") for word in command.split()]
        code, error = nsa(*words)
        assert code not in (None, 1) or "halt" in command or "smoke" in command or "status" in command or not error, (
            kind
        )


OUTPUTS = (
    "report R --out P", "compare R R --out P",
    "bench machine --json P", "bench attention --markdown P", "bench decode --plot P",
    "gpu-check --rehearse --bundle P", "exporter R --port 0 --file-sd P", "halt READ_ONLY", "status READ_ONLY --log",
    "report READ_ONLY",
)  # fmt: skip


@pytest.mark.parametrize("command", OUTPUTS)
@pytest.mark.parametrize("kind", ["far_below_file", "read_only", "loop"])
def test_an_output_that_cannot_be_written_is_reported_before_the_work(command, kind, nsa, places, read_only):
    """Seconds, not the minutes that a benchmark takes."""
    path = {
        "far_below_file": places["far_below_file"],
        "read_only": read_only / "x" / "y",
        "loop": places["loop"] / "x",
    }[kind]
    known = {"R": places["R"], "P": path, "READ_ONLY": read_only / "run"}
    code, error = nsa(*(str(known.get(word, word)) for word in command.split()))
    assert code in (OutputError.exit_code, 20), error
    assert len(error.splitlines()) <= 3
    assert any(str(place) in error for place in (*path.parents, path, read_only / "run"))


def test_only_paths_are_turned_into_messages(monkeypatch, capsys):
    def failing(error: BaseException):
        def app(**_: object) -> None:
            raise error

        return app

    for number in (
        errno.EACCES,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EPERM,
    ):
        monkeypatch.setattr(cli, "app", failing(OSError(number, os.strerror(number), "some/path")))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == OutputError.exit_code
        assert "some/path" in capsys.readouterr().err
    monkeypatch.setattr(cli, "app", failing(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == OutputError.exit_code
    for bug in (
        OSError(errno.EBADF, "Bad file descriptor"),
        OSError(errno.EACCES, "no path"),
        KeyError("x"),
        OSError("x"),
    ):
        monkeypatch.setattr(cli, "app", failing(bug))
        with pytest.raises(type(bug)):
            cli.main()
