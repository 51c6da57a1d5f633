"""`python -m proofs.drill --chaos`: prints the progress of a chaos drill, the table of its faults and the verdict."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa_train.cli.outputs import print_line, table_console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proofs.drill.chaos.run import ChaosProgress
    from proofs.drill.chaos.verdict import ChaosVerdict, PlayedFault

_MOST_WORDS = 70


def run_chaos(duration: str, seed: int, folder: Path, console: "Console", *, as_json: bool) -> bool:
    """Run it and print the result; whether every requirement holds."""
    from proofs.drill.chaos.run import ChaosDrill, unplayable
    from proofs.drill.chaos.schedule import make_plan, parse_duration

    plan = make_plan(seed, parse_duration(duration), unplayable())
    console.print(f"chaos for {duration}, seed {seed}: {plan.steps} steps, {len(plan.faults)} faults, in {folder}")
    stop_event = threading.Event()
    try:
        verdict = ChaosDrill(folder, plan, stop_event, lambda progress: console.print(_progress(progress))).run()
    finally:
        stop_event.set()
    record = to_json(verdict)
    (folder / "verdict.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        _print_tables(verdict)
    console.print(_summary(verdict))
    return verdict.holds


def to_json(verdict: "ChaosVerdict") -> dict[str, Any]:
    plan, outcome = verdict.plan, verdict.outcome
    return {
        "seed": plan.seed,
        "duration_s": plan.duration_s,
        "steps": plan.steps,
        "faults": [_fault_json(fault) for fault in verdict.played],
        "not_played": {fault.value: why for fault, why in plan.not_played.items()},
        "goodput": outcome.goodput if outcome is not None else None,
        "required_goodput": plan.required_goodput,
        "seconds": outcome.seconds if outcome is not None else {},
        "same_weights": outcome is not None and outcome.same_weights,
        "differing_steps": outcome.differing_steps if outcome is not None else None,
        "unexplained": [str(observation) for observation in verdict.unexplained],
        "unmet": verdict.unmet,
        "holds": verdict.holds,
    }


def _fault_json(fault: "PlayedFault") -> dict[str, Any]:
    planned = fault.planned
    return {
        "fault": planned.fault.value,
        "step": planned.step,
        "victim": planned.victim,
        "variant": planned.variant,
        "follows": planned.after_s is not None,
        "named_by": fault.named_by,
        "named_s": None if fault.named_at is None else fault.named_at - fault.at,
        "continued_s": None if fault.continued_at is None else fault.continued_at - fault.at,
        "repeated_steps": fault.repeated_steps,
    }


def _progress(progress: "ChaosProgress") -> str:
    goodput = "" if progress.goodput is None else f", goodput {progress.goodput:.0%}"
    news = f": {progress.news}" if progress.news else ""
    minutes, seconds = divmod(int(progress.elapsed_s), 60)
    return (
        f"{minutes:3d}:{seconds:02d}  step {progress.step} of {progress.steps}, {progress.played} of "
        f"{progress.faults} faults{goodput}{news}"
    )


def _print_tables(verdict: "ChaosVerdict") -> None:
    console = table_console()
    console.print(_fault_table(verdict))
    console.print(_class_table(verdict))
    for fault, why in verdict.plan.not_played.items():
        print_line(f"not played: {fault} ({why})")
    for unmet in verdict.unmet:
        print_line(f"unmet: {unmet}")


def _fault_table(verdict: "ChaosVerdict") -> "Table":
    from rich.table import Table

    from proofs.drill.chaos.fault_classes import PROFILES

    table = Table(
        "fault", "at step", "rank or node", "reported by", "after", "continued after", "steps repeated",
        box=None, pad_edge=False, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for fault in verdict.played:
        planned = fault.planned
        at = "while recovering" if planned.after_s is not None else str(planned.step)
        absorbed = "nobody, as required" if PROFILES[planned.fault].absorbed else ""
        table.add_row(
            f"{planned.fault}{f' ({planned.variant})' if planned.variant else ''}",
            at,
            str(planned.victim),
            fault.named_by[:_MOST_WORDS] or absorbed,
            _seconds(fault.at, fault.named_at),
            _seconds(fault.at, fault.continued_at),
            str(fault.repeated_steps),
        )
    return table


def _class_table(verdict: "ChaosVerdict") -> "Table":
    from rich.table import Table

    from proofs.drill.chaos.fault_classes import PROFILES

    table = Table("class", "what", "played", "slowest report", "slowest continuation", box=None, padding=(0, 2, 0, 0))
    for name, profile in PROFILES.items():
        of_class = [fault for fault in verdict.played if fault.planned.fault is name]
        named = [fault.named_at - fault.at for fault in of_class if fault.named_at is not None]
        continued = [fault.continued_at - fault.at for fault in of_class if fault.continued_at is not None]
        table.add_row(name, profile.title, str(len(of_class)), *(_slowest(each) for each in (named, continued)))
    return table


def _summary(verdict: "ChaosVerdict") -> str:
    return "; ".join(_summary_parts(verdict))


def _summary_parts(verdict: "ChaosVerdict") -> Iterator[str]:
    outcome, required = verdict.outcome, verdict.plan.required_goodput
    yield f"{len(verdict.played)} faults of {len({fault.planned.fault for fault in verdict.played})} classes"
    if outcome is not None:
        yield f"goodput {outcome.goodput:.1%}{f' ({required:.0%} required)' if required is not None else ''}"
        equal = outcome.same_weights and not outcome.differing_steps
        yield f"{'bitwise equal' if equal else 'NOT equal'} to the calm run"
    yield "holds" if verdict.holds else f"FAILS ({len(verdict.unmet)})"


def _seconds(since: float, at: float | None) -> str:
    return "" if at is None else f"{at - since:.1f} s"


def _slowest(seconds: list[float]) -> str:
    return f"{max(seconds):.1f} s" if seconds else ""
