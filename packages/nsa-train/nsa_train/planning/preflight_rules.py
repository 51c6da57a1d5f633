"""Preflight rules and verdicts: what a run must satisfy before it starts. Pure functions of the collected facts.

Most rules apply to long runs only, where a mistake costs days: 24.5 GPU-hours were once spent on a toy model in fp32
with checkpoints disabled. To add a rule, add it to RULES here and a case to tests/nsa_train/planning/test_preflight.py.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from nsa.errors import ConfigError, PreflightError
from nsa.options import CHECKPOINTING, Checkpointing
from nsa_train.config.layer import nearest
from nsa_train.config.model_sections import KernelsConfig
from nsa_train.config.schema import RunConfig
from nsa_train.config.setting_types import plain
from nsa_train.planning.hardware import GIB
from nsa_train.planning.preflight_facts import DryRunAttempt, PreflightFacts, RuleFinding, finding

SAFE_MEMORY = 0.9  # share of the memory that an estimate may fill
LONG_RUN_STEPS = 5000
_LONG_RUN_S = 2 * 3600.0
_TOY_PARAMETERS = 10_000_000  # in the blocks
_TOY_SEQ_LEN = 512
_FEWEST_CHECKPOINTS = 5
HALT_FILE, HELD_OUT = "halt_file", "held_out"
DECIDED_AT_START = ("other_run", HALT_FILE)
"""Rules that `nsa train --resume` and --clear-halt answer: commands that only calculate report them and do not fail."""
CHECKED_EARLY = ("out_dir", "other_run", "data")
"""Rules that need no torch: `nsa train` checks them before it imports what takes seconds."""
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


def _fast_kernels(facts: PreflightFacts) -> RuleFinding:
    """Check the backends that will run: as decided on this machine, else as the settings request them."""
    from nsa.kernels.choice_text import kernels_text
    from nsa_train.planning.estimate import BACKENDS
    from nsa_train.run_model import wanted_kernels

    device, is_gpu = facts.target.device.name, facts.target.device.is_gpu
    fastest = BACKENDS[is_gpu][0]
    if facts.kernels_problem is not None:
        return RuleFinding(False, facts.kernels_problem, "Set kernels.*=auto, and unset NSA_KERNEL.")
    if facts.kernels is not None:
        slow = [choice.branch for choice in facts.kernels if choice.backend != fastest and not choice.is_fastest]
        what = f"kernels: {kernels_text(facts.kernels)}"
    else:
        requested = wanted_kernels(facts.config)._asdict()
        slow = [branch for branch, name in requested.items() if name not in ("auto", fastest)]
        what = ", ".join(f"kernels.{branch} is {requested[branch]}" for branch in slow)
        what += "" if facts.config.runtime.use_flash else " (runtime.use_flash is false)"
        if not slow:
            return RuleFinding(None, f"decided at the start, on {device}: {fastest} if it can run there, else portable")
    if not slow:
        return RuleFinding(True, what)
    fix = f"Set kernels.*=auto runtime.use_flash=true, and unset NSA_KERNEL: {fastest} is the fast backend on {device}."
    if facts.kernels is not None and not all(choice.requested for choice in facts.kernels):
        fix = "Correct what prevents it, as the message says" + ("; `nsa gpu-check` shows more." if is_gpu else ".")
    return RuleFinding(False, f"{what}: {_slower(facts, fastest)}", fix)


def _slower(facts: PreflightFacts, fastest: str) -> str:
    """Describe how much slower the run's backend is than the fastest, in tokens/s."""
    if facts.estimate is None:
        return f"slower than {fastest}"
    tokens, backends = facts.estimate.tokens_per_step, {one.backend: one for one in facts.estimate.backends}
    slow = backends.get(facts.estimate.backend, facts.estimate.backends[-1])
    figures = [f"{tokens / one.step_s:,.0f} tokens/s with {one.backend}" for one in (slow, backends[fastest])]
    return f"about {figures[0]}, {figures[1]} ({slow.timing.partition(':')[0]}, not measured)"


def _gradient_checkpointing(facts: PreflightFacts) -> RuleFinding:
    """Requires checkpointing unless there is room for what the estimate may be off by."""
    mode = facts.config.runtime.gradient_checkpointing
    setting = f"runtime.gradient_checkpointing is {mode}"
    if mode == "full":
        return RuleFinding(True, setting)
    if facts.estimate is None:
        return RuleFinding(None, "memory cannot be estimated without the vocabulary size")
    memory = facts.estimate.memory
    room = int(SAFE_MEMORY * memory.available)
    return finding(
        memory.total <= room,
        f"{setting}, about {memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB",
        f"a long run needs {1 - SAFE_MEMORY:.0%} of the memory free, because the estimate is not exact",
        "" if memory.total <= room else _settings_that_fit(facts, room),
    )


def _settings_that_fit(facts: PreflightFacts, room: int) -> str:
    """The settings with which a step takes at most `room` bytes: more checkpointing first, then fewer rows at a time,
    then more devices."""
    config, target, estimated = facts.config, facts.target, facts.estimate
    assert estimated is not None
    from nsa_train.planning.estimate import estimate_memory
    from nsa_train.planning.model_figures import model_figures

    vocab_size, figures = estimated.vocab_size, model_figures(config, estimated.vocab_size)
    backends = KernelsConfig(**dict.fromkeys(KernelsConfig.model_fields, estimated.backend))

    def fits(mode: Checkpointing, rows: int, count: int = target.count, **parallel: Any) -> bool:
        changed = config.model_copy(
            update={
                "kernels": backends,
                "runtime": config.runtime.model_copy(update={"gradient_checkpointing": mode}),
                "train": config.train.model_copy(update={"batch_size": rows}),
                "parallel": config.parallel.model_copy(update=parallel),
            }
        )
        return estimate_memory(changed, replace(target, count=count), vocab_size, figures).total <= room

    mode = config.runtime.gradient_checkpointing
    fewest = target.data_ranks(config.parallel.ranks_per_row)
    rows = config.train.batch_size
    while rows >= fewest:
        for more in CHECKPOINTING[CHECKPOINTING.index(mode) :]:
            if fits(more, rows):
                changes = [f"runtime.gradient_checkpointing={more}"] if more != mode else []
                if rows != config.train.batch_size:
                    accumulated = -(-config.train.global_rows // rows)
                    changes += [f"train.batch_size={rows}", f"train.accumulate_grad_batches={accumulated}"]
                return f"Set {' '.join(changes)}."
        rows = rows // 2 // fewest * fewest
    smaller = "No batch fits. Make the model smaller (model.dim, model.n_layers), or shorten train.seq_len"
    counts = [2**power for power in range(1, 13) if 2**power >= target.count] if target.device.is_gpu else []
    for count in counts:
        shares = replace(target, count=count).data_ranks(config.parallel.ranks_per_row)
        devices = f"use {count} such devices with runtime.gradient_checkpointing=full parallel.data=fsdp"
        if fits("full", shares, count, data="fsdp"):
            return f"{smaller}, or {devices} train.batch_size={shares}."
        if fits("full", 1, count, data="fsdp", tp=1, cp=count):
            return f"{smaller}, or {devices} parallel.cp={count} train.batch_size=1."
    return f"{smaller}."


def _memory(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "memory cannot be estimated without the vocabulary size")
    memory = facts.estimate.memory
    what = f"about {memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB of {facts.target.device.name}"
    if memory.fits:
        return RuleFinding(True, what)
    fix = _settings_that_fit(facts, memory.available)
    return RuleFinding(False, f"{what}: the run would run out of memory", fix)


def _disk(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the checkpoint size is unknown without the vocabulary size")
    if facts.folder.disk_free is None:
        return RuleFinding(None, f"the free space on the disk of {facts.folder.path} is unknown")
    keep = facts.estimate.kept_checkpoints
    there = min(keep, len(facts.folder.checkpoints))
    need = (keep + 1 - there) * facts.estimate.checkpoint_bytes + facts.estimate.export_bytes
    fits = need <= facts.folder.disk_free
    what = f"{need / GIB:.2f} GiB for {keep} + 1 checkpoints and the final model"
    if not facts.target.here:
        return RuleFinding(None, f"{what}: the disk of {facts.target} cannot be checked from this machine")
    what = f"{what}, {facts.folder.disk_free / GIB:.1f} GiB free"
    return RuleFinding(fits, what, "Free disk space, set train.out_dir to another disk, or keep fewer checkpoints.")


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
        fix = "Stop that run, or set train.out_dir to another folder."
        return RuleFinding(False, what, fix, offers_override=False)
    if folder.checkpoints:
        what = f"{folder.path} already contains a run, with checkpoints up to step {folder.checkpoints[-1]}"
        fix = "Set train.out_dir to another folder, or add --resume."
        return RuleFinding(False, what, fix, offers_override=False)
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
    what = f"{folder.path}/.HALT would stop the run ({folder.halt})"
    return RuleFinding(
        False, what, "Read the reason; then add --clear-halt, or remove the file.", offers_override=False
    )


def _ranks(facts: PreflightFacts) -> RuleFinding:
    if facts.ranks_problem is None:
        return RuleFinding(True, f"train.batch_size {facts.config.train.batch_size} over {facts.target.count} rank(s)")
    return RuleFinding(False, facts.ranks_problem)


def _dry_run_rule(
    of: Callable[[PreflightFacts], DryRunAttempt], fix: str, *, offers_override: bool = False
) -> Callable[[PreflightFacts], RuleFinding]:
    def check(facts: PreflightFacts) -> RuleFinding:
        attempt = of(facts)
        if attempt.not_tried is not None:
            return RuleFinding(None, attempt.not_tried)
        return RuleFinding(attempt.problem is None, attempt.problem or attempt.seen, fix, offers_override)

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
    PreflightRule("gradient_checkpointing", "on where memory is short", _gradient_checkpointing, long_runs_only=True),
    PreflightRule("flash", "fast kernels", _fast_kernels, long_runs_only=True),
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
        _setting_rule(
            "data.synthetic_on_fail",
            lambda value: not value,
            "a long run must not continue on synthetic data",
            "Set data.synthetic_on_fail=false.",
        ),
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
    PreflightRule("memory", "enough device memory", _memory),
    PreflightRule("disk", "enough disk space", _disk),
    PreflightRule(
        "data", "a batch in time", _dry_run_rule(lambda facts: facts.dry_run.data, "Correct data.* and try again.")
    ),
    PreflightRule(
        HELD_OUT,
        "a batch to evaluate on",
        _dry_run_rule(
            lambda facts: facts.held_out,
            "Hold out more documents, or set train.eval_every=0.",
            offers_override=True,
        ),
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
            offers_override=True,
        ),
        # A run that has checkpoints continues without copies, with the condition copy_failed: stopping would cost more.
        applies=lambda facts: facts.config.train.checkpoint_store is not None and not facts.folder.checkpoints,
    ),
)
NAMES = tuple(rule.name for rule in RULES)
_NEVER_ALLOWED = frozenset(rule.name for rule in RULES if not rule.can_be_allowed)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


class RuleStatus(StrEnum):
    PASS = "pass"
    FAIL = "fail"
    ALLOWED = "allowed"
    """The rule fails and was allowed by name (`--allow`)."""
    NOT_CHECKED = "not checked"


@dataclass(frozen=True)
class RuleVerdict:
    rule: str
    asks: str
    status: RuleStatus
    message: str
    fix: str = ""
    offers_override: bool = True
    """Whether a refusal offers `--allow`."""


def check_rules(facts: PreflightFacts, allowed: Sequence[str] = (), only: Sequence[str] = NAMES) -> list[RuleVerdict]:
    """Evaluate every rule that applies to this run, or of `only` these."""
    check_names(allowed)
    long = is_long(facts)
    named = [rule for rule in RULES if rule.name in only]
    rules = [rule for rule in named if (long or not rule.long_runs_only) and rule.applies(facts)]
    return [_verdict(rule, rule.check(facts), allowed) for rule in rules]


def failed(verdicts: Iterable[RuleVerdict]) -> list[RuleVerdict]:
    return [verdict for verdict in verdicts if verdict.status == RuleStatus.FAIL]


def require_passed(verdicts: Iterable[RuleVerdict]) -> None:
    """Raise with every rule that failed."""
    if not (failures := failed(verdicts)):
        return
    count = "1 rule" if len(failures) == 1 else f"{len(failures)} rules"
    lines = [f"  - {verdict.rule}: {verdict.message.rstrip('.')}. {verdict.fix}".rstrip() for verdict in failures]
    raise PreflightError("\n".join([f"preflight refuses this run, {count}:", *lines, *how_to_override(failures)]))


def how_to_override(failures: Sequence[RuleVerdict]) -> list[str]:
    """A line with the `--allow` options that start the run anyway; none if it would end all the same."""
    if not all(verdict.offers_override for verdict in failures):
        return []
    return ["To run it anyway: " + " ".join(f"--allow={verdict.rule}" for verdict in failures)]


def check_names(allowed: Sequence[str]) -> None:
    """Refuse an `--allow` that names no rule, which would otherwise be ignored silently."""
    for name in allowed:
        if name not in NAMES:
            guess = nearest(name, NAMES)
            hint = f"Did you mean {guess}?" if guess else f"Rules are {', '.join(NAMES)}."
            raise ConfigError(f"--allow {name}: no such preflight rule. {hint}")
        if name in _NEVER_ALLOWED:
            raise ConfigError(f"--allow {name}: the run could not start. Correct what this rule reports.")


def _verdict(rule: PreflightRule, result: RuleFinding, allowed: Sequence[str]) -> RuleVerdict:
    if result.holds is None:
        return RuleVerdict(rule.name, rule.asks, RuleStatus.NOT_CHECKED, result.what)
    if result.holds:
        return RuleVerdict(rule.name, rule.asks, RuleStatus.PASS, result.what)
    status = RuleStatus.ALLOWED if rule.name in allowed else RuleStatus.FAIL
    offers_override = rule.can_be_allowed and result.offers_override
    return RuleVerdict(rule.name, rule.asks, status, result.what, result.fix, offers_override)
