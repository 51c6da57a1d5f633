"""`nsa doctor`: this machine and its kernel backends; `nsa gpu-check`: a GPU's kernels, in one archive."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa_train.cli.outputs import print_json, require_writable_file
from nsa_train.cli.startup import sigterm_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console

    from nsa.check.comparison import CheckResult


def doctor(
    device: str = typer.Option(None, help="Device (default: cuda if available, else cpu)."),
    dtype: str = typer.Option("bf16", help="bf16, fp16 or fp32."),
    n_heads: int = typer.Option(12, min=1, max=16_384, help="Query heads."),
    n_kv_groups: int = typer.Option(2, min=1, max=16_384, help="Key/value groups."),
    d_k: int = typer.Option(64, min=1, max=16_384, help="Key width per head."),
    d_v: int = typer.Option(64, min=1, max=16_384, help="Value width per head."),
    prove: bool = typer.Option(False, "--prove", help="Also check on this device that attention is correct."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: versions, device, backends and checks."),
) -> None:
    """Print the kernel backend chosen for each branch, and why the others were not.

    With `--prove`, also run them: against dense attention, decode against prefill, packed against separate documents,
    causality by changing later tokens, counted against predicted reads, repeatable gradients.

    Exit code: 0; 1 if a check of `--prove` fails; 20 if a backend requested by name cannot run here.

    **Example:** `nsa doctor --prove --dtype fp32 --n-heads 16 --n-kv-groups 1`
    """
    from rich.console import Console

    from nsa.bench.case import TORCH_DTYPES
    from nsa.check.installation import installation_facts
    from nsa.check.prove import prove as run_checks
    from nsa.kernels.cpu import build
    from nsa.kernels.gpu_versions import device_named

    if dtype not in TORCH_DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(TORCH_DTYPES)}.", param_hint="--dtype")
    where = device_named(device)
    console = Console(width=None if Console().is_terminal else 120, highlight=False, quiet=as_json)
    if where.type == "cpu" and not build.is_built():
        console.print("compiling the CPU kernels, once for this machine …")
    sizes = where, dtype, n_heads, n_kv_groups, d_k, d_v
    facts = installation_facts(*sizes)
    _print_facts(console, facts)
    checks: list[CheckResult] = []
    for check in run_checks(*sizes) if prove else ():
        if not checks:
            console.print()
        checks.append(check)
        console.print(check.line, markup=False, style=None if check.holds else "bold red")
    if as_json:
        print_json({**facts, "checks": [check.summary for check in checks] if prove else None})
    if not all(check.holds for check in checks):
        raise typer.Exit(1)
    console.print(
        f"\nRequire one with kernels.{facts['backends'][0]['branch']}=NAME in a config, or in every branch, and in the "
        f"library too, with NSA_KERNEL=NAME: it is used, or the run is refused."
    )


def _print_facts(console: "Console", facts: dict[str, Any]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from nsa.check.installation import triton_lines

    console.print(f"nsa {facts['nsa']} · torch {facts['torch']} · Python {facts['python']}")
    console.print(f"{facts['device']} ({facts['device_name']}), {facts['threads']} threads · {facts['dtype']}")
    if facts["cpu_kernels"]:
        console.print(f"CPU kernels: {facts['cpu_kernels']}")
    for line in triton_lines(facts):
        console.print(escape(line), style="bold red" if "fix" in line and facts["device"] != "cpu" else None)
    console.print(f"kernels on {facts['device'].partition(':')[0]} in {facts['dtype']}: {escape(facts['kernels'])}")
    if facts["triton_check"]:
        console.print(f"check of Triton on this GPU: {escape(facts['triton_check'])}")
    console.print()
    table = Table("branch", "backend", "here", "why", box=None, pad_edge=False)
    for row in facts["backends"]:
        table.add_row(*map(escape, row.values()), style="bold" if row["here"] == "chosen" else "dim")
    console.print(table)
    for warning in facts["warnings"]:
        console.print(f"\n[bold red]WARNING:[/] {escape(warning)}")


def gpu_check(
    full: bool = typer.Option(False, "--full", help="Also time kernels, layers, generation and dense attention."),
    rehearse: bool = typer.Option(False, "--rehearse", help="The same checks without a GPU: interpreted, tiny shapes."),
    only: list[str] = typer.Option(None, "--only", metavar="SUBJECT", help="Only this subject (may be repeated)."),
    bundle: Path = typer.Option(None, "--bundle", metavar="FILE", help="The archive (default: gpu_check_TIME.zip)."),
) -> None:
    """Check the kernels on this GPU: parity, autocast, determinism, compile, decode, training; `--full` adds timings.

    Each row shows the measured value and its limit. A check that fails, crashes or hangs does not stop the others.
    Exit code 0 only if all hold, else 1. One archive has every row and measurement, and no name, folder or address of
    this machine; it is complete after each row, so Ctrl-C or a crash keeps what is finished. What says most comes
    first. Subjects: environment, self-check, host, kernels, generation, training (a few steps of
    configs/train_50k.yaml), parity, autocast, causality, determinism, compile, decode, long (8k tokens), devices (two
    GPUs), speed.

    `--rehearse` runs the same code on a CPU under Triton's interpreter: rows that need a GPU are marked, and its
    archive does not count as a result. Without the trainer: `python -m nsa.check --full --bundle FILE`.

    **Example:** `nsa gpu-check --full --bundle out.zip`
    """
    from nsa.check.__main__ import check_gpu

    require_writable_file(bundle)
    with sigterm_as_interrupt():
        raise typer.Exit(check_gpu(bundle, rehearse=rehearse, full=full, only=tuple(only or ())))
