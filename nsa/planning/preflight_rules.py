"""The rules a run must keep before it may begin. Each looks at facts and finds; none looks for itself.

Most of them only hold for long runs, where a mistake costs days: 24.5 GPU-hours were once spent on a toy model in fp32
whose checkpoints nobody had switched on.
"""

from collections.abc import Callable
from dataclasses import dataclass

from nsa.planning.hardware import GIB
from nsa.planning.preflight_facts import DryRunAttempt, PreflightFacts

LONG_RUN_STEPS = 5000
LONG_RUN_S = 2 * 3600.0
TOY_PARAMETERS = 10_000_000  # in the blocks
TOY_SEQ_LEN = 512
FEWEST_CHECKPOINTS = 5
HALT_FILE, HELD_OUT = "halt_file", "held_out"
RECORD_GAP_S = 600.0  # nobody sees loss and gates between two records


@dataclass(frozen=True)
class RuleFinding:
    """`holds` is None where it could not be found out; `what` then says why."""

    holds: bool | None
    what: str
    fix: str = ""


@dataclass(frozen=True)
class PreflightRule:
    name: str
    """As `--allow` spells it."""
    asks: str
    """What must hold, in a few words."""
    check: Callable[[PreflightFacts], RuleFinding]
    long_runs_only: bool = False
    can_be_allowed: bool = True
    """Whether `--allow` lifts it; false where the trainer itself could not run."""
    applies: Callable[[PreflightFacts], bool] = lambda facts: True


def is_long(facts: PreflightFacts) -> bool:
    """Whether a mistake would be found too late."""
    if facts.config.train.steps >= LONG_RUN_STEPS:
        return True
    return facts.target.device.is_gpu and facts.estimate is not None and facts.estimate.wall_s > LONG_RUN_S


def _precision(facts: PreflightFacts) -> RuleFinding:
    precision = facts.config.runtime.precision
    return RuleFinding(
        precision == "bf16",
        f"runtime.precision is {precision}"
        + ("" if precision == "bf16" else ": other arithmetic is many times slower on a GPU, or unstable"),
        "Set runtime.precision=bf16.",
    )


def why_no_fp16(precision: str) -> str | None:
    """The reason against training in this precision, which the trainer gives too."""
    if precision != "fp16":
        return None
    return "runtime.precision is fp16: small gradients become zero in it without loss scaling, which the engine lacks"


NOT_FP16 = "Set runtime.precision=bf16, or fp32 on a GPU without bf16."


def _precision_fp16(facts: PreflightFacts) -> RuleFinding:
    precision = facts.config.runtime.precision
    problem = why_no_fp16(precision)
    return RuleFinding(problem is None, problem or f"runtime.precision is {precision}", NOT_FP16)


def _gradient_checkpointing(facts: PreflightFacts) -> RuleFinding:
    on = facts.config.runtime.gradient_checkpointing
    return RuleFinding(
        on,
        f"runtime.gradient_checkpointing is {_plain(on)}"
        + ("" if on else ": memory for activations then grows with every layer"),
        "Set runtime.gradient_checkpointing=true.",
    )


def _flash(facts: PreflightFacts) -> RuleFinding:
    on = facts.config.runtime.use_flash
    return RuleFinding(
        on,
        f"runtime.use_flash is {_plain(on)}" + ("" if on else ": fused kernels may not run"),
        "Set runtime.use_flash=true.",
    )


def _save_every(facts: PreflightFacts) -> RuleFinding:
    every, steps = facts.config.train.save_every, facts.config.train.steps
    return RuleFinding(
        every > 0,
        f"train.save_every is {every} for {steps} steps"
        + ("" if every > 0 else ": nothing could be recovered before the end"),
        f"Set e.g. train.save_every={max(1, steps // 10)}.",
    )


def _recovery_points(facts: PreflightFacts) -> RuleFinding:
    every, steps = facts.config.train.save_every, facts.config.train.steps
    count = steps // every if every else 0
    enough = count >= FEWEST_CHECKPOINTS
    return RuleFinding(
        enough,
        f"{count} checkpoints in {steps} steps (train.save_every={every})"
        + ("" if enough else f": a crash could lose {100 * min(every, steps) // steps} % of the run"),
        f"Set e.g. train.save_every={max(1, steps // 10)}.",
    )


def _toy_profile(facts: PreflightFacts) -> RuleFinding:
    toy = facts.config.is_toy
    return RuleFinding(
        not toy,
        f"profile is {facts.config.profile or 'null'}" + (": its config says it is unfit for long runs" if toy else ""),
        "Start from configs/train_50k.yaml.",
    )


def _toy_model(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the model's size is not known without its vocabulary")
    size, model = facts.estimate.parameters.in_blocks, facts.config.model
    what = f"{size / 1e6:.1f} M parameters in the blocks (model.dim={model.dim}, model.n_layers={model.n_layers})"
    return RuleFinding(
        size >= TOY_PARAMETERS,
        what if size >= TOY_PARAMETERS else f"{what}, at least {TOY_PARAMETERS / 1e6:.0f} M: a toy teaches nothing",
        "Set e.g. model.dim=768 model.n_layers=12, or start from configs/train_50k.yaml.",
    )


def _toy_sequence(facts: PreflightFacts) -> RuleFinding:
    seq_len = facts.config.train.seq_len
    fine = seq_len >= TOY_SEQ_LEN
    return RuleFinding(
        fine,
        f"train.seq_len is {seq_len}" + ("" if fine else f", at least {TOY_SEQ_LEN}: NSA is for long text"),
        "Set e.g. train.seq_len=2048.",
    )


def _synthetic_on_fail(facts: PreflightFacts) -> RuleFinding:
    on = facts.config.data.synthetic_on_fail
    return RuleFinding(
        not on,
        f"data.synthetic_on_fail is {_plain(on)}" + (": a long run on made-up data is lost" if on else ""),
        "Set data.synthetic_on_fail=false.",
    )


def _synthetic_data(facts: PreflightFacts) -> RuleFinding:
    dataset = facts.config.data.dataset
    made_up = dataset == "synthetic"
    return RuleFinding(
        not made_up,
        f"data.dataset is {dataset}" + (": a long run on made-up data teaches nothing" if made_up else ""),
        "Set data.dataset to fineweb_edu, local or prepared.",
    )


def _record_gap(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "the time of a step is not known without the vocabulary")
    every, step_s = facts.config.train.log_every, facts.estimate.step_s
    what = f"a record every {_seconds(every * step_s)} (train.log_every={every}, {_seconds(step_s)} a step"
    if every * step_s <= RECORD_GAP_S:
        return RuleFinding(True, f"{what})")
    if not facts.estimate.measured:  # an assumption must not refuse a run
        return RuleFinding(None, f"{what} by an assumed efficiency)")
    return RuleFinding(
        False,
        f"{what}), at most {RECORD_GAP_S:.0f} s: between records nobody sees loss and gates",
        f"Set train.log_every={int(RECORD_GAP_S / step_s)}."
        if step_s <= RECORD_GAP_S
        else "Make a step shorter: lower train.accumulate_grad_batches or train.batch_size.",
    )


def _out_dir(facts: PreflightFacts) -> RuleFinding:
    problem, path = facts.folder.problem, facts.folder.path
    if problem is None:
        return RuleFinding(True, f"{path} can be written")
    if not facts.target.here:
        return RuleFinding(None, f"{facts.target} is not here, so its disk could not be asked")
    return RuleFinding(False, f"train.out_dir is {path} and {problem}", "Set train.out_dir to a folder you can write.")


def _other_run(facts: PreflightFacts) -> RuleFinding:
    folder = facts.folder
    if folder.problem is not None:
        return RuleFinding(None, "the run folder cannot be looked at: see the rule out_dir")
    if facts.resuming:
        return RuleFinding(True, f"{folder.path} is resumed")
    if folder.in_use_by is not None:
        what = f"{folder.path} is in use by {folder.in_use_by}"
        return RuleFinding(False, what, "Stop that run, or set train.out_dir to another folder.")
    if folder.checkpoints:
        what = f"{folder.path} already holds a run, with checkpoints up to step {folder.checkpoints[-1]}"
        return RuleFinding(False, what, "Set train.out_dir to another folder, or add --resume.")
    if folder.other_settings and is_long(facts):
        shown = ", ".join(folder.other_settings[:2]) + (" …" if len(folder.other_settings) > 2 else "")
        what = f"{folder.path} already holds another run, of {folder.last_step} steps: {shown}"
        return RuleFinding(False, what, "Set train.out_dir to another folder.")
    return RuleFinding(True, f"{folder.path} holds no other run")


def _halt_file(facts: PreflightFacts) -> RuleFinding:
    folder = facts.folder
    if folder.problem is not None:
        return RuleFinding(None, "the run folder cannot be looked at: see the rule out_dir")
    if folder.halt is None:
        return RuleFinding(True, "nothing asks the run to stop")
    return RuleFinding(False, f"{folder.path}/.HALT would stop the run ({folder.halt})", f"Remove {folder.path}/.HALT.")


def _ranks(facts: PreflightFacts) -> RuleFinding:
    if facts.ranks_problem is None:
        return RuleFinding(True, f"train.batch_size {facts.config.train.batch_size} over {facts.target.count} rank(s)")
    return RuleFinding(False, facts.ranks_problem)


def _memory(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "memory cannot be reckoned without the vocabulary")
    memory, config = facts.estimate.memory, facts.config
    what = f"about {memory.total / GIB:.1f} of {memory.available / GIB:.1f} GiB of {facts.target.device.name}"
    if memory.fits:
        return RuleFinding(True, what)
    if memory.weights + memory.gradients + memory.optimizer > memory.available:
        fix = "Shard with parallel.data=fsdp over more GPUs, or make the model smaller: model.dim, model.n_layers."
    elif not config.runtime.gradient_checkpointing:
        fix = "Set runtime.gradient_checkpointing=true."
    elif config.train.batch_size > facts.target.count:
        half = max(facts.target.count, config.train.batch_size // 2)
        more = config.train.accumulate_grad_batches * config.train.batch_size // half
        fix = f"Set train.batch_size={half} train.accumulate_grad_batches={more}."
    else:
        fix = "Shard with parallel.data=fsdp over more GPUs, or shorten train.seq_len."
    return RuleFinding(False, f"{what}: it would run out of memory", fix)


def _disk(facts: PreflightFacts) -> RuleFinding:
    if facts.estimate is None:
        return RuleFinding(None, "a checkpoint's size is not known without the vocabulary")
    if facts.folder.disk_free is None:
        return RuleFinding(None, f"the disk of {facts.folder.path} does not say how much is free")
    keep = facts.estimate.kept_checkpoints
    there = min(keep, len(facts.folder.checkpoints))
    need = (keep + 1 - there) * facts.estimate.checkpoint_bytes + facts.estimate.export_bytes
    fits = need <= facts.folder.disk_free
    what = f"{need / GIB:.2f} GiB for {keep} + 1 checkpoints and the final model"
    if not facts.target.here:
        return RuleFinding(None, f"{what}: {facts.target} is not here, so its disk could not be asked")
    what = f"{what}, {facts.folder.disk_free / GIB:.1f} GiB free"
    return RuleFinding(fits, what, "Free disk space, set train.out_dir to another disk, or keep fewer checkpoints.")


def _attempt(of: Callable[[PreflightFacts], DryRunAttempt], fix: str) -> Callable[[PreflightFacts], RuleFinding]:
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
        _precision,
        long_runs_only=True,
        applies=lambda facts: facts.config.runtime.precision != "fp16",
    ),
    PreflightRule("precision_fp16", "not fp16", _precision_fp16, can_be_allowed=False),
    PreflightRule("gradient_checkpointing", "on", _gradient_checkpointing, long_runs_only=True),
    PreflightRule("flash", "on", _flash, long_runs_only=True),
    PreflightRule("save_every", "checkpoints are written", _save_every, long_runs_only=True),
    PreflightRule(
        "recovery_points",
        f"at least {FEWEST_CHECKPOINTS} checkpoints",
        _recovery_points,
        long_runs_only=True,
        applies=lambda facts: facts.config.train.save_every > 0,
    ),
    PreflightRule("toy_profile", "not marked as a toy", _toy_profile, long_runs_only=True),
    PreflightRule("toy_model", "a model worth the time", _toy_model, long_runs_only=True),
    PreflightRule("toy_sequence", "a sequence worth the time", _toy_sequence, long_runs_only=True),
    PreflightRule("synthetic_on_fail", "off", _synthetic_on_fail, long_runs_only=True),
    PreflightRule("synthetic_data", "real data", _synthetic_data, long_runs_only=True),
    PreflightRule("record_gap", "records often enough", _record_gap, long_runs_only=True),
    PreflightRule("out_dir", "the run folder can be written", _out_dir, can_be_allowed=False),
    PreflightRule("other_run", "a folder of its own", _other_run),
    PreflightRule(HALT_FILE, "no .HALT", _halt_file),
    PreflightRule("ranks", "rows divide over ranks", _ranks, can_be_allowed=False),
    PreflightRule("memory", "the device is large enough", _memory),
    PreflightRule("disk", "the disk is large enough", _disk),
    PreflightRule(
        "data", "a batch comes in time", _attempt(lambda facts: facts.dry_run.data, "Correct data.* and try again.")
    ),
    PreflightRule(
        HELD_OUT,
        "a batch to evaluate on",
        _attempt(lambda facts: facts.held_out, "Hold out more documents, or set train.eval_every=0."),
        applies=lambda facts: facts.config.train.eval_every > 0 and not facts.resuming,
    ),
    PreflightRule(
        "model", "the model builds", _attempt(lambda facts: facts.dry_run.model, "Correct model.* and nsa.*.")
    ),
    PreflightRule(
        "step", "a step works", _attempt(lambda facts: facts.dry_run.step, "Correct the config; see the message.")
    ),
    PreflightRule(
        "checkpoint",
        "a checkpoint reads back",
        _attempt(lambda facts: facts.dry_run.checkpoint, "Set train.out_dir to a disk that can be written."),
    ),
)
NAMES = tuple(rule.name for rule in RULES)
NEVER_ALLOWED = frozenset(rule.name for rule in RULES if not rule.can_be_allowed)


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _plain(on: bool) -> str:
    return "true" if on else "false"
