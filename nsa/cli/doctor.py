"""`nsa doctor`: hardware and software of this machine, and the kernel backend chosen for each branch."""

import platform
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from nsa.core.nsa_attention import NSAAttention
    from nsa.kernels.registry import BackendChoice


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
    from rich.markup import escape
    from rich.table import Table

    from nsa import __version__
    from nsa.core.nsa_attention import NSAAttention
    from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
    from nsa.kernels.cpu import build, describe
    from nsa.kernels.registry import BRANCHES

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(dtypes)}.", param_hint="--dtype")
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    console = Console(width=None if Console().is_terminal else 120, highlight=False)
    if where.type == "cpu" and not build.is_built():
        console.print("compiling the CPU kernels, once for this machine …")
    with torch.device("meta"):  # only its shape is needed
        attention = NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v)
    choices = attention.plan(where, dtypes[dtype]).choices

    accelerator = torch.cuda.get_device_name(where) if where.type == "cuda" else "no GPU" if where.type == "cpu" else ""
    console.print(f"nsa {__version__} · torch {torch.__version__} · Python {platform.python_version()}")
    console.print(f"{where} ({accelerator or where.type}), {torch.get_num_threads()} threads · {dtype}")
    if where.type == "cpu":
        console.print(f"CPU kernels: {describe()}")
    console.print(f"kernels on {where.type} in {dtype}: {escape(kernels_text(choices))}")
    if where.type == "cuda":
        verdict = _verdict(attention, where, dtypes[dtype], choices)
        console.print(f"check of Triton on this GPU: {escape(verdict)}")
    console.print()
    table = Table("branch", "backend", "here", "why", box=None, pad_edge=False)
    for row in _rows(attention, where, dtypes[dtype], choices):
        table.add_row(*map(escape, row), style="bold" if row[2] == "chosen" else "dim")
    console.print(table)
    if slow := slow_kernels_warning(choices, where.type):
        console.print(f"\n[bold red]WARNING:[/] {escape(slow)}")
    if prove and not _print_proofs(console, where, dtypes[dtype], n_heads, n_kv_groups, d_k, d_v):
        raise typer.Exit(1)
    console.print(
        f"\nRequire one with kernels.{BRANCHES[0]}=NAME in a config, or in every branch, and in the library too, with "
        f"NSA_KERNEL=NAME: it is used, or the run is refused."
    )


def _verdict(
    attention: "NSAAttention", device: "torch.device", dtype: "torch.dtype", choices: "Sequence[BackendChoice]"
) -> str:
    """Whether the Triton kernels passed their check, and the file of the record; without a check if none was needed."""
    from nsa.kernels.registry import BACKENDS

    verify = BACKENDS["triton"].verify
    if verify is None or all(choice.requested for choice in choices):
        return "not needed: every branch was requested by name"
    if reason := BACKENDS["triton"].why_not("selected", device, dtype, attention.shape):
        return f"not possible: {reason}"
    verdict = verify(device, dtype, attention.shape)  # known by now
    if not verdict.checked:
        return f"not done: {verdict.reason}"
    record = f", record in {verdict.evidence}" if verdict.evidence else ", no record could be kept"
    return ("passed" if verdict.passed else f"FAILED ({verdict.reason})") + record


def _rows(
    attention: "NSAAttention", device: "torch.device", dtype: "torch.dtype", choices: "Sequence[BackendChoice]"
) -> Iterator[tuple[str, str, str, str]]:
    """Branch, backend, whether it is chosen, can or cannot run here, and why."""
    from nsa.kernel_variables import requested_backends
    from nsa.kernels.registry import BACKENDS, BRANCHES

    requested = requested_backends(BRANCHES)
    for choice in choices:
        by = requested.get(choice.branch)
        for backend in BACKENDS.values():
            if backend.name == choice.backend:
                why = f"requested by {by.variable}" if by is not None and by.name == backend.name else choice.reason
                yield choice.branch, backend.name, "chosen", why
            elif reason := backend.why_not(choice.branch, device, dtype, attention.shape):
                yield choice.branch, backend.name, "cannot", reason
            else:
                yield choice.branch, backend.name, "can", _why_not_chosen(backend.name, device, choice)


def _why_not_chosen(backend: str, device: "torch.device", choice: "BackendChoice") -> str:
    """Of a backend that can run."""
    if backend == "reference":
        return "only by name: plain PyTorch, for checking, slow"
    if backend == "triton" and device.type == "cpu":
        return "only by name: interpreted, for checking, slow"
    if backend == "triton":
        return choice.why_not(backend) or "only by name, until it is checked on this GPU"
    return "not requested" if choice.requested else f"after {choice.backend} in preference"


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
