"""What to do about a step that is not finite, or far above those before it: no tensors, no clock, no files.

A bad step is skipped. More than `max_skipped` of them among the last `window` steps and the run goes back to its last
verified checkpoint, leaving out every batch since: the weights it would reach by repeating them are the ones that
failed. Going back to the same checkpoint twice, or more than `max_rollbacks` times, is not tried: the run ends.
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
    act: StepAction
    reason: str = ""


@dataclass(frozen=True)
class BadStepLimits:
    max_skipped: int = 3
    max_rollbacks: int = 3
    window: int = 128
    """Steps back that skipped steps count, and that spikes are measured against."""
    spike_sigma: float = 0.0
    """0 takes any finite step."""


@dataclass(frozen=True)
class BadStepState:
    """All that the judge knows, as JSON values; it is saved in every checkpoint."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    """Finite ones only, of the last steps: one NaN would make every mean a NaN for as long as it stays."""
    recent: list[int] = field(default_factory=list)
    """Skipped steps that still count."""
    skipped_steps: int = 0
    nonfinite_steps: int = 0
    origins: list[int] = field(default_factory=list)
    """Steps of the checkpoints that were gone back to."""
    left_out: list[Range] = field(default_factory=list)
    """Batches never trained on, first and one past last; the first batch of a run is 0."""

    def batches_before(self, step: int) -> int:
        """Batches taken or left out when a step has ended."""
        return step + sum(end - first for first, end in self.left_out)

    def window(self) -> dict[str, Any]:
        """Without the batches left out, which a checkpoint's record names itself."""
        values = asdict(self)
        del values["left_out"]
        return values

    @classmethod
    def restored(cls, window: Mapping[str, Any], left_out: Sequence[Range]) -> Self:
        return cls(**window, left_out=list(left_out))


class BadStepPolicy:
    def __init__(self, limits: BadStepLimits, memory: BadStepState | None = None) -> None:
        self.limits = limits
        self.memory = memory or BadStepState()

    def judge(self, step: int, loss: float, grad_norm: float) -> StepVerdict:
        """Of a step whose gradients are there and whose optimizer has not run yet."""
        limits, memory = self.limits, self.memory
        tops = self._top(memory.losses), self._top(memory.grad_norms)
        reasons = [
            text for text in (_trouble("loss", loss, tops[0]), _trouble("gradient norm", grad_norm, tops[1])) if text
        ]
        finite = math.isfinite(loss) and math.isfinite(grad_norm)
        self.memory = memory = replace(
            memory,
            losses=_take(memory.losses, loss, tops[0], limits.window),
            grad_norms=_take(memory.grad_norms, grad_norm, tops[1], limits.window),
            skipped_steps=memory.skipped_steps + bool(reasons),
            nonfinite_steps=memory.nonfinite_steps + (not finite),
            recent=[past for past in memory.recent if past > step - limits.window] + [step] * bool(reasons),
        )
        if not reasons:
            return StepVerdict(StepAction.STEP)
        reason = " and ".join(reasons)
        if len(memory.recent) <= limits.max_skipped:
            return StepVerdict(StepAction.SKIP, reason)
        return StepVerdict(
            StepAction.ROLL_BACK,
            f"{reason}, bad step {len(memory.recent)} of the last {limits.window} (train.max_skipped is "
            f"{limits.max_skipped})",
        )

    def why_not_back_to(self, origin: int | None) -> str | None:
        """Why going back to the checkpoint of this step would not help; None if it may."""
        if origin is None:
            return "there is no checkpoint to go back to"
        if origin in self.memory.origins:
            return f"the run went back to step {origin} before, and other batches have failed it as well"
        if len(self.memory.origins) >= self.limits.max_rollbacks:
            return f"the run went back {len(self.memory.origins)} times (train.max_rollbacks)"
        return None

    def go_back(self, step: int, origin: int, then: BadStepState) -> Range:
        """From a failed step to what was known at a checkpoint; returns the batches left out.

        The window is that of the checkpoint and the skips are forgiven; what has been counted stays counted.
        """
        left_out = then.batches_before(origin), self.memory.batches_before(step)
        self.memory = replace(
            then,
            recent=[],
            skipped_steps=self.memory.skipped_steps,
            nonfinite_steps=self.memory.nonfinite_steps,
            origins=[*self.memory.origins, origin],
            left_out=[*then.left_out, left_out],
        )
        return left_out

    def _top(self, values: Sequence[float]) -> float:
        """The largest value that is no spike. Half a window is needed to tell, and some spread in it."""
        if not self.limits.spike_sigma or len(values) < max(2, self.limits.window // 2):
            return math.inf
        mean = fmean(values)
        spread = math.sqrt(fmean((value - mean) * (value - mean) for value in values))
        return mean + self.limits.spike_sigma * spread if spread > 0 else math.inf


def _trouble(name: str, value: float, top: float) -> str | None:
    if not math.isfinite(value):
        return f"{name} is {value}"
    return f"{name} is {value:.6g}, beyond {top:.6g} (train.spike_sigma)" if value > top else None


def _take(values: list[float], value: float, top: float, window: int) -> list[float]:
    """A spike counts as the largest value that is none: it neither hides the next one nor is it forgotten."""
    return [*values, min(value, top)][-window:] if math.isfinite(value) else values
