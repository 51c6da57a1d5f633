"""`nsa report` and `nsa compare`: the HTML report of a run; settings, results and loss curves of several runs."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError
from nsa_train.cli.early_checks import find_run
from nsa_train.cli.outputs import print_error, print_json, print_line, require_writable_file
from nsa_train.terminal_text import printable

if TYPE_CHECKING:
    from nsa_train.record.run_data import RunData

DEFAULT_NAME = "report.html"
_MOST_RUNS = 6
_STYLES = ("cyan", "magenta", "green", "yellow", "red", "blue")


def report(
    run: Path = typer.Argument(..., metavar="RUN", callback=find_run, help="Run folder (train.out_dir)."),
    out: Path = typer.Option(None, "--out", help=f"File to write; default: RUN/{DEFAULT_NAME}."),
) -> None:
    """Write an HTML report of a run: curves, timeline, goodput, findings, settings and environment in one file.

    **Example:** `nsa report artifacts/run --out run.html`
    """
    path = out or run / DEFAULT_NAME
    require_writable_file(path)

    from nsa_train.watch.view.run_report import render
    from nsa_train.watch.view.summary import take_snapshot

    _write(path, render(take_snapshot(run)))


def compare(
    runs: list[Path] = typer.Argument(..., metavar="RUN RUN", help=f"2 to {_MOST_RUNS} run folders."),
    out: Path = typer.Option(None, "--out", help="Also write an HTML report with all curves on common axes."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: results of every run, settings that differ."),
) -> None:
    """Compare runs: differing settings, results side by side, loss curves on common axes.

    Exit code: 0 if the runs could be read, whatever they show; 20 if one is no run folder.

    **Example:** `nsa compare artifacts/a artifacts/b --out compare.html`
    """
    if not 2 <= len(runs) <= _MOST_RUNS:
        raise ConfigError(
            f"nsa compare was given {len(runs)} run folder(s) and takes 2 to {_MOST_RUNS}: more curves than "
            f"that cannot be distinguished. Give 2 to {_MOST_RUNS} run folders."
        )
    require_writable_file(out)

    from nsa_train.watch.run_reader import load

    loaded = [load(folder) for folder in runs]
    if as_json:
        print_json(_comparison(loaded))
    else:
        _show(loaded)
    if out is not None:
        from nsa_train.watch.view.run_report import render_comparison

        _write(out, render_comparison(loaded), to_stderr=as_json)


def _comparison(runs: "list[RunData]") -> dict[str, Any]:
    """The comparison as `--json` prints it. Times are in seconds; null is unknown."""
    from nsa_train.watch.view.summary import differing_settings, summarize

    summaries = []
    for run in runs:
        summary = summarize(run)
        values = {name: value for name, value in asdict(summary).items() if name != "wall"}
        wall_s = summary.wall.total if summary.wall is not None else None
        summaries.append({"folder": str(run.folder), **values, "goodput": summary.goodput, "wall_s": wall_s})
    return {"runs": summaries, "differing_settings": dict(differing_settings(runs))}


def _show(loaded: "list[RunData]") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from nsa_train.watch.view.run_report import value_text
    from nsa_train.watch.view.summary import differing_settings, figures, run_labels, summarize
    from nsa_train.watch.view.terminal_plot import PlotCurve, braille_plot, plain_ascii, title

    console = Console(highlight=False, markup=False)
    unicode = console.encoding.startswith("utf")
    names = run_labels(loaded)

    def show(head: str, rows: list[tuple[str, list[str]]]) -> None:
        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        table.add_column(head)
        for name, style in zip(names, _STYLES, strict=False):
            table.add_column(Text(name, f"bold {style}"), overflow="fold")
        for name, values in rows:
            table.add_row(Text(printable(name), "dim"), *map(Text, values))
        console.print(table)

    show("", figures([summarize(run) for run in loaded]))
    console.print()
    differing = [(key, [value_text(value) for value in values]) for key, values in differing_settings(loaded)]
    if differing:
        show("settings that differ", differing)
    else:
        console.print("all settings are equal")
    console.print()
    curves = [
        PlotCurve(run.lead.counted("step"), run.lead.counted("loss"), style, letter=name[0])
        for run, name, style in zip(loaded, names, _STYLES, strict=False)
    ]
    width = min(console.width, 120)
    lines = [title("loss", "nats per token", width), *braille_plot(curves, width, 16)]
    for line in lines:
        console.print(line if unicode else plain_ascii(line), no_wrap=True, overflow="crop")


def _write(path: Path, text: str, *, to_stderr: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    say = print_error if to_stderr else print_line
    say(f"wrote {path} ({len(text.encode()) / 2**20:.2f} MiB)")
