"""Modelled times of the Triton kernels on a GPU that is not present: `python -m proofs.perf_model --gpu a100`."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console
from rich.table import Table

from nsa.bench.machine import describe_machine
from nsa.errors import ConfigError, NSAError
from nsa.options import Checkpointing
from nsa.token_counts import spell
from nsa_train.cli.bench import (
    Data,
    Dtype,
    JsonFile,
    Lengths,
    MarkdownFile,
    PlotFile,
    ShapeName,
    progress,
)
from nsa_train.cli.outputs import require_writable_file, table_console
from nsa_train.config.load import load
from proofs.perf_model import fit as fitting
from proofs.perf_model import report as reports
from proofs.perf_model.gpus import HOST_US, GpuModel, gpu_named
from proofs.perf_model.prediction import HOST_TIME
from proofs.perf_model.selection_overlap import measure_overlap
from proofs.perf_model.training_step import predict_step, shape_of

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def perf_model(
    context: typer.Context,
    gpu: Annotated[str, typer.Option(help="a100, h100, b200 or mi300x.")] = "a100",
    lengths: Lengths = "8k,16k,32k,64k",
    dtype: Dtype = "bf16",
    shape: ShapeName = "base",
    data: Data = "random",
    as_triton: Annotated[
        bool, typer.Option("--as-triton", help="Scale our arithmetic by how much slower Triton attention was there.")
    ] = False,
    launch_us: Annotated[
        float, typer.Option(min=0.0, help="Microseconds per launch: 5 from Python, about 1.5 in a CUDA graph.")
    ] = 5.0,
    host_us: Annotated[
        tuple[float, float], typer.Option(help="Microseconds of host time of a layer, forward and both passes.")
    ] = HOST_US,
    bundle: Annotated[
        Path | None, typer.Option(help="Archive of a GPU check on this GPU: its measured terms replace assumptions.")
    ] = None,
    step: Annotated[
        Path | None, typer.Option(help="Settings of a run: also model a whole training step of it on one GPU.")
    ] = None,
    json: JsonFile = None,
    plot: PlotFile = None,
    markdown: MarkdownFile = None,
) -> None:
    """Estimate the time of the Triton kernels on a GPU that is not present: **modelled**, nothing runs on a GPU.

    Each kernel's loop is counted from its launcher's grid, on blocks that the real selection chooses here. Its time is
    its slowest bound: tensor cores with exponentials, instructions (from its machine code), memory, L2, launches,
    torch's sorts and scans. Units that wait for the last programs of a grid (*tail*) are counted. **Dense** is
    published FlashAttention; both sides are timed by the same rule.

    *selected*: our selected branch, forward, with its index, beside the paper's loop, which processes one query of a
    group at a time. The second table is of the last length, slowest kernel first.

    **Example:** `python -m proofs.perf_model --gpu a100 --lengths 8k,64k --data smooth --markdown model.md`
    """
    if context.invoked_subcommand:
        return
    require_writable_file(json, plot, markdown)
    measured = None
    if bundle is not None:
        of_gpu, body = fitting.measured_gpu(bundle)
        if of_gpu != gpu:
            raise ConfigError(f"--bundle is of {of_gpu} and --gpu is {gpu!r}: say --gpu {of_gpu}.")
        measured = fitting.fit(body, gpu, fitting.predictor(gpu))
    report = reports.ModelReport(
        " ".join(["python -m proofs.perf_model", *sys.argv[1:]]), describe_machine(), gpu_named(gpu),
        host_time=HOST_TIME if measured is None else "with measured host time",
    )  # fmt: skip
    console = table_console(200)
    console.print(reports.headline(report))
    with progress() as log:
        for pair in reports.model(gpu, lengths, dtype, shape, data, as_triton, launch_us, log, measured, host_us):
            report.pairs.append(pair)
    _print_fitting(console, reports.TOTAL_COLUMNS, [reports.total_row(pair) for pair in report.pairs])
    last = report.pairs[-1].both
    console.print(f"\nkernels at {spell(last.length)}, {last.dtype}, {last.data} data, {last.label}")
    _print_fitting(console, reports.KERNEL_COLUMNS, reports.kernel_rows(last))
    if step is not None:
        for line in _model_step(step, report.gpu):
            console.print(line, markup=False)
    for line in reports.assumptions(report.gpu):
        console.print(f"· {line}", markup=False)
    for path, text in ((json, report.to_json), (plot, report.to_svg), (markdown, report.to_markdown)):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text(), encoding="utf-8")


@app.command()
def fit(
    bundle: Annotated[Path, typer.Argument(help="Archive that `nsa gpu-check --full --bundle FILE` wrote.")],
) -> None:
    """Take launch cost, host time, tails and Triton's share from an archive of the GPU check, and print the model with
    and without them beside what was measured. `--bundle FILE` then answers other questions with them."""
    gpu, body = fitting.measured_gpu(bundle)
    console = table_console(200)
    with progress() as log:
        log(f"fitting the kernels of {body['gpu']['name']}")
        terms = fitting.fit(body, gpu, fitting.predictor(gpu))
    for line in fitting.summary(terms, gpu):
        console.print(line, markup=False)
    for columns, rows in (
        (fitting.KERNEL_COLUMNS, fitting.kernel_rows(body, gpu, terms)),
        (fitting.LENGTH_COLUMNS, fitting.length_rows(body, gpu, terms)),
    ):
        table = Table(*columns, box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)


def _model_step(settings: Path, gpu: GpuModel) -> Iterator[str]:
    config = load(settings)
    overlap = measure_overlap(shape_of(config), config.train.seq_len)
    for mode in get_args(Checkpointing):
        yield from ("", *reports.step_lines(predict_step(config, gpu, mode, overlap)))


def _print_fitting(console: Console, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print all columns, or the first ones where a terminal is too narrow for the rest."""
    shown = len(columns) if console.width >= 110 else reports.NARROW[columns]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns[:shown]):
        words = (*name.split(), *(row[index] for row in rows))
        table.add_column(name, min_width=max(map(len, words)))
    for row in rows:
        table.add_row(*row[:shown])
    console.print(table)


if __name__ == "__main__":
    try:
        app()
    except NSAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
