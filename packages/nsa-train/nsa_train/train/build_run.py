"""Builds the parts of a run: resume point, data, model, checkpointer, callbacks, trainer."""

import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from nsa.errors import DataError
from nsa_train.checkpoint.run_state import TOKENIZER_RECORD, VOCAB_SIZE, RunRecord
from nsa_train.config.schema import RunConfig
from nsa_train.data.prefetcher import PrefetchSettings
from nsa_train.data.rows.specs import RowData, SyntheticData
from nsa_train.data.tokenizer import Tokenizer, tokenizer_record
from nsa_train.planning.hardware import peak_flops
from nsa_train.planning.model_figures import model_figures
from nsa_train.record.run_folder import RunFolder
from nsa_train.run_model import ALL_PARAMETERS
from nsa_train.train import datasets
from nsa_train.train.callbacks.evaluation import EvaluationCallback
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.callbacks.replica_check import ReplicaCheckCallback
from nsa_train.train.callbacks.stop_requests import StopRequestCallback
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback
from nsa_train.train.engine.build import build_train_module, build_trainer
from nsa_train.train.engine.checkpoint_callback import make_checkpoint_callback
from nsa_train.train.engine.checkpointer import VerifiedCheckpointer, make_checkpointer
from nsa_train.train.engine.data_loader import RowLoader
from nsa_train.train.engine.environment import on_first_rank
from nsa_train.train.engine.nan_guard import BadStepCallback, BadStepPolicy, RollbackTrainer
from nsa_train.train.host_collectives import HostCollectives
from nsa_train.train.resume import (
    ResumePoint,
    SettingChange,
    WeightImporter,
    find_initial_weights,
    find_resume_point,
    require_same_data,
    require_same_settings,
)
from nsa_train.train.run_outputs import DocumentProgress, RunReport, RunReporter
from nsa_train.train.signal_handlers import SignalHandlers
from nsa_train.train.start_options import StartOptions

_IMPORTED_WEIGHTS = ".imported_weights"


@dataclass(frozen=True)
class RunContext:
    """Facts about a run before its parts are built."""

    config: RunConfig
    options: StartOptions
    ranks: RankInfo
    device: torch.device
    folder: RunFolder
    signals: SignalHandlers
    reporter: RunReporter
    importer: WeightImporter | None


@dataclass(frozen=True)
class _RunInputs:
    """Inputs of a run, once everything that can refuse it has been checked."""

    vocab_size: int
    tokenizer: Tokenizer | None
    checkpointer: VerifiedCheckpointer
    resume_point: ResumePoint
    changes: list[SettingChange]
    data: RowData
    held_out: RowData | None
    loader: RowLoader
    initial_weights: Path | None
    """A checkpoint whose weights a new run starts with."""


def check_inputs(context: RunContext, cleanup: ExitStack) -> _RunInputs:
    """Everything that can refuse a run; writes nothing to its folder."""
    config, ranks, folder = context.config, context.ranks, context.folder
    vocab_size = config.model.vocab_size or datasets.vocabulary(config)
    if config.train.trainable != ALL_PARAMETERS:
        model_figures(config, vocab_size)  # raises if a pattern matches no parameter
    checkpointer = make_checkpointer(config, folder.path, store=config.train.checkpoint_store)
    point = find_resume_point(checkpointer, folder.checkpoints, context.options)
    changes: list[SettingChange] = []
    if point.path is not None:
        changes = on_first_rank(ranks, partial(require_same_settings, point.path, config, vocab_size))
    if context.options.allow:
        rules = ", ".join(context.options.allow)
        context.reporter.line(f"WARNING: this run may break preflight rules (--allow): {rules}")
    data, held_out = _choose_data(context, vocab_size)
    if point.path is not None:
        on_first_rank(ranks, partial(require_same_data, point.path, config, data, changes))
    loader = RowLoader(
        data,
        global_rows=config.train.global_rows,
        ranks=ranks,
        work_dir=folder.path,
        prefetch=_prefetch_settings(config),
        on_documents=DocumentProgress(config.data.report_docs, context.reporter),
    )
    cleanup.callback(loader.close)
    on_first_rank(ranks, partial(datasets.require_set_tokenizer, config))
    tokenizer = datasets.saved_tokenizer(config, vocab_size)
    initial = _initial_weights(context, checkpointer.key, vocab_size, cleanup) if point.path is None else None
    return _RunInputs(vocab_size, tokenizer, checkpointer, point, changes, data, held_out, loader, initial)


def _initial_weights(context: RunContext, key: bytes | None, vocab_size: int, cleanup: ExitStack) -> Path | None:
    """The checkpoint whose weights the run starts with. An exported folder is imported into the run's folder, which all
    ranks can read, until the run ends."""
    init_from = context.options.init_from
    if init_from is None:
        return None
    imported = context.folder.path / _IMPORTED_WEIGHTS
    if context.ranks.first:
        shutil.rmtree(imported, ignore_errors=True)  # of a run that was killed
        cleanup.callback(shutil.rmtree, imported, ignore_errors=True)
    checkpoint, changes = on_first_rank(
        context.ranks,
        lambda: find_initial_weights(init_from, context.config, vocab_size, key, imported, context.importer),
    )
    context.reporter.line(
        f"starting with the weights of {init_from if Path(checkpoint).is_relative_to(imported) else checkpoint}"
    )
    for change in changes:
        context.reporter.line(f"WARNING: the weights were trained with another setting: {change}")
    return Path(checkpoint)


def build_trainer_of_run(
    context: RunContext, inputs: _RunInputs, report: RunReport
) -> tuple[RollbackTrainer, HeartbeatCallback, StopRequestCallback]:
    """The trainer, with the train module and the callbacks around its steps."""
    config, ranks, folder = context.config, context.ranks, context.folder
    collectives = HostCollectives(config.parallel.timeout_s)
    policy = BadStepPolicy(config.train)
    module = build_train_module(config, inputs.vocab_size, ranks, context.device)
    checkpoints = make_checkpoint_callback(config)
    price = config.runtime.usd_per_hour
    heartbeat = HeartbeatCallback(
        path=folder.heartbeat(ranks.rank),
        ranks=ranks,
        collectives=collectives,
        log_every=config.train.log_every,
        data=str(inputs.data),
        synthetic=isinstance(inputs.data, SyntheticData),
        emit=report.beat,
        counts=lambda: policy.state.counts(),
        allowed=context.options.allow,
        full_speed=_full_speed(context, inputs.vocab_size),
        usd_per_s=None if price is None else ranks.world * price / 3600,
    )
    bad_steps = BadStepCallback(
        policy, collectives, checkpoints, heartbeat, report.event_log, deferred=bool(module.optim.defaults["fused"])
    )
    module.check_step, checkpoints.check_unread_step = bad_steps.check_step, bad_steps.check_unread_step
    stop_requests = StopRequestCallback(
        folder, ranks, collectives, context.signals, checkpoints, heartbeat, report.event_log
    )
    callbacks: dict[str, Callback] = {
        "heartbeat": heartbeat,
        "bad_steps": bad_steps,
        "checkpointer": checkpoints,
        "stop_requests": stop_requests,
    }
    if report.event_log is not None:
        callbacks["event_log"] = report.event_log
        inputs.checkpointer.report_copy = report.event_log.add_copy
    if config.train.replica_check_every:
        callbacks["replica_check"] = ReplicaCheckCallback(config.train.replica_check_every, collectives)
    if inputs.held_out is not None:
        callbacks["evaluation"] = EvaluationCallback(
            data=inputs.held_out,
            rows=config.train.batch_size,
            batches=config.train.eval_batches,
            every=config.train.eval_every,
            ranks=ranks,
            collectives=collectives,
            emit=report.evaluation,
            report_failure=partial(report.failed_evaluation, heartbeat),
            stay_alive=heartbeat.stay_alive,
        )
    trainer = build_trainer(config, folder, module, inputs.loader, inputs.checkpointer, callbacks)
    inputs.checkpointer.tokenizer = inputs.tokenizer
    inputs.checkpointer.record = lambda: _run_record(context, inputs, trainer, policy)
    return trainer, heartbeat, stop_requests


def _run_record(context: RunContext, inputs: _RunInputs, trainer: RollbackTrainer, policy: BadStepPolicy) -> RunRecord:
    """state.json of a checkpoint."""
    return RunRecord(
        step=trainer.global_step,
        world_size=context.ranks.world,
        config=context.config.model_dump(mode="json"),
        data_cursor=inputs.loader.state_dict(),
        skipped_batches=policy.state.left_out,
        spike_window=policy.state.window(),
        more={
            VOCAB_SIZE: inputs.vocab_size,
            **({TOKENIZER_RECORD: tokenizer_record(inputs.tokenizer)} if inputs.tokenizer else {}),
        },
    )


def _full_speed(context: RunContext, vocab_size: int) -> float | None:
    """Tokens per second if every FLOP of the model ran at the peak of all devices; None if that is not known."""
    peak = peak_flops(context.config.runtime, context.device)
    if peak is None:
        return None
    return context.ranks.world * peak / sum(model_figures(context.config, vocab_size).flops.values())


def _choose_data(context: RunContext, vocab_size: int) -> tuple[RowData, RowData | None]:
    """Rows to train on and to evaluate on. Synthetic rows replace missing data only if the config allows it, with a
    warning.
    """
    config, folder = context.config, context.folder.path
    data = datasets.training_rows(config, vocab_size, folder)
    held_out = datasets.held_out_rows(config, vocab_size, folder) if config.train.eval_every else None
    if not config.data.synthetic_on_fail or config.data.dataset == "synthetic":
        return data, held_out
    problem = on_first_rank(context.ranks, lambda: _why_no_data(data))
    if problem is None:
        return data, held_out
    context.reporter.line(f"WARNING: TRAINING ON SYNTHETIC DATA (data.synthetic_on_fail), because {problem}")
    rows = SyntheticData(config.data.synthetic_task, vocab_size, config.train.seq_len, config.train.seed)
    return rows, rows if held_out is not None else None


def _why_no_data(data: RowData) -> str | None:
    try:
        data.open().next_batch(1)
    except DataError as problem:
        return str(problem)
    return None


def _prefetch_settings(config: RunConfig) -> PrefetchSettings | None:
    data = config.data
    if not data.prefetch:
        return None
    return PrefetchSettings(data.queue_depth, data.warmup_batches, data.warmup_timeout_s, data.loader_timeout_s)
