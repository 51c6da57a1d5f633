"""Equality of runs on one rank, DDP, FSDP, HSDP and with accumulation; fp32, same rows, same seed."""

import math

import pytest
import torch

from nsa_train.config.layer import flatten
from nsa_train.names import PROGRESS, heartbeat
from nsa_train.record.heartbeat_record import read_beats
from tests.attention_options import OPTIONS
from tests.nsa_train.train.runs import Job, run_all

STEPS = 8


def losses_and_norms(folder):
    beats = [beat for beat in read_beats(folder / heartbeat(0)) if beat.msg == PROGRESS]
    assert [beat.step for beat in beats] == list(range(1, STEPS + 1))
    return torch.tensor([[beat.loss, beat.grad_norm] for beat in beats], dtype=torch.float64)


ALL_OPTIONS = [
    f"{key}={value}" for key, value in flatten(OPTIONS["all"]).items()
]  # shared keys and values, QK-norm, biases, yarn
WAYS = {
    "one": Job("", 1),
    "accumulation": Job("", 1, ["train.batch_size=1", "train.accumulate_grad_batches=4"]),
    "ddp": Job("", 2),
    "ddp_accumulation": Job("", 2, ["train.batch_size=2", "train.accumulate_grad_batches=2"]),
    "fsdp": Job("", 2, ["parallel.data=fsdp"]),
    "fsdp_accumulation": Job("", 2, ["parallel.data=fsdp", "train.batch_size=2", "train.accumulate_grad_batches=2"]),
    "fsdp_checkpointed": Job("", 2, ["parallel.data=fsdp", "runtime.gradient_checkpointing=true"]),
    "fsdp_selective": Job("", 2, ["parallel.data=fsdp", "runtime.gradient_checkpointing=selective"]),
    "hsdp": Job("", 4, ["parallel.data=hsdp", "parallel.shard_ranks=2"]),
    "linear": Job("", 1, ["nsa.phi=linear"]),
    "linear_fsdp": Job("", 2, ["nsa.phi=linear", "parallel.data=fsdp"]),
    "mlp": Job("", 1, ["nsa.phi=mlp", "model.tie_embeddings=true"]),
    "mlp_fsdp": Job("", 2, ["nsa.phi=mlp", "model.tie_embeddings=true", "parallel.data=fsdp"]),
    "options": Job("", 1, ALL_OPTIONS),
    "options_fsdp": Job("", 2, [*ALL_OPTIONS, "parallel.data=fsdp"]),
    # One shard per group: a mesh of (N, 1), where gradients must not be divided twice.
    "hsdp_of_one": Job("", 2, ["parallel.data=hsdp", "parallel.shard_ranks=1"]),
}


ALONE = {"one": "one", "options_fsdp": "options", "linear_fsdp": "linear", "mlp_fsdp": "mlp"}
COMPARED = "test_losses_norms_and_weights_are_those_of_one_rank"
# For every change; the others are two of these at once, or the same with other settings, and run every night.
EVERY_CHANGE = ("accumulation", "ddp", "fsdp", "options_fsdp")


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """A run of each way that a selected test needs."""
    folder = tmp_path_factory.mktemp("ways")
    chosen = [item for item in request.session.items if getattr(item, "originalname", "") == COMPARED]
    ways = {item.callspec.params["way"] for item in chosen}
    needed = {"one", "fsdp", *ways, *(ALONE.get(way, "one") for way in ways)}
    jobs = {name: job for name, job in WAYS.items() if name in needed}
    for name, job in jobs.items():
        job.out_dir = str(folder / name)
        job.changes = [f"train.steps={STEPS}", *job.changes]
    codes = run_all(*jobs.values())
    assert codes == [[0] * job.world for job in jobs.values()]
    return folder


def marked(way: str):
    return pytest.param(way, marks=() if way in EVERY_CHANGE else pytest.mark.nightly)


@pytest.mark.parametrize("way", [marked(way) for way in WAYS if way not in ALONE.values()])
def test_losses_norms_and_weights_are_those_of_one_rank(runs, way):
    alone = ALONE.get(way, "one")
    one, other = losses_and_norms(runs / alone), losses_and_norms(runs / way)
    assert (one - other).abs().max() < 1e-4
    mine, theirs = (torch.load(runs / name / "model.pt", weights_only=True) for name in (alone, way))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_it_learns(runs):
    losses = losses_and_norms(runs / "one")[:, 0]
    assert losses[0] == pytest.approx(math.log(257), abs=0.05)
    assert losses[-1] < losses[0]


def test_every_rank_has_a_heartbeat_with_the_same_loss(runs):
    first, second = (list(read_beats(runs / "fsdp" / heartbeat(rank))) for rank in (0, 1))
    assert [beat.loss for beat in first] == [beat.loss for beat in second]
    assert {beat.rank for beat in second} == {1}
