"""A run keeps what its model needs: weights, settings and tokenizer are read from a verified checkpoint alone."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest
import torch

from nsa.errors import CheckpointError, DataError
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.trained_model import open_trained_model
from nsa_train.data.prepare.plan import make_plan
from nsa_train.data.prepare.run import prepare
from nsa_train.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from nsa_train.names import TOKENIZER, is_known_file
from nsa_train.run_model import build_model

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on. "


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Runs on documents with a BPE, on a set prepared with it, and on synthetic rows; the BPE's file is gone."""
    from tests.nsa_train.train.runs import Job, run_all

    folder = tmp_path_factory.mktemp("runs")
    with (folder / "text.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": str(i), "text": f"{i} {TEXT * 4}"}) + "\n" for i in range(64))
    bpe = folder / "bpe.json"
    train_bpe([TEXT], 300, bpe)
    prepare(make_plan(str(folder / "text.jsonl"), str(bpe)), str(folder / "set"), workers=1)
    documents = ["data.dataset=local", f"data.path={folder / 'text.jsonl'}", f"data.tokenizer={bpe}"]
    codes = run_all(
        Job(str(folder / "documents"), changes=["train.steps=2", "train.warmup_steps=1", *documents]),
        Job(
            str(folder / "prepared"),
            changes=["train.steps=2", "train.warmup_steps=1", "data.dataset=prepared", f"data.path={folder / 'set'}"],
        ),
        Job(str(folder / "synthetic"), changes=["train.steps=2", "train.warmup_steps=1"]),
        Job(str(folder / "few_ids"), changes=["train.steps=2", "train.warmup_steps=1", "model.vocab_size=64"]),
    )
    assert codes == [[0]] * 4
    os.rename(bpe, folder / "moved.json")
    return folder


@pytest.mark.parametrize("name", ["documents", "prepared"])
def test_a_run_and_its_checkpoints_keep_the_tokenizer_of_their_data(runs, name):
    expected = load_tokenizer(str(runs / "moved.json"))
    trained = open_trained_model(runs / name)
    saved = trained.tokenizer()
    assert saved is not None
    assert (saved.fingerprint, saved.eos_id) == (expected.fingerprint, expected.eos_id)
    assert trained.vocab_size == expected.vocab_size
    assert load_tokenizer(str(runs / name)).fingerprint == expected.fingerprint  # beside env.json
    assert set(trained.files.sizes) >= {TOKENIZER, "state.json"}
    assert all(map(is_known_file, trained.files.sizes))


def test_synthetic_rows_keep_a_tokenizer_only_if_the_model_has_its_ids(runs):
    saved = open_trained_model(runs / "synthetic").tokenizer()
    assert saved is not None
    assert saved.fingerprint == ByteTokenizer.fingerprint
    assert open_trained_model(runs / "few_ids").tokenizer() is None
    assert not (runs / "few_ids" / TOKENIZER).exists()


def test_settings_and_weights_make_the_model_of_the_run(runs):
    trained = open_trained_model(runs / "documents" / "checkpoints" / "latest")
    model = build_model(trained.config, trained.vocab_size)
    model.load_state_dict(trained.tensors)
    saved = torch.load(runs / "documents" / "model.pt", weights_only=True)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())
    assert trained.record.step == 2


def commit_again(run: Path, change) -> Path:
    """A copy of the last checkpoint with a changed file, committed: only its content is wrong."""
    folder = CheckpointFolder(run / "checkpoints")
    step = folder.steps()[-1]
    staging = folder.begin(step)
    shutil.copytree(folder.step_path(step), staging)
    (staging / "COMMIT.json").unlink()
    change(staging)
    folder.commit(step)
    return run


@pytest.fixture
def copied(runs, tmp_path) -> Path:
    return Path(shutil.copytree(runs / "documents", tmp_path / "run", symlinks=True))


def test_another_tokenizer_in_a_checkpoint_is_refused(copied):
    text = ByteTokenizer().to_json()
    commit_again(copied, lambda folder: (folder / TOKENIZER).write_text(text))
    with pytest.raises(DataError, match="fingerprint"):
        open_trained_model(copied).tokenizer()


def test_a_changed_tokenizer_is_refused_like_any_changed_file(copied):
    file = copied / "checkpoints" / "latest" / TOKENIZER
    file.write_text(file.read_text().replace("dog", "cat"))
    with pytest.raises(CheckpointError, match="SHA-256"):
        open_trained_model(copied / "checkpoints" / "latest").tokenizer()


def test_settings_of_another_version_are_refused_by_name(copied):
    def change(folder: Path) -> None:
        from nsa_train.checkpoint.run_state import _fingerprint

        state = json.loads((folder / "state.json").read_text())
        state["config"]["model"]["dim"] = "wide"
        state["config_fingerprint"] = _fingerprint(state["config"])
        (folder / "state.json").write_text(json.dumps(state))

    with pytest.raises(CheckpointError, match="settings"):
        open_trained_model(commit_again(copied, change))


def test_a_checkpoint_without_settings_and_a_folder_without_checkpoints_are_refused(copied, tmp_path):
    with pytest.raises(CheckpointError, match=r"state\.json"):
        open_trained_model(commit_again(copied, lambda folder: (folder / "state.json").unlink()))
    with pytest.raises(CheckpointError, match="no good checkpoint"):
        open_trained_model(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        open_trained_model(tmp_path / "nowhere")


def test_a_run_of_an_earlier_version_is_read_and_has_no_tokenizer(tmp_path):
    with tarfile.open(Path(__file__).parent / "fixtures" / "run_e78e5fe.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    trained = open_trained_model(tmp_path / "run")
    assert trained.tokenizer() is None
    assert trained.tensors["embeddings.weight"].shape[0] == trained.vocab_size
