"""Gather the facts of a run for `nsa.planning`: before it with a dry run, at its start without one."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from nsa.checkpoint.folder import CheckpointFolder
from nsa.checkpoint.lock import holder
from nsa.config.schema import RunConfig
from nsa.errors import ConfigError, DataError, NSAError
from nsa.observe.run_folder import RunFolder, why_not_writable
from nsa.planning.estimate import RunEstimate, estimate
from nsa.planning.hardware import GIB, RANKS_PER_NODE, HardwareTarget, hardware_here
from nsa.planning.host_memory import host_memory
from nsa.planning.preflight import demand, failed, judge
from nsa.planning.preflight_facts import DryRun, DryRunAttempt, FolderFacts, PreflightFacts, look_at_folder
from nsa.planning.preflight_rules import HALT_FILE, HELD_OUT, why_no_fp16
from nsa.train import datasets
from nsa.train.distributed import RankInfo
from nsa.train.dry_run_process import DryRunLimits, DryRunRequest, dry_run_in_child
from nsa.train.held_out import try_held_out
from nsa.train.rank_rules import check

DRY_RUN_S = 600.0
_SPARED_SHARE = 0.9  # of the memory that is available: the rest is for whoever else is here
_BATCH_BYTES_PER_TOKEN = 64  # ids, labels and document lengths, as they are built, sent and received


def gather(
    config: RunConfig,
    target: HardwareTarget,
    *,
    efficiency: float | None = None,
    price: float | None = None,
    try_it: bool = True,
    look_for_data: bool = True,
    look_for_held_out: bool = False,
    fetch_remote: bool = False,
    resuming: bool = False,
    say: Callable[[str], None] = lambda text: None,
    memory_limit: int | None = None,
    time_limit_s: float = DRY_RUN_S,
) -> PreflightFacts:
    """The facts of a run that has not begun. `try_it`: with a dry run; `say` hears what it is doing. Without one,
    `look_for_data` asks whether the data is there, `look_for_held_out` whether it gives a batch to evaluate on.

    The dry run may take `memory_limit` bytes of this machine (default: nearly all that is available now) and
    `time_limit_s` besides the loader's own timeout. What would not fit by the estimate is not started.
    """
    problem, folder = _ranks_problem(config, target.count), _folder(config)
    try:
        vocab_size = config.model.vocab_size or datasets.vocabulary(config)
        if target.here:
            datasets.require_tokenizer(config)
    except NSAError as error:
        may_come_back = isinstance(error, DataError) and not (try_it or look_for_data)
        no_data = DryRunAttempt(not_tried=str(error)) if may_come_back else DryRunAttempt(problem=str(error))
        no_model = DryRunAttempt(not_tried="the model's size is not known without its vocabulary")
        return PreflightFacts(
            config, target, None, folder, DryRun(no_data, no_model, no_model, no_model), problem, resuming
        )
    reckoned = estimate(config, target, vocab_size, efficiency=efficiency, price=price)
    spare = memory_limit or int(_SPARED_SHARE * host_memory().available)
    if try_it and problem is not None:
        tried = DryRun.not_tried("the config cannot be computed: see the rule ranks")
        tried = replace(tried, data=_look_for_data(config, target, folder, resuming))
    elif try_it and why_no_fp16(config.runtime.precision):
        tried = DryRun.not_tried("the config cannot be computed: see the rule precision_fp16")
        tried = replace(tried, data=_look_for_data(config, target, folder, resuming))
    elif try_it:
        limits = DryRunLimits(spare, time_s=time_limit_s + config.data.loader_timeout_s)
        request = DryRunRequest.of(
            config,
            vocab_size,
            target,
            fetch_remote=fetch_remote,
            no_data=_too_large(_batch_bytes(config, datasets.global_rows(config) // target.count), spare, "a batch"),
            no_real_step=_too_large(_host_bytes(reckoned), spare, "a real step") if target.here else None,
        )
        tried = dry_run_in_child(request, limits, say)
        if tried.step_s is not None:
            reckoned = estimate(config, target, vocab_size, price=price, measured_step_s=tried.step_s)
    else:
        tried = DryRun.not_tried("no dry run was asked for")
        if look_for_data:
            tried = replace(tried, data=_look_for_data(config, target, folder, resuming))
    held_out = DryRunAttempt(not_tried="no dry run was asked for")
    if too_large := _too_large(_batch_bytes(config, config.train.batch_size), spare, "a batch"):
        held_out = DryRunAttempt(not_tried=too_large)
    elif (try_it or look_for_held_out) and tried.data.problem is None:
        held_out = _held_out(config, vocab_size, resuming, fetch_remote=fetch_remote or look_for_held_out)
    return PreflightFacts(config, target, reckoned, folder, tried, problem, resuming, held_out)


def _too_large(need: int, spare: int, what: str) -> str | None:
    if need <= spare:
        return None
    return f"{what} would take about {need / GIB:.1f} GiB and this machine can spare {spare / GIB:.1f} GiB now"


def _host_bytes(reckoned: RunEstimate) -> int:
    """Memory of this machine that a real dry run takes: the step where that runs here, and a checkpoint read back."""
    memory = reckoned.memory
    on_host = reckoned.checkpoint_bytes if reckoned.target.device.is_gpu else memory.total
    return on_host + 2 * memory.weights


def _batch_bytes(config: RunConfig, n_rows: int) -> int:
    return n_rows * config.train.seq_len * _BATCH_BYTES_PER_TOKEN


def demand_fitness(
    config: RunConfig,
    ranks: RankInfo,
    *,
    resuming: bool,
    clear_halt: bool = False,
    allowed: Sequence[str] = (),
    left_to_ranks: Collection[str] = (),
) -> None:
    """At the start of a run, in one process: raise with every rule that it breaks. Of the data, one held-out batch is
    read at most.

    Its own first batch, step and checkpoint are the measurement here. `left_to_ranks`: rules that a launcher does
    not judge. A `.HALT` alone does not refuse: the run ends with a code of its own for that.
    """
    target = hardware_here(config.runtime.device, ranks.world, ranks.local_world)
    # A rank may have been restarted: data that is gone then may come back, so it is no reason to give up.
    facts = gather(
        config,
        target,
        try_it=False,
        resuming=resuming,
        look_for_data=not ranks.distributed,
        look_for_held_out=HELD_OUT not in left_to_ranks,
    )
    if clear_halt:
        facts = replace(facts, folder=replace(facts.folder, halt=None))
    verdicts = [verdict for verdict in judge(facts, allowed) if verdict.rule not in left_to_ranks]
    if {verdict.rule for verdict in failed(verdicts)} != {HALT_FILE}:
        demand(verdicts)


def world_of(config: RunConfig, nproc: int, nodes: tuple[int, int]) -> RankInfo:
    """The ranks a launcher will start: of an elastic number of nodes, the smallest that this config can use."""
    worlds = [nproc * count for count in range(nodes[0], nodes[1] + 1)]
    fitting = (world for world in worlds if _ranks_problem(config, world, nproc) is None)
    return RankInfo(world=next(fitting, worlds[0]), local_world=nproc)


def _look_for_data(config: RunConfig, target: HardwareTarget, folder: FolderFacts, resuming: bool) -> DryRunAttempt:
    """Whether the data is there at all. A run that continues from a checkpoint finds that out itself, and may wait."""
    if config.data.synthetic_on_fail or (resuming and folder.checkpoints):
        return DryRunAttempt(not_tried="the run itself looks for it")
    if place := datasets.remote_address(config):
        return DryRunAttempt(not_tried=f"{place} is on another machine")
    if not target.here:
        return DryRunAttempt(not_tried=f"{target} is not here, so its disk could not be asked")
    try:
        datasets.find_data(config)
    except NSAError as error:
        return DryRunAttempt(problem=str(error))
    return DryRunAttempt(not_tried="no batch was fetched: no dry run was asked for")


def _held_out(config: RunConfig, vocab_size: int, resuming: bool, *, fetch_remote: bool) -> DryRunAttempt:
    """Not of a run that is resumed: a failing evaluation is recorded there, and must not keep it from going on."""
    if resuming or not config.train.eval_every:
        return DryRunAttempt(not_tried="nothing will be evaluated before the run is under way")
    return try_held_out(config, vocab_size, fetch_remote=fetch_remote)


def _folder(config: RunConfig) -> FolderFacts:
    folder = RunFolder(config.train.out_dir)
    if problem := why_not_writable(folder.path):
        return FolderFacts(str(folder.path), problem=problem)
    held_by = holder(folder.path)
    steps = CheckpointFolder(folder.checkpoints).steps()
    return look_at_folder(config, steps, in_use_by=str(held_by) if held_by else None)


def _ranks_problem(config: RunConfig, world: int, local_world: int | None = None) -> str | None:
    try:
        check(
            config, RankInfo(world=world, local_world=local_world or min(world, RANKS_PER_NODE), distributed=world > 1)
        )
    except ConfigError as error:
        return str(error)
    return None
