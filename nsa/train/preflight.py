"""Gather the facts of a run for `nsa.guard`: before it with a dry run, at its start without one."""

from collections.abc import Callable, Sequence

from nsa.config.schema import RunConfig
from nsa.errors import ConfigError, NSAError
from nsa.guard.estimate import estimate
from nsa.guard.facts import Attempt, DryRun, Facts, FolderFacts, look_at_folder
from nsa.guard.hardware import RANKS_PER_NODE, Target, hardware_here
from nsa.guard.preflight import demand, judge
from nsa.guard.rules import why_no_fp16
from nsa.observe.run_folder import RunFolder
from nsa.train import rows
from nsa.train.build import check
from nsa.train.checkpoint.folder import CheckpointFolder
from nsa.train.held_out import try_held_out
from nsa.train.ranks import Ranks


def gather(
    config: RunConfig,
    target: Target,
    *,
    efficiency: float | None = None,
    price: float | None = None,
    try_it: bool = True,
    fetch_remote: bool = False,
    resuming: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> Facts:
    """The facts of a run that has not begun. `try_it`: with a dry run; `say` hears what it is doing."""
    problem = _ranks_problem(config, target.count)
    try:
        vocab_size = config.model.vocab_size or rows.vocabulary(config)
    except NSAError as error:
        no_model = Attempt(not_tried="the model's size is not known without its vocabulary")
        tried = DryRun(Attempt(problem=str(error)), no_model, no_model, no_model)
        return Facts(config, target, None, _folder(config), tried, problem, resuming)
    if problem is not None:
        tried = DryRun.not_tried("the config cannot be computed: see the rule ranks")
    elif why_no_fp16(config.runtime.precision):
        tried = DryRun.not_tried("the config cannot be computed: see the rule precision_fp16")
    elif try_it:
        from nsa.train.dry_run import dry_run

        tried = dry_run(config, vocab_size, target, fetch_remote=fetch_remote, say=say)
    else:
        tried = DryRun.not_tried("no dry run was asked for")
    reckoned = estimate(config, target, vocab_size, efficiency=efficiency, price=price, measured_step_s=tried.step_s)
    not_asked = Attempt(not_tried="no dry run was asked for")
    held_out = _held_out(config, vocab_size, resuming, fetch_remote=fetch_remote) if try_it else not_asked
    return Facts(config, target, reckoned, _folder(config), tried, problem, resuming, held_out)


def demand_fitness(config: RunConfig, vocab_size: int, ranks: Ranks, *, resuming: bool, allowed: Sequence[str]) -> None:
    """At the start of a run, on one rank: raise with every rule that it breaks.

    Its own first batch, step and checkpoint are the measurement here, and the caller has looked for `.HALT` and for
    checkpoints of another run while it took the folder.
    """
    target = hardware_here(config.runtime.device, ranks.world, ranks.local_world)
    facts = Facts(
        config,
        target,
        estimate(config, target, vocab_size),
        _folder(config),
        DryRun.not_tried("the run itself is the trial"),
        resuming=resuming,
        held_out=_held_out(config, vocab_size, resuming, fetch_remote=True),
    )
    demand(judge(facts, allowed))


def _held_out(config: RunConfig, vocab_size: int, resuming: bool, *, fetch_remote: bool) -> Attempt:
    """Not of a run that is resumed: a failing evaluation is recorded there, and must not keep it from going on."""
    if resuming or not config.train.eval_every:
        return Attempt(not_tried="nothing will be evaluated before the run is under way")
    return try_held_out(config, vocab_size, fetch_remote=fetch_remote)


def _folder(config: RunConfig) -> FolderFacts:
    return look_at_folder(config, CheckpointFolder(RunFolder(config.train.out_dir).checkpoints).steps())


def _ranks_problem(config: RunConfig, world: int) -> str | None:
    try:
        check(config, Ranks(world=world, local_world=min(world, RANKS_PER_NODE), distributed=world > 1))
    except ConfigError as error:
        return str(error)
    return None
