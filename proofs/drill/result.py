"""Result of one drill scenario: what detected the fault, what was left behind, whether the run resumed and finished."""

from dataclasses import dataclass, field

from nsa_train.record.events import EventKind
from proofs.drill import artifacts
from proofs.drill.harness import STEPS, DrillHarness, DrillProcess


@dataclass
class DrillResult:
    """Filled in while a scenario runs; `unmet` lists every requirement that failed."""

    fault: str
    detected_by: str = ""
    after_s: float | None = None
    """Seconds from the fault to the record that reports it."""
    continued_s: float | None = None
    """Seconds from the fault to the first step after the interruption, if it interrupted a run that was resumed. The
    drill resumes at once where the launcher does not: the time until somebody notices is not in it."""
    repeated_steps: int | None = None
    """Steps that were done again, if it interrupted a run."""
    left_behind: str = ""
    resumed: str = ""
    unmet: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def holds(self) -> bool:
        return not self.unmet

    def require(self, holds: object, otherwise: str) -> None:
        if not holds:
            self.unmet.append(otherwise)

    def require_equal(self, what: str, value: object, expected: object) -> None:
        self.require(value == expected, f"{what} is {value!r}, not {expected!r}")

    def detected(self, by: str, after_s: float, *, within_s: float) -> None:
        self.detected_by, self.after_s = by, after_s
        self.require(0 <= after_s <= within_s, f"found after {after_s:.1f} s, not within {within_s:.1f} s")


def finish(
    harness: DrillHarness,
    result: DrillResult,
    process: DrillProcess,
    *,
    steps: int = STEPS,
    ranks: int = 1,
    same_as_undisturbed: bool = False,
    fault_at: float | None = None,
) -> None:
    """Require that a resumed run exits with 0 at its last step, with the undisturbed run's weights where promised.

    fault_at: when a running run was interrupted; what that cost is measured.
    """
    code = process.wait()
    result.require_equal("exit code of the resumed run", code, 0)
    again = artifacts.events(harness.run_folder, EventKind.RESTART)
    origin = f"from step {again[-1].step}" if again else "from the beginning"
    if code != 0:
        result.resumed = f"no: exit {code}"
        return
    result.require_equal("last step", artifacts.last_step(harness.run_folder), steps)
    result.require_equal("newest verified checkpoint", artifacts.newest_good_step(harness.run_folder), steps)
    result.resumed = f"yes, {origin}"
    if fault_at is not None:
        measure_interruption(harness, result, fault_at)
    if same_as_undisturbed:
        same = artifacts.same_end(harness.run_folder, harness.undisturbed(ranks))
        result.require(same, "the weights or losses differ from those of an undisturbed run")
        result.resumed += (
            ", bitwise equal to an undisturbed run" if same else ", but not bitwise equal to an undisturbed run"
        )


def measure_interruption(harness: DrillHarness, result: DrillResult, fault_at: float) -> None:
    """Record when the first step after the last start was done, and how many steps were done again."""
    records = artifacts.beats(harness.run_folder)
    starts = artifacts.events(harness.run_folder, EventKind.START) + artifacts.events(
        harness.run_folder, EventKind.RESTART
    )
    started_at = max((event.ts for event in starts if event.ts > fault_at), default=fault_at)
    after = [beat.ts for beat in records if beat.ts > started_at]
    result.require(after, "no step was recorded after the fault")
    if after:
        result.continued_s = min(after) - fault_at
        result.repeated_steps = len(records) - len({beat.step for beat in records})
