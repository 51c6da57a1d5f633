"""`nsa report`: writes the HTML report of a run."""

from pathlib import Path

import typer

from nsa.cli.outputs import print_line, require_writable_file

DEFAULT_NAME = "report.html"


def report(
    run: Path = typer.Argument(..., metavar="RUN", help="Run folder (train.out_dir)."),
    out: Path = typer.Option(None, "--out", help=f"File to write; default: RUN/{DEFAULT_NAME}."),
) -> None:
    """Write an HTML report of a run: curves, timeline, goodput, findings, settings and environment in one file.

    **Example:** `nsa report artifacts/run --out run.html`
    """
    path = out or run / DEFAULT_NAME
    require_writable_file(path)

    from nsa.observe.view.report.run_report import render
    from nsa.observe.view.snapshot import take_snapshot

    write(path, render(take_snapshot(run)))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print_line(f"wrote {path} ({len(text.encode()) / 2**20:.2f} MiB)")
