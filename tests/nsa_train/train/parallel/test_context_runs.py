"""Training runs whose rows are divided among ranks are those of one rank: losses, norms, held-out scores, weights."""

import csv
import json

import pytest
import torch

from nsa_train import names
from nsa_train.record.heartbeat_record import read_beats
from tests.nsa_train.train.runs import Job, run_all

pytestmark = pytest.mark.nightly  # many runs; test_context_parallel.py compares layers for every change
STEPS = 20
ZIGZAG, CONTIGUOUS = ["parallel.cp=2"], ["parallel.cp=2", "parallel.cp_split=contiguous"]
FSDP, HSDP = "parallel.data=fsdp", ["parallel.data=hsdp", "parallel.shard_ranks=1"]
FULL, SELECTIVE = "runtime.gradient_checkpointing=full", "runtime.gradient_checkpointing=selective"
ACCUMULATED = ["train.batch_size=2", "train.accumulate_grad_batches=2"]
SELECTOR = ["nsa.selector_loss=0.5", "nsa.selector_loss_share=0.25"]
FAMILIES = [  # layers with other windows and other RoPE: positions of every layer, divided
    "model.n_layers=3", "model.attention=window,nsa,dense", "model.window=9", "model.rope_layers=scaled,scaled,plain",
    "model.rope_scaling.rope_type=linear", "model.rope_scaling.factor=2", "model.rotary_dim=6", "model.post_norm=true",
    "model.qk_norm=true", "model.qk_norm_per=layer", "model.ffn_bias=true",
]  # fmt: skip
WAYS = {
    "fsdp, 2 × 2": (4, [*ZIGZAG, FSDP, SELECTIVE]),
    "ddp": (2, [*ZIGZAG, FULL]),
    "ddp, 2 × 2": (4, CONTIGUOUS),
    "hsdp, 2 × 2": (4, [*ZIGZAG, *HSDP, FULL]),
    "fsdp, contiguous": (2, [*CONTIGUOUS, FSDP, SELECTIVE]),
    "four": (4, ["parallel.cp=4", "parallel.cp_split=contiguous", FSDP]),
    "four, zig-zag": (4, ["parallel.cp=4", "nsa.w=8", FSDP]),
    "accumulation": (2, [*ZIGZAG, FSDP, *ACCUMULATED]),
    "with tensor parallelism": (4, [*ZIGZAG, "parallel.tp=2", FSDP]),
}
# The selector loss is a mean per data-parallel rank, which count different numbers of queries; a smaller batch is
# evaluated on other rows.
ALONE = {"four, zig-zag": "narrow window", "accumulation": "accumulated"}
ALONE |= dict.fromkeys(("fsdp, 2 × 2", "ddp, 2 × 2", "hsdp, 2 × 2"), "two rows")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "documents.jsonl"
    texts = [f"Document {i}: " + " ".join(f"{w * i % 97}" for w in range(i % 50)) for i in range(300)]
    path.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    return path


def run_jobs(folder, corpus, *jobs: Job, timeout_s: float):
    """Real documents in packed rows."""
    base = [
        f"train.steps={STEPS}", "train.eval_every=10", "train.eval_batches=2", "train.lr_schedule=constant",
        "data.dataset=local", f"data.path={corpus}", "data.held_out=0.1",
    ]  # fmt: skip
    for job in jobs:
        job.out_dir, job.changes = str(folder / job.out_dir), [*base, *job.changes]
    codes = run_all(*jobs, timeout_s=timeout_s)
    assert {code for ranks in codes for code in ranks} == {0}
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, corpus):
    jobs = [Job("one", 1, SELECTOR)]
    for steps in (8, STEPS):
        jobs.append(Job("stopped", 2, [*SELECTOR, *ZIGZAG, FSDP, f"train.steps={steps}"], resume=steps == STEPS))
    jobs += [Job("families", 1, FAMILIES), Job("families, divided", 2, [*FAMILIES, *ZIGZAG, FSDP])]
    return run_jobs(tmp_path_factory.mktemp("runs"), corpus, *jobs, timeout_s=280)


@pytest.fixture(scope="module")
def ways(tmp_path_factory, corpus):
    jobs = [Job("one", 1, SELECTOR), Job("two rows", 2, SELECTOR), Job("narrow window", 1, [*SELECTOR, "nsa.w=8"])]
    jobs.append(Job("accumulated", 1, [*SELECTOR, *ACCUMULATED]))
    jobs += [Job(name, world, [*SELECTOR, *changes]) for name, (world, changes) in WAYS.items()]
    return run_jobs(tmp_path_factory.mktemp("ways"), corpus, *jobs, timeout_s=1500)


@pytest.fixture(scope="module")
def moved(tmp_path_factory, corpus):
    """Two data-parallel ranks of two each, then tensor parallelism, then one rank."""
    legs = [(4, [*ZIGZAG, FSDP], 7), (2, ["parallel.tp=2", FSDP], 14), (1, [], STEPS)]
    jobs = [Job("one")]
    for world, changes, steps in legs:
        jobs.append(Job("moved", world, [*changes, f"train.steps={steps}"], resume=steps != legs[0][2]))
    return run_jobs(tmp_path_factory.mktemp("moved"), corpus, *jobs, timeout_s=600)


def numbers(folder):
    beats = {beat.step: beat for beat in read_beats(folder / names.heartbeat(0)) if beat.msg == names.PROGRESS}
    assert sorted(beats) == list(range(1, STEPS + 1))
    return torch.tensor([[beats[step].loss, beats[step].grad_norm] for step in sorted(beats)], dtype=torch.float64)


def held_out(folder):
    with (folder / names.VAL_CSV).open() as file:
        return {int(row["step"]): (float(row["val_loss"]), float(row["val_accuracy"])) for row in csv.DictReader(file)}


def require_same_run(one, other):
    assert (numbers(one) - numbers(other)).abs().max() < 1e-4
    assert held_out(one).keys() == {10, 20}
    for step, scores in held_out(one).items():
        assert held_out(other)[step] == pytest.approx(scores, abs=1e-4), step
    mine, theirs = (torch.load(folder / names.MODEL, weights_only=True) for folder in (one, other))
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_a_divided_run_that_was_stopped_and_resumed_is_that_of_one_rank(runs):
    require_same_run(runs / "one", runs / "stopped")


def test_layers_with_other_windows_and_other_rope_are_those_of_one_rank(runs):
    require_same_run(runs / "families", runs / "families, divided")


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("way", WAYS)
def test_every_data_parallelism_and_checkpointing(ways, way):
    require_same_run(ways / ALONE.get(way, "one"), ways / way)


@pytest.mark.timeout(900)
def test_a_run_goes_from_layout_to_layout(moved):
    """Equal losses at every step are equal documents at every step."""
    require_same_run(moved / "one", moved / "moved")
