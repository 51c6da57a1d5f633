"""`nsa report`: one HTML file about a run."""

from pathlib import Path

import typer

from nsa.cli.outputs import require_writable_file
from nsa.cli.terminal import say

DEFAULT_NAME = "report.html"


def report(
    run: Path = typer.Argument(..., metavar="RUN", help="A run folder (train.out_dir)."),
    out: Path = typer.Option(None, "--out", help=f"The file to write; RUN/{DEFAULT_NAME} without it."),
) -> None:
    """Write curves, timeline, goodput, findings, settings with origins and environment into one file for a browser.

    **Example:** `nsa report artifacts/run --out run.html`
    """
    path = out or run / DEFAULT_NAME
    require_writable_file(path)

    from nsa.observe.view.report.run_report import render
    from nsa.observe.view.snapshot import look_once

    write(path, render(look_once(run)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say(f"wrote {path} ({len(text.encode()) / 2**20:.2f} MiB)")
