"""One run from its description to an exit code. The order of things is here; what each does is in its own module."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from olmo_core.distributed.utils import broadcast_object
from olmo_core.train import Duration, LoadStrategy, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import ConsoleLoggerCallback, GarbageCollectorCallback

from nsa import names
from nsa.checkpoint.folder import CheckpointFolder
from nsa.checkpoint.load import export
from nsa.checkpoint.lock import RunLock
from nsa.checkpoint.run_state import RunRecord
from nsa.config.schema import RunConfig
from nsa.data.prefetcher import PrefetchSettings
from nsa.data.rows.specs import RowData, SyntheticData
from nsa.errors import ConfigError, DataError, ExitCode, NSAError
from nsa.files import NO_ROOM, no_room_error
from nsa.kernels.cpu.build import set_cache_folder
from nsa.kernels.triton.switch import set_tuning
from nsa.observe import halt_file
from nsa.observe.events import EventKind
from nsa.observe.heartbeat import HeartbeatRecord
from nsa.observe.metric_writers import VAL_LOSS, MetricWriters, scalars
from nsa.observe.run_folder import RunFolder
from nsa.train import datasets
from nsa.train.callbacks.evaluation import EvaluationCallback, EvaluationResult
from nsa.train.callbacks.event_log import EventLogCallback
from nsa.train.callbacks.heartbeat import HeartbeatCallback
from nsa.train.callbacks.replica_check import ReplicaCheckCallback
from nsa.train.callbacks.signals import SignalHandlers
from nsa.train.callbacks.stop_requests import StopRequestCallback
from nsa.train.distributed import HostCollectives, RankInfo
from nsa.train.engine.bad_step_hook import BadStepCallback, RollbackTrainer, counts, make_judge
from nsa.train.engine.build import build_train_module, choose_device
from nsa.train.engine.data_loader import RowLoader
from nsa.train.experiment_tracking import start_tracking
from nsa.train.flight_recorder import keep_record
from nsa.train.preflight_facts import demand_fitness
from nsa.train.resume import ResumePoint, find_origin, make_checkpointer, make_saver, signing_key
from nsa.train.resume_check import VOCAB_SIZE, SettingChange, require_same_data, require_same_settings

_LOCK_WAIT_S = 20.0  # ranks of a killed run need a moment to be gone


class RunReporter(Protocol):
    """Where a run speaks to whoever started it; only rank 0 does."""

    def line(self, text: str) -> None: ...
    def beat(self, beat: HeartbeatRecord, steps: int) -> None: ...
    def verdict(self, verdict: EvaluationResult) -> None: ...


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    resume_from: Path | None = None,
    clear_halt: bool = False,
    allowed: Sequence[str] = (),
    reporter: RunReporter | None = None,
) -> int:
    """Train, or go on training, until done or asked to stop; returns the exit code.

    `resume` goes on from the newest good checkpoint of the run folder, or begins if there is none; `resume_from` from
    this checkpoint, or from the newest good one of this folder. A `.HALT` that is there already refuses the start;
    `clear_halt` puts it aside. `allowed`: rules of preflight that this run may break. Errors that carry an exit code
    are raised.
    """
    ranks = RankInfo.from_environment()
    resuming = resume or resume_from is not None
    require_fitness = partial(
        demand_fitness, config, ranks, resuming=resuming, clear_halt=clear_halt, allowed=tuple(allowed)
    )
    if not ranks.distributed:
        require_fitness()  # before anything is written
    device = choose_device(config, ranks)
    if config.runtime.threads is not None:
        torch.set_num_threads(config.runtime.threads)
    set_cache_folder(Path(config.runtime.kernel_cache) if config.runtime.kernel_cache else None)
    set_tuning(config.runtime.tune_kernels)
    with ExitStack() as open_things:
        folder = RunFolder(config.train.out_dir)
        folder.make()
        here = ranks.rank, os.getpid()
        signals = SignalHandlers(folder.path / names.stackdump(*here), folder.path / names.collectives(*here))
        open_things.callback(signals.close)
        signals.install()
        open_things.enter_context(_environment(config, ranks, device))
        if ranks.distributed:
            _on_first(ranks, require_fitness)
        _on_first(ranks, lambda: _claim(config, folder, resume or bool(resume_from), open_things))
        asked = _on_first(ranks, lambda: _halted_before(folder, clear_halt))
        if asked is not None:
            if ranks.first and reporter is not None:
                reporter.line(
                    f"not started: {names.HALT} is in {folder.path} from before ({asked}). Look at what it says; then "
                    f"add --clear-halt, or remove the file, to go on."
                )
            return ExitCode.HALTED
        heard = reporter if ranks.first else None
        run = _TrainingRun(config, ranks, device, folder, signals, heard, open_things, (resume, resume_from), allowed)
        return run.go()


@contextmanager
def _environment(config: RunConfig, ranks: RankInfo, device: torch.device) -> Iterator[None]:
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
    # Before the engine configures logging: it would put its handler on everything.
    logging.getLogger("olmo_core").setLevel(logging.WARNING)
    keep_record()
    prepare_training_environment(
        seed=config.train.seed,
        backend=backend if ranks.distributed else None,
        timeout=timedelta(seconds=config.parallel.timeout_s),
        shared_filesystem=True,
    )
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
    # The engine sets a default device, which puts a Python hook into every torch call.
    torch.set_default_device(None)
    try:
        yield
    finally:
        teardown_training_environment()


def _on_first(ranks: RankInfo, act: Callable[[], Any]) -> Any:
    """Act on rank 0 and give its answer, or its refusal, to all."""
    answer: tuple[Any, NSAError | None] = (None, None)
    if ranks.first:
        try:
            answer = (act(), None)
        except NSAError as error:
            answer = (None, error)
    value, refusal = broadcast_object(answer)
    if refusal is not None:
        raise refusal
    return value


def _claim(config: RunConfig, folder: RunFolder, resuming: bool, open_things: ExitStack) -> None:
    """Take the run folder for this run."""
    lock = RunLock(folder.path).acquire(wait_s=_LOCK_WAIT_S if resuming else 0.0)
    open_things.callback(lock.release)
    checkpoints = CheckpointFolder(folder.checkpoints, key=signing_key(config))
    checkpoints.clean_up()
    if not resuming and (steps := checkpoints.steps()):
        raise ConfigError(
            f"{folder.path} already holds a run, up to step {steps[-1]}: a new one would mix with it. Add --resume to "
            f"go on with it, or set train.out_dir to another folder."
        )


def _halted_before(folder: RunFolder, clear: bool) -> str | None:
    """What a `.HALT` in the folder says, who wrote it and when; None without one, or when it was put aside."""
    now = time.time()
    if clear:
        halt_file.clear(folder.path, now=now, step=folder.last_step())
    asked = halt_file.read(folder.path)
    return None if asked is None else asked.describe(now)


class _TrainingRun:
    def __init__(
        self,
        config: RunConfig,
        ranks: RankInfo,
        device: torch.device,
        folder: RunFolder,
        signals: SignalHandlers,
        reporter: RunReporter | None,
        open_things: ExitStack,
        resume: tuple[bool, Path | None],
        allowed: Sequence[str],
    ) -> None:
        """Everything that can refuse a run comes before anything that writes to its folder."""
        self.config, self.ranks, self.device, self.folder = config, ranks, device, folder
        self.signals, self.reporter = signals, reporter
        self.agreement = HostCollectives(config.parallel.timeout_s)
        self.judge = make_judge(config)
        self.vocab_size = config.model.vocab_size or datasets.vocabulary(config)
        self.allowed = tuple(allowed)
        self.checkpointer = make_checkpointer(config, folder.path, self._record)
        self.origin = origin = find_origin(self.checkpointer, folder.checkpoints, *resume)
        self.changes: list[SettingChange] = []
        if origin.path is not None:
            self.changes = _on_first(ranks, partial(require_same_settings, origin.path, config, self.vocab_size))
        if self.allowed:
            self._line(f"WARNING: this run may break rules of preflight (--allow): {', '.join(self.allowed)}")
        self.data = self._choose_rows()
        if origin.path is not None:
            _on_first(ranks, partial(require_same_data, origin.path, config, self.data, self.changes))
        self.loader = RowLoader(
            self.data,
            global_rows=datasets.global_rows(config),
            ranks=ranks,
            work_dir=folder.path,
            prefetch=_feed_settings(config),
            on_documents=self._report_documents,
        )
        open_things.callback(self.loader.close)
        self.copies = MetricWriters(folder.path) if ranks.first else None
        self.story = EventLogCallback(folder.path) if ranks.first else None
        if self.copies is not None:
            open_things.callback(self.copies.close)
        resuming = any(resume) or ranks.restarts > 0
        self.couriers = start_tracking(config, folder.path, ranks.first, self._line, resuming=resuming)
        for courier in self.couriers:
            open_things.callback(courier.close)
        self._documents_told = 0

    def go(self) -> int:
        trainer, wishes = self._build()
        origin = self.origin
        self._tell_start(origin)
        if origin.path is not None:
            trainer.load_checkpoint(origin.path, load_trainer_state=True, load_optim_state=True)
        try:
            trainer.fit()
        except RuntimeError as error:
            # The engine wraps what went wrong in a thread of its own.
            if isinstance(error.__cause__, NSAError):
                raise error.__cause__ from error
            raise
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            raise no_room_error(error, self.folder.path) from error
        self._finish(trainer, wishes)
        return wishes.exit_code

    def _build(self) -> tuple[RollbackTrainer, StopRequestCallback]:
        config = self.config
        module = build_train_module(config, self.vocab_size, self.ranks, self.device)
        saver = make_saver(config)
        heartbeat = HeartbeatCallback(
            path=self.folder.heartbeat(self.ranks.rank),
            ranks=self.ranks,
            agreement=self.agreement,
            log_every=config.train.log_every,
            data=str(self.data),
            synthetic=isinstance(self.data, SyntheticData),
            say=self._hear,
            counts=lambda: counts(self.judge.memory),
            allowed=self.allowed,
        )
        module.guard = BadStepCallback(self.judge, self.agreement, saver, heartbeat, self.story)
        wishes = StopRequestCallback(
            self.folder, self.ranks, self.agreement, self.signals, saver=saver, heartbeat=heartbeat, story=self.story
        )
        callbacks = {
            "heartbeat": heartbeat,
            "guard": module.guard,
            "checkpointer": saver,
            "wishes": wishes,
            "console_logger": ConsoleLoggerCallback(log_interval=2**62, metrics_log_interval=2**62),
            "garbage_collector": GarbageCollectorCallback(),
        }
        if self.story is not None:
            callbacks["story"] = self.story
        if config.train.replica_check_every:
            callbacks["replicas"] = ReplicaCheckCallback(config.train.replica_check_every, self.agreement)
        if config.train.eval_every:
            callbacks["evaluation"] = EvaluationCallback(
                data=self.data
                if self._stands_in
                else datasets.held_out_rows(config, self.vocab_size, self.folder.path),
                rows=config.train.batch_size,
                batches=config.train.eval_batches,
                every=config.train.eval_every,
                ranks=self.ranks,
                agreement=self.agreement,
                say=self._hear_verdict,
                report_failure=partial(self._report_failed_evaluation, heartbeat),
                stay_alive=heartbeat.stay_alive,
            )
        trainer = RollbackTrainer(
            work_dir=self.folder.path,
            train_module=module,
            data_loader=self.loader,
            device=self.device,
            save_folder=str(self.folder.checkpoints),
            checkpointer=self.checkpointer,
            callbacks=callbacks,
            max_duration=Duration.steps(config.train.steps),
            load_strategy=LoadStrategy.never,
            metrics_collect_interval=config.train.log_every,
            cancel_check_interval=2
            ** 62,  # the engine's own check may stop ranks at different steps; `StopRequestCallback` does not
        )
        self._trainer = trainer
        return trainer, wishes

    def _record(self) -> RunRecord:
        return RunRecord(
            step=self._trainer.global_step,
            world_size=self.ranks.world,
            config=self.config.model_dump(mode="json"),
            data_cursor=self.loader.state_dict(),
            skipped_batches=self.judge.memory.left_out,
            spike_window=self.judge.memory.window(),
            more={VOCAB_SIZE: self.vocab_size},
        )

    def _choose_rows(self) -> RowData:
        """The rows asked for; made-up ones only where that was allowed, and said."""
        config, wanted = self.config, datasets.training_rows(self.config, self.vocab_size, self.folder.path)
        self._stands_in = False
        if not config.data.synthetic_on_fail or config.data.dataset == "synthetic":
            return wanted
        problem = _on_first(self.ranks, lambda: _why_no_data(wanted))
        if problem is None:
            return wanted
        self._stands_in = True
        self._line(f"WARNING: TRAINING ON SYNTHETIC DATA (data.synthetic_on_fail), because {problem}")
        return SyntheticData(config.data.synthetic_task, self.vocab_size, config.train.seq_len, config.train.seed)

    def _tell_start(self, origin: ResumePoint) -> None:
        if self.story is None:
            return
        config = self.config
        self.folder.write_env(
            config,
            device=str(self.device),
            threads=torch.get_num_threads(),
            world_size=self.ranks.world,
            local_world_size=self.ranks.local_world,
            data=str(self.data),
            vocab_size=self.vocab_size,
            allowed=list(self.allowed),
        )
        tell, lost = partial(self.story.add_at, origin.step), self.folder.last_step() - origin.step
        kind = EventKind.RESTART if origin.path is not None or self.ranks.restarts else EventKind.START
        tell(kind, world=self.ranks.world, origin=str(origin.path or ""), data=str(self.data))
        for finding in origin.passed_over:
            tell(EventKind.CHECKPOINT_REJECTED, problem=str(finding))
            self._line(f"WARNING: a checkpoint was passed over: {finding}")
        if kind == EventKind.RESTART and lost > 0:
            tell(EventKind.LOST_STEPS, steps=lost)
        if origin.path is not None:
            self._line(f"going on from {origin.path}")
            for change in self.changes:
                self._line(f"changed since that checkpoint: {change}")
            if changed := [str(change) for change in self.changes if not change.key.startswith("track.")]:
                tell(EventKind.SETTINGS_CHANGED, reason="; ".join(changed))
        self._line(
            f"{self.data} · {self.vocab_size} ids · {config.train.steps} steps of {datasets.global_rows(config)} rows "
            f"of {config.train.seq_len} tokens · {self.ranks.world} rank(s) on {self.device} · {self.folder.path}"
        )

    def _finish(self, trainer: RollbackTrainer, wishes: StopRequestCallback) -> None:
        if self.ranks.first:
            self._tell_end(trainer, wishes.exit_code)
        if wishes.exit_code == ExitCode.DONE:
            wishes.heartbeat.tell_done()

    def _tell_end(self, trainer: RollbackTrainer, code: int) -> None:
        last = self.folder.checkpoints / f"step{trainer.global_step}"
        if code == ExitCode.DONE:
            written = export(last, self.folder.path, key=signing_key(self.config))
            assert self.story is not None
            self.story.add_at(trainer.global_step, EventKind.DONE)
            self._line(f"done: step {trainer.global_step}, {', '.join(str(path) for path in written)}")
        else:
            how = "--clear-halt --resume" if code == ExitCode.HALTED else "--resume"
            self._line(f"stopped at step {trainer.global_step}, saved in {last}; {how} goes on from there")

    def _hear(self, beat: HeartbeatRecord) -> None:
        if self.copies is not None and beat.msg == names.PROGRESS:
            self.copies.write(beat)
            self._send(beat.step, scalars(beat))
        if self.reporter is not None:
            self.reporter.beat(beat, self.config.train.steps)

    def _send(self, step: int, numbers: dict[str, float]) -> None:
        for courier in self.couriers:
            courier.log(step, numbers)

    def _hear_verdict(self, verdict: EvaluationResult) -> None:
        if self.copies is not None and self.story is not None:
            self.copies.write_evaluation(**verdict._asdict(), ts=time.time())
            self._send(verdict.step, {VAL_LOSS: verdict.val_loss})
            self.story.add(EventKind.EVALUATION, val_loss=verdict.val_loss, tokens=verdict.tokens)
        if self.reporter is not None:
            self.reporter.verdict(verdict)

    def _report_failed_evaluation(self, heartbeat: HeartbeatCallback, problem: str | None) -> None:
        """On rank 0 as an event; another rank that failed says why in its own heartbeat."""
        if self.story is not None:
            self.story.add(EventKind.EVALUATION_FAILED, error=problem or "on another rank; its heartbeat says why")
            self._line(f"WARNING: the evaluation at step {heartbeat.step} failed ({problem or 'on another rank'})")
        elif problem is not None:
            heartbeat.beat(names.ALIVE, detail=f"evaluation failed: {problem}")

    def _report_documents(self, count: int) -> None:
        every = self.config.data.report_docs
        if every and count // every > self._documents_told:
            self._documents_told = count // every
            self._line(f"{count} documents read")

    def _line(self, text: str) -> None:
        if self.reporter is not None:
            self.reporter.line(text)


def _feed_settings(config: RunConfig) -> PrefetchSettings | None:
    data = config.data
    if not data.prefetch:
        return None
    return PrefetchSettings(data.queue_depth, data.warmup_batches, data.warmup_timeout_s, data.loader_timeout_s)


def _why_no_data(data: RowData) -> str | None:
    try:
        data.open().next_batch(1)
    except DataError as problem:
        return str(problem)
    return None
