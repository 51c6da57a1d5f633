"""`train.trainable`: frozen parameters keep their bits, and everything around a step works on the trained ones."""

import json

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.checkpoint.load import open_checkpoint
from nsa_train.config import load
from nsa_train.planning.estimate import estimate
from nsa_train.planning.hardware import hardware_here
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.run_model import trainable_names
from nsa_train.train.distributed import RankInfo
from nsa_train.train.dry_run import dry_run
from nsa_train.train.engine.build import build_train_module
from tests.nsa_train.train.faulty_runs import Fault, run_faulty
from tests.nsa_train.train.runs import Job, run_all, write_config

PHI = "train.trainable=*.phi_k.*"
MERGED = ["model.attention=[dense,merged]", "nsa.phi=softmax", "nsa.selector_loss=1.0", "nsa.selector_loss_share=0.5"]
FSDP = [PHI, "parallel.data=fsdp", "runtime.gradient_checkpointing=selective"]
STEPS = 6


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """The sharded run is stopped and resumed at night only, when the test that compares it is selected."""
    folder = tmp_path_factory.mktemp("trainable")
    texts = [f"Document {i}: " + " ".join(f"{w * i % 97}" for w in range(i % 50)) for i in range(200)]
    corpus = folder / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    text = ["data.dataset=local", f"data.path={corpus}", "data.held_out=0.1", "train.lr_schedule=constant"]

    def job(name, world=1, *changes, steps=STEPS, **more):
        settings = [f"train.steps={steps}", "train.save_every=2", "train.warmup_steps=0", *text, *MERGED, *changes]
        return Job(str(folder / name), world, settings, **more)

    first = dict(init_from=str(folder / "first"))
    resumed = any(item.name == "test_a_resumed_sharded_run_is_bit_identical" for item in request.session.items)
    jobs = [
        job("first", steps=2),
        job("whole", 1, PHI, **first),
        job("stopped", 1, PHI, steps=3, **first),
        job("stopped", 1, PHI, resume=True),
        job("full", 1, PHI, "runtime.gradient_checkpointing=full", **first),
        job("selective", 1, PHI, "runtime.gradient_checkpointing=selective", **first),
        job("ddp", 2, PHI, "parallel.data=ddp", "train.replica_check_every=2", **first),
        job("fsdp", 2, *FSDP, **first),
        *([job("fsdp_stopped", 2, *FSDP, steps=3, **first), job("fsdp_stopped", 2, *FSDP, resume=True)] * resumed),
        job("healed", 1, init_from=str(folder / "whole")),
        job("whole", 1, steps=8, resume=True),
        job("nothing", 1, "train.trainable=*.phi_q.*"),
    ]
    codes = run_all(*jobs)
    assert codes == [*([0] * one.world for one in jobs[:-2]), [20], [20]]
    return folder


def weights(folder):
    return torch.load(folder / names.MODEL, weights_only=True)


def progress(folder):
    beats = {beat.step: beat for beat in read_beats(folder / names.heartbeat(0)) if beat.msg == names.PROGRESS}
    return [(step, beat.loss, beat.grad_norm, beat.selector_loss) for step, beat in sorted(beats.items())]


def changed(folder, since):
    now, before = weights(folder), weights(since)
    assert now.keys() == before.keys()
    return {name for name in now if not torch.equal(now[name], before[name])}


@pytest.mark.parametrize("name", ["whole", "ddp", "fsdp"])
def test_frozen_parameters_keep_their_bits_and_the_others_change(runs, name):
    of_phi = {f"blocks.1.attention.phi_k.{each}" for each in ("w_score", "w_square")}
    assert changed(runs / name, runs / "first") == of_phi
    assert all(norm > 0 for _, _, norm, _ in progress(runs / name))


@pytest.mark.parametrize("other", ["stopped", "full", "selective"])
def test_resumed_or_recomputed_is_bit_identical(runs, other):
    assert progress(runs / other) == progress(runs / "whole")
    assert len(progress(runs / other)) == STEPS
    assert changed(runs / other, runs / "whole") == set()


@pytest.mark.nightly  # test_resume does it with all parameters for every change
def test_a_resumed_sharded_run_is_bit_identical(runs):
    sharded, resumed = progress(runs / "fsdp"), progress(runs / "fsdp_stopped")
    assert len(resumed) == STEPS
    assert resumed == sharded
    assert changed(runs / "fsdp_stopped", runs / "fsdp") == set()


def test_the_checkpoint_has_optimizer_state_of_trained_parameters_alone(runs):
    from nsa_train.checkpoint.load import require_harmless

    index = require_harmless(open_checkpoint(runs / "whole" / "checkpoints" / f"step{STEPS}"), pieces=False)
    state = {key for key in index.state_dict_metadata if key.startswith("optim.state.")}
    assert {key.split(".")[-1] for key in state} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(state) == 2 * 3
    assert all(".phi_k." in key for key in state)


def test_a_new_run_may_train_everything_from_there_and_the_same_run_may_not(runs):
    assert len(changed(runs / "healed", runs / "whole")) == len(weights(runs / "whole"))
    assert progress(runs / "healed")[0][1] < 6
    assert progress(runs / "whole")[-1][0] == STEPS, "the refused resume changed nothing"
    assert not (runs / "nothing" / "checkpoints").exists()
    assert not (runs / "nothing" / names.heartbeat(0)).exists()


@pytest.mark.nightly  # processes of its own; the policy reads the norm of whatever gradients there are
def test_a_step_with_a_bad_gradient_is_skipped(tmp_path):
    job = Job(str(tmp_path / "run"), 1, ["train.steps=6", *MERGED, PHI])
    assert run_faulty((job, Fault("forward", batches=[3]))) == [[0]]
    skipped = [event for event in read_events(tmp_path / "run") if event.kind == EventKind.SKIPPED_STEP]
    assert len(skipped) == 1


@pytest.mark.parametrize("patterns", [["*.phi_k.*", "*.phi_q.*"], ["blocks"]])
def test_a_pattern_without_a_match_is_refused_by_name(patterns):
    with pytest.raises(ConfigError) as refused:
        trainable_names(["embeddings.weight", "blocks.0.attention.phi_k.w_place"], patterns)
    assert patterns[-1] in str(refused.value)
    assert "embeddings.weight" in str(refused.value)
    if len(patterns) > 1:
        assert f"{patterns[0]} matches" not in str(refused.value)


@pytest.mark.parametrize("patterns", ["[]", ""])
def test_an_empty_list_is_refused(tmp_path, patterns):
    with pytest.raises(ConfigError, match=r"train\.trainable"):
        load(write_config(tmp_path), overrides=[f"train.trainable={patterns}"])


def small(tmp_path, *changes):
    return load(write_config(tmp_path), overrides=[*MERGED, f"train.out_dir={tmp_path / 'run'}", *changes])


def test_the_optimizer_has_the_trained_parameters_and_no_decay_of_phi(tmp_path):
    module = build_train_module(small(tmp_path, PHI), 257, RankInfo(), torch.device("cpu"))
    assert [(len(group["params"]), group["weight_decay"]) for group in module.optim.param_groups] == [(2, 0.0)]
    one = small(tmp_path, "train.trainable=[blocks.0.attention.w_q.weight, lm_head.*]")
    trained = build_train_module(one, 257, RankInfo(), torch.device("cpu")).model.named_parameters()
    assert [name for name, p in trained if p.requires_grad] == [
        "blocks.0.attention.w_q.weight", "lm_head.norm.weight", "lm_head.w_out.weight",
    ]  # fmt: skip


@pytest.mark.parametrize("fake", [None, "one step with fake tensors is enough here"])
def test_the_dry_run_makes_a_step_with_frozen_parameters(tmp_path, fake):
    outcome = dry_run(
        small(tmp_path, PHI), 257, hardware_here("cpu"), fetch_remote=False, log=lambda text: None, no_real_step=fake
    )
    assert outcome.step.problem is None
    assert outcome.step.seen is not None
    broken = small(tmp_path, "train.trainable=*.phi_q.*")
    refused = dry_run(broken, 257, hardware_here("cpu"), fetch_remote=False, log=lambda text: None, no_real_step=fake)
    assert "phi_q" in refused.model.problem


def test_the_estimate_has_gradients_and_moments_of_trained_parameters_alone(tmp_path):
    target = hardware_here("cpu")
    whole, phi = (estimate(small(tmp_path, *more), target, 257) for more in ((), (PHI,)))
    trained = 2 * 2 * 8  # two tensors [groups, width]
    assert phi.memory.weights == whole.memory.weights
    assert (phi.memory.gradients, phi.memory.optimizer) == (4 * trained, 4 * (2 * trained + 2))
    first_layer = estimate(small(tmp_path, "train.trainable=blocks.0.feed_forward.w1.weight"), target, 257)
    assert (
        first_layer.memory.gradients * 2
        == whole.memory.gradients
        - estimate(
            small(tmp_path, "train.trainable=[embeddings.*, lm_head.*, *norm*, *.attention.*, *.w2.*, *.w3.*]"),
            target,
            257,
        ).memory.gradients
    )
    assert phi.checkpoint_bytes < whole.checkpoint_bytes
