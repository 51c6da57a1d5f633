"""Verdict of a chaos drill: every fault reported in time, every observation explained, no step lost, weights as calm.

`name_faults` and `evaluate` are pure; `read_outcome` reads the two run folders.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from nsa_train.watch.conditions import HealthLimits
from nsa_train.watch.health import examine
from nsa_train.watch.history import RunHistory
from nsa_train.watch.view.measured_goodput import TimeCause
from nsa_train.watch.view.summary import take_snapshot
from proofs.drill import artifacts
from proofs.drill.chaos.fault_classes import PROFILES
from proofs.drill.chaos.observations import Observation
from proofs.drill.chaos.schedule import RANKS, ChaosPlan, PlannedFault

SETTLE_S = 30.0
"""A fault explains observations until this long after the run has continued."""
_BEFORE_S = 1.0  # between an injection and the note of its time
_MOST_SHOWN = 12
_OF_NUMBERS = ("finding:grad_spikes", "finding:loss_spike", "finding:loss_plateau")
_NEAR_STEPS = 10
"""The watchdog of the run with faults may have looked some steps later."""


@dataclass
class PlayedFault:
    planned: PlannedFault
    at: float
    """Time of the injection."""
    restored_at: float | None = None
    """Time at which the fault itself was over."""
    continued_at: float | None = None
    """First new step after that."""
    repeated_steps: int = 0
    named_at: float | None = None
    named_by: str = ""

    def explains(self, observation: Observation) -> bool:
        end = float("inf") if self.continued_at is None else self.continued_at + SETTLE_S
        return self.at - _BEFORE_S <= observation.at <= end and any(
            pattern.matches(observation.kind, observation.text) for pattern in PROFILES[self.planned.fault].explains
        )


@dataclass(frozen=True)
class ChaosOutcome:
    """Artifacts of the two runs."""

    steps_missing: dict[int, list[int]]
    """Rank → steps without a record."""
    same_weights: bool
    differing_steps: list[int]
    """Steps whose loss or gradient norm differs from the calm run's."""
    goodput: float
    seconds: dict[str, float]
    """Wall time by cause, as `nsa report` counts it."""


@dataclass
class ChaosVerdict:
    plan: ChaosPlan
    played: list[PlayedFault]
    outcome: ChaosOutcome | None
    unexplained: list[Observation] = field(default_factory=list)
    unmet: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.unmet


def name_faults(played: Sequence[PlayedFault], observations: Iterable[Observation]) -> None:
    """Note which observation reports each fault first; one observation reports one fault, the oldest that it fits."""
    for observation in observations:
        for fault in played:
            if fault.named_at is None and fault.at <= observation.at and _reports(observation, fault):
                fault.named_at, fault.named_by = observation.at, str(observation)
                break


def _reports(observation: Observation, fault: PlayedFault) -> bool:
    patterns = PROFILES[fault.planned.fault].named_by
    return any(pattern.matches(observation.kind, observation.text) for pattern in patterns)


def evaluate(
    plan: ChaosPlan,
    played: Sequence[PlayedFault],
    observations: Sequence[Observation],
    outcome: ChaosOutcome | None,
    in_calm_run: Callable[[Observation], bool] = lambda observation: False,
) -> ChaosVerdict:
    """`outcome` is None if the run did not finish; `in_calm_run` tells of what the calm run shows too."""
    verdict = ChaosVerdict(plan, list(played), outcome)
    for fault in played:
        fault.named_at, fault.named_by = None, ""
    name_faults(played, observations)
    verdict.unmet += [text for fault in played for text in _unmet_of(fault)]
    done = {fault.planned for fault in played}
    verdict.unmet += [f"{_label(fault)} was not played" for fault in plan.faults if fault not in done]
    unexplained = (each for each in observations if not any(fault.explains(each) for fault in played))
    verdict.unexplained = [each for each in unexplained if not in_calm_run(each)]
    verdict.unmet += [f"not explained by a fault: {observation}" for observation in verdict.unexplained[:_MOST_SHOWN]]
    if (more := len(verdict.unexplained) - _MOST_SHOWN) > 0:
        verdict.unmet.append(f"not explained by a fault: {more} more")
    if outcome is None:
        verdict.unmet.append("the run did not finish")
    else:
        verdict.unmet += _unmet_at_the_end(plan, outcome)
    return verdict


def found_in_calm_run(calm: Path, observation: Observation) -> bool:
    """Whether the calm run, which computed the same numbers, gives the same finding: noise of the model."""
    if observation.kind not in _OF_NUMBERS or observation.step is None:
        return False
    condition, history = observation.kind.removeprefix("finding:"), RunHistory()
    for beat in artifacts.beats(calm):
        history.add(beat, beat.ts)
        if abs(beat.step - observation.step) > _NEAR_STEPS:
            continue
        if condition in {finding.name for finding in examine(history, now=beat.ts, limits=HealthLimits())}:
            return True
    return False


def read_outcome(plan: ChaosPlan, run_folder: Path, calm: Path) -> ChaosOutcome:
    steps = range(1, plan.steps + 1)
    recorded = {rank: {beat.step for beat in artifacts.beats(run_folder, rank)} for rank in range(RANKS)}
    ours, theirs = artifacts.step_history(run_folder), artifacts.step_history(calm)
    wall = take_snapshot(run_folder).summary.wall
    return ChaosOutcome(
        steps_missing={
            rank: [step for step in steps if step not in recorded_steps] for rank, recorded_steps in recorded.items()
        },
        same_weights=artifacts.same_weights(run_folder, calm),
        differing_steps=[step for step in steps if ours.get(step) != theirs.get(step)],
        goodput=wall.share(TimeCause.PRODUCTIVE) if wall is not None else 0.0,
        seconds={str(cause): seconds for cause, seconds in wall.seconds.items()} if wall is not None else {},
    )


def _unmet_of(fault: PlayedFault) -> list[str]:
    profile, label, unmet = PROFILES[fault.planned.fault], _label(fault.planned), []
    if not profile.absorbed:
        if fault.named_at is None:
            unmet.append(f"{label} was reported by nobody")
        elif (after := fault.named_at - fault.at) > profile.named_within_s:
            unmet.append(f"{label} was reported after {after:.0f} s, not within {profile.named_within_s:.0f} s")
    if fault.continued_at is None:
        unmet.append(f"the run did not continue after {label}")
    return unmet


def _unmet_at_the_end(plan: ChaosPlan, outcome: ChaosOutcome) -> list[str]:
    unmet = [
        f"{len(missing)} steps of rank {rank} have no record, the first is {missing[0]}"
        for rank, missing in outcome.steps_missing.items()
        if missing
    ]
    if outcome.differing_steps:
        unmet.append(
            f"{len(outcome.differing_steps)} steps have another loss or gradient norm than the calm run, the first is "
            f"{outcome.differing_steps[0]}"
        )
    if not outcome.same_weights:
        unmet.append("the final weights are not bitwise equal to those of the calm run")
    if plan.required_goodput is not None and outcome.goodput < plan.required_goodput:
        unmet.append(f"goodput is {outcome.goodput:.1%}, below {plan.required_goodput:.0%}")
    return unmet


def _label(fault: PlannedFault) -> str:
    return f"fault {fault.number} ({fault.fault})"
