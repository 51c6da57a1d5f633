"""`nsa doctor`: hardware and software of this machine, and the kernel backend chosen for each branch."""

from typing import TYPE_CHECKING, Any

import typer

from nsa_train.cli.outputs import print_json

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

    console.print(f"nsa {facts['nsa']} · torch {facts['torch']} · Python {facts['python']}")
    console.print(f"{facts['device']} ({facts['device_name']}), {facts['threads']} threads · {facts['dtype']}")
    if facts["cpu_kernels"]:
        console.print(f"CPU kernels: {facts['cpu_kernels']}")
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
