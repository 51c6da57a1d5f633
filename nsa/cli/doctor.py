"""`nsa doctor`: hardware and software of this machine, and the kernel backend chosen for each branch."""

import platform
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console


def doctor(
    device: str = typer.Option(None, help="Device (default: cuda if available, else cpu)."),
    dtype: str = typer.Option("bf16", help="bf16, fp16 or fp32."),
    n_heads: int = typer.Option(12, help="Query heads."),
    n_kv_groups: int = typer.Option(2, help="Key/value groups."),
    d_k: int = typer.Option(64, help="Key width per head."),
    d_v: int = typer.Option(64, help="Value width per head."),
    prove: bool = typer.Option(False, "--prove", help="Also check on this device that attention is correct."),
) -> None:
    """Print the kernel backend chosen for each branch, and why the others were not.

    With `--prove`, also run them: against dense attention, decode against prefill, packed against separate documents,
    causality by changing later tokens, counted against predicted reads, repeatable gradients. Exit code 1 if any fails.

    **Example:** `nsa doctor --prove --dtype fp32 --n-heads 16 --n-kv-groups 1`
    """
    import torch
    from rich.console import Console
    from rich.table import Table

    from nsa import __version__
    from nsa.core.nsa_attention import NSAAttention
    from nsa.kernels.cpu import build, describe
    from nsa.kernels.registry import BACKENDS, BRANCHES

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(dtypes)}.", param_hint="--dtype")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    if where.type == "cpu" and not build.is_built():
        console.print("compiling the CPU kernels, once for this machine …")
    with torch.device("meta"):  # only its shape is needed
        attention = NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v)
    chosen = {choice.branch: choice for choice in attention.plan(where, dtypes[dtype]).choices}

    accelerator = torch.cuda.get_device_name(where) if where.type == "cuda" else "no GPU" if where.type == "cpu" else ""
    console.print(f"nsa {__version__} · torch {torch.__version__} · Python {platform.python_version()}")
    console.print(f"{where} ({accelerator or where.type}), {torch.get_num_threads()} threads · {dtype}")
    console.print(f"CPU kernels: {describe()}\n" if where.type == "cpu" else "")
    table = Table("branch", "backend", "here", "why", box=None, pad_edge=False)
    for branch in BRANCHES:
        for backend in BACKENDS.values():
            if backend.name == chosen[branch].backend:
                verdict, why = "chosen", chosen[branch].reason
            elif reason := backend.why_not(branch, where, dtypes[dtype], attention.shape):
                verdict, why = "cannot", reason
            elif not backend.by_default:
                verdict, why = "can", "only by name: for checking, slow"
            else:
                verdict, why = "can", f"after {chosen[branch].backend} in preference"
            style = "bold" if verdict == "chosen" else "dim"
            table.add_row(branch, backend.name, verdict, why, style=style)
    console.print(table)
    if prove and not _print_proofs(console, where, dtypes[dtype], n_heads, n_kv_groups, d_k, d_v):
        raise typer.Exit(1)
    console.print(f"\nRequire one with kernels.{BRANCHES[0]}=NAME in a config: it is used, or the run is refused.")


def _print_proofs(
    console: "Console", device: "torch.device", dtype: "torch.dtype", n_heads: int, n_kv_groups: int, d_k: int, d_v: int
) -> bool:
    from nsa.verify.prove import prove

    console.print()
    all_hold = True
    for proof in prove(device, dtype, n_heads, n_kv_groups, d_k, d_v):
        all_hold &= proof.holds
        verdict = "[green]holds[/]" if proof.holds else "[bold red]FAILS[/]"
        console.print(f"{verdict}  {proof.claim:44} {proof.measured:9.2g}  (at most {proof.limit:g})")
    return all_hold
