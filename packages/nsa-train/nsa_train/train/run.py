"""Runs training from a config to an exit code: preflight, run folder, process groups, parts, training loop, end.

This module is the order of these steps; `build_run` builds the parts and `run_outputs` reports what they do.
"""

import shutil
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch

from nsa.errors import CheckpointError, ConfigError, ExitCode, NSAError
from nsa.files import NO_ROOM, no_room_error
from nsa.kernels.cpu.build import cache_folder, is_built, set_cache_folder
from nsa.kernels.triton.tile_store import set_tuning
from nsa_train import names
from nsa_train.checkpoint.folder import CheckpointFolder
from nsa_train.checkpoint.lock import RunLock
from nsa_train.config.schema import RunConfig
from nsa_train.record import halt_file
from nsa_train.record.run_folder import RunFolder
from nsa_train.train.build_run import RunContext, build_trainer_of_run, check_inputs
from nsa_train.train.callbacks.heartbeat_callback import kernel_choices
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine.build import choose_device
from nsa_train.train.engine.checkpointer import signing_key
from nsa_train.train.engine.environment import on_first_rank, training_environment
from nsa_train.train.engine.nan_guard import RollbackTrainer
from nsa_train.train.gather_preflight_facts import require_preflight
from nsa_train.train.host_collectives import HostCollectives, agree_on_kernels
from nsa_train.train.resume import WeightImporter
from nsa_train.train.run_outputs import RunReport, RunReporter, SilentReporter
from nsa_train.train.signal_handlers import SignalHandlers
from nsa_train.train.start_options import StartOptions

_LOCK_WAIT_S = 20.0  # ranks of a killed run take a moment to exit


def train(
    config: RunConfig,
    options: StartOptions | None = None,
    reporter: RunReporter | None = None,
    importer: WeightImporter | None = None,
) -> int:
    """Train, or resume training, until done or stopped; returns the exit code. Errors with an exit code are raised.

    importer: reads an exported folder that `options.init_from` may name.
    """
    options = options or StartOptions()
    ranks = RankInfo.from_environment().divided(config.parallel)
    _configure_process(config)
    if not ranks.distributed:
        require_preflight(config, ranks, options)  # before anything is written
    device = choose_device(config, ranks)
    with ExitStack() as cleanup:
        folder = RunFolder(config.train.out_dir)
        cleanup.push(partial(_explain_full_disk, folder.path))  # the last to see an error: closing a file may raise one
        if folder.make() and not ranks.distributed:
            cleanup.push(partial(_remove_if_refused, folder.path))
        signals = SignalHandlers.of_rank(folder.path, ranks.rank)
        cleanup.callback(signals.close)
        signals.install()
        cleanup.enter_context(training_environment(config, ranks, device))
        if ranks.distributed:
            options = _agree_to_resume(options, config.parallel.timeout_s)
            on_first_rank(ranks, partial(require_preflight, config, ranks, options))
        on_first_rank(ranks, lambda: _claim(config, folder, options.resuming, cleanup))
        reporter = reporter if reporter is not None and ranks.first else SilentReporter()
        halt_request = on_first_rank(ranks, lambda: _pending_halt(folder, options.clear_halt))
        if halt_request is not None:
            reporter.line(
                f"not started: {folder.path} holds a {names.HALT} file ({halt_request}). Read the reason; then start "
                f"with --clear-halt, or remove the file."
            )
            return ExitCode.HALTED
        context = RunContext(config, options, ranks, device, folder, signals, reporter, importer)
        inputs = check_inputs(context, cleanup)
        report = RunReport(config, options, ranks, folder, reporter)
        cleanup.callback(report.close)
        trainer, heartbeat, stop_requests = build_trainer_of_run(context, inputs, report)
        if inputs.initial_weights is not None:
            inputs.checkpointer.load_weights(inputs.initial_weights, trainer.train_module)
        if device.type == "cpu" and not is_built():
            reporter.line(f"compiling the CPU kernels in {cache_folder()}, once for this machine …")
        kernels = agree_on_kernels(
            partial(kernel_choices, trainer.train_module, device), HostCollectives(config.parallel.timeout_s)
        )
        report.start(
            inputs.resume_point, inputs.changes, inputs.data, inputs.vocab_size, inputs.tokenizer, device, kernels
        )
        _fit(trainer, inputs.resume_point.path)
        exit_code = stop_requests.exit_code
        report.end(trainer.global_step, exit_code)
        if exit_code == ExitCode.DONE:
            heartbeat.log_done()
        return exit_code


def _explain_full_disk(folder: Path, _: object, error: BaseException | None, *__: object) -> None:
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        raise no_room_error(error, folder) from error


def _remove_if_refused(folder: Path, kind: type[BaseException] | None, *_: object) -> None:
    """Remove the folder of a new run that was refused before it began, which env.json would tell."""
    if kind is not None and issubclass(kind, NSAError):
        with suppress(CheckpointError), RunLock(folder).acquire():  # another start may have taken the folder
            if not (folder / names.ENV).exists():
                shutil.rmtree(folder)


def _configure_process(config: RunConfig) -> None:
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    set_cache_folder(Path(config.runtime.kernel_cache) if config.runtime.kernel_cache else None)
    set_tuning(config.runtime.tune_kernels)


def _agree_to_resume(options: StartOptions, timeout_s: float) -> StartOptions:
    """Resume on all ranks if any does: a node that was rebooted may have been started without --resume."""
    (any_resumes,) = HostCollectives(timeout_s).any([options.resume])
    return options.joining_resumed_run() if any_resumes and not options.resume else options


def _claim(config: RunConfig, folder: RunFolder, resuming: bool, cleanup: ExitStack) -> None:
    """Lock the run folder for this run, and refuse to mix a new run with an old one."""
    lock = RunLock(folder.path).acquire(wait_s=_LOCK_WAIT_S if resuming else 0.0)
    cleanup.callback(lock.release)
    checkpoints = CheckpointFolder(folder.checkpoints, key=signing_key(config))
    checkpoints.clean_up()
    if not resuming and (steps := checkpoints.steps()):
        raise ConfigError(
            f"{folder.path} already holds a run, up to step {steps[-1]}: a new one would mix with it. Add --resume to "
            f"continue it, or set train.out_dir to another folder."
        )


def _pending_halt(folder: RunFolder, clear: bool) -> str | None:
    """Content, author and age of a `.HALT` file in the folder; None without one, or after `clear` moved it aside."""
    now = time.time()
    if clear:
        halt_file.clear(folder.path, now=now, step=folder.last_step())
    request = halt_file.read(folder.path)
    return None if request is None else request.describe(now)


def _fit(trainer: RollbackTrainer, checkpoint: Path | None) -> None:
    """Load the checkpoint, if any, and train. Errors that the engine wraps become errors with an exit code."""
    if checkpoint is not None:
        trainer.load_checkpoint(checkpoint, load_trainer_state=True, load_optim_state=True)
    try:
        trainer.train()
    except RuntimeError as error:
        # The engine wraps an error of one of its threads.
        if isinstance(error.__cause__, NSAError):
            raise error.__cause__ from error
        raise
