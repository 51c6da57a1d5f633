"""A run that was stopped and went on is the run that was never stopped, bit for bit."""

import json

import pytest
import torch

from nsa_train import names
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import read_beats
from tests.nsa_train.train.runs import Job, run_all

DOCUMENTS = [f"Document {i}: " + " ".join(f"{w * i % 97}" for w in range(i % 50)) for i in range(400)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    path.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(DOCUMENTS)))
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    """Real documents in packed rows; checkpoints in the background at steps 4 and 8."""
    folder = tmp_path_factory.mktemp("resume")
    base = ["train.steps=10", "train.save_every=4", "data.dataset=local", f"data.path={corpus}", "data.held_out=0.1"]

    def job(name, world=1, *changes, **more):
        return Job(str(folder / name), world, [*base, *changes], **more)

    half = "train.steps=6", "train.lr_schedule=constant"
    whole = ("train.lr_schedule=constant",)
    codes = run_all(
        job("whole", 1, *whole),
        job("stopped", 1, *half),
        job("stopped", 1, *whole, resume=True),
        job("stopped_at_a_save", 1, *half),
        job("branched", 1, *whole, resume_from=str(folder / "stopped_at_a_save" / "checkpoints" / "step4")),
        job("whole_fsdp", 2, "parallel.data=fsdp", *whole),
        job("stopped_fsdp", 2, "parallel.data=fsdp", *half),
        job("stopped_fsdp", 2, "parallel.data=fsdp", *whole, resume=True),
        job("two_to_one", 2, *half),
        job("two_to_one", 1, *whole, resume=True),
        job("one_to_two", 1, *half),
        job("one_to_two", 2, *whole, resume=True),
        job("fresh", 1, *whole, resume=True),
        job("whole", 1, *whole),
    )
    assert {code for ranks in codes[:-1] for code in ranks} == {0}
    return folder, codes


def logged_losses(folder, rank=0):
    """(step, loss, grad_norm) of every step, as the last process that did it told it."""
    beats = {beat.step: beat for beat in read_beats(folder / names.heartbeat(rank)) if beat.msg == names.PROGRESS}
    return [(step, beats[step].loss, beats[step].grad_norm) for step in sorted(beats)]


def weights(folder):
    return torch.load(folder / names.MODEL, weights_only=True)


@pytest.mark.parametrize(
    ("stopped", "whole"), [("stopped", "whole"), ("stopped_fsdp", "whole_fsdp"), ("fresh", "whole")]
)
def test_resumed_is_bit_identical(runs, stopped, whole):
    folder, _ = runs
    assert logged_losses(folder / stopped) == logged_losses(folder / whole)
    assert [step for step, *_ in logged_losses(folder / stopped)] == list(range(1, 11))
    mine, theirs = weights(folder / stopped), weights(folder / whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_an_older_checkpoint_can_be_continued_in_another_folder(runs):
    folder, _ = runs
    assert logged_losses(folder / "branched") == logged_losses(folder / "whole")[4:]
    mine, theirs = weights(folder / "branched"), weights(folder / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("changed", ["two_to_one", "one_to_two"])
def test_another_number_of_ranks_sees_the_same_data(runs, changed):
    folder, _ = runs
    mine, theirs = torch.tensor(logged_losses(folder / changed)), torch.tensor(logged_losses(folder / "whole"))
    assert (mine - theirs).abs().max() < 1e-4
    state = json.loads((folder / changed / "checkpoints" / "step10" / "state.json").read_text())
    whole = json.loads((folder / "whole" / "checkpoints" / "step10" / "state.json").read_text())
    assert state["data_cursor"] == whole["data_cursor"]


def test_a_folder_with_a_run_in_it_is_not_used_again_by_accident(runs):
    assert runs[1][-1] == [2]


def test_events_tell_starts_saves_and_the_end(runs):
    kinds = [event.kind for event in read_events(runs[0] / "stopped")]
    assert kinds[:2] == [EventKind.START, EventKind.FIRST_STEP]
    assert kinds.count(EventKind.RESTART) == 1
    assert kinds.count(EventKind.DONE) == 2
    saves = [event.step for event in read_events(runs[0] / "stopped") if event.kind == EventKind.SAVE]
    assert saves == [4, 6, 8, 10]


def test_only_checkpoints_signed_with_the_runs_key_are_loaded(tmp_path):
    for name in ("ours", "another"):
        (tmp_path / name).write_text(f"the signing key of {name}")
    signed, forged = (f"train.checkpoint_key_file={tmp_path / name}" for name in ("ours", "another"))
    run = str(tmp_path / "run")
    codes = run_all(
        Job(run, changes=["train.steps=2", signed]),
        Job(run, changes=["train.steps=3", forged], resume=True),
        Job(run, changes=["train.steps=3", signed], resume=True),
    )
    assert codes == [[0], [22], [0]]
