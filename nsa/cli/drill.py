"""`nsa drill`: checks that this installation detects each fault and recovers."""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.cli.outputs import print_line, require_writable_folder
from nsa.cli.sigterm import sigterm_as_interrupt
from nsa.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from nsa.drill.result import DrillResult

_WIDTH = 170  # of a table that goes to a file
_ONLY = "Run only this scenario (may be repeated); `--list` names them."


def drill(
    only: list[str] = typer.Option(None, "--only", metavar="NAME", help=_ONLY),
    keep: Path = typer.Option(None, "--keep", metavar="DIR", help="New folder in which to keep the runs."),
    as_json: bool = typer.Option(False, "--json", help="Print results as JSON; progress goes to stderr."),
    jobs: int = typer.Option(None, "--jobs", min=1, help="Scenarios at a time (default: 2, on one core 1)."),
    list_only: bool = typer.Option(False, "--list", help="List the scenarios and exit."),
) -> None:
    """Check that this installation detects each fault and recovers: real runs of a tiny model, real faults.

    Prints what detected each fault, what was left behind and whether the run resumed. Exit code 0 if every requirement
    of every scenario holds; else 1, and the run folders are kept. Needs no GPU.

    **Example:** `nsa drill --only killed_rank --only full_disk --keep artifacts/drill`
    """
    from rich.console import Console

    from nsa.drill.suite import SCENARIOS, choose

    if list_only:
        for name, scenario in SCENARIOS.items():
            print(f"{name:16} {scenario.title}")
        return
    names = choose(only or [])
    folder = _folder(keep)
    console = Console(stderr=as_json, highlight=False, markup=False, soft_wrap=True)
    began, rows = time.monotonic(), {}
    with sigterm_as_interrupt():
        for name, row in _run(names, folder, jobs or min(2, len(os.sched_getaffinity(0))), console):
            rows[name] = row
    ordered = [rows[name] for name in names]
    if as_json:
        print(json.dumps([{**asdict(row), "holds": row.holds} for row in ordered], indent=2))
    else:
        wide = console if console.is_terminal else Console(width=_WIDTH, highlight=False, markup=False)
        wide.print(_table(ordered))
        for row in ordered:
            for unmet in row.unmet:
                print_line(f"{row.fault}: {unmet}")
    bad = sum(not row.holds for row in ordered)
    minutes = f"{(time.monotonic() - began) / 60:.1f} minutes"
    console.print(f"{len(ordered) - bad} of {len(ordered)} rows hold, {minutes}")
    if keep is None and not bad:
        shutil.rmtree(folder)
    else:
        console.print(f"runs kept in {folder}")
    raise typer.Exit(1 if bad else 0)


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

    from nsa.drill.suite import SCENARIOS, DrillSuite

    done: dict[str, DrillResult] = {}
    with DrillSuite(folder, jobs) as suite, Live(console=console, transient=True, auto_refresh=False) as live:
        if not console.is_terminal:
            console.print(f"{len(names)} scenarios, {jobs} at a time, in {folder}")
        for name, row in suite.run(names):
            done[name] = row
            if console.is_terminal:
                rows = [done.get(other) or SCENARIOS[other].title for other in names]
                live.update(_table(rows), refresh=True)
            else:
                console.print(f"{row.fault}: {_verdict(row)}, {row.took_s:.0f} s")
            yield name, row


def _table(rows: "Sequence[DrillResult | str]") -> "Table":
    """Rows, and the titles of those that are not finished yet."""
    from rich.table import Table
    from rich.text import Text

    columns = ("fault", "detected by", "after", "left behind", "resumed", "verdict")
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        if isinstance(row, str):
            table.add_row(row, style="dim")
            continue
        after = "" if row.after_s is None else f"{row.after_s:.1f} s"
        style = "green" if row.holds else "bold red"
        table.add_row(row.fault, row.detected_by, after, row.left_behind, row.resumed, Text(_verdict(row), style))
    return table


def _verdict(row: "DrillResult") -> str:
    return "holds" if row.holds else f"FAILS ({len(row.unmet)})"
