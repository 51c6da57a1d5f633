"""Seconds of training until a run of a table has the held-out loss that the others end with, as CSV and as a table.

    python -m experiments.nsa_vs_dense.run text_16k --at-once 1
    python -m experiments.nsa_vs_dense.time_to_loss text_16k --beside dense

The target of a seed is the higher of the two last losses, of the variant and of the one it is compared with. Times are
without evaluations, and mean something only if the runs had the machine to themselves, with the same number of threads.
"""

import argparse
import csv
from dataclasses import asdict, dataclass
from itertools import pairwise

from experiments.nsa_vs_dense.results import RESULTS
from experiments.nsa_vs_dense.tables import StudyRun, read_tables
from nsa_train import names
from nsa_train.record.heartbeat_record import read_beats
from nsa_train.watch.run_reader import load


@dataclass(frozen=True)
class LossPoint:
    step: int
    loss: float
    seconds: float
    """Of training, until this evaluation."""


@dataclass(frozen=True)
class TimeToLoss:
    variant: str
    seed: int
    target: float
    """Held-out loss, nats per token."""
    seconds: float
    beside: float
    """Seconds of the other variant to the same loss."""
    last_loss: float
    beside_last_loss: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.beside


def loss_points(run: StudyRun) -> list[LossPoint]:
    """The evaluations of a run that was not interrupted, with the seconds of training before each."""
    training, seconds, last = {0: 0.0}, 0.0, 0
    for beat in read_beats(run.folder / names.heartbeat(0)):
        if beat.msg == names.PROGRESS and beat.step_s is not None:
            seconds += (beat.step - last) * beat.step_s
            training[beat.step], last = seconds, beat.step
    points, evaluating = [], 0.0
    for record in load(run.folder).counted_evaluations():
        if record.step not in training:
            raise ValueError(
                f"{run.folder} logged no time at step {record.step}: train.log_every must divide eval_every"
            )
        points.append(LossPoint(record.step, record.val_loss, training[record.step] - evaluating))
        evaluating += record.seconds
    return points


def seconds_to(points: list[LossPoint], target: float) -> float:
    """Interpolate linearly between the two evaluations around the first that has the target."""
    for before, after in pairwise(points):
        if after.loss <= target:
            share = (before.loss - target) / (before.loss - after.loss)
            return before.seconds + share * (after.seconds - before.seconds)
    raise ValueError(f"no evaluation has a loss of {target} or less")


def compare(variant: StudyRun, beside: StudyRun) -> TimeToLoss:
    mine, theirs = loss_points(variant), loss_points(beside)
    target = max(mine[-1].loss, theirs[-1].loss)
    seconds = seconds_to(mine, target), seconds_to(theirs, target)
    return TimeToLoss(variant.variant, variant.seed, target, *seconds, mine[-1].loss, theirs[-1].loss)


def main() -> None:
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--beside", default="dense", help="the variant to compare with (default dense)")
    options = parser.parse_args()
    finished = [run for run in tables[options.table].runs if run.finished]
    opponents = {run.seed: run for run in finished if run.variant == options.beside}
    comparisons = [compare(run, opponents[run.seed]) for run in finished if run not in opponents.values()]
    with open(RESULTS / f"{options.table}_time.csv", "w", encoding="utf-8", newline="") as file:
        rows = csv.DictWriter(file, [*TimeToLoss.__dataclass_fields__, "ratio"], lineterminator="\n")
        rows.writeheader()
        rows.writerows({**asdict(each), "ratio": f"{each.ratio:.3f}"} for each in comparisons)
    print(
        f"| variant | seed | held-out loss | seconds | seconds of {options.beside} | ratio |\n|---|---|---|---|---|---|"
    )
    for each in comparisons:
        times = f"{each.seconds:,.0f} | {each.beside:,.0f} | {each.ratio:.2f}"
        print(f"| {each.variant} | {each.seed} | {each.target:.3f} | {times} |")


if __name__ == "__main__":
    main()
