"""`nsa bench`: time the attention on this machine beside dense attention."""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from nsa.errors import ConfigError
from nsa_train.cli.outputs import require_writable_file, table_console

app = typer.Typer(
    help="Time the attention and dense SDPA in interleaved rounds. No speed-up is printed for a wrong result.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Lengths = Annotated[str, typer.Option(help="Tokens, e.g. 2k,4k,8k; k is 1,024.")]
Dtype = Annotated[str, typer.Option(help="fp32, bf16 or fp16, several with commas; the same for all implementations.")]
ShapeName = Annotated[
    str,
    typer.Option(
        help="base (12 heads, 2 groups, d=64), gqa16 (16 heads per group), paper (64 heads, 192/128), "
        "tiny, wide (32 heads, 8 groups, d=128)."
    ),
]
_Backend = Annotated[
    list[str] | None, typer.Option(help="Time this backend; repeat for more. Default: all that `auto` may choose.")
]
_Peers = Annotated[bool, typer.Option(help="Also time third-party packages that are installed.")]
_Part = Annotated[str, typer.Option(help="all, or one of compressed, select, selected, sliding alone.")]
_Passes = Annotated[str, typer.Option(help="forward, backward (forward and backward), or both, timed separately.")]
Data = Annotated[
    str,
    typer.Option(help="random: neighbours select unrelated blocks, the worst case; smooth: neighbours are similar."),
]
_Device = Annotated[str, typer.Option(help="cpu or cuda.")]
_Threads = Annotated[int, typer.Option(min=0, help="Threads, on as many cores; 0: all cores.")]
_Budget = Annotated[float, typer.Option("--budget-s", min=0.0, help="Seconds of timing per case; at least one round.")]
_RealTime = Annotated[
    bool,
    typer.Option(
        "--real-time", help="Time each round with real-time priority and pause after it: for a machine with other work."
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write every sample, the machine and the commit here.")]
PlotFile = Annotated[Path | None, typer.Option("--plot", help="Draw the speed-ups over length here (SVG).")]
MarkdownFile = Annotated[Path | None, typer.Option("--markdown", help="Write the table here.")]

_OPTIONS: dict[str, Any] = dict(
    lengths=Lengths, dtype=Dtype, shape=ShapeName, backend=_Backend, peers=_Peers, part=_Part, passes=_Passes,
    data=Data, device=_Device, threads=_Threads, budget_s=_Budget, real_time=_RealTime, json=JsonFile,
    plot=PlotFile, markdown=MarkdownFile,
)  # fmt: skip
"""Options of the subcommands, in the order of --help."""
_EVERYWHERE: dict[str, Any] = dict(device="cpu", threads=0, json=None)


def _subcommand(**defaults: Any) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a benchmark under the function's name and docstring; `defaults` names its options of OPTIONS."""

    def register(documented: Callable[[], None]) -> Callable[[], None]:
        def command(**options: Any) -> None:
            _run(documented.__name__, **options)

        option_defaults = _EVERYWHERE | defaults
        command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option_defaults[name], annotation=option)
            for name, option in _OPTIONS.items()
            if name in option_defaults
        ])  # fmt: skip
        command.__doc__ = documented.__doc__
        app.command(documented.__name__)(command)
        return documented

    return register


@_subcommand(
    lengths="2k,4k,8k", dtype="fp32,bf16", shape="base", backend=None, peers=True, part="all", passes="both",
    data="random", budget_s=30.0, real_time=False, plot=None, markdown=None,
)  # fmt: skip
def attention() -> None:
    """Attention on given queries, keys and values, forward and with backward, against dense causal SDPA.

    **NSA**: select, compressed, selected and sliding attention, mixed by gates; each branch has its own keys and
    values, compressed ones are given. **Dense**: SDPA over one set of keys and values per group, in the form and layout
    that is fastest here. Projections are in neither. A speed-up is printed only if, in this run, outputs and gradients
    of both match the reference.

    **Example:** `nsa bench attention --lengths 2k,4k --dtype bf16 --threads 1 --json result.json --plot result.svg`
    """


@_subcommand(
    lengths="2k,4k,8k", dtype="fp32,bf16", shape="base", backend=None, data="random", budget_s=30.0, real_time=False,
    plot=None, markdown=None,
)  # fmt: skip
def prefill() -> None:
    """Prefill of a new cache, without projections, against SDPA over the whole prompt at once.

    **NSA** processes chunks of 2,048 tokens: append to the cache, compress, select, attend, mix. **Dense** copies keys
    and values into its cache and attends once, causally, which is its fastest way.

    **Example:** `nsa bench prefill --lengths 4k --dtype fp32`
    """


@_subcommand(
    lengths="4k,8k,16k,32k,64k", dtype="fp32,bf16", shape="base", backend=None, data="random", budget_s=10.0,
    real_time=False, plot=None, markdown=None,
)  # fmt: skip
def decode() -> None:
    """Decode of one token, batch 1, with a cache of the given length, against SDPA with one query and such a cache.

    **NSA** is the module's cached step without projections: append, compress where a block is full, select, attend,
    mix. **Dense** writes the key and value into a preallocated contiguous cache and attends over it.

    **Example:** `nsa bench decode --lengths 4k,64k --dtype bf16`
    """


@_subcommand(lengths="2k", dtype="bf16", backend=None, budget_s=60.0, markdown=None)
def train() -> None:
    """A training step of the 125M configuration against the same model with dense attention: 12 layers, dim 768.

    Forward, loss, backward, clipping and AdamW on one row of tokens, vocabulary 32,768; bf16 is autocast over fp32
    weights. The dense model has the same queries and one set of keys and values per group.

    **Example:** `nsa bench train --lengths 2k --dtype bf16`
    """


@_subcommand(lengths="4k,8k,16k,32k", dtype="fp32", shape="base", backend=None, budget_s=60.0, markdown=None)
def memory() -> None:
    """Peak memory of forward and backward above the inputs, by length, each measured in a separate process.

    Memory is linear in length if the last column does not grow. A measurement is stopped after 20 times `--budget-s`.

    **Example:** `nsa bench memory --lengths 4k,8k,16k`
    """


@_subcommand()
def machine() -> None:
    """Peak speed of the machine: matrix products in fp32 and bf16, memory bandwidth, with one thread and with all.

    **Example:** `nsa bench machine --json machine.json`
    """


@app.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def model() -> None:
    """Moved: the GPU performance model is `python -m proofs.perf_model` in a checkout, with the same options."""
    raise ConfigError(
        "`nsa bench model` has moved: the GPU performance model is not part of the installed package. In a checkout, "
        "run: python -m proofs.perf_model (same options)."
    )


def _run(
    op: str,
    *,
    json: Path | None,
    plot: Path | None = None,
    markdown: Path | None = None,
    lengths: str = "1",
    dtype: str = "fp32",
    backend: list[str] | None = None,
    peers: bool = False,
    **rest: Any,
) -> None:
    require_writable_file(json, plot, markdown)

    from nsa.bench.suite import BenchRequest, bench

    request = BenchRequest(op, lengths, dtype, backends=tuple(backend or ()), peers=peers, **rest)
    console = table_console(200)
    with progress() as log:
        bench(
            request, " ".join(["nsa", *sys.argv[1:]]), log, partial(console.print, markup=False),
            partial(_print_table, console), json=json, plot=plot, markdown=markdown,
        )  # fmt: skip


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
    """A status line on a terminal; one line per message elsewhere."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:
        yield lambda text: console.print(text, markup=False)
        return
    with console.status("starting") as status:
        yield status.update
