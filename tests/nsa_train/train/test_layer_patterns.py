"""Runs with several kinds of layers: sharded as alone, resumed as whole, packed, checkpointed, exported, evaluated."""

import json

import pytest
import torch

from nsa_train import names
from nsa_train.record.heartbeat_record import read_beats
from tests.nsa_train.train.runs import Job, run_all

DOCUMENTS = [f"Document {i}: " + " ".join(f"{w * i % 97}" for w in range(i % 50)) for i in range(400)]
MIXED = ["nsa.kv=per_branch", "nsa.phi=avg", "model.n_layers=5", "model.attention=[dense,nsa,window,global,merged]"]
MERGED = ["model.n_layers=2", "model.attention=merged", "nsa.phi=softmax", "nsa.selector_loss=1.0", "parallel.data=ddp"]
EVALUATION = ["train.eval_every=4", "train.eval_batches=1"]
STEPS = 8


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    """Runs of merged layers are stopped and resumed at night only, when a test that compares them is selected."""
    folder = tmp_path_factory.mktemp("patterns")
    corpus = folder / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(DOCUMENTS)))
    text = ["data.dataset=local", f"data.path={corpus}", "data.held_out=0.1", "train.lr_schedule=constant"]

    def job(name, world=1, *changes, steps=STEPS, **more):
        settings = [f"train.steps={steps}", "train.save_every=3", *EVALUATION, *text, *MIXED, *changes]
        return Job(str(folder / name), world, settings, **more)

    jobs = [
        job("whole"),
        job("stopped", steps=5),
        job("stopped", resume=True),
        job("other_pattern", 1, "model.attention=nsa", resume_from=str(folder / "whole" / "checkpoints" / "step6")),
        job("fsdp", 2, "parallel.data=fsdp", "runtime.gradient_checkpointing=selective"),
        job("dense", 1, "model.attention=dense"),
        job("merged", 2, *MERGED),
    ]
    if any("merged_stopped" in item.name for item in request.session.items):
        jobs += [job("merged_stopped", 2, *MERGED, steps=5), job("merged_stopped", 2, *MERGED, resume=True)]
    codes = run_all(*jobs)
    assert codes == [[20] if "other_pattern" in one.out_dir else [0] * one.world for one in jobs]
    return folder


def progress(folder):
    beats = {beat.step: beat for beat in read_beats(folder / names.heartbeat(0)) if beat.msg == names.PROGRESS}
    return [beats[step] for step in sorted(beats)]


def losses(folder):
    return [(beat.step, beat.loss, beat.grad_norm) for beat in progress(folder)]


def weights(folder):
    return torch.load(folder / names.MODEL, weights_only=True)


@pytest.mark.parametrize(
    ("stopped", "whole"),
    [  # test_selector_loss_runs stops and resumes a run with a selector loss for every change
        ("stopped", "whole"),
        pytest.param("merged_stopped", "merged", marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_is_bit_identical(runs, stopped, whole):
    assert losses(runs / stopped) == losses(runs / whole)
    mine, theirs = weights(runs / stopped), weights(runs / whole)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_sharded_and_checkpointed_losses_norms_and_weights_are_those_of_one_rank(runs):
    one, other = (torch.tensor([step[1:] for step in losses(runs / name)]) for name in ("whole", "fsdp"))
    assert len(one) == STEPS
    assert (one - other).abs().max() < 1e-4
    mine, theirs = weights(runs / "fsdp"), weights(runs / "whole")
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, atol=1e-4, rtol=1e-3, msg=lambda text, n=name: f"{n}: {text}")


def test_layers_have_the_parameters_of_their_kind(runs):
    tensors = weights(runs / "whole")
    keys = [tensors[f"blocks.{layer}.attention.w_k.weight"].shape[0] // 16 for layer in range(5)]
    assert keys == [1, 3, 1, 2, 1]
    gated = {name.split(".")[1] for name in tensors if ".gates." in name}
    assert gated == {"1", "3"}


def test_merged_layers_train_phi_by_the_selector_loss_and_record_no_gates(runs):
    last = progress(runs / "merged")[-1]
    assert last.selector_loss > 0
    assert last.sel_k_max > 0
    assert last.gate_entropy_mean is None
    trained = weights(runs / "merged")
    assert {name.split(".")[3] for name in trained if ".attention." in name} == {"w_q", "w_k", "w_v", "phi_k", "w_out"}
    assert trained["blocks.0.attention.phi_k.w_score"].abs().max() > 0


def test_loss_falls_for_every_pattern(runs):
    for name in ("whole", "dense", "merged"):
        assert progress(runs / name)[-1].loss < progress(runs / name)[0].loss - 0.5


def test_reads_are_counted_in_all_layers_and_gates_where_there_are_any(runs):
    for name in ("whole", "dense", "merged"):
        for beat in progress(runs / name):
            assert beat.reads_pred == beat.reads_act_total > 0
    assert [len(beat.gate_shares_by_layer) for beat in progress(runs / "whole")] == [2] * STEPS
    assert all(beat.gate_shares_by_layer[1][2] == 0 for beat in progress(runs / "whole"))
    assert all(beat.gate_entropy_mean is None for beat in progress(runs / "dense"))


def test_two_kinds_begin_with_the_same_queries_feed_forward_and_embeddings():
    from nsa_train.config.schema import RunConfig
    from nsa_train.train.engine.transformer import build_transformer

    def start(pattern):
        model = {"dim": 32, "n_layers": 2, "n_heads": 4, "d_k": 8, "d_v": 8, "attention": pattern, "init_std": 0.08}
        engine = build_transformer(RunConfig.model_validate({"model": model, "train": {"seed": 7}}), 64)
        engine.init_weights(device=torch.device("cpu"))
        return dict(engine.named_parameters())

    nsa = start("nsa")
    assert nsa["blocks.0.attention.w_q.weight"].std().item() == pytest.approx(0.08, rel=0.1)
    for pattern in ("dense", "window", "global", "window,global"):
        other = start(pattern)
        for name, value in other.items():
            if not any(part in name for part in ("w_k", "w_v", "gates")):
                assert torch.equal(value, nsa[name]), name
