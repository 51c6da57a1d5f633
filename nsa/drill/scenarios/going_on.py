"""After a fault: start the run again as an operator would, and see whether it ends as if nothing had happened."""

from nsa.drill import evidence
from nsa.drill.row import Row
from nsa.drill.stage import STEPS, Process, Stage
from nsa.observe.events import Kind


def finish(
    stage: Stage, row: Row, process: Process, *, steps: int = STEPS, ranks: int = 1, like_calm: bool = False
) -> None:
    """Demand that a resumed run ends with 0, at its last step, and where that is promised with the calm one's bits."""
    code = process.end()
    row.demand_equal("exit code of the resumed run", code, 0)
    again = evidence.events(stage.run, Kind.RESTART)
    origin = f"from step {again[-1].step}" if again else "from the beginning"
    if code != 0:
        row.resumed = f"no: exit {code}"
        return
    row.demand_equal("last step", evidence.last_step(stage.run), steps)
    row.demand_equal("newest verified checkpoint", evidence.newest_good_step(stage.run), steps)
    row.resumed = f"yes, {origin}"
    if like_calm:
        same = evidence.same_end(stage.run, stage.calm(ranks))
        row.demand(same, "the weights or losses differ from those of a calm run")
        row.resumed += ", bits of the calm run" if same else ", but with other bits than the calm run"
