"""Runs with a selector loss: exact resume, sharding, recomputation, and the metrics it appears in or stays out of."""

import json
from types import SimpleNamespace

import pytest
import torch

from nsa.model.loss import IGNORE
from nsa.model.transformer import NSATransformer
from nsa_train import names
from nsa_train.record.heartbeat_record import HeartbeatRecord, read_beats
from nsa_train.train.engine.train_module import StepSkippingTrainModule
from tests.nsa_train.train.runs import Job, run_all
from tests.shapes import attention_args

ON = ("nsa.selector_loss=1.0", "nsa.selector_loss_share=0.5")
OWN_KEYS = ("nsa.kv=per_branch", "nsa.phi=avg")  # whose gradients it changes
CONSTANT = "train.lr_schedule=constant"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Real documents in packed rows."""
    folder = tmp_path_factory.mktemp("selector_loss")
    texts = [f"Document {i}: " + " ".join(f"{w * i % 97}" for w in range(i % 50)) for i in range(200)]
    corpus = folder / "documents.jsonl"
    corpus.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(texts)))
    base = [CONSTANT, *OWN_KEYS, "train.steps=4", "data.dataset=local", f"data.path={corpus}", "data.held_out=0.1"]

    def job(name, world=1, *changes, **more):
        return Job(str(folder / name), world, [*base, *changes], **more)

    codes = run_all(
        job("whole", 1, *ON),
        job("stopped", 1, *ON, "train.steps=2"),
        job("stopped", 1, *ON, resume=True),
        job("without", 1),
        job("recomputed", 1, *ON, "runtime.gradient_checkpointing=full"),
        job("selective", 1, *ON, "runtime.gradient_checkpointing=selective"),
        job("fsdp", 2, *ON, "parallel.data=fsdp"),
        job("ddp", 2, *ON, "parallel.data=ddp"),
    )
    assert {code for ranks in codes for code in ranks} == {0}
    return folder


def steps_of(folder) -> dict[int, HeartbeatRecord]:
    return {beat.step: beat for beat in read_beats(folder / names.heartbeat(0)) if beat.msg == names.PROGRESS}


def numbers(folder) -> list[tuple]:
    return [(step, beat.loss, beat.grad_norm, beat.selector_loss) for step, beat in sorted(steps_of(folder).items())]


def weights(folder) -> dict[str, torch.Tensor]:
    return torch.load(folder / names.MODEL, weights_only=True)


@pytest.mark.parametrize("other", ["stopped", "recomputed", "selective"])
def test_stopped_or_recomputed_is_bit_identical(runs, other):
    assert numbers(runs / other) == numbers(runs / "whole")
    assert len(numbers(runs / other)) == 4
    mine, theirs = weights(runs / other), weights(runs / "whole")
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_it_is_logged_by_itself_and_changes_gradients_not_the_loss(runs):
    whole, without = steps_of(runs / "whole"), steps_of(runs / "without")
    assert all(beat.selector_loss > 0 for beat in whole.values())
    assert all(beat.selector_loss is None for beat in without.values())
    assert whole[1].loss == without[1].loss
    assert whole[1].grad_norm != without[1].grad_norm


@pytest.mark.parametrize("sharding", ["fsdp", "ddp"])
def test_ranks_train_together(runs, sharding):
    """Each rank samples among its own tokens, so losses agree and sums of rounding and sampling do not."""
    for (_, loss, _, selector), (_, want, _, _) in zip(numbers(runs / sharding), numbers(runs / "whole"), strict=True):
        assert loss == pytest.approx(want, abs=1e-2)
        assert 0 < selector < 10
    if sharding == "fsdp":
        pairs = zip(numbers(runs / "fsdp"), numbers(runs / "ddp"), strict=True)
        assert all(mine == pytest.approx(theirs, rel=1e-2) for mine, theirs in pairs)


def test_the_sample_moves_with_the_trainers_step(monkeypatch):
    module, trained = StepSkippingTrainModule.__new__(StepSkippingTrainModule), []
    module.model = NSATransformer(20, n_layers=2, **attention_args("tiny", selector_loss=1.0))
    module._trainer, module.device, module.world_mesh = SimpleNamespace(global_step=7), torch.device("cpu"), None
    module.label_ignore_index = IGNORE
    module.rank_microbatch_size = 2
    monkeypatch.setattr(module, "_backward", lambda *arguments, **options: trained.append(options) or torch.ones(()))
    module.train_batch({"input_ids": torch.tensor([[4, 3]]), "labels": torch.tensor([[3, IGNORE]])}, dry_run=True)
    assert [options["loss_div_factor"] for options in trained] == [1]
    assert [block.attention.selector_step for block in module.model.blocks] == [7, 7]
