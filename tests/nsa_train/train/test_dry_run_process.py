"""Preflight survives the dry run: memory and time are limited, and however its process ends, a rule says so."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

pytest.importorskip("olmo_core", reason="the engine is in the train extra")

from nsa_train.config import load
from nsa_train.planning.hardware import GIB, hardware_here
from nsa_train.planning.preflight_rules import RuleStatus, check_rules
from nsa_train.train.gather_preflight_facts import _dry_run_in_child, gather
from tests.nsa_train.train.runs import environment, write_config

ENOUGH = dict(memory_bytes=4 * GIB, time_s=120.0)
HUGE = ["model.dim=32768", "model.n_layers=2"]


def run_config(tmp_path: Path, *changes: str):
    return load(write_config(tmp_path), overrides=[f"train.out_dir={tmp_path}/run", *changes])


def dry_run(config, log=lambda text: None, target=None, **options):
    target = target or hardware_here("cpu")
    return _dry_run_in_child(config, 257, target, log=log, fetch_remote=False, **{**ENOUGH, **options})


def children() -> list[int]:
    """Dry runs that this process has started and not seen the end of."""
    pids = [word for file in Path("/proc/self/task").glob("*/children") for word in file.read_text().split()]
    return [int(pid) for pid in pids if "nsa_train.train.dry_run" in Path(f"/proc/{pid}/cmdline").read_text()]


def content(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*")}


def test_a_model_larger_than_the_machine_is_refused_and_never_built(tmp_path):
    """The address space is limited, so that a preflight that builds it fails here instead of taking the machine."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (5 * GIB, 5 * GIB))

    command = [sys.executable, "-m", "nsa_train.cli", "preflight", str(write_config(tmp_path)), *HUGE, "--json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), preexec_fn=limit, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    verdict_of = {verdict["rule"]: verdict for verdict in json.loads(done.stdout)["verdicts"]}
    assert verdict_of["memory"]["status"] == "fail"
    # Its shapes were checked with fake tensors; nothing tried to allocate it.
    assert (verdict_of["model"]["status"], verdict_of["step"]["status"]) == ("pass", "pass")
    assert verdict_of["checkpoint"]["status"] == "not checked"
    assert "GiB" in verdict_of["checkpoint"]["message"]


@pytest.mark.nightly
def test_what_fits_the_machine_but_not_the_limit_is_tried_with_fake_tensors(tmp_path):
    config = run_config(tmp_path, "model.dim=1024", "model.n_heads=16", "model.n_layers=6")
    facts = gather(config, hardware_here("cpu"), memory_limit=int(1.2 * GIB))
    assert "GiB" in facts.dry_run.checkpoint.not_tried
    assert facts.dry_run.step.problem is None
    assert facts.dry_run.step_s is None
    assert {verdict.rule for verdict in check_rules(facts) if verdict.status == RuleStatus.FAIL} == set()


@pytest.mark.nightly
def test_a_child_above_its_memory_limit_is_killed_and_the_rule_says_so(tmp_path):
    """The model and its first step are real here; the limit leaves room for torch and not for them."""
    config = run_config(tmp_path, "model.dim=1024", "model.n_heads=16", "model.n_layers=6")
    said: list[str] = []
    outcome = dry_run(config, said.append, memory_bytes=int(0.7 * GIB))
    failed = {name for name in ("data", "model", "step", "checkpoint") if getattr(outcome, name).problem}
    assert len(failed) == 1
    assert failed <= {"model", "step"}
    problem = getattr(outcome, failed.pop()).problem
    assert "0.70 GiB" in problem
    assert outcome.data.problem is None
    assert outcome.data.seen
    assert outcome.checkpoint.not_tried
    assert "building the model" in said
    assert children() == []


def test_a_child_that_dies_fails_the_rule_it_was_at_and_leaves_nothing(tmp_path):
    def say(text: str) -> None:
        if text == "one checkpoint":
            (child,) = children()
            deadline = time.monotonic() + 120
            while not list(tmp_path.glob(".preflight-*")) and time.monotonic() < deadline:
                time.sleep(0.001)
            os.kill(child, signal.SIGSEGV)

    outcome = dry_run(run_config(tmp_path), say)
    assert "SIGSEGV" in outcome.checkpoint.problem
    assert outcome.step.seen
    assert outcome.model.seen
    assert content(tmp_path) == {"run.yaml"}


def test_a_dry_run_that_does_not_end_is_ended(tmp_path):
    outcome = dry_run(run_config(tmp_path), time_s=0.5)
    assert "--timeout" in outcome.data.problem
    assert children() == []


def test_a_child_that_raises_is_told_with_its_last_line(tmp_path):
    assert "TypeError" in dry_run(run_config(tmp_path), unknown_option=1).data.problem


def test_the_child_ends_with_its_parent_and_is_the_first_victim_of_an_out_of_memory_kill(tmp_path):
    config, target = run_config(tmp_path).model_dump(mode="json"), asdict(hardware_here("cpu"))
    request = dict(config=config, vocab_size=257, target=target, fetch_remote=False)
    child = subprocess.Popen(
        [sys.executable, "-m", "nsa_train.train.dry_run"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, env=environment(), start_new_session=True,
    )  # fmt: skip
    try:
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        assert json.loads(child.stdout.readline()) == {"log": "fetching a batch"}
        assert Path(f"/proc/{child.pid}/oom_score_adj").read_text().strip() == "1000"
        child.stdin.close()
        assert child.wait(timeout=120) == -signal.SIGKILL
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
