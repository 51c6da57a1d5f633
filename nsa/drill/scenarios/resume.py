"""Resume after a fault: the run must finish, where required bitwise equal to an undisturbed run."""

from nsa.drill import artifacts
from nsa.drill.harness import STEPS, DrillHarness, DrillProcess
from nsa.drill.result import DrillResult
from nsa.observe.events import EventKind


def finish(
    harness: DrillHarness,
    result: DrillResult,
    process: DrillProcess,
    *,
    steps: int = STEPS,
    ranks: int = 1,
    same_as_undisturbed: bool = False,
) -> None:
    """Require that a resumed run exits with 0 at its last step, with the undisturbed run's weights where promised."""
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
    if same_as_undisturbed:
        same = artifacts.same_end(harness.run_folder, harness.undisturbed(ranks))
        result.require(same, "the weights or losses differ from those of an undisturbed run")
        result.resumed += (
            ", bitwise equal to an undisturbed run" if same else ", but not bitwise equal to an undisturbed run"
        )
