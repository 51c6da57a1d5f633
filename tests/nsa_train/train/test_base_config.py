"""The 125M configuration of the runbook, as it ships but for device and batch, takes real steps on a CPU."""

import math

import pytest

from nsa_train import names
from nsa_train.record.heartbeat_record import read_beats
from tests.nsa_train.train.runs import Job, run_all


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_two_optimizer_steps_of_the_125m_model(tmp_path):
    settings = [
        "model.dim=768",
        "model.n_layers=12",
        "model.n_heads=12",
        "model.n_kv_groups=2",
        "model.d_k=64",
        "model.d_v=64",
        "nsa.l=32",
        "nsa.d=16",
        "nsa.l_sel=64",
        "nsa.n_sel=16",
        "nsa.w=512",
        "runtime.precision=bf16",
        "runtime.gradient_checkpointing=true",
        "runtime.threads=2",
        "train.steps=2",
        "train.seq_len=2048",
        "train.batch_size=1",
        "train.lr=2e-4",
        "train.warmup_steps=0",
    ]
    assert run_all(Job(str(tmp_path / "run"), changes=settings), timeout_s=1500) == [[0]]
    beats = [beat for beat in read_beats(tmp_path / "run" / names.heartbeat(0)) if beat.msg == names.PROGRESS]
    assert [beat.step for beat in beats] == [1, 2]
    for beat in beats:  # two batches of a model that has just begun: about a uniform guess, with a gradient
        assert abs(beat.loss - math.log(257)) < 0.5
        assert 0 < beat.grad_norm < math.inf
        assert beat.reads_pred == beat.reads_act_total
    assert (tmp_path / "run" / names.MODEL).stat().st_size > 300e6  # 78 M parameters in fp32
