"""Every start option reaches the run on each way to it; a field added to `StartOptions` needs no new test."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa_train.cli.launch import launch
from nsa_train.cli.main import app
from nsa_train.cli.train import train
from nsa_train.train.start_options import StartOptions

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

CONFIG = str(Path(__file__).parents[3] / "configs" / "train_showcase.yaml")
WORDS = [CONFIG, "data.dataset=synthetic"]
_FOLDER = tempfile.TemporaryDirectory()
ANOTHER_RUN = Path(_FOLDER.name)
(ANOTHER_RUN / "checkpoints" / "step1").mkdir(parents=True)  # launchers ask for a run with a checkpoint
FIELDS = [field.name for field in dataclasses.fields(StartOptions)]
OTHER_VALUES = {bool: True, Path: ANOTHER_RUN, tuple: ("precision", "memory")}
CLEARED_BY_LAUNCHER = "clear_halt"
"""The launcher acts on it itself, once: a .HALT file that appears before a restart must stop the run."""


def differing(name: str) -> StartOptions:
    """Options of which one is not the default, whatever its type."""
    field = next(field for field in dataclasses.fields(StartOptions) if field.name == name)
    kind = next(kind for kind in OTHER_VALUES if kind.__name__ in str(field.type))
    options = StartOptions(**{name: OTHER_VALUES[kind]})
    assert options != StartOptions()
    return options


def invoke(command: str, *words: str) -> None:
    result = CliRunner().invoke(app, [command, *words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output


@pytest.fixture
def arrived(monkeypatch):
    """Options that reach the run and the launcher, which do not start."""
    seen = {}
    monkeypatch.setattr(
        "nsa_train.train.run.train", lambda config, options, reporter, importer: seen.update(run=options) or 0
    )
    monkeypatch.setattr(
        "nsa_train.train.launch.launcher.launch", lambda settings, *_: seen.update(settings=settings) or 0
    )
    monkeypatch.setattr(
        "nsa_train.cli.launch._require_preflight", lambda *arguments: seen.update(checked=arguments[-1])
    )
    monkeypatch.setattr("nsa_train.cli.launch._clear_halt", lambda folder: seen.update(cleared=folder))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return seen


@pytest.mark.parametrize("command", [train, launch], ids=lambda command: command.__name__)
def test_every_field_is_an_option_of_both_commands(command):
    assert set(FIELDS) <= inspect.signature(command).parameters.keys()


@pytest.mark.parametrize("name", FIELDS)
def test_from_the_command_line_of_train_to_the_run(name, arrived):
    options = differing(name)
    invoke("train", *WORDS, *options.to_args())
    assert arrived == {"run": options}


def rank_options(arrived, restart: bool = False) -> StartOptions:
    """Options of the ranks of a launched run, by the arguments that the launcher adds to their command."""
    settings = arrived.pop("settings")
    start = settings.start.for_restart() if restart else settings.start
    assert settings.command[:4] == [sys.executable, "-m", "nsa_train.cli", "train"]
    invoke("train", *settings.command[4:], *start.to_args())
    return arrived.pop("run")


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize("command", ["launch", "train --ddp 1"])
def test_through_the_launcher_to_the_ranks(command, name, arrived, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    options = differing(name)
    invoke(*command.split(), *WORDS, *options.to_args())
    assert arrived["checked"] == options
    assert ("cleared" in arrived) == options.clear_halt
    expected = StartOptions() if name == CLEARED_BY_LAUNCHER else options
    assert rank_options(arrived) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_a_restart_resumes_from_the_run_folder_and_keeps_the_rest(name, arrived):
    invoke("launch", *WORDS, *differing(name).to_args())
    unchanged = {"allow": differing(name).allow}
    assert rank_options(arrived, restart=True) == StartOptions(resume=True, **unchanged)


def test_resume_from_wins_over_resume_on_every_way(arrived):
    options = StartOptions(resume=True, resume_from=ANOTHER_RUN)
    invoke("launch", *WORDS, *options.to_args())
    assert rank_options(arrived) == options


@pytest.mark.parametrize("name", [name for name in FIELDS if name != CLEARED_BY_LAUNCHER])
def test_through_launcher_agent_and_rank_as_processes(name, tmp_path):
    """The command of a real rank, under a real agent and launcher."""
    program = f"import json, sys; json.dump(sys.argv[1:], open({str(tmp_path / 'arguments')!r}, 'w'))"
    options = differing(name)
    script = f"""
from pathlib import Path
from nsa_train.train.launch.launcher import LaunchSettings, launch
from nsa_train.train.start_options import StartOptions
options = StartOptions(**{ {name: value if not isinstance(value := getattr(options, name), Path) else str(value)}!r})
settings = LaunchSettings(command={[sys.executable, "-c", program]!r}, run_folder=Path({str(tmp_path)!r}), nproc=1,
                          start=options)
raise SystemExit(launch(settings, print))
"""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TORCHELASTIC")}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, cwd=Path(CONFIG).parents[1], env=environ)
    assert json.loads((tmp_path / "arguments").read_text()) == options.to_args()


@pytest.mark.parametrize("others_resume", [True, False])
def test_a_rank_among_ranks_that_resume_resumes_too(monkeypatch, others_resume):
    """What all ranks say together is fixed here; tests/proofs/drill/test_node_cluster.py has nodes that say it."""
    from nsa_train.train import run

    monkeypatch.setattr(run.HostCollectives, "any", lambda collectives, flags: [others_resume or flags[0]])
    assert run._agree_to_resume(StartOptions(resume_from=Path("elsewhere")), 1.0) == StartOptions(
        resume=others_resume, resume_from=None if others_resume else Path("elsewhere")
    )
