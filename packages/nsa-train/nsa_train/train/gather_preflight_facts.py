"""Collects the facts for preflight (`nsa_train.planning`): before a run with a dry run, at its start without one."""

import math
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nsa.child_process import ChildFailed, ChildProcess
from nsa.errors import CheckpointError, ConfigError, DataError, DataTimeout, KernelUnavailable, NSAError, StoreRefused
from nsa.files import remove_scratch_of
from nsa.kernels.registry import BackendChoice, backend_request, plan
from nsa_train.checkpoint.transfer import S3Prefix
from nsa_train.config.rules import broken_parallel_rules
from nsa_train.config.schema import RunConfig
from nsa_train.data.prefetcher import BatchPrefetcher, PrefetchSettings
from nsa_train.data.rows.specs import DirectData, MixedData, PreparedData
from nsa_train.data.shards.manifest import read_manifest
from nsa_train.planning.estimate import RunEstimate, estimate
from nsa_train.planning.hardware import GIB, RANKS_PER_NODE, HardwareTarget, hardware_here, host_memory, process_memory
from nsa_train.planning.preflight_facts import DryRun, DryRunAttempt, FolderFacts, PreflightFacts, read_folder_facts
from nsa_train.planning.preflight_rules import (
    HALT_FILE,
    HELD_OUT,
    check_rules,
    failed,
    is_long,
    require_passed,
    why_no_fp16,
)
from nsa_train.run_model import kernel_shape, wanted_kernels
from nsa_train.storage import StorageFolder
from nsa_train.train import datasets
from nsa_train.train.distributed import RankInfo
from nsa_train.train.start_options import StartOptions

_DRY_RUN_S = 600.0
_SPARED_SHARE = 0.9  # of the available memory: the rest is for other processes
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
    look_for_store: bool = False,
    fetch_remote: bool = False,
    resuming: bool = False,
    log: Callable[[str], None] = lambda text: None,
    memory_limit: int | None = None,
    time_limit_s: float = _DRY_RUN_S,
) -> PreflightFacts:
    """The facts of a run that has not started. `try_it`: with a dry run, whose progress goes to `log`. Without one,
    `look_for_data` checks whether the data exists, `look_for_held_out` whether it gives a batch to evaluate on.
    `look_for_store` asks the object store of checkpoints whether it accepts the credentials.

    The dry run may use `memory_limit` bytes of this machine (default: nearly all that is available now) and
    `time_limit_s` in addition to the loader's own timeout. Parts that do not fit by the estimate are not started.
    """
    problem, folder = _ranks_problem(config, target.count), read_folder_facts(config)
    store = _store(config, target, folder) if look_for_store else DryRunAttempt(not_tried="it was not asked")
    try:
        vocab_size = config.model.vocab_size or datasets.vocabulary(config)
        if target.here:
            datasets.require_tokenizer(config)
    except NSAError as error:
        may_come_back = isinstance(error, DataError) and not (try_it or look_for_data)
        no_data = DryRunAttempt(not_tried=str(error)) if may_come_back else DryRunAttempt(problem=str(error))
        no_model = DryRunAttempt(not_tried="the model's size is not known without its vocabulary")
        tried = DryRun(no_data, no_model, no_model, no_model)
        return PreflightFacts(config, target, None, folder, tried, problem, resuming, store=store)
    estimated = estimate(config, target, vocab_size, efficiency=efficiency, price=price)
    spare = memory_limit or int(_SPARED_SHARE * host_memory().available)
    broken_rule = "ranks" if problem else "precision_fp16" if why_no_fp16(config.runtime.precision) else None
    if try_it and broken_rule is None:
        shares = target.data_ranks(config.parallel.ranks_per_row)
        tried = _dry_run_in_child(
            config,
            vocab_size,
            target,
            log=log,
            memory_bytes=spare,
            time_s=time_limit_s + config.data.loader_timeout_s,
            fetch_remote=fetch_remote,
            no_data=_too_large(_batch_bytes(config, config.train.global_rows // shares), spare, "a batch"),
            no_real_step=_too_large(_host_bytes(estimated), spare, "a real step") if target.here else None,
        )
        if tried.step_s is not None:
            estimated = estimate(config, target, vocab_size, price=price, measured_step_s=tried.step_s)
    else:
        see_rule = f"the config cannot be computed: see the rule {broken_rule}"
        tried = DryRun.not_tried(see_rule if try_it else "no dry run was requested")
        if try_it or look_for_data:
            tried = replace(tried, data=datasets.look_for_data(config, target, folder, resuming))
    held_out = DryRunAttempt(not_tried="no dry run was requested")
    if too_large := _too_large(_batch_bytes(config, config.train.batch_size), spare, "a batch"):
        held_out = DryRunAttempt(not_tried=too_large)
    elif (try_it or look_for_held_out) and tried.data.problem is None:
        held_out = _held_out(config, vocab_size, resuming, fetch_remote=fetch_remote or look_for_held_out)
    facts = PreflightFacts(config, target, estimated, folder, tried, problem, resuming, held_out, store)
    return _with_kernels(facts, estimated, efficiency, price) if target.here and is_long(facts) else facts


def _dry_run_in_child(
    config: RunConfig,
    vocab_size: int,
    target: HardwareTarget,
    *,
    log: Callable[[str], None],
    memory_bytes: int,
    time_s: float,
    **options: Any,
) -> DryRun:
    """The result of `nsa_train.train.dry_run`, even if its process dies: the part that was being tried has failed then,
    and those after it were not tried. The process and its descendants are ended above `memory_bytes`, and after
    `time_s`.
    """
    attempts: dict[str, DryRunAttempt] = {}
    step_s, deadline = None, time.monotonic() + time_s

    def why_end() -> str | None:
        if (used := process_memory(child.pid)) > memory_bytes:
            return (
                f"when it held {used / GIB:.2f} GiB: its limit is the {memory_bytes / GIB:.2f} GiB that this machine "
                f"can spare"
            )
        late = time.monotonic() > deadline
        return f"because it had not finished within {time_s:.0f} s (--timeout)" if late else None

    with ChildProcess("the dry run", ("-m", "nsa_train.train.dry_run")) as child:
        child.send(config=config.model_dump(mode="json"), vocab_size=vocab_size, target=asdict(target), **options)
        try:
            for message in child.messages(watch=why_end):
                if "log" in message:
                    log(message["log"])
                attempts |= {part: DryRunAttempt(**attempt) for part, attempt in message.get("attempts", {}).items()}
                step_s = message.get("step_s", step_s)
        except ChildFailed as error:
            if missing := [part for part in ("data", "model", "step", "checkpoint") if part not in attempts]:
                rest = DryRunAttempt(not_tried=f"the dry run ended before it: see the rule {missing[0]}")
                attempts |= {**dict.fromkeys(missing, rest), missing[0]: DryRunAttempt(problem=str(error))}
        finally:
            child.close()
            remove_scratch_of(child.pid, Path(config.train.out_dir))
    return DryRun(**attempts, step_s=step_s)


def _with_kernels(
    facts: PreflightFacts, estimated: RunEstimate, efficiency: float | None, price: float | None
) -> PreflightFacts:
    """Add the backends of a long run on this machine, and the estimate for them."""
    config, target, vocab_size = facts.config, facts.target, estimated.vocab_size
    try:
        kernels = _kernels(config, target)
    except KernelUnavailable as error:
        return replace(facts, kernels_problem=str(error))
    again = estimate(
        config,
        target,
        vocab_size,
        efficiency=efficiency,
        price=price,
        measured_step_s=facts.dry_run.step_s,
        kernels=kernels,
    )
    return replace(facts, kernels=kernels, estimate=again)


def _kernels(config: RunConfig, target: HardwareTarget) -> tuple[BackendChoice, ...]:
    """The backends that this machine will use; on a GPU this may check the Triton kernels there."""
    device = torch.device("cuda" if target.device.is_gpu else "cpu")
    dtype = torch.bfloat16 if config.runtime.precision == "bf16" else torch.float32
    return plan(backend_request(wanted_kernels(config)), device, dtype, kernel_shape(config)).choices


def _too_large(need: int, spare: int, what: str) -> str | None:
    if need <= spare:
        return None
    return f"{what} would take about {need / GIB:.1f} GiB and this machine can spare {spare / GIB:.1f} GiB now"


def _host_bytes(estimated: RunEstimate) -> int:
    """Host memory of a real dry run: the step, if it runs on the host, and a checkpoint read back."""
    memory = estimated.memory
    on_host = estimated.checkpoint_bytes if estimated.target.device.is_gpu else memory.total
    return on_host + 2 * memory.weights


def _batch_bytes(config: RunConfig, n_rows: int) -> int:
    return n_rows * config.train.seq_len * _BATCH_BYTES_PER_TOKEN


def require_preflight(
    config: RunConfig,
    ranks: RankInfo,
    options: StartOptions,
    *,
    look_for_data: bool | None = None,
    look_for_store: bool | None = None,
    left_to_ranks: Collection[str] = (),
) -> None:
    """At the start of a run, in one process: raise with every preflight rule that it breaks.

    Reads one held-out batch of the data at most; the run's own first batch, step and checkpoint replace the dry run.
    `look_for_data`: whether missing data is a reason to refuse; by default for a single rank only, since one of several
    may have been restarted and the data may come back. `look_for_store`: the same for credentials that the object store
    refuses. `left_to_ranks`: rules that a launcher leaves to its ranks. A
    `.HALT` file alone does not raise: the run ends with an exit code of its own for it.
    """
    target = hardware_here(config.runtime.device, ranks.world, ranks.local_world)
    facts = gather(
        config,
        target,
        try_it=False,
        resuming=options.resuming,
        look_for_data=not ranks.distributed if look_for_data is None else look_for_data,
        look_for_held_out=HELD_OUT not in left_to_ranks,
        look_for_store=not ranks.distributed if look_for_store is None else look_for_store,
    )
    if options.clear_halt:
        facts = replace(facts, folder=replace(facts.folder, halt=None))
    verdicts = [verdict for verdict in check_rules(facts, options.allow) if verdict.rule not in left_to_ranks]
    if {verdict.rule for verdict in failed(verdicts)} != {HALT_FILE}:
        require_passed(verdicts)


def smallest_world(config: RunConfig, nproc: int, nodes: tuple[int, int]) -> RankInfo:
    """The ranks that a launcher may start, of an elastic number of nodes the fewest.

    Raises if that number includes some that cannot run this config: a run that comes to have that many would end. If
    none can, preflight says why.
    """
    counts = range(nodes[0], nodes[1] + 1)
    unfit = [count for count in counts if _ranks_problem(config, nproc * count, nproc) is not None]
    if not unfit or len(unfit) == len(counts):
        return RankInfo(world=nproc * nodes[0], local_world=nproc)
    fit = ", ".join(str(count) for count in counts if count not in unfit)
    ranks, rows = nproc * unfit[0], config.train.batch_size
    step = math.lcm(*(nproc * count for count in counts))
    why, fix = f"the rule `ranks` fails with {ranks} ranks", ""
    if rows % ranks:
        why = f"train.batch_size ({rows}) must be a multiple of the number of ranks ({ranks})"
        fix = f", or e.g. train.batch_size={-(-rows // step) * step}"
    raise ConfigError(
        f"--nnodes {nodes[0]}:{nodes[1]} --nproc {nproc} allows {unfit[0]} nodes, and {why}: the run would end when a "
        f"node is lost or joins. Set --nnodes to numbers that all fit (of these: {fit}){fix}."
    )


def _held_out(config: RunConfig, vocab_size: int, resuming: bool, *, fetch_remote: bool) -> DryRunAttempt:
    """Whether the held-out split gives one batch to evaluate on: the preflight rule `held_out`. Not for a resumed run:
    a failed evaluation is recorded there and must not prevent it from continuing."""
    if resuming or not config.train.eval_every:
        return DryRunAttempt(not_tried="nothing is evaluated at the start of this run")
    data, wanted = datasets.held_out_rows(config, vocab_size), config.train.batch_size
    if isinstance(data, DirectData) and not data.held_out_fraction:
        return DryRunAttempt(problem="data.held_out is 0 and train.eval_every is not: there is nothing to evaluate on")
    if not fetch_remote and (place := datasets.remote_address(config)):
        return DryRunAttempt(not_tried=f"{place} is on another machine; --fetch tries it")
    try:
        if isinstance(data, PreparedData):
            return _in_manifest(data, wanted)
        if isinstance(data, MixedData):
            attempts = [_in_manifest(each, wanted) for each in data.sets]
            return next((each for each in attempts if each.problem), attempts[0])
        if isinstance(data, DirectData):
            return _in_documents(data, wanted, config.data.loader_timeout_s)
    except DataError as error:
        if isinstance(error, DataTimeout) or config.data.synthetic_on_fail:
            return DryRunAttempt(not_tried=f"no held-out batch was read: {error}")
        return DryRunAttempt(problem=f"no batch of {wanted} held-out rows to evaluate on: {error}")
    return DryRunAttempt(seen=f"{data} have no end")


def _in_manifest(data: PreparedData, wanted: int) -> DryRunAttempt:
    tokens = read_manifest(StorageFolder(data.url)).totals(data.split)["tokens"]
    rows = -(-tokens // data.seq_len)
    what = f"{data} holds {tokens:,} tokens, {rows} rows of {data.seq_len}"
    if rows >= wanted:
        return DryRunAttempt(seen=what)
    return DryRunAttempt(
        problem=f"{what}: an evaluation needs a batch of {wanted} rows (train.batch_size); prepare it again with a "
        f"larger --held-out"
    )


def _in_documents(data: DirectData, wanted: int, timeout_s: float) -> DryRunAttempt:
    """Read in a separate process, so that a source with few held-out documents is read for `timeout_s` at most."""
    with BatchPrefetcher(
        data, global_rows=wanted, settings=PrefetchSettings(queue_depth=1, timeout_s=timeout_s)
    ) as prefetcher:
        next(prefetcher)
    return DryRunAttempt(seen=f"{data} gives a batch of {wanted} rows")


def _store(config: RunConfig, target: HardwareTarget, folder: FolderFacts) -> DryRunAttempt:
    """Whether the object store accepts the credentials of this machine. One that does not answer, or answers that it
    is overloaded, is no reason to refuse: copies of checkpoints are tried again at every save."""
    url = config.train.checkpoint_store
    if url is None or folder.checkpoints:
        return DryRunAttempt(not_tried="this run needs no check of an object store")
    if not target.here:
        return DryRunAttempt(not_tried=f"{target} is not here, so its credentials could not be checked")
    try:
        S3Prefix(url, patient=False).check_access()
    except StoreRefused as error:
        return DryRunAttempt(problem=f"train.checkpoint_store: {error}")
    except CheckpointError as error:
        return DryRunAttempt(not_tried=f"train.checkpoint_store: {error} Copies are tried again at every save")
    return DryRunAttempt(seen=f"{url} accepts the credentials")


def _ranks_problem(config: RunConfig, world: int, local_world: int | None = None) -> str | None:
    broken = broken_parallel_rules(config, world, local_world or min(world, RANKS_PER_NODE))
    return "\n".join(rule.message for rule in broken) or None
