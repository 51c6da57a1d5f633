"""After a fault: start the run again as an operator would, and see whether it ends as if nothing had happened."""

from nsa.drill import artifacts
from nsa.drill.harness import STEPS, DrillHarness, DrillProcess
from nsa.drill.result import DrillResult
from nsa.observe.events import EventKind


def finish(
    stage: DrillHarness,
    row: DrillResult,
    process: DrillProcess,
    *,
    steps: int = STEPS,
    ranks: int = 1,
    like_calm: bool = False,
) -> None:
    """Demand that a resumed run ends with 0, at its last step, and where that is promised with the calm one's bits."""
    code = process.end()
    row.demand_equal("exit code of the resumed run", code, 0)
    again = artifacts.events(stage.run, EventKind.RESTART)
    origin = f"from step {again[-1].step}" if again else "from the beginning"
    if code != 0:
        row.resumed = f"no: exit {code}"
        return
    row.demand_equal("last step", artifacts.last_step(stage.run), steps)
    row.demand_equal("newest verified checkpoint", artifacts.newest_good_step(stage.run), steps)
    row.resumed = f"yes, {origin}"
    if like_calm:
        same = artifacts.same_end(stage.run, stage.calm(ranks))
        row.demand(same, "the weights or losses differ from those of a calm run")
        row.resumed += ", bits of the calm run" if same else ", but with other bits than the calm run"
