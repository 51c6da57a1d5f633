"""Preflight rules on recorded facts: no case needs a run or a file."""

import re
from dataclasses import replace

import pytest

from nsa.errors import ConfigError, PreflightError
from nsa.kernels.registry import BRANCHES, BackendChoice, PassedOver
from nsa_train.config.schema import RunConfig
from nsa_train.planning.estimate import estimate
from nsa_train.planning.hardware import GIB, parse_target
from nsa_train.planning.preflight_facts import DryRun, DryRunAttempt, FolderFacts, PreflightFacts
from nsa_train.planning.preflight_rules import (
    _NEVER_ALLOWED,
    NAMES,
    RULES,
    RuleStatus,
    check_names,
    check_rules,
    is_long,
    require_passed,
)

SOUND = {
    "model": dict(dim=512, n_layers=8, n_heads=8),
    "runtime": dict(precision="bf16", gradient_checkpointing=True, use_flash=True),
    "train": dict(
        steps=50_000, seq_len=2048, batch_size=4, save_every=5000, warmup_steps=0, checkpoint_store="s3://bucket/run"
    ),
}
WENT_WELL = DryRun(*[DryRunAttempt(seen="fine")] * 4)
FOLDER = FolderFacts("artifacts/x", disk_free=100 * GIB)


def choices(backend: str, *passed_over: PassedOver, **why: bool) -> tuple[BackendChoice, ...]:
    return tuple(BackendChoice(branch, backend, passed_over, **why) for branch in BRANCHES)


VERIFIED = choices("triton", verified=True)
FAILED = choices(
    "portable",
    PassedOver("cpu", "it runs on a CPU, not on cuda"),
    PassedOver("triton", "its check failed, see /cache/evidence.json"),
)


def facts(
    target="a100-80gb",
    *,
    folder=FOLDER,
    dry_run=WENT_WELL,
    here=True,
    profile=None,
    step_s=None,
    kernels=VERIFIED,
    **sections,
) -> PreflightFacts:
    merged = {**SOUND, **{name: SOUND.get(name, {}) | more for name, more in sections.items()}}
    config = RunConfig.model_validate({"profile": profile, **merged})
    hardware = replace(parse_target(target), here=here)
    run_estimate = estimate(config, hardware, 257, measured_step_s=step_s, kernels=kernels)
    fine = DryRunAttempt(seen="fine")
    return PreflightFacts(config, hardware, run_estimate, folder, dry_run, held_out=fine, store=fine, kernels=kernels)


def statuses(of: PreflightFacts, allowed=()) -> dict[str, RuleStatus]:
    return {verdict.rule: verdict.status for verdict in check_rules(of, allowed)}


def failed(of: PreflightFacts) -> set[str]:
    return {rule for rule, status in statuses(of).items() if status == RuleStatus.FAIL}


def test_a_sound_long_run_passes_every_rule():
    assert set(statuses(facts()).values()) == {RuleStatus.PASS}
    assert statuses(facts()).keys() == set(NAMES)


TIGHT = 38  # rows that fill more than 90 % of an RTX 3090 without checkpointing, and no more than all of it

BROKEN = {
    "precision": facts(runtime=dict(precision="fp32")),
    "precision_fp16": facts(runtime=dict(precision="fp16")),
    "gradient_checkpointing": facts(
        "rtx3090", train=dict(batch_size=TIGHT), runtime=dict(gradient_checkpointing="off")
    ),
    "flash": facts(runtime=dict(use_flash=False), kernels=None),
    "save_every": facts(train=dict(save_every=0)),
    "recovery_points": facts(train=dict(save_every=20_000)),
    "toy_profile": facts(profile="toy"),
    "toy_model": facts(model=dict(dim=128, n_layers=2)),
    "toy_sequence": facts(train=dict(seq_len=128)),
    "synthetic_on_fail": facts(data=dict(synthetic_on_fail=True)),
    "synthetic_data": facts(data=dict(dataset="synthetic")),
    "record_gap": facts(step_s=40.0),
    "out_dir": facts(folder=FolderFacts("artifacts/x", problem="artifacts is not a folder", disk_free=100 * GIB)),
    "other_run": facts(folder=replace(FOLDER, checkpoints=(100, 200))),
    "halt_file": facts(folder=replace(FOLDER, halt="gates collapsed")),
    "ranks": replace(facts(), ranks_problem="train.batch_size (3) must be a multiple of the number of ranks (2)."),
    "memory": facts("rtx3090", train=dict(batch_size=1024, log_every=1)),
    "disk": facts(folder=replace(FOLDER, disk_free=GIB)),
    "data": facts(dry_run=replace(WENT_WELL, data=DryRunAttempt(problem="no batch within 120 s"))),
    "held_out": replace(facts(), held_out=DryRunAttempt(problem="0 rows of 2048")),
    "model": facts(dry_run=replace(WENT_WELL, model=DryRunAttempt(problem="no kernel"))),
    "step": facts(dry_run=replace(WENT_WELL, step=DryRunAttempt(problem="out of memory"))),
    "checkpoint": facts(dry_run=replace(WENT_WELL, checkpoint=DryRunAttempt(problem="read-only file system"))),
    "checkpoint_store": replace(facts(), store=DryRunAttempt(problem="SignatureDoesNotMatch")),
}


def test_every_rule_has_a_case():
    assert BROKEN.keys() == set(NAMES)


@pytest.mark.parametrize("rule", BROKEN)
def test_a_broken_rule_is_found_alone_and_says_what_to_do(rule):
    assert failed(BROKEN[rule]) == {rule}
    verdict = next(verdict for verdict in check_rules(BROKEN[rule]) if verdict.rule == rule)
    assert verdict.fix or "must" in verdict.message
    with pytest.raises(PreflightError) as refusal:
        require_passed(check_rules(BROKEN[rule]))
    assert f"  - {rule}: {verdict.message[:40]}" in str(refusal.value)


@pytest.mark.parametrize("rule", sorted(BROKEN.keys() - _NEVER_ALLOWED))
def test_an_allowed_rule_is_marked_and_lets_the_run_go(rule):
    verdicts = check_rules(BROKEN[rule], [rule])
    assert {verdict.rule for verdict in verdicts if verdict.status == RuleStatus.ALLOWED} == {rule}
    require_passed(verdicts)


@pytest.mark.parametrize("rule", sorted(_NEVER_ALLOWED))
def test_a_rule_without_which_nothing_starts_cannot_be_allowed(rule):
    with pytest.raises(ConfigError, match=rule):
        check_rules(BROKEN[rule], [rule])
    with pytest.raises(PreflightError) as refusal:
        require_passed(check_rules(BROKEN[rule]))
    assert f"--allow={rule}" not in str(refusal.value)


def test_a_store_that_does_not_answer_or_a_run_that_has_checkpoints_is_not_refused():
    down = replace(facts(), store=DryRunAttempt(not_tried="503"))
    assert statuses(down)["checkpoint_store"] == RuleStatus.NOT_CHECKED
    again = replace(BROKEN["checkpoint_store"], folder=replace(FOLDER, checkpoints=(100,)), resuming=True)
    assert "checkpoint_store" not in statuses(again)


def test_allowing_one_rule_allows_no_other():
    both = facts(runtime=dict(precision="fp32", use_flash=False), kernels=None)
    assert statuses(both, ["flash"])["precision"] == RuleStatus.FAIL


def test_all_failed_rules_are_reported_at_once():
    of = facts(
        runtime=dict(precision="fp32", gradient_checkpointing=False, use_flash=False),
        train=dict(save_every=0, seq_len=128),
        model=dict(dim=128, n_layers=2),
        profile="toy",
        kernels=None,
    )
    wanted = {"precision", "flash", "save_every", "toy_profile", "toy_model", "toy_sequence"}
    assert failed(of) == wanted
    with pytest.raises(PreflightError) as refusal:
        require_passed(check_rules(of))
    assert all(f"- {rule}: " in str(refusal.value) and f"--allow={rule}" in str(refusal.value) for rule in wanted)
    assert refusal.value.exit_code == 2


def flash(of: PreflightFacts):
    return next(verdict for verdict in check_rules(of) if verdict.rule == "flash")


def test_the_backend_that_will_run_is_checked_and_not_a_flag():
    assert flash(facts()).message == "kernels: triton, verified on this GPU"
    refused = flash(facts(kernels=FAILED))
    assert refused.status == RuleStatus.FAIL
    assert "see /cache/evidence.json" in refused.message
    assert "tokens/s with portable" in refused.message
    assert "tokens/s with triton (calculated, not measured)" in refused.message
    assert "nsa gpu-check" in refused.fix
    by_name = flash(facts(kernels=choices("portable", requested=True)))
    assert (by_name.status, "kernels.*=auto" in by_name.fix) == (RuleStatus.FAIL, True)


def test_one_slow_branch_is_enough():
    mixed = (*VERIFIED[:2], BackendChoice("selected", "reference", requested=True), VERIFIED[3])
    assert flash(facts(kernels=mixed)).status == RuleStatus.FAIL


def test_on_another_machine_only_the_requested_backends_are_checked():
    auto = flash(facts(here=False, kernels=None))
    assert (auto.status, "decided at the start" in auto.message) == (RuleStatus.NOT_CHECKED, True)
    named = flash(_with_kernels("portable"))
    assert named.status == RuleStatus.FAIL
    assert "kernels.selected is portable" in named.message
    assert flash(_with_kernels("triton")).status == RuleStatus.NOT_CHECKED


def _with_kernels(selected: str) -> PreflightFacts:
    of = facts(here=False, kernels=None)
    section = of.config.kernels.model_copy(update={"selected": selected})
    return replace(of, config=of.config.model_copy(update={"kernels": section}))


def test_a_requested_backend_that_cannot_run_is_refused():
    of = replace(facts(kernels=None), kernels_problem="kernels.selected='triton' cannot run here: no GPU.")
    assert "cannot run here" in flash(of).message
    assert flash(of).status == RuleStatus.FAIL


def test_a_long_run_on_a_cpu_needs_the_compiled_kernels():
    assert flash(facts("cpu", kernels=choices("cpu"))).status == RuleStatus.PASS
    assert flash(facts("cpu", kernels=choices("portable", PassedOver("cpu", "no compiler")))).status == RuleStatus.FAIL


def test_rules_for_long_runs_do_not_apply_to_a_short_run():
    of = facts("cpu", train=dict(steps=200, save_every=0, seq_len=128), runtime=dict(precision="fp32"), profile="toy")
    assert failed(of) == set()
    assert statuses(of).keys() == {rule.name for rule in RULES if not rule.long_runs_only}


def test_long_is_many_steps_anywhere_or_hours_on_a_gpu():
    short, many = dict(steps=4999, seq_len=512, batch_size=1), dict(steps=5000, seq_len=512, batch_size=1)
    assert not is_long(facts(train=short))
    assert is_long(facts(train=many))
    assert is_long(facts("cpu", train=many))
    slow = dict(steps=4999, batch_size=256)
    assert is_long(facts(train=slow))
    assert not is_long(facts("cpu", train=slow))


def test_resuming_goes_on_in_the_folder_of_the_run():
    folder = replace(FOLDER, checkpoints=(100,), other_settings=("train.lr 0.1 → 0.2",))
    assert failed(replace(facts(folder=folder), resuming=True)) == set()


def test_a_folder_with_another_config_is_refused_to_a_long_run_only():
    folder = replace(FOLDER, other_settings=("model.dim 128 → 512",), last_step=35_360)
    assert failed(facts(folder=folder)) == {"other_run"}
    assert failed(facts(folder=folder, train=dict(steps=100))) == set()


def test_disk_is_needed_for_the_kept_checkpoints_and_the_one_being_written():
    run_estimate = facts().estimate
    need = 4 * run_estimate.checkpoint_bytes + run_estimate.export_bytes
    assert failed(facts(folder=replace(FOLDER, disk_free=need))) == set()
    assert failed(facts(folder=replace(FOLDER, disk_free=need - 1))) == {"disk"}
    there = replace(FOLDER, disk_free=need - 2 * run_estimate.checkpoint_bytes, checkpoints=(1, 2))
    assert failed(replace(facts(folder=there), resuming=True)) == set()


@pytest.mark.parametrize("steps", [1, 999, 5000, 50_000, 50_001])
@pytest.mark.parametrize(("save_every", "keep_every"), [(0, 0), (1000, 0), (1000, 1000), (1000, 5000), (500, 1500)])
@pytest.mark.parametrize("keep", [1, 3, 200])
def test_disk_is_needed_for_milestones_too(steps, save_every, keep_every, keep):
    train = dict(steps=steps, save_every=save_every, keep_every=keep_every, keep_checkpoints=keep, warmup_steps=0)
    saved = sorted({*(range(save_every, steps + 1, save_every) if save_every else ()), steps})
    kept_steps = {step for step in saved if step in saved[-keep:] or (keep_every and step % keep_every == 0)}
    run_estimate = facts(train=train).estimate
    assert run_estimate.kept_checkpoints == len(kept_steps)
    need = (len(kept_steps) + 1) * run_estimate.checkpoint_bytes + run_estimate.export_bytes
    assert "disk" not in failed(facts(train=train, folder=replace(FOLDER, disk_free=need)))
    assert "disk" in failed(facts(train=train, folder=replace(FOLDER, disk_free=need - 1)))


def test_the_suggested_fix_for_memory_is_enough():
    def fix(**sections) -> str:
        return next(v.fix for v in check_rules(facts("rtx3090", **sections)) if v.rule == "memory")

    off = dict(gradient_checkpointing="off")
    assert "gradient_checkpointing=selective" in fix(train=dict(batch_size=64), runtime=off)
    assert "gradient_checkpointing=full" in fix(train=dict(batch_size=1024), runtime=off)
    assert fix(train=dict(batch_size=1024)) == "Set train.batch_size=128 train.accumulate_grad_batches=8."
    assert "fsdp" in fix(train=dict(batch_size=1, seq_len=2**21))


@pytest.mark.parametrize(
    ("target", "sections"),
    [
        ("rtx3090", dict(train=dict(batch_size=1 << 14))),
        ("rtx3090", dict(train=dict(batch_size=1 << 14), runtime=dict(gradient_checkpointing="off"))),
        ("rtx3090:4", dict(train=dict(batch_size=1000), parallel=dict(data="fsdp"))),
        ("rtx3090", dict(model=dict(dim=8192, n_layers=60, n_heads=64))),
        ("rtx3090", dict(train=dict(batch_size=1, seq_len=2**21))),
    ],
)
def test_a_fix_for_memory_makes_it_fit(target, sections):
    """Settings that the message names, on as many devices as it names, pass the rule that gave it."""
    fix = next(v.fix for v in check_rules(facts(target, **sections)) if v.rule == "memory")
    changed: dict[str, dict] = {name: dict(values) for name, values in sections.items()}
    for section, name, value in re.findall(r"(\w+)\.(\w+)=(\w+)", fix):
        changed.setdefault(section, {})[name] = int(value) if value.isdecimal() else value
    assert changed != sections
    count = re.search(r"use (\d+) such devices", fix)
    assert "memory" not in failed(facts(f"rtx3090:{count[1]}" if count else target, **changed))
    rows = changed["train"]["batch_size"] * changed["train"].get("accumulate_grad_batches", 1)
    assert count or rows >= sections["train"]["batch_size"], "the global batch stays"


def test_advice_for_a_model_that_no_gpu_holds_does_not_promise_a_batch():
    fix = next(v.fix for v in check_rules(facts("cpu", model=dict(dim=65536, n_layers=200))) if v.rule == "memory")
    assert "model.dim" in fix
    assert not re.search(r"\w+\.\w+=", fix)


@pytest.mark.parametrize("rule", ["data", "model", "step", "checkpoint", "other_run", "halt_file"])
def test_an_override_is_not_offered_where_the_run_would_end_all_the_same(rule):
    both = replace(BROKEN[rule], config=BROKEN["precision"].config)
    assert failed(both) == {rule, "precision"}
    for of in (BROKEN[rule], both):
        with pytest.raises(PreflightError) as refusal:
            require_passed(check_rules(of))
        assert "--allow" not in str(refusal.value)


def test_checkpointing_is_demanded_only_where_memory_is_short():
    """Without checkpointing, the run passes on a GPU where it fills a small part of the memory."""

    def verdict_on(target: str, mode: str):
        of = facts(target, train=dict(batch_size=TIGHT), runtime=dict(gradient_checkpointing=mode))
        return next(v for v in check_rules(of) if v.rule == "gradient_checkpointing")

    assert verdict_on("a100-80gb", "off").status == RuleStatus.PASS
    tight = verdict_on("rtx3090", "off")
    assert (tight.status, tight.fix) == (RuleStatus.FAIL, "Set runtime.gradient_checkpointing=selective.")
    assert verdict_on("rtx3090", "selective").status == verdict_on("rtx3090", "full").status == RuleStatus.PASS


def test_what_could_not_be_checked_is_neither_a_pass_nor_a_failure():
    of = facts(here=False, dry_run=DryRun.not_tried("there is no such GPU here"))
    status_of = statuses(of)
    for rule in ("disk", "data", "model", "step", "checkpoint"):
        assert status_of[rule] == RuleStatus.NOT_CHECKED
    require_passed(check_rules(of))
    unknown = statuses(replace(facts(), estimate=None))
    assert {rule for rule, status in unknown.items() if status == RuleStatus.NOT_CHECKED} == {
        "toy_model", "record_gap", "memory", "disk",
    }  # fmt: skip


def test_an_assumed_speed_refuses_no_run():
    of = facts(train=dict(log_every=50_000))
    assert statuses(of)["record_gap"] == RuleStatus.NOT_CHECKED
    fix = next(v.fix for v in check_rules(facts(step_s=40.0)) if v.rule == "record_gap")
    assert fix == "Set train.log_every=15."
    assert failed(facts(step_s=40.0, train=dict(log_every=15))) == set()
    assert "shorter" in next(v.fix for v in check_rules(facts(step_s=700.0)) if v.rule == "record_gap")


def test_an_override_must_name_a_rule():
    with pytest.raises(ConfigError, match=r"precision\?"):
        check_names(["precison"])
    with pytest.raises(ConfigError):
        check_rules(facts(), ["everything"])
