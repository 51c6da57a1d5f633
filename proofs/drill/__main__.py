"""`python -m proofs.drill`: checks that this installation detects each fault and recovers."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from nsa.errors import ConfigError
from nsa_train.cli.main import require_finite_numbers, run_app
from nsa_train.cli.outputs import print_line, require_writable_folder, table_console
from nsa_train.cli.startup import sigterm_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from proofs.drill.result import DrillResult

app = typer.Typer(name="drill", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
_ONLY = "Run only this scenario (may be repeated); `--list` names them."
_JOBS = "Scenarios at a time (default: 2, on one core and with --nodes 1)."
_NODES = "Run the scenarios of several nodes: three on this machine, in network namespaces (Linux, root)."
_CHAOS = "One run of this duration (5m, 1h) under random faults of every class; at least 2m."
_SEED = "Of --chaos: the same seed plays the same faults at the same steps."


@app.command()
def drill(
    only: list[str] = typer.Option(None, "--only", metavar="NAME", help=_ONLY),
    keep: Path = typer.Option(None, "--keep", metavar="DIR", help="New folder in which to keep the runs."),
    as_json: bool = typer.Option(False, "--json", help="Print results as JSON; progress goes to stderr."),
    jobs: int = typer.Option(None, "--jobs", min=1, help=_JOBS),
    nodes: bool = typer.Option(False, "--nodes", help=_NODES),
    chaos: str = typer.Option(None, "--chaos", metavar="DURATION", help=_CHAOS),
    seed: int = typer.Option(0, "--seed", min=0, help=_SEED),
    list_only: bool = typer.Option(False, "--list", help="List the scenarios and exit."),
) -> None:
    """Check that this installation detects each fault and recovers: real runs of a tiny model, real faults.

    Prints what detected each fault, what was left behind and whether the run resumed. Exit code 0 if every requirement
    of every scenario holds; else 1, and the run folders are kept. Needs no GPU.

    With `--nodes` the faults are those of several nodes: killed, cut off, slow, back with another address. Nodes are
    namespaces of this machine, whose own network is not touched; exit code 20 where that is not permitted. The table
    adds when the run continued and how many steps it repeated.

    With `--chaos` one training of two ranks meets random faults: kills, hangs, a full disk, a corrupt checkpoint, bad
    servers, NaN, wrong clocks, halts, a lost node where namespaces are permitted. It must end with the weights of a
    calm run, bit for bit; every fault must be reported in time and every problem in the logs explained by a fault. From
    30m on 85 % goodput, as `nsa report` counts it, is required. Steps are paced by sleeping, which changes no number,
    so that the calm run before takes minutes.

    **Example:** `python -m proofs.drill --only killed_rank --only full_disk --keep artifacts/drill`
    """
    from rich.console import Console

    from proofs.drill.chaos.console import run_chaos
    from proofs.drill.chaos.schedule import parse_duration
    from proofs.drill.suite import NODE_SCENARIOS, SCENARIOS, choose

    if list_only:
        for name, scenario in {**({} if nodes else SCENARIOS), **NODE_SCENARIOS}.items():
            print(f"{name:28} {scenario.title}{' (--nodes)' if name in NODE_SCENARIOS else ''}")
        return
    if chaos is not None:
        if only or nodes or jobs:
            raise ConfigError("--chaos is one run with all faults: --only, --nodes and --jobs do not apply. Omit them.")
        parse_duration(chaos)
        folder = _folder(keep)
        console = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
        with sigterm_as_interrupt():
            holds = run_chaos(chaos, seed, folder, console, as_json=as_json)
        _end(folder, keep, holds, console)
    names = choose(only or [], nodes=nodes)
    at_a_time = jobs or (1 if nodes else min(2, len(os.sched_getaffinity(0))))
    folder = _folder(keep)
    console = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    began, rows = time.monotonic(), {}
    with sigterm_as_interrupt():
        for name, row in _run(names, folder, at_a_time, console):
            rows[name] = row
    ordered = [rows[name] for name in names]
    if as_json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in ordered], indent=2))
    else:
        table_console().print(_table(ordered))
        for row in ordered:
            for unmet in row.unmet:
                print_line(f"{row.fault}: {unmet}")
    bad = sum(not row.holds for row in ordered)
    minutes = f"{(time.monotonic() - began) / 60:.1f} minutes"
    console.print(f"{len(ordered) - bad} of {len(ordered)} rows hold, {minutes}")
    _end(folder, keep, not bad, console)


def _end(folder: Path, keep: Path | None, holds: bool, console: "Console") -> NoReturn:
    """Remove the runs unless something failed or they were asked for, and exit."""
    if keep is None and holds:
        shutil.rmtree(folder)
    else:
        console.print(f"runs kept in {folder}")
    raise typer.Exit(0 if holds else 1)


def _folder(keep: Path | None) -> Path:
    if keep is None:
        return Path(tempfile.mkdtemp(prefix="nsa-drill-"))
    require_writable_folder(keep)
    if keep.exists() and any(keep.iterdir()):
        raise ConfigError(f"--keep {keep} is not empty: the drill needs an empty folder. Name a new one.")
    keep.mkdir(parents=True, exist_ok=True)
    return keep.absolute()


def _run(names: list[str], folder: Path, jobs: int, console: "Console") -> "Iterator[tuple[str, DrillResult]]":
    """Print each result when it is ready; on a terminal the table grows below."""
    from rich.live import Live

    from proofs.drill.suite import DrillSuite, scenario

    done: dict[str, DrillResult] = {}
    with DrillSuite(folder, jobs) as suite, Live(console=console, transient=True, auto_refresh=False) as live:
        if not console.is_terminal:
            console.print(f"{len(names)} scenarios, {jobs} at a time, in {folder}")
        for name, row in suite.run(names):
            done[name] = row
            if console.is_terminal:
                rows = [done.get(other) or scenario(other).title for other in names]
                live.update(_table(rows), refresh=True)
            else:
                console.print(f"{row.fault}: {_verdict(row)}, {row.took_s:.0f} s")
            yield name, row


def _table(rows: "Sequence[DrillResult | str]") -> "Table":
    """Rows, and the titles of those that are not finished yet."""
    from rich.table import Table
    from rich.text import Text

    from proofs.drill.result import DrillResult

    of_nodes = any(isinstance(row, DrillResult) and row.continued_s is not None for row in rows)
    columns = ["fault", "detected by", "after", "left behind", "resumed", "verdict"]
    columns[3:3] = ["continued after", "steps repeated"] if of_nodes else []
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        if isinstance(row, str):
            table.add_row(row, style="dim")
            continue
        repeated = "" if row.repeated_steps is None else str(row.repeated_steps)
        cost = [_seconds(row.continued_s), repeated] if of_nodes else []
        verdict = Text(_verdict(row), "green" if row.holds else "bold red")
        table.add_row(row.fault, row.detected_by, _seconds(row.after_s), *cost, row.left_behind, row.resumed, verdict)
    return table


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} s"


def _verdict(row: "DrillResult") -> str:
    return "holds" if row.holds else f"FAILS ({len(row.unmet)})"


require_finite_numbers(app)

if __name__ == "__main__":
    run_app(app, "python -m proofs.drill")
