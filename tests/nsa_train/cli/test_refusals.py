"""`nsa train`, `nsa launch`, `nsa preflight` and `nsa estimate` give every reason against a run at once, with exit 2,
before a rank starts or a model is built."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import ConfigError, PreflightError
from nsa_train.checkpoint.lock import RunLock
from nsa_train.cli.main import app
from nsa_train.train.gather_preflight_facts import smallest_world
from tests import fork_server
from tests.nsa_train.train.runs import environment, write_config


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def occupied(tmp_path) -> Path:
    """A run folder with a checkpoint of somebody else."""
    (tmp_path / "run" / "checkpoints" / "step5").mkdir(parents=True)
    return tmp_path / "run"


def refused(command: str, tmp_path: Path, *words: str) -> tuple[set[str], str]:
    """The rules that an invocation was refused for, and what it printed before."""
    result = CliRunner().invoke(
        app, [command, str(write_config(tmp_path)), f"train.out_dir={tmp_path}/run", *words], env={"COLUMNS": "200"}
    )
    if isinstance(result.exception, PreflightError):
        assert result.exception.exit_code == 2
        return set(re.findall(r"^  - (\w+): ", str(result.exception), re.MULTILINE)), result.stdout
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 2, result.output
    return set(re.findall(r"^fail +(\w+) ", result.stdout, re.MULTILINE)), result.stdout


MISSING = ("data.dataset=local", "data.path=nowhere/at/all")


def test_another_run_and_missing_data_are_reported_together(tmp_path, occupied):
    assert refused("train", tmp_path, *MISSING)[0] == {"other_run", "data"}
    assert sorted(path.name for path in occupied.rglob("*")) == ["checkpoints", "step5"]


@pytest.mark.parametrize(("command", "more"), [("preflight", ["--no-dry-run"]), ("estimate", [])])
def test_commands_that_only_calculate_accept_a_folder_with_a_run(command, more, tmp_path, occupied):
    (occupied / ".HALT").write_text("halt: look at me\n")
    words = [command, str(write_config(tmp_path)), f"train.out_dir={occupied}", "data.dataset=synthetic", *more]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    if command == "preflight":
        assert re.search(r"^allowed +other_run ", done.stdout, re.MULTILINE)
        assert "add --resume" in " ".join(done.stdout.split())
    assert refused(command, tmp_path, *MISSING, *more)[0] == {"data"}
    assert sorted(path.name for path in occupied.rglob("*")) == [".HALT", "checkpoints", "step5"]


def test_the_launcher_refuses_before_any_rank_starts(tmp_path, occupied):
    command = ["-m", "nsa_train.cli", "launch", "--nproc", "3", str(write_config(tmp_path))]
    words = [*command, f"train.out_dir={occupied}", *MISSING]
    done = fork_server.run(words, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == 2, done.stderr
    assert set(re.findall(r"^  - (\w+): ", done.stderr, re.MULTILINE)) == {"other_run", "data", "ranks"}
    assert not (occupied / "logs").exists()
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["train", "preflight", "estimate"])
def test_synthetic_data_is_refused_to_a_long_run(command, tmp_path):
    long = ["train.steps=5000", "runtime.precision=bf16", "runtime.gradient_checkpointing=true"]
    rules, _ = refused(command, tmp_path, *long, *(["--no-dry-run"] if command == "preflight" else []))
    assert rules == {"synthetic_data", "save_every", "toy_model", "toy_sequence"}


@pytest.mark.parametrize("command", ["train", "preflight", "estimate"])
@pytest.mark.parametrize("place", ["file", "file/below", "read_only/run"])
def test_a_run_folder_that_cannot_be_written_is_a_reason(command, place, tmp_path, read_only):
    (tmp_path / "file").write_text("")
    out_dir = f"{read_only}/run" if place.startswith("read_only") else f"{tmp_path}/{place}"
    more = ["--no-dry-run"] if command == "preflight" else []
    rules, _ = refused(command, tmp_path, *MISSING, *more, f"train.out_dir={out_dir}")
    assert rules == {"out_dir", "data"}


def test_a_run_that_is_still_going_on_in_the_folder_is_a_reason(tmp_path):
    with RunLock(tmp_path / "run"):
        assert refused("train", tmp_path)[0] == {"other_run"}


def test_estimate_refuses_what_preflight_refuses_and_still_prints_the_figures(tmp_path):
    rules, printed = refused("estimate", tmp_path, "train.batch_size=3", "--target", "a100-80gb:2")
    assert rules == {"ranks"}
    assert "memory per device" in printed
    rules, printed = refused(
        "estimate", tmp_path, "model.dim=8192", "model.n_layers=40", "--target", "rtx3090", "--json"
    )
    assert rules == {"memory"}
    figures = json.loads(printed)
    assert figures["refused_by"] == ["memory"]
    assert figures["memory_bytes"]["total"] > figures["memory_bytes"]["available"]


def test_a_halt_file_beside_other_reasons_is_one_of_them(tmp_path, occupied):
    (occupied / ".HALT").write_text("halt: look at me\n")
    assert refused("train", tmp_path)[0] == {"other_run", "halt_file"}
    assert refused("train", tmp_path, "--clear-halt")[0] == {"other_run"}
    assert (occupied / ".HALT").exists()


def test_an_elastic_launch_must_work_with_every_number_of_nodes(tmp_path):
    from nsa_train.config import load

    config = load(write_config(tmp_path))  # 4 rows
    assert smallest_world(config, 1, (1, 2)).world == 1
    assert smallest_world(config, 2, (1, 2)).world == 2
    assert smallest_world(config, 3, (1, 2)).world == 3  # none works: preflight says why
    with pytest.raises(ConfigError, match=r"3 nodes.*of these: 4.*train.batch_size=12"):
        smallest_world(config, 1, (3, 4))
    with pytest.raises(ConfigError, match=r"3 nodes.*6.*of these: 1, 2\).*train.batch_size=24"):
        smallest_world(config, 2, (1, 4))
