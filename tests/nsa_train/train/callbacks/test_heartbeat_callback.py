"""Content of a run folder and of its heartbeat after a short run."""

import csv
import itertools
import json
import math

import pytest
import torch

from nsa.core.attention_config import SLIDING_GATE_INIT
from nsa_train import names
from nsa_train.config.schema import RunConfig
from nsa_train.planning.model_figures import model_figures
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import RECORD_FIELDS, REQUIRED_FIELDS, read_beats
from nsa_train.train.callbacks.heartbeat_callback import mib
from tests.nsa_train.train.runs import Job, run_all

WINDOW = math.exp(SLIDING_GATE_INIT) / (2 + math.exp(SLIDING_GATE_INIT))
FIRST_ENTROPY = -WINDOW * math.log(WINDOW) - (1 - WINDOW) * math.log((1 - WINDOW) / 2)
"""Of gates that start equal but for the window's."""


PROGRESS_FIELDS = RECORD_FIELDS.keys() - {*REQUIRED_FIELDS, "detail", "failure_code", "selector_loss"}
"""Fields of every progress record of a model whose layers have gates."""


def test_memory_is_in_mib():
    assert mib(3 * 2**20) == 3.0


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beats")
    base = ["train.steps=7", "train.log_every=3", "train.eval_every=4", "train.eval_batches=2", "train.save_every=4"]
    base += ["runtime.peak_tflops=0.05", "runtime.usd_per_hour=2.5"]
    bf16 = [*base, "runtime.precision=bf16", "runtime.gradient_checkpointing=true", "data.prefetch=true"]
    (folder / "broken.jsonl").write_text("this is not JSON\n")
    missing = ["data.dataset=local", f"data.path={folder}/broken.jsonl", "data.max_bad_units=0", "train.steps=2"]
    codes = run_all(
        Job(str(folder / "plain"), 1, base),
        Job(str(folder / "bf16"), 1, bf16),
        Job(str(folder / "bf16_fsdp"), 2, [*bf16, "parallel.data=fsdp"]),
        Job(str(folder / "missing"), 2, missing),
        Job(str(folder / "stand_in"), 1, [*missing, "data.synthetic_on_fail=true"]),
        Job(str(folder / "long_stand_in"), 1, [*missing, "data.synthetic_on_fail=true", "train.steps=5000"]),
        Job(str(folder / "uneven"), 2, ["train.batch_size=3"]),
    )
    assert codes == [[0], [0], [0, 0], [21, 21], [0], [2], [2, 2]]
    return folder


def test_the_run_folder_is_complete(runs):
    file_names = {path.name for path in (runs / "plain").iterdir()}
    assert file_names >= {names.ENV, names.EVENTS, names.heartbeat(0), names.TRAINING_CSV, names.VAL_CSV, names.METRICS,
                     names.TENSORBOARD, names.CHECKPOINTS, names.MODEL, names.MODEL_SAFETENSORS}  # fmt: skip
    assert not list((runs / "plain").glob(names.STACKDUMPS))
    assert (runs / "plain" / names.CHECKPOINTS / "latest").resolve().name == "step7"
    env = json.loads((runs / "plain" / names.ENV).read_text())
    assert env["config"]["train"]["steps"] == 7
    assert env["origins"]["train.steps"] == "command line"
    assert env["kernels"]["selected"] == {"backend": "cpu", "reason": "first choice"}


@pytest.mark.parametrize("run", ["plain", "bf16", "bf16_fsdp"])
def test_progress_records_have_every_field_and_make_sense(runs, run):
    beats = list(read_beats(runs / run / names.heartbeat(0)))
    assert [(beat.msg, beat.step) for beat in beats] == [
        (names.START, 0), *((names.PROGRESS, step) for step in (1, 3, 6, 7)), (names.DONE, 7),
    ]  # fmt: skip
    env = json.loads((runs / run / names.ENV).read_text())
    for beat in beats[1:-1]:
        assert all(getattr(beat, name) is not None for name in PROGRESS_FIELDS)
        assert math.isfinite(beat.loss)
        assert beat.toks_per_s > 0
        flops = sum(model_figures(RunConfig.of_saved(env["config"]), 257).flops.values())
        assert beat.mfu == pytest.approx(beat.toks_per_s * flops / (env["world_size"] * 0.05e12))
        assert beat.tokens_per_usd == pytest.approx(beat.toks_per_s * 3600 / (env["world_size"] * 2.5))
        assert beat.grad_norm > 0
        assert beat.reads_pred == beat.reads_act_total > 0
        assert beat.gate_entropy_mean == pytest.approx(FIRST_ENTROPY, abs=0.05)
        assert sum(beat.gate_branch_shares) == pytest.approx(1)
        assert len(beat.gate_shares_by_layer) == 2
        assert all(sum(shares) == pytest.approx(1) for shares in beat.gate_shares_by_layer)
        assert beat.forward_s > 0
        assert 50 < beat.host_mem_rss < 50_000
        assert beat.kernel_sliding == "cpu"
        assert beat.kernels_reason == "first choice"
        assert beat.synthetic is True
        assert beat.tokens_seen == beat.step * 4 * 64
    # forward_s is of the last step, step_s the mean since the record before: the forward pass is part of that time.
    for before, beat in itertools.pairwise(beats[1:-1]):
        assert beat.forward_s < (beat.step - before.step) * beat.step_s


def test_csv_and_metrics_copy_the_heartbeat(runs):
    beats = [beat for beat in read_beats(runs / "plain" / names.heartbeat(0)) if beat.msg == names.PROGRESS]
    with (runs / "plain" / names.TRAINING_CSV).open() as file:
        rows = list(csv.DictReader(file))
    assert [(int(row["step"]), float(row["loss"])) for row in rows] == [(beat.step, beat.loss) for beat in beats]
    metrics = json.loads((runs / "plain" / names.METRICS).read_text())
    assert metrics["loss"] == beats[-1].loss
    with (runs / "plain" / names.VAL_CSV).open() as file:
        verdicts = list(csv.DictReader(file))
    assert [int(row["step"]) for row in verdicts] == [4, 7]
    assert metrics["val_loss"] == float(verdicts[-1]["val_loss"])
    assert all(float(row["val_loss"]) < 6 for row in verdicts)
    assert metrics["val_accuracy"] == float(verdicts[-1]["val_accuracy"])
    told = [event.details for event in read_events(runs / "plain") if event.kind == EventKind.EVALUATION]
    assert [each["val_accuracy"] for each in told] == [float(row["val_accuracy"]) for row in verdicts]


def test_bf16_trains_fp32_weights(runs):
    for run in ("bf16", "bf16_fsdp"):
        weights = torch.load(runs / run / names.MODEL, weights_only=True)
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    plain, bf16, sharded = (
        [beat.loss for beat in read_beats(runs / run / names.heartbeat(0)) if beat.loss]
        for run in ("plain", "bf16", "bf16_fsdp")
    )
    assert plain == pytest.approx(bf16, abs=0.05)
    assert bf16 == pytest.approx(sharded, abs=0.05)


def test_synthetic_data_is_marked_in_every_record(runs):
    beats = list(read_beats(runs / "stand_in" / names.heartbeat(0)))
    assert {beat.synthetic for beat in beats} == {True}
    assert {beat.data for beat in beats} == {"synthetic rows (copy)"}
