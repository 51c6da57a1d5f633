"""NaN guard: skips a step whose loss or gradients are NaN, infinite or a spike, and rolls back to a checkpoint.

All of the mechanism is in this file, in the order of a step: `BadStepPolicy` decides (skip, roll back or stop),
`BadStepCallback` asks it between the backward pass and the optimizer, `step_unless_bad` makes or skips the optimizer's
step, `RollbackTrainer` leaves the engine's loop for a rollback.

A bad step is skipped. After more than `train.max_skipped` of them among the last `train.skip_window` steps the run
rolls back to its last verified checkpoint and leaves out every batch since: repeating them would reach the weights that
failed. The run ends instead of rolling back to the same checkpoint twice, or more than `train.max_rollbacks` times.

Between the backward pass and the optimizer every rank reads its loss and the gradient norm and all ranks take the mean
(one all-reduce of two numbers on the host), so that all of them decide on the same numbers.

On a GPU reading them would make the host wait for the backward pass at every step. There the same decision is made on
the device, by the limits that the host knows, and the fused optimizer leaves weights and moments as they are.
The host reads the numbers one step later, when they have long arrived, or at once before it logs, saves or stops: a
skipped step is logged then, and a rollback leaves out one batch more.

A skipped step counts as a step: it used up its batch, and the learning rate, a function of the step, advances as if the
step had been made. Its gradients are dropped; weights, moments and the optimizer's own step count stay unchanged, bit
for bit.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from olmo_core.train import Trainer
from torch import Tensor

from nsa.errors import NonFiniteError
from nsa_train import names
from nsa_train.config.schema import TrainConfig
from nsa_train.record.events import EventKind
from nsa_train.train.callbacks.heartbeat_callback import HeartbeatCallback
from nsa_train.train.engine import Callback, PathOrStr
from nsa_train.train.engine.checkpoint_callback import CheckpointCallback
from nsa_train.train.host_collectives import HostCollectives
from nsa_train.train.run_outputs import EventLogCallback

_Range = tuple[int, int]


class StepAction(StrEnum):
    STEP = "step"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class _StepVerdict:
    action: StepAction
    reason: str = ""


@dataclass(frozen=True)
class BadStepState:
    """State of the policy as JSON values, saved in every checkpoint."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Values of the last steps, finite ones only: one NaN would make every mean a NaN while it is in the window."""
    recent: list[int] = field(default_factory=list)
    """Skipped steps that still count."""
    skipped_steps: int = 0
    nonfinite_steps: int = 0
    origins: list[int] = field(default_factory=list)
    """Steps of the checkpoints that the run rolled back to."""
    left_out: list[_Range] = field(default_factory=list)
    """Batches never trained on, first and one past last; the first batch of a run is 0."""

    def batches_before(self, step: int) -> int:
        """Batches trained on or left out by the end of a step."""
        return step + sum(end - first for first, end in self.left_out)

    def counts(self) -> dict[str, int]:
        """Totals by their names in the heartbeat."""
        return {"skipped_steps": self.skipped_steps, "nonfinite_steps": self.nonfinite_steps}

    def window(self) -> dict[str, Any]:
        """The saved part of the state, without `left_out`, which a checkpoint's record holds separately."""
        values = asdict(self)
        del values["left_out"]
        return values

    @classmethod
    def restored(cls, window: Mapping[str, Any], left_out: Sequence[_Range]) -> Self:
        return cls(**window, left_out=list(left_out))


class BadStepPolicy:
    """Decides about each step from its loss and gradient norm alone: no tensors, no clock, no files."""

    def __init__(self, limits: TrainConfig, state: BadStepState | None = None) -> None:
        self.limits = limits
        self.state = state or BadStepState()

    def decide(self, step: int, loss: float, grad_norm: float) -> _StepVerdict:
        """For a step whose gradients are computed and whose optimizer has not run yet."""
        limits, state, tops = self.limits, self.state, self.tops()
        reasons = [
            text for text in (_problem("loss", loss, tops[0]), _problem("gradient norm", grad_norm, tops[1])) if text
        ]
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.state = state = replace(
            state,
            losses=_append(state.losses, loss, tops[0], limits.skip_window),
            grad_norms=_append(state.grad_norms, grad_norm, tops[1], limits.skip_window),
            skipped_steps=state.skipped_steps + bool(reasons),
            nonfinite_steps=state.nonfinite_steps + (not finite),
            recent=[past for past in state.recent if past > step - limits.skip_window] + [step] * bool(reasons),
        )
        if not reasons:
            return _StepVerdict(StepAction.STEP)
        reason = " and ".join(reasons)
        if len(state.recent) <= limits.max_skipped:
            return _StepVerdict(StepAction.SKIP, reason)
        return _StepVerdict(
            StepAction.ROLL_BACK,
            f"{reason}, bad step {len(state.recent)} of the last {limits.skip_window} (train.max_skipped is "
            f"{limits.max_skipped})",
        )

    def tops(self) -> tuple[float, float]:
        """The largest loss and gradient norm of the next step that are not spikes."""
        return self._top(self.state.losses), self._top(self.state.grad_norms)

    def why_not_back_to(self, origin: int | None) -> str | None:
        """Why rolling back to the checkpoint of this step would not help; None if it may."""
        if origin is None:
            return "there is no checkpoint to roll back to"
        if origin in self.state.origins:
            return f"the run rolled back to step {origin} before, and other batches have failed as well"
        if len(self.state.origins) >= self.limits.max_rollbacks:
            return f"the run rolled back {len(self.state.origins)} times (train.max_rollbacks)"
        return None

    def roll_back(self, step: int, origin: int, saved: BadStepState) -> _Range:
        """Change the state from that of a failed step to the one saved at a checkpoint; returns the batches left out.

        The window is that of the checkpoint and recent skips are cleared; the total counts are kept.
        """
        left_out = saved.batches_before(origin), self.state.batches_before(step)
        self.state = replace(
            saved,
            recent=[],
            skipped_steps=self.state.skipped_steps,
            nonfinite_steps=self.state.nonfinite_steps,
            origins=[*self.state.origins, origin],
            left_out=[*saved.left_out, left_out],
        )
        return left_out

    def _top(self, values: Sequence[float]) -> float:
        """The largest value that is not a spike; infinite until half a window with some spread is known."""
        if not self.limits.spike_sigma or len(values) < max(2, self.limits.skip_window // 2):
            return math.inf
        mean = fmean(values)
        spread = math.sqrt(fmean((value - mean) * (value - mean) for value in values))
        return mean + self.limits.spike_sigma * spread if spread > 0 else math.inf


def _problem(name: str, value: float, top: float) -> str | None:
    if not math.isfinite(value):
        return f"{name} is {value}"
    return f"{name} is {value:.6g}, beyond {top:.6g} (train.spike_sigma)" if value > top else None


def _append(values: list[float], value: float, top: float, window: int) -> list[float]:
    """A spike enters the window as the largest value that is none, so that it neither hides the next nor is lost."""
    return [*values, min(value, top)][-window:] if math.isfinite(value) else values


class _RollBack(Exception):
    """Leaves the engine's loop in the middle of a step: nothing of it may be saved, evaluated or logged as progress."""


@dataclass(frozen=True)
class _UnreadStep:
    """Loss and gradient norm of a step, on their way from the device."""

    step: int
    numbers: Tensor
    arrived: torch.cuda.Event | None

    @classmethod
    def copied(cls, step: int, numbers: Tensor) -> Self:
        on_host = numbers.to("cpu", non_blocking=True)  # from a GPU: into pinned memory
        if not numbers.is_cuda:
            return cls(step, on_host, None)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(step, on_host, arrived)

    def read(self) -> tuple[float, float]:
        if self.arrived is not None:
            self.arrived.synchronize()
        loss, grad_norm = self.numbers.tolist()
        return loss, grad_norm


@dataclass
class BadStepCallback(Callback):
    priority: ClassVar[int] = 20  # before the heartbeat, which logs what was skipped

    policy: BadStepPolicy
    collectives: HostCollectives
    checkpoints: CheckpointCallback
    heartbeat: HeartbeatCallback
    event_log: EventLogCallback | None
    deferred: bool = False
    """Decide on the device, and read the numbers later."""
    _unread: _UnreadStep | None = None

    def check_unread_step(self) -> None:
        """Read the numbers of the last step, if they are unread, and act on them; raises `_RollBack`."""
        if (unread := self._unread) is None:
            return
        self._unread = None
        self._decide(unread.step, *unread.read())

    def post_train_batch(self) -> None:
        """Before the heartbeat of a log step, and before the last save, which comes after the training loop."""
        if self.heartbeat.due() or self.trainer.training_complete:
            self.check_unread_step()

    def check_step(self, loss: Tensor, grad_norm: Tensor) -> Tensor | bool:
        """Whether to skip the step, on all ranks alike, or, deferred, that answer on the device; may raise
        `_RollBack`."""
        if self.deferred:
            return self._decide_on_device(loss, grad_norm)
        numbers = torch.stack([loss.detach().double(), grad_norm.detach().double()]).tolist()
        return self._decide(self.step, *self.collectives.means(numbers))

    def _decide(self, step: int, loss: float, grad_norm: float) -> bool:
        """Whether to skip the step, which is logged then; may raise `_RollBack`."""
        verdict = self.policy.decide(step, loss, grad_norm)
        if verdict.action == StepAction.STEP:
            return False
        numbers = dict(loss=loss, grad_norm=grad_norm)
        self.heartbeat.beat_at(step, names.SKIPPED, detail=verdict.reason, **numbers, **self.policy.state.counts())
        if self.event_log is not None:
            self.event_log.add_at(step, EventKind.SKIPPED_STEP, reason=verdict.reason, **numbers)
        if verdict.action == StepAction.ROLL_BACK:
            raise _RollBack(verdict.reason)
        return True

    def _decide_on_device(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 if this step must not be made, as the fused optimizer takes it, without waiting for the device."""
        self.check_unread_step()
        top_loss, top_norm = self.policy.tops()
        mean_loss, norm = loss.detach().double(), grad_norm.detach().double()
        if dist.is_initialized():
            mean_loss = mean_loss.clone()
            dist.all_reduce(mean_loss)  # all ranks: those that share a row have different tokens of it
            mean_loss /= dist.get_world_size()
        good = mean_loss.isfinite() & (mean_loss <= top_loss) & norm.isfinite() & (norm <= top_norm)
        self._unread = _UnreadStep.copied(self.step, torch.stack([mean_loss, norm]))
        return (~good).float()

    def roll_back(self, reason: str) -> None:
        """Load the last verified checkpoint in this process; the data continues after the batch that failed."""
        trainer, failed_at = self.trainer, self.step
        self.checkpoints.wait_for_save()
        checkpoint = trainer.checkpointer.find_resumable(Path(trainer.save_folder))
        if why_not := self.policy.why_not_back_to(checkpoint.step):
            raise NonFiniteError(
                f"step {failed_at}: {reason}, and {why_not}. Look at the data of these steps and at {names.EVENTS}; a "
                f"lower train.lr, a longer train.warmup_steps or a smaller train.grad_clip may help."
            )
        assert checkpoint.path is not None
        cursor, state = trainer.data_loader.state_dict(), self.policy.state
        self._unread = None
        trainer.train_module.zero_grads()
        trainer.load_checkpoint(checkpoint.path, load_trainer_state=True, load_optim_state=True)
        saved, self.policy.state = self.policy.state, state
        first, end = self.policy.roll_back(failed_at, self.step, saved)
        trainer.data_loader.load_state_dict(cursor)
        self._log_rollback(failed_at, reason, checkpoint.path, [first, end])

    def post_checkpoint_loaded(self, path: PathOrStr) -> None:
        record = self.trainer.checkpointer.loaded_record  # from the bytes that were verified
        if record is None:
            return
        self.policy.state = BadStepState.restored(record.spike_window, record.skipped_batches)

    def _log_rollback(self, failed_at: int, reason: str, path: Path, batches: list[int]) -> None:
        first, last = batches[0], batches[1] - 1
        detail = f"step {failed_at}: {reason}; rolled back to step {self.step}, leaving out batches {first} to {last}"
        self.heartbeat.beat(names.ROLLED_BACK, detail=detail, **self.policy.state.counts())
        if self.event_log is None:
            return
        self.event_log.add_at(failed_at, EventKind.ROLLBACK, reason=reason, origin=str(path), left_out_batches=batches)
        self.event_log.add(EventKind.LOST_STEPS, steps=failed_at - self.step, reason=reason)


def step_unless_bad(optimizer: Any, bad: Tensor | bool, set_learning_rates: Callable[[], None]) -> None:
    """Make the optimizer's step if it is not bad.

    A tensor is that answer on the device: the fused optimizer reads it there and, for 1, leaves weights, moments and
    its step count as they are.
    """
    if bad is True:
        return
    set_learning_rates()
    optimizer.found_inf = bad if isinstance(bad, Tensor) else None
    optimizer.step()
    optimizer.found_inf = None


@dataclass
class _ReportedError(Callback):
    """The error that the engine has reported to its callbacks."""

    error: BaseException | None = None

    def on_error(self, exc: BaseException) -> None:
        self.error = exc


@dataclass
class RollbackTrainer(Trainer):
    """The engine's trainer, with rollback to a checkpoint and no metrics pipeline.

    The engine reduces metrics over ranks in a thread, and records how long a background save took at whatever step
    each rank has reached. Ranks then reduce different sets of metrics and wait for each other forever. Nothing here
    reads those metrics (the heartbeat is the record of a run), so none is recorded.
    """

    def train(self) -> None:
        """`fit`, with errors after the last step, e.g. of the last save, also reported to the callbacks."""
        reported = _ReportedError()
        self.add_callback("reported_error", reported)
        try:
            self.fit()
        except BaseException as error:
            if reported.error is not error:
                for callback in self.callbacks.values():
                    callback.on_error(error)
            raise

    def record_metric(self, *args: Any, **kwargs: Any) -> None: ...

    def _fit_epoch(self) -> None:
        try:
            super()._fit_epoch()
        except _RollBack as request:
            reason = str(request)
        else:
            return
        # Outside the handler, so that nothing holds the frames of the failed step, and with them its memory.
        bad_steps = self.callbacks["bad_steps"]
        assert isinstance(bad_steps, BadStepCallback)
        bad_steps.roll_back(reason)
