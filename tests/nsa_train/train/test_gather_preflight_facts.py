"""The dry run measures, finds what does not work, and leaves nothing behind; `train` keeps the same rules."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")


from nsa.errors import PreflightError
from nsa.kernels.registry import BRANCHES, BackendChoice, PassedOver
from nsa_train import names
from nsa_train.config import load
from nsa_train.planning.hardware import hardware_here, parse_target
from nsa_train.planning.preflight_rules import RuleStatus, check_rules
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.train import datasets
from nsa_train.train import dry_run as module
from nsa_train.train.distributed import RankInfo
from nsa_train.train.dry_run import dry_run
from nsa_train.train.gather_preflight_facts import gather, require_preflight
from nsa_train.train.run import train
from nsa_train.train.start_options import StartOptions
from tests.nsa_train.train.runs import Job, run_all, write_config


def run_config(tmp_path: Path, *changes: str):
    return load(write_config(tmp_path), overrides=[f"train.out_dir={tmp_path}/run", *changes])


def tried(config, target=None, **more):
    said = []
    target = target or hardware_here("cpu")
    return dry_run(config, 257, target, fetch_remote=False, log=said.append, **more), said


def content(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.fixture
def no_feeder(monkeypatch):
    """The batch comes from this process: what is asked of the feeder is asked elsewhere."""
    monkeypatch.setattr(module, "_try_data", lambda *_: (module.DryRunAttempt(not_tried="not here"), None))


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "folder of an earlier run"])
def test_a_real_step_and_checkpoint_are_made_and_nothing_stays(tmp_path, exists):
    as_shipped = ["runtime.precision=bf16", "runtime.gradient_checkpointing=true"]
    config = run_config(tmp_path, "train.accumulate_grad_batches=2", *as_shipped)
    if exists:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("mine")
    before = content(tmp_path)
    outcome, said = tried(config)
    for part in (outcome.data, outcome.model, outcome.step, outcome.checkpoint):
        assert part.problem is None
        assert part.not_tried is None
    assert "the first batch came after" in outcome.data.seen
    assert "read back and compared" in outcome.checkpoint.seen
    assert "made-up" not in outcome.step.seen
    assert outcome.step_s > 0
    assert said == ["fetching a batch", "building the model", "one step", "one checkpoint"]
    assert content(tmp_path) == before


def test_data_that_gives_no_batch_is_found(tmp_path):
    (tmp_path / "broken.jsonl").write_text("this is not JSON\n")
    changes = ["data.dataset=local", f"data.path={tmp_path}/broken.jsonl", "data.max_bad_units=0"]
    outcome, _ = tried(run_config(tmp_path, *changes), parse_target("a100-80gb"))
    assert outcome.data.problem is not None


def test_a_dataset_elsewhere_is_left_alone_unless_asked_for(tmp_path, no_feeder):
    config = run_config(tmp_path, "data.dataset=fineweb_edu")
    assert datasets.remote_address(config) == "fineweb_edu"
    assert (
        datasets.remote_address(run_config(tmp_path, "data.dataset=prepared", "data.path=s3://bucket/x"))
        == "s3://bucket/x"
    )
    assert datasets.remote_address(run_config(tmp_path, "data.dataset=local", f"data.path={tmp_path}")) is None


def test_a_checkpoint_that_reads_back_differently_is_found(tmp_path, no_feeder, monkeypatch):
    honest = module.read_model

    def flipped(path):
        weights = honest(path)
        weights["embeddings.weight"][0, 0] += 1
        return weights

    monkeypatch.setattr(module, "read_model", flipped)
    outcome, _ = tried(run_config(tmp_path))
    assert "embeddings.weight first" in outcome.checkpoint.problem
    assert content(tmp_path) == {"run.yaml"}


def test_a_folder_that_cannot_be_written_is_found(tmp_path, no_feeder, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", full)
    outcome, _ = tried(run_config(tmp_path))
    assert "No space left" in outcome.checkpoint.problem
    assert outcome.step.problem is None


def test_a_step_that_is_not_finite_is_found(tmp_path, no_feeder, monkeypatch):
    monkeypatch.setattr(module.StepSkippingTrainModule, "forward_backward", lambda *_: float("nan"))
    outcome, _ = tried(run_config(tmp_path))
    assert "not finite" in outcome.step.problem
    assert outcome.checkpoint.not_tried is not None


def test_a_kernel_that_no_backend_has_is_found_before_the_run(tmp_path, no_feeder):
    config = run_config(tmp_path, "kernels.sliding=cuda_magic")
    for target in (None, parse_target("h200")):
        outcome, _ = tried(config, target)
        assert "cuda_magic" in outcome.model.problem


def test_a_target_that_is_not_here_runs_with_fake_tensors(tmp_path, no_feeder, monkeypatch):
    config = run_config(tmp_path, "model.dim=2048", "model.n_layers=2", "train.seq_len=4096", "train.batch_size=64")
    outcome, _ = tried(config, parse_target("h100-80gb:8"))
    assert (outcome.model.problem, outcome.step.problem, outcome.step_s) == (None, None, None)
    assert "fake tensors" in outcome.step.seen
    assert "is not here" in outcome.checkpoint.not_tried
    monkeypatch.setattr("olmo_core.nn.feed_forward.FeedForward.forward", lambda self, x: x[..., :-1])
    assert tried(config, parse_target("h100-80gb:8"))[0].step.problem is not None


def test_a_sharded_model_is_not_built_whole_on_one_rank(tmp_path, no_feeder):
    config = run_config(tmp_path, "parallel.data=fsdp")
    outcome, said = tried(config, hardware_here("cpu", 2))
    assert "building the model" not in said
    assert "shards the model over 2 ranks" in outcome.checkpoint.not_tried
    assert outcome.step.problem is None
    assert tried(run_config(tmp_path), hardware_here("cpu", 2))[0].step_s > 0


@pytest.mark.nightly
def test_the_measured_step_replaces_the_assumption(tmp_path, no_feeder):
    facts = gather(run_config(tmp_path), hardware_here("cpu"))
    assert facts.estimate.timing.startswith("measured")
    assert facts.estimate.step_s == facts.dry_run.step_s


def flash(facts):
    return next(verdict for verdict in check_rules(facts) if verdict.rule == "flash")


def test_a_long_run_on_this_machine_is_checked_with_the_kernels_that_will_run(tmp_path, monkeypatch):
    config = run_config(tmp_path, "train.steps=5000")
    facts = gather(config, hardware_here("cpu"), try_it=False)
    assert [choice.backend for choice in facts.kernels] == ["cpu"] * 4
    assert flash(facts).message == "kernels: cpu (C++), all branches"
    failed = tuple(
        BackendChoice(branch, "portable", (PassedOver("triton", "its check failed, see evidence"),))
        for branch in BRANCHES
    )
    seen = []
    monkeypatch.setattr(
        "nsa_train.train.gather_preflight_facts.plan",
        lambda request, device, dtype, shape: seen.append((device.type, dtype)) or SimpleNamespace(choices=failed),
    )
    on_gpu = gather(config, replace(parse_target("a100-80gb"), here=True), try_it=False)
    assert seen == [("cuda", torch.float32)]
    assert (on_gpu.estimate.backend, flash(on_gpu).status) == ("portable", RuleStatus.FAIL)
    assert "see evidence" in flash(on_gpu).message
    monkeypatch.setattr("nsa_train.train.gather_preflight_facts.hardware_here", lambda *_: on_gpu.target)
    with pytest.raises(PreflightError, match="flash: kernels: portable"):
        require_preflight(config, RankInfo(), StartOptions())


def test_kernels_are_not_decided_for_short_runs_and_other_machines(tmp_path):
    assert gather(run_config(tmp_path), hardware_here("cpu"), try_it=False).kernels is None
    assert gather(run_config(tmp_path, "train.steps=5000"), parse_target("h200"), try_it=False).kernels is None


def test_a_requested_backend_that_cannot_run_here_is_refused(tmp_path):
    config = run_config(tmp_path, "train.steps=5000", "kernels.selected=triton")
    facts = gather(config, hardware_here("cpu"), try_it=False)
    assert "kernels.selected='triton' cannot run here" in flash(facts).message


def test_ranks_that_do_not_divide_the_batch_are_told_in_the_trainers_words(tmp_path):
    facts = gather(run_config(tmp_path, "train.batch_size=3"), parse_target("a100-80gb:2"))
    assert "train.batch_size (3) must be a multiple of the number of ranks (2)" in facts.ranks_problem
    assert facts.dry_run.model.not_tried is not None


def test_fp16_is_refused_under_its_own_name(tmp_path):
    config = run_config(tmp_path, "runtime.precision=fp16")
    failed = [
        rule_verdict.rule
        for rule_verdict in check_rules(gather(config, hardware_here("cpu")))
        if rule_verdict.status == RuleStatus.FAIL
    ]
    assert failed == ["precision_fp16"]
    with pytest.raises(PreflightError, match="precision_fp16"):
        train(config)
    assert not (tmp_path / "run").exists()


def test_an_unknown_vocabulary_is_a_data_problem(tmp_path):
    facts = gather(run_config(tmp_path, "data.dataset=prepared", f"data.path={tmp_path}/no"), hardware_here("cpu"))
    assert facts.estimate is None
    assert facts.dry_run.data.problem is not None


LONG = ["train.steps=5000", "train.save_every=0"]
BROKEN = ["precision", "save_every", "toy_model", "toy_sequence"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    for name in ("allowed", "allowed_again"):
        (folder / name).mkdir()
    codes = run_all(
        Job(str(folder / "refused"), 2, LONG),
        Job(str(folder / "short_of_one"), 1, LONG, allow=BROKEN[1:]),
        Job(str(folder / "allowed"), 1, ["train.steps=3"], allow=["precision", "memory"]),
    )
    assert codes == [[2, 2], [2], [0]]
    return folder


def test_train_refuses_before_anything_is_trained(runs):
    for name in ("refused", "short_of_one"):
        assert not list(runs.glob(f"{name}/heartbeat*"))
        assert not (runs / name / names.ENV).exists()


def test_overrides_are_recorded_in_env_and_in_every_heartbeat(runs):
    assert json.loads((runs / "allowed" / names.ENV).read_text())["allowed"] == ["precision", "memory"]
    beats = list(read_beats(runs / "allowed" / names.heartbeat(0)))
    assert len(beats) >= 4
    assert all(beat.allowed == ("precision", "memory") for beat in beats)


def test_a_checkpoint_takes_no_more_disk_than_was_estimated(runs):
    saved = runs / "allowed" / names.CHECKPOINTS / "step3"
    taken = sum(path.stat().st_size for path in saved.rglob("*") if path.is_file())
    estimated = gather(load(runs / "run.yaml"), parse_target("h200"), try_it=False).estimate.checkpoint_bytes
    assert taken < estimated < 2 * taken  # of a model this small, half is the files' own


def test_settings_that_differ_from_the_run_in_the_folder_are_reported(runs):
    config = load(runs / "run.yaml", overrides=[f"train.out_dir={runs}/allowed", "train.lr=0.5", "train.steps=9000"])
    facts = gather(config, parse_target("h200"), try_it=False)
    assert facts.folder.last_step == 3
    assert facts.folder.other_settings == ("train.lr 0.003 → 0.5",)
    assert facts.folder.checkpoints == (3,)
