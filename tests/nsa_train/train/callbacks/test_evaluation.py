"""Held-out data that cannot be evaluated: found before step 1, and never the end of a run."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from typer.testing import CliRunner

from nsa_train import names
from nsa_train.cli.main import app
from nsa_train.config import load
from nsa_train.planning.hardware import hardware_here
from nsa_train.planning.preflight_rules import RuleStatus, check_rules
from nsa_train.record.events import EventKind, read_events
from nsa_train.shipped import CORPUS
from nsa_train.train.gather_preflight_facts import _held_out, gather
from tests.nsa_train.train.runs import ROOT, Job, run_all, write_config

RULE = "held_out"
EVALUATED = ["train.steps=4", "train.save_every=2", "train.eval_every=2", "train.eval_batches=1"]


def prepare(out: Path, held_out: str) -> str:
    words = ["data", "prepare", str(CORPUS), str(out), "--tokenizer", "byte", "--workers", "1", "--held-out", held_out]
    done = CliRunner(env={"COLUMNS": "200"}).invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    return " ".join(done.output.split())


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """A set without and one with held-out documents, and what `prepare` printed about each."""
    folder = tmp_path_factory.mktemp("sets")
    return folder, {name: prepare(folder / name, share) for name, share in (("without", "0.0005"), ("with", "0.02"))}


def of_set(path: Path) -> list[str]:
    return ["data.dataset=prepared", f"data.path={path}", *EVALUATED]


def of_documents(held_out: str) -> list[str]:
    return ["data.dataset=local", f"data.path={CORPUS}", f"data.held_out={held_out}", *EVALUATED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory, sets):
    folder = tmp_path_factory.mktemp("held_out")
    breaks = folder / "breaks"
    shutil.copytree(sets[0] / "with", breaks)
    run_all(Job(str(folder / "broke"), 1, of_set(breaks)))
    for shard in (breaks / "validation").iterdir():
        shard.unlink()
    codes = run_all(
        Job(str(folder / "refused_set"), 2, of_set(sets[0] / "without")),
        Job(str(folder / "refused_documents"), 1, of_documents("0.0")),
        Job(str(folder / "allowed"), 2, of_set(sets[0] / "without"), allow=[RULE]),
        Job(str(folder / "allowed"), 1, [*of_set(sets[0] / "without"), "train.steps=6"], resume=True),
        Job(str(folder / "broke"), 1, [*of_set(breaks), "train.steps=6"], resume=True),
    )
    assert codes == [[2, 2], [2], [0, 0], [0], [0]]
    return folder


def failures(folder: Path) -> list[int]:
    return [event.step for event in read_events(folder) if event.kind == EventKind.EVALUATION_FAILED]


@pytest.mark.parametrize("name", ["refused_set", "refused_documents"])
def test_a_run_is_refused_before_anything_is_written(runs, name):
    assert not (runs / name / names.ENV).exists()
    assert not list(runs.glob(f"{name}/heartbeat*"))


def test_a_failing_evaluation_costs_neither_checkpoints_nor_the_model(runs):
    kinds = [(event.kind, event.step) for event in read_events(runs / "allowed")]
    assert failures(runs / "allowed") == [2, 4, 6]
    assert kinds.index((EventKind.EVALUATION_FAILED, 4)) < kinds.index((EventKind.DONE, 4))
    assert {path.name for path in (runs / "allowed" / names.CHECKPOINTS).iterdir()} >= {"step2", "step4", "step6"}
    assert (runs / "allowed" / names.MODEL).is_file()


def test_held_out_data_lost_during_a_run_does_not_end_it(runs):
    evaluated = [event.step for event in read_events(runs / "broke") if event.kind == EventKind.EVALUATION]
    assert evaluated == [2, 4]
    assert failures(runs / "broke") == [6]
    assert (runs / "broke" / names.MODEL).is_file()


@pytest.mark.parametrize("name", ["allowed", "broke"])
def test_status_names_it(runs, name):
    done = CliRunner().invoke(app, ["status", str(runs / name), "--json"])
    findings = json.loads(done.output)["findings"]
    assert [finding["condition"] for finding in findings] == ["evaluation_failed"]


def verdict(tmp_path, *changes):
    config = load(write_config(tmp_path), overrides=[f"train.out_dir={tmp_path}/run", *changes])
    facts = gather(config, hardware_here("cpu"), try_it=False)
    facts = replace(facts, held_out=_held_out(config, 257, False, fetch_remote=False))
    return next((rule_verdict for rule_verdict in check_rules(facts) if rule_verdict.rule == RULE), None)


def test_preflight_checks_the_data_of_the_evaluation(tmp_path, sets):
    without, with_some = of_set(sets[0] / "without"), of_set(sets[0] / "with")
    assert verdict(tmp_path, *without).status == RuleStatus.FAIL
    assert verdict(tmp_path, *with_some).status == RuleStatus.PASS
    assert verdict(tmp_path, *with_some, "train.batch_size=100000").status == RuleStatus.FAIL
    assert verdict(tmp_path, *of_documents("0.000001")).status == RuleStatus.FAIL
    assert verdict(tmp_path, *of_documents("0.02")).status == RuleStatus.PASS
    assert verdict(tmp_path, *EVALUATED).status == RuleStatus.PASS, "synthetic rows never end"
    mixed = ["data.dataset=prepared", *EVALUATED]
    for others, status in (("without", RuleStatus.FAIL), ("with/.", RuleStatus.PASS)):
        mixture = f"data.mixture={{{sets[0] / 'with'}: 3, {sets[0]}/{others}: 1}}"
        assert verdict(tmp_path, *mixed, mixture).status == status
    assert verdict(tmp_path, *without, "train.eval_every=0") is None
    assert verdict(tmp_path, *EVALUATED, "data.dataset=fineweb_edu", "data.held_out=0").status == RuleStatus.FAIL
    assert verdict(tmp_path, *EVALUATED, "data.dataset=fineweb_edu").status == RuleStatus.NOT_CHECKED


def test_prepare_warns_of_a_held_out_split_that_is_too_small(sets):
    assert "WARNING" in sets[1]["without"]
    assert "--held-out" in sets[1]["without"]
    assert "WARNING" not in sets[1]["with"]


def test_the_data_commands_of_the_tutorial_ask_for_a_split_that_can_be_evaluated():
    """The corpus of the tutorial has about 5 MB; prepare's default share is for corpora of gigabytes."""
    page = (ROOT / "docs/TUTORIAL.md").read_text()
    (command,) = [line for line in page.splitlines() if line.startswith("nsa data prepare my-run/text")]
    assert float(command.split("--held-out")[1].split()[0]) >= 0.01
