"""`nsa bench`: what the attention costs on this machine, beside dense attention."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nsa.cli.outputs import require_writable_file
from nsa.errors import ConfigError

if TYPE_CHECKING:
    from nsa.bench.suite import BenchRequest

app = typer.Typer(
    help="Measure the attention beside dense SDPA: one process, interleaved rounds, no ratio without a right answer.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Lengths = Annotated[str, typer.Option(help="Tokens, e.g. 2k,4k,8k; k is 1,024.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16, fp16, several with commas; all contenders in the same one.")]
ShapeName = Annotated[
    str,
    typer.Option(help="base (12 heads, 2 groups, d=64), gqa16 (16 heads per group), paper (64 heads, 192/128), tiny."),
]
Backend = Annotated[
    list[str] | None, typer.Option(help="Race this backend; repeat for more. Default: all that `auto` may choose.")
]
Peers = Annotated[bool, typer.Option(help="Race other implementations too, where they are installed.")]
Data = Annotated[
    str,
    typer.Option(help="random: neighbours choose unrelated blocks, the worst case; smooth: they resemble each other."),
]
Device = Annotated[str, typer.Option(help="cpu, or cuda: a GPU, with its own clock, memory and peaks.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads, on as many cores; 0: all cores.")]
Budget = Annotated[float, typer.Option("--budget-s", min=0.0, help="Seconds of timing per figure; at least one round.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write the record here: every sample, machine, commit.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the ratios over length here (SVG).")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")]


@app.command()
def attention(
    lengths: Lengths = "2k,4k,8k",
    dtype: Dtype = "fp32,bf16",
    shape: ShapeName = "base",
    backend: Backend = None,
    peers: Peers = True,
    part: Annotated[str, typer.Option(help="all, or one of compressed, select, selected, sliding alone.")] = "all",
    passes: Annotated[str, typer.Option(help="forward, backward (forward and backward), or both figures.")] = "both",
    data: Data = "random",
    device: Device = "cpu",
    threads: Threads = 0,
    budget_s: Budget = 30.0,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Attention on given queries, keys and values, forward and with backward, against dense causal SDPA.

    **Ours**: select, compressed, selected and sliding attention, mixed by gates; each branch has its own keys and
    values, compressed ones are given. **Dense**: SDPA over one set of keys and values per group, in its fastest form
    and layout here. Projections are in neither. A ratio is printed only if, in this run, outputs and gradients of both
    sides match the reference.

    **Example:** `nsa bench attention --lengths 2k,4k --dtype bf16 --threads 1 --json result.json --plot result.svg`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("attention", lengths, dtype, shape, tuple(backend or ()), peers, part, passes, data, threads,
    budget_s,
              device), json, plot, markdown)  # fmt: skip


@app.command()
def prefill(
    lengths: Lengths = "2k,4k,8k",
    dtype: Dtype = "fp32,bf16",
    shape: ShapeName = "base",
    backend: Backend = None,
    data: Data = "random",
    device: Device = "cpu",
    threads: Threads = 0,
    budget_s: Budget = 30.0,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """A prompt into a new cache, without projections, against SDPA over the whole prompt at once.

    **Ours** takes chunks of 2,048 tokens: append to the cache, compress, select, attend, mix. **Dense** copies keys
    and values into its cache and attends once, causally, which suits it best.

    **Example:** `nsa bench prefill --lengths 4k --dtype fp32`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("prefill", lengths, dtype, shape, tuple(backend or ()), False, data=data, threads=threads,
              budget_s=budget_s, device=device), json, plot, markdown)  # fmt: skip


@app.command()
def decode(
    lengths: Lengths = "4k,8k,16k,32k,64k",
    dtype: Dtype = "fp32,bf16",
    shape: ShapeName = "base",
    backend: Backend = None,
    data: Data = "random",
    device: Device = "cpu",
    threads: Threads = 0,
    budget_s: Budget = 10.0,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """One token, batch 1, on a cache that already holds so many, against SDPA with one query over a cache as long.

    **Ours** is the module's cached step without projections: append, compress where a block is full, select, attend,
    mix. **Dense** writes the key and value into a preallocated contiguous cache and attends over what it holds.

    **Example:** `nsa bench decode --lengths 4k,64k --dtype bf16`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("decode", lengths, dtype, shape, tuple(backend or ()), False, data=data, threads=threads,
              budget_s=budget_s, device=device), json, plot, markdown)  # fmt: skip


@app.command()
def train(
    lengths: Lengths = "2k",
    dtype: Dtype = "bf16",
    backend: Backend = None,
    device: Device = "cpu",
    threads: Threads = 0,
    budget_s: Budget = 60.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """A training step of the 125M configuration against the same model with dense attention: 12 layers, dim 768.

    Forward, loss, backward, clipping and AdamW on one row of tokens, vocabulary 32,768; bf16 is autocast over fp32
    weights. The dense model has the same queries and one set of keys and values per group.

    **Example:** `nsa bench train --lengths 2k --dtype bf16`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("train", lengths, dtype, "base", tuple(backend or ()), False, threads=threads, budget_s=budget_s,
              device=device), json, None, markdown)  # fmt: skip


@app.command()
def memory(
    lengths: Lengths = "4k,8k,16k,32k",
    dtype: Dtype = "fp32",
    shape: ShapeName = "base",
    backend: Backend = None,
    device: Device = "cpu",
    threads: Threads = 0,
    budget_s: Budget = 60.0,
    json: JsonFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Memory of forward and backward above the inputs, by length, each in a process of its own.

    Linear means that the last column does not grow. A measurement is given up after 20 times `--budget-s`.

    **Example:** `nsa bench memory --lengths 4k,8k,16k`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("memory", lengths, dtype, shape, tuple(backend or ()), False, threads=threads, budget_s=budget_s,
              device=device), json, None, markdown)  # fmt: skip


@app.command()
def machine(device: Device = "cpu", threads: Threads = 0, json: JsonFile = None) -> None:
    """What the machine can do: matrix products in fp32 and bf16, memory bandwidth, with one thread and with all.

    **Example:** `nsa bench machine --json machine.json`
    """
    from nsa.bench.suite import BenchRequest

    _run(BenchRequest("machine", "1", threads=threads, device=device), json, None, None)


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def model() -> None:
    """Moved: the GPU performance model is `python -m tools.perf_model` in a checkout, with the same options."""
    raise ConfigError(
        "`nsa bench model` has moved: the GPU performance model is not part of the installed package. In a checkout, "
        "run: python -m tools.perf_model (same options)."
    )


def _run(wish: "BenchRequest", json: Path | None, plot: Path | None, markdown: Path | None) -> None:
    require_writable_file(json, plot, markdown)

    from nsa.bench import plot as plotting
    from nsa.bench import report as reports
    from nsa.bench.suite import new_report, run

    report = new_report(" ".join(["nsa", *sys.argv[1:]]), wish.device)
    console = stdout_console()
    console.print(reports.machine_line(report.machine))
    if warning := reports.busy(report.machine):
        console.print(warning, style="yellow")
    with progress() as say:
        for result in run(wish, report, say):
            if isinstance(result, reports.MachinePeaks):
                console.print(reports.peaks_line(result))
            elif json is not None:  # a run that is cut short leaves what it had
                report.write(json)
    if report.figures:
        _print_table(console, reports.COLUMNS, [row for figure in report.figures for row in reports.rows(figure)])
        for note in dict.fromkeys(note for figure in report.figures for note in reports.notes(figure)):
            console.print(note, markup=False)
    if report.memory:
        _print_table(console, reports.MEMORY_COLUMNS, [reports.memory_row(measured) for measured in report.memory])
    if json is not None:
        report.write(json)
    if plot is not None:
        plotting.write(report, plot)
    if markdown is not None:
        markdown.parent.mkdir(parents=True, exist_ok=True)
        markdown.write_text(report.to_markdown(), encoding="utf-8")


def stdout_console() -> Console:
    """Tables piped to a file keep their rows whole."""
    return Console(width=None if Console().is_terminal else 200, highlight=False)


def _print_table(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    previous: Any = None
    for row in rows:
        if previous not in (None, row[:3]):
            table.add_section()
        table.add_row(*row, style="dim" if row[3].startswith("dense") else None)
        previous = row[:3]
    console.print(table)


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal; lines that follow each other elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status("starting") as status:
        yield status.update
