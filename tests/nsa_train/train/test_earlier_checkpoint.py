"""A checkpoint that an earlier version wrote resumes: the steps that follow have the losses of that version's run."""

import json
import shutil

import pytest
import yaml

pytest.importorskip("olmo_core", reason="in the train extra")

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
