"""Runs with compiled blocks: the losses of uncompiled ones, exact resume, sharded and checkpointed too."""

import pytest
from torch.distributed.checkpoint import FileSystemReader

from nsa_train import names
from tests.nsa_train.train.engine.test_nan_guard_runs import same_weights
from tests.nsa_train.train.runs import Job, run_all
from tests.nsa_train.train.test_resume import corpus, logged_losses  # noqa: F401

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]

SELECTIVE = "runtime.gradient_checkpointing=selective"


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):  # noqa: F811
    """Real documents in packed rows."""
    folder = tmp_path_factory.mktemp("compiled")
    base = ["train.steps=8", "train.save_every=4", "train.lr_schedule=constant"]
    data = ["data.dataset=local", f"data.path={corpus}", "data.held_out=0.1", "train.log_every=3"]

    def job(name, world=1, *changes, **more):
        return Job(str(folder / name), world, [*base, *data, *changes], **more)

    on, fsdp = "runtime.compile=on", "parallel.data=fsdp"
    codes = run_all(
        job("eager"),
        job("compiled", 1, on),
        job("stopped", 1, on, "train.steps=4"),
        job("stopped", 1, on, resume=True),
        job("into_eager", 1, on, "train.steps=4"),
        job("into_eager", resume=True),
        job("ddp", 2, on),
        job("fsdp", 2, on, fsdp),
        job("fsdp_selective", 2, on, fsdp, SELECTIVE),
        timeout_s=1500,
    )
    assert {code for ranks in codes for code in ranks} == {0}
    return folder


@pytest.mark.parametrize("name", ["compiled", "into_eager", "ddp", "fsdp", "fsdp_selective"])
def test_losses_are_those_of_the_uncompiled_run(runs, name):
    expected, compiled = logged_losses(runs / "eager"), logged_losses(runs / name)
    assert [step for step, *_ in compiled][-1] == 8
    both = {step: (loss, norm) for step, loss, norm in compiled}
    for step, loss, norm in expected:
        assert both[step] == (pytest.approx(loss, rel=1e-5), pytest.approx(norm, rel=1e-4))


def test_resuming_is_exact(runs):
    """Although the first step of the second process is logged, and the same step of the whole run is not."""
    assert same_weights(runs / "stopped", runs / "compiled")


def test_checkpoints_have_the_names_of_the_uncompiled_model(runs):
    def keys(name):
        index = next((runs / name / names.CHECKPOINTS / "step8").rglob(".metadata"))
        return FileSystemReader(index.parent).read_metadata().state_dict_metadata.keys()

    assert keys("compiled") == keys("eager")
    assert keys("fsdp_selective") == keys("fsdp")
