"""Write a table's results from its runs: curves and last figures as CSV, a picture of the curves, a table for the docs.

    python -m experiments.nsa_vs_dense.results far_recall

Runs that are not finished appear with what they have. `nsa eval RUN --tasks selection` is called where a finished run
of a table of accuracies has no such result yet.
"""

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from experiments.nsa_vs_dense.curves import draw_curves
from experiments.nsa_vs_dense.tables import HERE, StudyRun, StudyTable, read_tables
from nsa_train.record.evaluations import read_evaluations
from nsa_train.record.run_data import RunData
from nsa_train.watch.run_reader import load

RESULTS = HERE / "results"
SOLVED = 0.99
"""Accuracy from which a synthetic task counts as solved."""


@dataclass(frozen=True)
class RunResult:
    variant: str
    seed: int
    step: int
    loss: float
    """Nats per token, of the last evaluation."""
    accuracy: float
    solved_at: int | None
    """The first evaluation with an accuracy of `SOLVED` or more."""
    fact_hit: float | None
    """Share of questions whose fact lies in a block that some layer chose."""


def result(run: StudyRun, data: RunData) -> RunResult | None:
    """Read the result of a run; None without any evaluation."""
    records = data.counted_evaluations()
    if not records:
        return None
    last = records[-1]
    solved = next((record.step for record in records if record.val_accuracy >= SOLVED), None)
    hits = [
        row["fact_hit"] for evaluation in data.model_evaluations for row in evaluation.facts if row.get("layer") is None
    ]
    hit = hits[-1] if hits else None
    return RunResult(run.variant, run.seed, last.step, last.val_loss, last.val_accuracy, solved, hit)


def evaluate_selection(run: StudyRun) -> None:
    command = [sys.executable, "-m", "nsa_train.cli", "eval", str(run.folder), "--tasks", "selection", "--rows", "32"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def summary(results: Sequence[RunResult]) -> str:
    """Markdown: one row per variant, the seeds' mean and range."""
    lines = [
        "| variant | seeds | step | held-out loss | accuracy | solved at step | fact found |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in dict.fromkeys(each.variant for each in results):
        own = [each for each in results if each.variant == variant]
        solved = [str(each.solved_at) if each.solved_at else "not" for each in own]
        hits = [each.fact_hit for each in own if each.fact_hit is not None]
        lines.append(
            f"| {variant} | {len(own)} | {max(each.step for each in own):,} | {_spread(e.loss for e in own)} | "
            f"{_spread(e.accuracy for e in own)} | {', '.join(solved)} | {_spread(hits) if hits else '–'} |"
        )
    return "\n".join(lines) + "\n"


def _spread(values: Iterable[float]) -> str:
    numbers = list(values)
    low, high = min(numbers), max(numbers)
    return f"{fmean(numbers):.3f}" + (f" ({low:.3f}–{high:.3f})" if len(numbers) > 1 else "")


def write(table: StudyTable, folder: Path) -> str:
    """Write all files of a table; returns its summary."""
    folder.mkdir(parents=True, exist_ok=True)
    data = {run: load(run.folder) for run in table.runs if run.folder.exists()}
    curves = {run: run_data.counted_evaluations() for run, run_data in data.items()}
    with open(folder / f"{table.name}_curves.csv", "w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("variant", "seed", "step", "loss", "accuracy"))
        for run, records in curves.items():
            rows.writerows(
                (run.variant, run.seed, r.step, f"{r.val_loss:.5f}", f"{r.val_accuracy:.5f}") for r in records
            )
    results = [row for run, own in data.items() if (row := result(run, own))]
    with open(folder / f"{table.name}.csv", "w", encoding="utf-8", newline="") as file:
        named = csv.DictWriter(file, RunResult.__dataclass_fields__, lineterminator="\n")
        named.writeheader()
        named.writerows(asdict(each) for each in results)
    (folder / f"{table.name}.svg").write_text(draw_curves(table, curves), encoding="utf-8")
    text = summary(results)
    (folder / f"{table.name}.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    options = parser.parse_args()
    table = tables[options.table]
    for run in table.runs:
        known = any(evaluation.facts for evaluation in read_evaluations(run.folder))
        if run.finished and run.selects and table.drawn == "accuracy" and not known:
            print(f"nsa eval {run.folder} --tasks selection", flush=True)
            evaluate_selection(run)
    print(write(table, RESULTS))


if __name__ == "__main__":
    main()
