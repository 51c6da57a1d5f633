"""Preflight rules: what a run must satisfy before it starts. Pure functions of the collected facts.

Most rules apply to long runs only, where a mistake costs days: 24.5 GPU-hours were once spent on a toy model in fp32
with checkpoints disabled. To add a rule, add it to RULES here and a case to tests/nsa_train/planning/test_preflight.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nsa_train.config.schema import RunConfig
from nsa_train.config.setting_types import plain
from nsa_train.planning.preflight_facts import DryRunAttempt, PreflightFacts, RuleFinding, finding
from nsa_train.planning.resource_rules import disk, fast_kernels, gradient_checkpointing, memory

LONG_RUN_STEPS = 5000
_LONG_RUN_S = 2 * 3600.0
_TOY_PARAMETERS = 10_000_000  # in the blocks
_TOY_SEQ_LEN = 512
_FEWEST_CHECKPOINTS = 5
HALT_FILE, HELD_OUT = "halt_file", "held_out"
_RECORD_GAP_S = 600.0  # longest time without a record of loss and gates


@dataclass(frozen=True)
class PreflightRule:
    name: str
    """Name of the rule, as in `--allow NAME`."""
    asks: str
    """The requirement, in a few words."""
    check: Callable[[PreflightFacts], RuleFinding]
    long_runs_only: bool = False
    can_be_allowed: bool = True
    """Whether `--allow` overrides it; false if the trainer itself could not run."""
    applies: Callable[[PreflightFacts], bool] = lambda facts: True


def is_long(facts: PreflightFacts) -> bool:
    """Whether the rules for long runs apply: many steps, or hours on a GPU."""
    if facts.config.train.steps >= LONG_RUN_STEPS:
        return True
    return facts.target.device.is_gpu and facts.estimate is not None and facts.estimate.wall_s > _LONG_RUN_S


def _setting_rule(
    key: str, holds: Callable[[Any], bool], why: str, fix: str
) -> Callable[[PreflightFacts], RuleFinding]:
    """A rule about the value of one setting."""

    def check(facts: PreflightFacts) -> RuleFinding:
        value = facts.config.value(key)
        return finding(holds(value), f"{key} is {plain(value)}", why, fix)

    return check


def _switch_rule(key: str, required: bool, why: str) -> Callable[[PreflightFacts], RuleFinding]:
    """A rule that a boolean setting has this value."""
    return _setting_rule(key, lambda value: value is required, why, f"Set {key}={plain(required)}.")


def why_no_fp16(precision: str) -> str | None:
    """Why a run cannot train in this precision, or None; the trainer checks it too."""
    if precision != "fp16":
        return None
    return "runtime.precision is fp16: small gradients underflow without loss scaling, which the engine does not have"


NOT_FP16 = "Set runtime.precision=bf16, or fp32 on a GPU without bf16."


def _precision_fp16(facts: PreflightFacts) -> RuleFinding:
    precision = facts.config.runtime.precision
    problem = why_no_fp16(precision)
    return RuleFinding(problem is None, problem or f"runtime.precision is {precision}", NOT_FP16)


def _save_every(facts: PreflightFacts) -> RuleFinding:
    every, steps = facts.config.train.save_every, facts.config.train.steps
    return finding(
        every > 0,
        f"train.save_every is {every} for {steps} steps",
        "a crash would lose the whole run",
        f"Set e.g. train.save_every={max(1, steps // 10)}.",
    )


def _recovery_points(facts: PreflightFacts) -> RuleFinding:
    every, steps = facts.config.train.save_every, facts.config.train.steps
    count = steps // every if every else 0
    return finding(
        count >= _FEWEST_CHECKPOINTS,
        f"{count} checkpoints in {steps} steps (train.save_every={every})",
        f"a crash could lose {100 * min(every, steps) // steps} % of the run",
        f"Set e.g. train.save_every={max(1, steps // 10)}.",
    )


def _toy_model(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the model size is unknown without the vocabulary size")
    size, model = facts.estimate.parameters.in_blocks, facts.config.model
    return finding(
        size >= _TOY_PARAMETERS,
        f"{size / 1e6:.1f} M parameters in the blocks (model.dim={model.dim}, model.n_layers={model.n_layers})",
        f"a long run needs at least {_TOY_PARAMETERS / 1e6:.0f} M",
        "Set e.g. model.dim=768 model.n_layers=12, or start from configs/train_50k.yaml.",
    )


def _record_gap(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the step time is unknown without the vocabulary size")
    every, step_s = facts.config.train.log_every, facts.estimate.step_s
    what = f"a record every {_seconds(every * step_s)} (train.log_every={every}, {_seconds(step_s)} a step"
    if every * step_s <= _RECORD_GAP_S:
        return RuleFinding(True, f"{what})")
    if not facts.estimate.measured:  # an assumed speed must not refuse a run
        return RuleFinding(None, f"{what} at an assumed efficiency)")
    return RuleFinding(
        False,
        f"{what}), at most {_RECORD_GAP_S:.0f} s: loss and gates are not recorded in between",
        f"Set train.log_every={int(_RECORD_GAP_S / step_s)}."
        if step_s <= _RECORD_GAP_S
        else "Make a step shorter: reduce train.accumulate_grad_batches or train.batch_size.",
    )


def _out_dir(facts: PreflightFacts) -> RuleFinding:
    problem, path = facts.folder.problem, facts.folder.path
    if problem is None:
        return RuleFinding(True, f"{path} is writable")
    if not facts.target.here:
        return RuleFinding(None, f"the disk of {facts.target} cannot be checked from this machine")
    return RuleFinding(False, f"train.out_dir is {path} and {problem}", "Set train.out_dir to a writable folder.")


def _other_run(facts: PreflightFacts) -> RuleFinding:
    folder = facts.folder
    if folder.problem is not None:
        return RuleFinding(None, "the run folder cannot be read: see the rule out_dir")
    if facts.resuming:
        return RuleFinding(True, f"{folder.path} is being resumed")
    if folder.in_use_by is not None:
        what = f"{folder.path} is in use by {folder.in_use_by}"
        return RuleFinding(False, what, "Stop that run, or set train.out_dir to another folder.")
    if folder.checkpoints:
        what = f"{folder.path} already contains a run, with checkpoints up to step {folder.checkpoints[-1]}"
        return RuleFinding(False, what, "Set train.out_dir to another folder, or add --resume.")
    if folder.other_settings and is_long(facts):
        shown = ", ".join(folder.other_settings[:2]) + (" …" if len(folder.other_settings) > 2 else "")
        what = f"{folder.path} already contains another run, of {folder.last_step} steps: {shown}"
        return RuleFinding(False, what, "Set train.out_dir to another folder.")
    return RuleFinding(True, f"{folder.path} contains no other run")


def _halt_file(facts: PreflightFacts) -> RuleFinding:
    folder = facts.folder
    if folder.problem is not None:
        return RuleFinding(None, "the run folder cannot be read: see the rule out_dir")
    if folder.halt is None:
        return RuleFinding(True, "there is no .HALT file")
    return RuleFinding(False, f"{folder.path}/.HALT would stop the run ({folder.halt})", f"Remove {folder.path}/.HALT.")


def _ranks(facts: PreflightFacts) -> RuleFinding:
    if facts.ranks_problem is None:
        return RuleFinding(True, f"train.batch_size {facts.config.train.batch_size} over {facts.target.count} rank(s)")
    return RuleFinding(False, facts.ranks_problem)


def _dry_run_rule(of: Callable[[PreflightFacts], DryRunAttempt], fix: str) -> Callable[[PreflightFacts], RuleFinding]:
    def check(facts: PreflightFacts) -> RuleFinding:
        attempt = of(facts)
        if attempt.not_tried is not None:
            return RuleFinding(None, attempt.not_tried)
        return RuleFinding(attempt.problem is None, attempt.problem or attempt.seen, fix)

    return check


RULES: tuple[PreflightRule, ...] = (
    PreflightRule(
        "precision",
        "bf16",
        _setting_rule(
            "runtime.precision",
            lambda value: value == "bf16",
            "other precisions are much slower on a GPU, or unstable",
            "Set runtime.precision=bf16.",
        ),
        long_runs_only=True,
        applies=lambda facts: facts.config.runtime.precision != "fp16",
    ),
    PreflightRule("precision_fp16", "not fp16", _precision_fp16, can_be_allowed=False),
    PreflightRule("gradient_checkpointing", "on where memory is short", gradient_checkpointing, long_runs_only=True),
    PreflightRule("flash", "fast kernels", fast_kernels, long_runs_only=True),
    PreflightRule("save_every", "checkpoints are written", _save_every, long_runs_only=True),
    PreflightRule(
        "recovery_points",
        f"at least {_FEWEST_CHECKPOINTS} checkpoints",
        _recovery_points,
        long_runs_only=True,
        applies=lambda facts: facts.config.train.save_every > 0,
    ),
    PreflightRule(
        "toy_profile",
        "not marked as a toy",
        _setting_rule(
            "profile",
            lambda value: value != RunConfig.TOY,
            "the config is marked as unsuitable for long runs",
            "Start from configs/train_50k.yaml.",
        ),
        long_runs_only=True,
    ),
    PreflightRule("toy_model", "not a toy model", _toy_model, long_runs_only=True),
    PreflightRule(
        "toy_sequence",
        "not a toy sequence length",
        _setting_rule(
            "train.seq_len",
            lambda value: value >= _TOY_SEQ_LEN,
            f"a long run needs at least {_TOY_SEQ_LEN}, because NSA is for long sequences",
            "Set e.g. train.seq_len=2048.",
        ),
        long_runs_only=True,
    ),
    PreflightRule(
        "synthetic_on_fail",
        "off",
        _switch_rule("data.synthetic_on_fail", False, "a long run must not continue on synthetic data"),
        long_runs_only=True,
    ),
    PreflightRule(
        "synthetic_data",
        "real data",
        _setting_rule(
            "data.dataset",
            lambda value: value != "synthetic",
            "a long run on synthetic data learns nothing useful",
            "Set data.dataset to fineweb_edu, local or prepared.",
        ),
        long_runs_only=True,
    ),
    PreflightRule("record_gap", "frequent records", _record_gap, long_runs_only=True),
    PreflightRule("out_dir", "a writable run folder", _out_dir, can_be_allowed=False),
    PreflightRule("other_run", "an unused run folder", _other_run),
    PreflightRule(HALT_FILE, "no .HALT file", _halt_file),
    PreflightRule("ranks", "batch divisible by ranks", _ranks, can_be_allowed=False),
    PreflightRule("memory", "enough device memory", memory),
    PreflightRule("disk", "enough disk space", disk),
    PreflightRule(
        "data", "a batch in time", _dry_run_rule(lambda facts: facts.dry_run.data, "Correct data.* and try again.")
    ),
    PreflightRule(
        HELD_OUT,
        "a batch to evaluate on",
        _dry_run_rule(lambda facts: facts.held_out, "Hold out more documents, or set train.eval_every=0."),
        applies=lambda facts: facts.config.train.eval_every > 0 and not facts.resuming,
    ),
    PreflightRule(
        "model", "the model builds", _dry_run_rule(lambda facts: facts.dry_run.model, "Correct model.* and nsa.*.")
    ),
    PreflightRule(
        "step", "a step runs", _dry_run_rule(lambda facts: facts.dry_run.step, "Correct the config; see the message.")
    ),
    PreflightRule(
        "checkpoint",
        "a checkpoint can be read back",
        _dry_run_rule(lambda facts: facts.dry_run.checkpoint, "Set train.out_dir to a writable disk."),
    ),
    PreflightRule(
        "checkpoint_store",
        "an object store that accepts the credentials",
        _dry_run_rule(
            lambda facts: facts.store,
            "Correct AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or the profile) and the bucket, or set "
            "train.checkpoint_store=null.",
        ),
        # A run that has checkpoints continues without copies, with the condition copy_failed: stopping would cost more.
        applies=lambda facts: facts.config.train.checkpoint_store is not None and not facts.folder.checkpoints,
    ),
)
NAMES = tuple(rule.name for rule in RULES)
NEVER_ALLOWED = frozenset(rule.name for rule in RULES if not rule.can_be_allowed)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
