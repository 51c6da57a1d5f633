"""The commands of `nsa checkpoint`."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from nsa.errors import CheckpointError
from nsa_train.checkpoint.folder import CheckpointFolder, RetentionPolicy
from nsa_train.checkpoint.lock import RunLock
from nsa_train.checkpoint.manifest import LocalFiles, build_manifest, encode
from nsa_train.checkpoint.run_state import RunRecord
from nsa_train.cli.checkpoint import app

ROOT = Path(__file__).parents[3]

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    run = tmp_path_factory.mktemp("run")
    folder = CheckpointFolder(run / "checkpoints")
    for step in (10, 20):
        staging = folder.begin(step)
        dcp.save({"model": {name: tensor + step for name, tensor in WEIGHTS.items()}}, checkpoint_id=staging)
        folder.commit(step)
    return run


@pytest.fixture
def run(saved_run, tmp_path):
    return Path(shutil.copytree(saved_run, tmp_path / "run", symlinks=True))


def nsa(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    if isinstance(result.exception, CheckpointError):  # nsa_train.cli.main turns it into a message and a code
        return result.exception.exit_code, f"{result.stdout}{result.exception}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def damage(run: Path) -> None:
    os.truncate(run / "checkpoints/step20/__0_0.distcp", 100)


def test_ls_shows_good_and_bad(run):
    code, text = nsa("ls", run)
    assert code == 0
    assert [line.split()[0] for line in text.splitlines()] == ["step10", "step20"]
    assert text.endswith("← latest\n")
    damage(run)
    assert "step20        BAD: __0_0.distcp has 100 bytes" in nsa("ls", run / "checkpoints")[1]
    with RunLock(run):
        assert f"in use by process {os.getpid()}" in nsa("ls", run)[1]


def test_ls_answers_without_torch(run):
    """A listing that an operator repeats must not wait seconds for an import."""
    command = [sys.executable, "-X", "importtime", "-m", "nsa_train.cli", "checkpoint", "ls", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert "step20" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "nsa_train.checkpoint.folder" in loaded
    assert not loaded & {"torch", "numpy"}


def test_ls_says_why_each_is_kept(tmp_path):
    folder = CheckpointFolder(tmp_path / "checkpoints", retention=RetentionPolicy(1, 20))
    settings = {"train": {"keep_checkpoints": 1, "keep_every": 20}}
    for step, reason in ((10, "requested"), (20, "interval"), (30, "interval"), (35, "last")):
        RunRecord(step, 1, settings, {}).write(made_folder(folder.begin(step)))
        folder.commit(step, reason)
    lines = nsa("ls", tmp_path)[1].splitlines()
    assert [line.split()[0] for line in lines] == ["step10", "step20", "step35"]
    assert [line.partition("kept: ")[2] for line in lines] == ["requested", "every 20", "newest 1 ← latest"]
    assert [line.partition("saved: ")[2].split()[0] for line in lines] == ["requested", "interval", "last"]


def made_folder(path: Path) -> Path:
    path.mkdir()
    return path


WITHOUT_TRAIN = """
import json, sys

ABSENT = {"olmo_core", "numpy", "safetensors", "tensorboard", "boto3", "botocore", "pyarrow", "tokenizers"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from nsa_train.cli.main import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["nsa", "checkpoint", *words]
    try:
        main()
    except SystemExit as end:
        codes.append(int(end.code or 0))
    print("=" * 9)
    print("=" * 9, file=sys.stderr)
print(codes)
"""


def without_train(*commands: tuple[object, ...]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each `nsa checkpoint` where the train extra's packages cannot be imported."""
    command = [sys.executable, "-c", WITHOUT_TRAIN, json.dumps([list(map(str, words)) for words in commands])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    *outputs, codes = done.stdout.split("=" * 9 + "\n")
    return list(zip(json.loads(codes), outputs, done.stderr.split("=" * 9 + "\n"), strict=False))


def test_push_and_pull_without_the_train_extra_name_it(tmp_path):
    from tests.nsa_train.train.engine.test_checkpointer import save

    save(tmp_path / "run/checkpoints", 1)
    ended = without_train(
        ("push", tmp_path / "run/checkpoints/step1", "s3://models/run"),
        ("pull", "s3://models/run", tmp_path / "pulled"),
    )
    assert len(ended) == 2
    for code, _, errors in ended:
        assert code == 20, errors
        assert "pip install 'nsa-train[train]'" in errors
        assert "boto3" in errors
        assert "Traceback" not in errors


def test_verify_and_ls_need_no_train_extra(tmp_path):
    """A run's own checkpoints, with the engine's classes in their index and numpy's in their rank files."""
    import numpy

    from tests.nsa_train.train.engine.test_checkpointer import save

    run = tmp_path / "run"
    save(run / "checkpoints", 1)
    torch.save({"rng": numpy.random.get_state()}, run / "checkpoints/step1/train/rank0.pt")
    folder = run / "checkpoints/step1"
    (folder / "COMMIT.json").write_bytes(encode(build_manifest(LocalFiles(folder), 1, "now")))

    damaged = Path(shutil.copytree(run, tmp_path / "damaged", symlinks=True))
    os.truncate(damaged / "checkpoints/step1/model_and_optim/__0_0.distcp", 100)
    good, listed, bad = without_train(("verify", run), ("ls", run), ("verify", damaged))
    assert good[0] == 0, good
    assert good[1].startswith("good  ")
    assert listed[0] == 0, listed
    assert (bad[0], bad[1][:3]) == (22, "BAD")


def test_ls_of_a_folder_without_checkpoints(tmp_path):
    for command in ("ls", "verify"):
        for folder in (tmp_path, tmp_path / "x"):
            code, text = nsa(command, folder)
            assert code == 22
            assert str(folder) in text
            assert "Name a run folder" in text


def test_verify_ends_with_22_if_one_is_bad(run):
    assert nsa("verify", run)[0] == 0
    assert nsa("verify", run / "checkpoints/latest")[1].startswith("good  ")
    damage(run)
    code, text = nsa("verify", run)
    assert code == 22
    assert [line[:4] for line in text.splitlines()] == ["good", "BAD "]
    assert nsa("verify", run / "checkpoints/step10")[0] == 0


def test_verify_with_a_key_refuses_unsigned(run, tmp_path):
    (tmp_path / "key").write_text("k" * 40)
    code, text = nsa("verify", run, "--key-file", tmp_path / "key")
    assert code == 22
    assert "is not signed" in text
    assert "kkkk" not in text


def test_export_takes_the_newest_good_one_and_says_so(run, tmp_path):
    damage(run)
    result = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "out")])
    assert result.exit_code == 0, result.output
    assert "WARNING: passed over step20" in result.stderr
    assert "WARNING" not in result.stdout
    assert "from step10" in result.stdout
    state = torch.load(tmp_path / "out/model.pt", weights_only=True)
    assert {name: tensor.dtype for name, tensor in state.items()} == {"a.weight": torch.float32, "b": torch.bfloat16}
    assert torch.equal(state["a.weight"], WEIGHTS["a.weight"] + 10)
    assert nsa("export", run / "checkpoints/step20", "--out", tmp_path / "out")[0] == 22


def test_export_of_a_plain_dcp_folder_needs_an_override(tmp_path):
    dcp.save({"model": WEIGHTS}, checkpoint_id=tmp_path / "foreign")
    assert nsa("export", tmp_path / "foreign", "--out", tmp_path / "out")[0] == 22
    assert not (tmp_path / "out").exists()
    assert nsa("export", tmp_path / "foreign", "--out", tmp_path / "out", "--allow-foreign")[0] == 0


def test_help_has_an_example():
    for command in ("ls", "verify", "export"):
        assert f"nsa checkpoint {command}" in " ".join(nsa(command, "--help")[1].split())
