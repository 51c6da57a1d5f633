"""Policy for bad steps (non-finite or spiking loss or gradient norm): skip, roll back or stop. Pure functions.

A bad step is skipped. After more than `max_skipped` of them among the last `window` steps the run rolls back to its
last verified checkpoint and leaves out every batch since: repeating them would reach the weights that failed. The run
ends instead of rolling back to the same checkpoint twice, or more than `max_rollbacks` times.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Any, Self

Range = tuple[int, int]


class StepAction(StrEnum):
    STEP = "step"
    SKIP = "skip"
    ROLL_BACK = "roll back"


@dataclass(frozen=True)
class StepVerdict:
    action: StepAction
    reason: str = ""


@dataclass(frozen=True)
class BadStepLimits:
    max_skipped: int = 3
    max_rollbacks: int = 3
    window: int = 128
    """Number of last steps in which skipped steps count and against which spikes are measured."""
    spike_sigma: float = 0.0
    """0 accepts any finite step."""


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
    left_out: list[Range] = field(default_factory=list)
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
    def restored(cls, window: Mapping[str, Any], left_out: Sequence[Range]) -> Self:
        return cls(**window, left_out=list(left_out))


class BadStepPolicy:
    def __init__(self, limits: BadStepLimits, state: BadStepState | None = None) -> None:
        self.limits = limits
        self.state = state or BadStepState()

    def decide(self, step: int, loss: float, grad_norm: float) -> StepVerdict:
        """For a step whose gradients are computed and whose optimizer has not run yet."""
        limits, state, tops = self.limits, self.state, self.tops()
        reasons = [
            text for text in (_problem("loss", loss, tops[0]), _problem("gradient norm", grad_norm, tops[1])) if text
        ]
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.state = state = replace(
            state,
            losses=_append(state.losses, loss, tops[0], limits.window),
            grad_norms=_append(state.grad_norms, grad_norm, tops[1], limits.window),
            skipped_steps=state.skipped_steps + bool(reasons),
            nonfinite_steps=state.nonfinite_steps + (not finite),
            recent=[past for past in state.recent if past > step - limits.window] + [step] * bool(reasons),
        )
        if not reasons:
            return StepVerdict(StepAction.STEP)
        reason = " and ".join(reasons)
        if len(state.recent) <= limits.max_skipped:
            return StepVerdict(StepAction.SKIP, reason)
        return StepVerdict(
            StepAction.ROLL_BACK,
            f"{reason}, bad step {len(state.recent)} of the last {limits.window} (train.max_skipped is "
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

    def roll_back(self, step: int, origin: int, saved: BadStepState) -> Range:
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
        if not self.limits.spike_sigma or len(values) < max(2, self.limits.window // 2):
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
