"""Checkpoints that earlier versions wrote resume: the steps that follow have the losses of those versions' runs.

tests/nsa_train/checkpoint/fixtures/run_6909cc8f.tar.xz is of two ranks (fsdp) at commit 6909cc8f, before φ was stored
as rows: the checkpoint of step 2 of 4, run.yaml, and model.safetensors as step 4 left it.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

pytest.importorskip("olmo_core", reason="in the train extra")

from nsa_train.checkpoint.load import VerifiedFiles, read_index
from nsa_train.checkpoint.trained_model import open_trained_model
from tests.nsa.hf import earlier_exports as earlier
from tests.nsa_train.train.runs import Job, run_all


def test_a_run_resumes_with_the_losses_that_followed(tmp_path):
    record = earlier.record()
    shutil.unpack_archive(earlier.RUN, tmp_path, filter="data")
    config, out = tmp_path / "run.yaml", tmp_path / "earlier_run"
    config.write_text(yaml.safe_dump(record["run"]["settings"]))
    assert run_all(Job(str(out), config=str(config), resume=True)) == [[0]]
    beats = [json.loads(line) for line in (out / "heartbeat_rank0.jsonl").read_text().splitlines()]
    losses = {str(beat["step"]): beat["loss"] for beat in beats if beat.get("loss") is not None}
    rounding = 0 if earlier.this_machine() == record["machine"] else 1e-4
    assert losses == pytest.approx({step: record["run"]["losses"][step] for step in ("3", "4")}, abs=rounding)


LOSSES = {3: 5.547267198562622, 4: 5.550086975097656}


def test_pieces_of_phi_by_group_load_into_rows_and_are_exported_by_group(tmp_path):
    archive = Path(__file__).parents[1] / "checkpoint" / "fixtures" / "run_6909cc8f.tar.xz"
    shutil.unpack_archive(archive, tmp_path, filter="data")
    run = tmp_path / "run_6909cc8f"
    (run / "model.safetensors").rename(tmp_path / "as_it_was.safetensors")
    assert run_all(Job(str(run), 2, config=str(run / "run.yaml"), resume=True)) == [[0, 0]]
    beats = [json.loads(line) for line in (run / "heartbeat_rank0.jsonl").read_text().splitlines()]
    losses = {beat["step"]: beat["loss"] for beat in beats if beat.get("loss") is not None}
    assert losses == pytest.approx(LOSSES, abs=1e-4)
    w_in = "model.blocks.0.attention.phi_k.w_in"
    stored = [read_index(VerifiedFiles(run / "checkpoints" / step, None)) for step in ("step2", "step4")]
    assert [index.state_dict_metadata[w_in].size for index in stored] == [(2, 4, 4, 8), (32, 8)]
    assert len(stored[0].state_dict_metadata[w_in].chunks) == 2
    before = load_file(tmp_path / "as_it_was.safetensors")
    for tensors in (load_file(run / "model.safetensors"), open_trained_model(run).tensors):
        assert {name: tensor.shape for name, tensor in tensors.items()} == {n: each.shape for n, each in before.items()}
        assert before["blocks.0.attention.phi_k.w_in"].shape == (2, 4, 4, 8)
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, before[name], atol=1e-4, rtol=1e-3)
