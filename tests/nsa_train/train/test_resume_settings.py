"""A run resumes with the settings its checkpoint was saved with; what may change is said in the schema."""

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa.errors import ConfigError
from nsa_train import names
from nsa_train.checkpoint.run_state import VOCAB_SIZE, RunRecord
from nsa_train.config import load
from nsa_train.config.layer import flatten
from nsa_train.config.schema import RunConfig, settings
from nsa_train.config.setting_types import may_change_on_resume
from nsa_train.record.events import EventKind, read_events
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import build_train_module
from nsa_train.train.resume import changed_settings, require_same_settings
from tests.attention_options import OPTIONS
from tests.nsa_train.train.runs import Job, run_all, write_config

FREE = {key for key, field in settings().items() if may_change_on_resume(field)}
VOCABULARY = 257


def record(config=None, *, without=(), **more) -> RunRecord:
    values = (config or RunConfig()).model_dump(mode="json")
    for section, key in without:
        del values[section][key]
    return RunRecord(4, 1, values, {"cursor": None}, more=more)


def test_what_decides_the_model_or_the_data_may_not_change():
    fixed = settings().keys() - FREE
    # A preset is compared by the values that it sets; the selector loss changes how a model is trained, not the model;
    # a gate's initial bias has no effect after the start.
    free = {"nsa.preset", "nsa.selector_loss", "nsa.selector_loss_share", "nsa.selector_blocks"}
    free |= {"nsa.sliding_gate_init"}
    assert {key for key in settings() if key.startswith(("model.", "nsa."))} - free <= fixed
    assert {"train.seed", "train.seq_len", "data.dataset", "data.held_out", "data.packing"} <= fixed
    assert "data.mask_document_ends" in fixed
    assert {"train.steps", "train.out_dir", "train.save_every", "train.lr", "kernels.sliding", "parallel.data"} <= FREE


@pytest.mark.parametrize("key", settings())
def test_every_setting_that_differs_is_found(key):
    """Saved with a value that no setting has."""
    saved = record()
    place = saved.config
    for section in key.split(".")[:-1]:
        place = place[section]
    place[key.split(".")[-1]] = 987654321
    (change,) = changed_settings(saved, RunConfig(), VOCABULARY)
    assert (change.key, change.saved, change.allowed) == (key, 987654321, key in FREE)


def test_values_are_compared_as_they_take_effect():
    spelled_out = RunConfig.model_validate({"model": {"ffn_dim": RunConfig().model.ffn_size, "vocab_size": VOCABULARY}})
    saved = record(**{VOCAB_SIZE: VOCABULARY})
    assert changed_settings(saved, spelled_out, VOCABULARY) == []
    assert changed_settings(record(spelled_out), RunConfig(), VOCABULARY) == []
    assert [change.key for change in changed_settings(saved, RunConfig(), 8192)] == ["model.vocab_size"]


@pytest.mark.parametrize(("phi", "saved", "refused"), [("avg", "before", False), ("mlp", "before", True)])
def test_what_auto_means_now_is_not_what_an_older_run_trained_with(tmp_path, phi, saved, refused):
    """`before` was every operator's default once. A learned one trained so must not go on as `after`."""
    values = RunConfig(nsa=dict(phi=phi)).model_dump(mode="json")
    values["nsa"]["rope_compressed"] = saved
    RunRecord(4, 1, values, {"cursor": None}).write(tmp_path)
    resumed = RunConfig(nsa=dict(phi=phi))
    if refused:
        with pytest.raises(ConfigError, match=r"nsa\.rope_compressed"):
            require_same_settings(tmp_path, resumed, VOCABULARY)
    else:
        assert not require_same_settings(tmp_path, resumed, VOCABULARY)


def test_a_setting_newer_than_the_checkpoint_had_its_default():
    old = record(without=[("nsa", "gate_temperature"), ("train", "replica_check_every")])
    assert changed_settings(old, RunConfig(), VOCABULARY) == []
    changed = RunConfig.model_validate({"nsa": {"gate_temperature": 2.0}})
    assert [change.key for change in changed_settings(old, changed, VOCABULARY)] == ["nsa.gate_temperature"]


NEWER_OPTIONS = (
    ("model", "qk_norm"), ("model", "qkv_bias"), ("model", "attention_out_bias"), ("model", "rope_scaling"),
    ("model", "init_std"), ("nsa", "kv"),
)  # fmt: skip


def test_a_run_from_before_the_attentions_options_resumes_without_them_and_not_with_them(tmp_path):
    old = record(without=NEWER_OPTIONS)
    assert changed_settings(old, RunConfig(nsa=dict(kv="per_branch")), VOCABULARY) == []
    old.write(tmp_path)
    options = {**OPTIONS["all"], "model": {**OPTIONS["all"]["model"], "init_std": 0.08}}
    with pytest.raises(ConfigError) as refused:
        require_same_settings(tmp_path, RunConfig.model_validate(options), VOCABULARY)
    for text in (
        "nsa.kv: saved per_branch, now shared",
        "model.qk_norm: saved false, now true",
        "model.init_std: saved 0.02, now 0.08",
        "model.rope_scaling.rope_type: saved default, now yarn",
        "model.rope_scaling.factor: saved null, now 4.0",
    ):
        assert text in str(refused.value)


def test_a_run_that_learned_from_the_first_tokens_of_other_documents_does_not_silently_stop_it(tmp_path):
    old = record(without=[("data", "mask_document_ends")])
    old.write(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.mask_document_ends=false"):
        require_same_settings(tmp_path, RunConfig(), VOCABULARY)
    assert not require_same_settings(tmp_path, RunConfig(data=dict(mask_document_ends=False)), VOCABULARY)
    assert not RunConfig.of_saved(old.config).data.mask_document_ends
    assert RunConfig().data.mask_document_ends


def test_a_setting_this_version_does_not_know_is_refused():
    saved = record()
    saved.config["nsa"]["of_a_later_version"] = 3
    (change,) = changed_settings(saved, RunConfig(), VOCABULARY)
    assert not change.allowed


def test_the_optimizer_takes_what_may_change_from_the_config(tmp_path):
    def module(*changes: str):
        return build_train_module(
            load(write_config(tmp_path), overrides=changes), VOCABULARY, RankInfo(), torch.device("cpu")
        )

    saved, resumed = module(), module("train.lr=0.02", "train.weight_decay=0.5")
    wanted = [(group["initial_lr"], group["weight_decay"]) for group in resumed.optim.param_groups]
    resumed.optim.load_state_dict(saved.optim.state_dict())
    assert [(group["initial_lr"], group["weight_decay"]) for group in resumed.optim.param_groups] == wanted
    assert {decay for _, decay in wanted} == {0.0, 0.5}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("other")
    texts = [json.dumps({"id": str(i), "text": f"document {i} " * (5 + i % 7)}) + "\n" for i in range(200)]
    (folder / "a.jsonl").write_text("".join(texts))
    (folder / "moved").mkdir()
    (folder / "elsewhere").mkdir()  # a new folder of a run that is refused would be removed
    (folder / "moved" / "a.jsonl").write_text("".join(texts))
    (folder / "b.jsonl").write_text("".join(reversed(texts[:150])))
    run = str(folder / "run")

    def changed(*words: str, path: str = "a.jsonl", **more) -> Job:
        base = ["train.steps=4", "data.dataset=local", f"data.path={folder / path}", *words]
        return Job(more.pop("out", run), changes=base, **more)

    same = "model.n_layers=4"
    saved_in = str(folder / "run" / "checkpoints" / "step4")
    more = ["train.steps=6", "train.lr=0.01", "train.weight_decay=0.1", "train.batch_size=8", "train.save_every=1"]
    more += ["runtime.precision=bf16", "kernels.sliding=portable", "runtime.threads=2", "parallel.data=fsdp"]
    codes = run_all(
        changed(same),
        changed(same, "model.dim=64", resume_from=saved_in, out=str(folder / "elsewhere")),
        changed("model.n_layers=2", "nsa.w=32", "model.rope_base=10000", resume=True),
        changed(same, "train.seed=5", resume=True, world=2),
        changed(same, path="b.jsonl", resume=True),
        changed(
            same, *more, path="moved/a.jsonl", resume_from=str(folder / "run"), out=str(folder / "continued"), world=2
        ),
    )
    return folder, codes


def written(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_other_settings_and_other_data_are_refused_before_anything_is_written(runs):
    folder, codes = runs
    assert codes == [[0], [20], [20], [20, 20], [21], [0, 0]]
    assert written(folder / "elsewhere").keys() <= {".lock"}
    since = (folder / "elsewhere").stat().st_mtime_ns  # the first that was refused
    assert {name for name, at in written(folder / "run").items() if at >= since} <= {".lock"}


def test_all_settings_are_named_at_once_with_both_values(runs):
    changes = ["model.n_layers=2", "nsa.w=32", "model.rope_base=10000", "train.lr=0.5", "data.dataset=local"]
    config = load(runs[0] / "run.yaml", overrides=[*changes, "data.path=x"])
    with pytest.raises(ConfigError) as refused:
        require_same_settings(runs[0] / "run" / "checkpoints" / "step4", config, VOCABULARY)
    message = str(refused.value)
    for part in (
        "model.n_layers: saved 4, now 2",
        "nsa.w: saved 16, now 32",
        "model.rope_base: saved 500000.0, now 10000",
    ):
        assert part in message
    assert "train.lr" not in message


def test_what_may_change_does_and_is_recorded(runs):
    folder = runs[0] / "continued"
    (event,) = [event for event in read_events(folder) if event.kind == EventKind.SETTINGS_CHANGED]
    for key in ("train.lr", "train.weight_decay", "runtime.precision", "kernels.sliding", "train.batch_size"):
        assert key in event.details["reason"]
    last = [beat for beat in read_beats(folder / names.heartbeat(0)) if beat.msg == names.PROGRESS][-1]
    assert last.step == 6
    assert last.lr == pytest.approx(0.1 * 0.01), "the last step of a cosine to a tenth of the new train.lr"
    saved = flatten(json.loads((folder / "checkpoints" / "step6" / "state.json").read_text()))
    assert saved["data_cursor.cursor.next_row"] == 4 * 4 + 2 * 8
