"""What a run reports: console lines, events.jsonl, metric files (CSV, TensorBoard, metrics.json), W&B and MLflow."""

import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from nsa.errors import ExitCode
from nsa.files import write_atomic
from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
from nsa.kernels.registry import BackendChoice
from nsa_train import names
from nsa_train.checkpoint.load import export
from nsa_train.checkpoint.transfer import CopyResult
from nsa_train.config.schema import RunConfig
from nsa_train.data.rows.specs import RowData
from nsa_train.data.tokenizer import Tokenizer, tokenizer_record
from nsa_train.record.events import EventKind, add_event
from nsa_train.record.failure_codes import code_of_exception
from nsa_train.record.heartbeat_record import HeartbeatRecord
from nsa_train.record.run_folder import RunFolder
from nsa_train.train.callbacks.evaluation import EvaluationResult
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.distributed import RankInfo
from nsa_train.train.engine import Callback, PathOrStr
from nsa_train.train.engine.checkpointer import signing_key
from nsa_train.train.metric_writers import VAL_ACCURACY, VAL_LOSS, MetricWriters, start_tracking, tracked_numbers
from nsa_train.train.resume import ResumePoint, SettingChange
from nsa_train.train.start_options import StartOptions


class RunReporter(Protocol):
    """Console output of a run; called on rank 0."""

    def line(self, text: str) -> None: ...
    def beat(self, beat: HeartbeatRecord, steps: int) -> None: ...
    def evaluation(self, result: EvaluationResult) -> None: ...


class SilentReporter:
    """For the other ranks, and for callers that want no output."""

    def line(self, text: str) -> None: ...
    def beat(self, beat: HeartbeatRecord, steps: int) -> None: ...
    def evaluation(self, result: EvaluationResult) -> None: ...


@dataclass
class EventLogCallback(Callback):
    """Appends first step, saves and errors of a run to events.jsonl. On rank 0."""

    run_folder: Path
    _started: bool = False

    def add(self, kind: EventKind, **details: object) -> None:
        self.add_at(self.step, kind, **details)

    def add_at(self, step: int, kind: EventKind, **details: object) -> None:
        add_event(self.run_folder, kind, ts=time.time(), step=step, **details)

    def post_train_batch(self) -> None:
        if not self._started:
            self._started = True
            self.add(EventKind.FIRST_STEP)

    def post_checkpoint_saved(self, path: PathOrStr) -> None:
        """Called in the thread that finished the save, when the run may be some steps further."""
        step = names.step_of(Path(path).name)
        assert step is not None
        self.add_at(step, EventKind.SAVE, path=str(path))

    def add_copy(self, result: CopyResult) -> None:
        """Called in the thread that finished the save, which must not fail if the event cannot be written."""
        details = {"path": str(result.path), "address": result.address}
        if result.failure is not None:
            details["error"] = result.failure
        with suppress(OSError):
            kind = EventKind.COPIED if result.failure is None else EventKind.COPY_FAILED
            self.add_at(result.step, kind, **details)

    def on_error(self, exc: BaseException) -> None:
        self.add(EventKind.ERROR, error=f"{type(exc).__name__}: {exc}", failure_code=code_of_exception(exc))


class RunReport:
    """Passes what happens in this rank on to every destination. Files and trackers are written by rank 0 only."""

    def __init__(
        self, config: RunConfig, options: StartOptions, ranks: RankInfo, folder: RunFolder, reporter: RunReporter
    ) -> None:
        self.config, self.options, self.ranks, self.folder, self.reporter = config, options, ranks, folder, reporter
        with ExitStack() as opened:
            self.metrics = MetricWriters(folder.path) if ranks.first else None
            if self.metrics is not None:
                opened.callback(self.metrics.close)
            self.event_log = EventLogCallback(folder.path) if ranks.first else None
            resuming = options.resuming or ranks.restarts > 0
            self.trackers = start_tracking(config, folder.path, ranks.first, reporter.line, resuming=resuming)
            for tracker in self.trackers:
                opened.callback(tracker.close)
            self._opened = opened.pop_all()

    def close(self) -> None:
        self._opened.close()

    def start(
        self,
        point: ResumePoint,
        changes: Sequence[SettingChange],
        data: RowData,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        device: torch.device,
        kernels: Sequence[BackendChoice],
    ) -> None:
        """Write env.json and tokenizer.json, and log where the run starts from, on what, and with which kernels."""
        if self.event_log is None:
            return
        config, ranks = self.config, self.ranks
        self.folder.write_env(
            config,
            device=str(device),
            threads=torch.get_num_threads(),
            world_size=ranks.world,
            local_world_size=ranks.local_world,
            data=str(data),
            vocab_size=vocab_size,
            tokenizer={"name": tokenizer.name, **tokenizer_record(tokenizer)} if tokenizer is not None else None,
            kernels={choice.branch: {"backend": choice.backend, "reason": choice.reason} for choice in kernels},
            allowed=list(self.options.allow),
        )
        if tokenizer is not None:
            write_atomic(self.folder.path / names.TOKENIZER, tokenizer.to_json())
        add, lost = partial(self.event_log.add_at, point.step), self.folder.last_step() - point.step
        kind = EventKind.RESTART if point.path is not None or ranks.restarts else EventKind.START
        add(kind, world=ranks.world, origin=str(point.path or ""), data=str(data))
        for finding in point.passed_over:
            add(EventKind.CHECKPOINT_REJECTED, problem=str(finding))
            self.reporter.line(f"WARNING: a checkpoint was rejected: {finding}")
        if kind == EventKind.RESTART and lost > 0:
            add(EventKind.LOST_STEPS, steps=lost)
        if point.path is not None:
            self.reporter.line(f"resuming from {point.path}")
            for change in changes:
                self.reporter.line(f"changed since that checkpoint: {change}")
            if changed := [str(change) for change in changes if not change.key.startswith("track.")]:
                add(EventKind.SETTINGS_CHANGED, reason="; ".join(changed))
        self.reporter.line(
            f"{data} · {vocab_size} ids · {config.train.steps} steps of {config.train.global_rows} rows of "
            f"{config.train.seq_len} tokens · {ranks.world} rank(s) on {device} · {self.folder.path}"
        )
        self.reporter.line(f"kernels: {kernels_text(kernels)}")
        if slow := slow_kernels_warning(kernels, device.type):
            self.reporter.line(f"WARNING: {slow}")

    def end(self, step: int, code: int) -> None:
        """Export the model of a finished run; log how the run ended and how to continue it."""
        if self.event_log is None:
            return
        last = self.folder.checkpoints / names.step_name(step)
        if code == ExitCode.DONE:
            written = export(last, self.folder.path, key=signing_key(self.config))
            self.event_log.add_at(step, EventKind.DONE)
            self.reporter.line(f"done: step {step}, {', '.join(str(path) for path in written)}")
        else:
            option = "--clear-halt --resume" if code == ExitCode.HALTED else "--resume"
            self.reporter.line(f"stopped at step {step}, saved in {last}; continue with {option}")

    def beat(self, beat: HeartbeatRecord) -> None:
        if self.metrics is not None and beat.msg == names.PROGRESS:
            self.metrics.write(beat)
            self._track(beat.step, tracked_numbers(beat))
        self.reporter.beat(beat, self.config.train.steps)

    def evaluation(self, result: EvaluationResult) -> None:
        if self.metrics is not None and self.event_log is not None:
            self.metrics.write_evaluation(**result._asdict(), ts=time.time())
            self._track(result.step, {VAL_LOSS: result.val_loss, VAL_ACCURACY: result.val_accuracy})
            scores = {"val_loss": result.val_loss, "val_accuracy": result.val_accuracy}
            self.event_log.add(EventKind.EVALUATION, **scores, tokens=result.tokens)
        self.reporter.evaluation(result)

    def failed_evaluation(self, heartbeat: HeartbeatCallback, problem: str | None) -> None:
        """An event on rank 0; another rank that failed writes the reason into its own heartbeat."""
        if self.event_log is not None:
            self.event_log.add(EventKind.EVALUATION_FAILED, error=problem or "on another rank, see its heartbeat")
            reason = problem or "on another rank"
            self.reporter.line(f"WARNING: the evaluation at step {heartbeat.step} failed ({reason})")
        elif problem is not None:
            heartbeat.beat(names.ALIVE, detail=f"evaluation failed: {problem}")

    def _track(self, step: int, numbers: dict[str, float]) -> None:
        for tracker in self.trackers:
            tracker.log(step, numbers)


class DocumentProgress:
    """Prints the number of documents read, every `every` documents; 0 prints nothing."""

    def __init__(self, every: int, reporter: RunReporter) -> None:
        self._every, self._reporter, self._printed = every, reporter, 0

    def __call__(self, count: int) -> None:
        if self._every and count // self._every > self._printed:
            self._printed = count // self._every
            self._reporter.line(f"{count} documents read")
