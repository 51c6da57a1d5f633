"""`nsa doctor`: hardware and software of this machine, and the kernel backend chosen for each branch."""

import importlib.util
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from nsa_train.cli.outputs import print_json

if TYPE_CHECKING:
    import torch
    from rich.console import Console

    from nsa.check.prove import ProofResult
    from nsa.core.nsa_attention import NSAAttention
    from nsa.kernels.registry import BackendChoice


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
    import torch
    from rich.console import Console

    from nsa.check.prove import prove as run_checks
    from nsa.core.nsa_attention import NSAAttention
    from nsa.kernels.cpu import build
    from nsa.kernels.gpu_versions import device_named

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if dtype not in dtypes:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(dtypes)}.", param_hint="--dtype")
    where = device_named(device)
    console = Console(width=None if Console().is_terminal else 120, highlight=False, quiet=as_json)
    if where.type == "cpu" and not build.is_built():
        console.print("compiling the CPU kernels, once for this machine …")
    with torch.device("meta"):  # only its shape is needed
        attention = NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v)
    facts = _facts(attention, where, dtypes[dtype], dtype)
    _print_facts(console, facts)
    checks: list[ProofResult] = []
    for check in run_checks(where, dtypes[dtype], n_heads, n_kv_groups, d_k, d_v) if prove else ():
        if not checks:
            console.print()
        checks.append(check)
        verdict = "[green]holds[/]" if check.holds else "[bold red]FAILS[/]"
        console.print(f"{verdict}  {check.claim:44} {check.measured:9.2g}  (at most {check.limit:g})")
    if as_json:
        print_json(
            {**facts, "checks": [{**asdict(check), "holds": check.holds} for check in checks] if prove else None}
        )
    if not all(check.holds for check in checks):
        raise typer.Exit(1)
    console.print(
        f"\nRequire one with kernels.{facts['backends'][0]['branch']}=NAME in a config, or in every branch, and in the "
        f"library too, with NSA_KERNEL=NAME: it is used, or the run is refused."
    )


def _facts(attention: "NSAAttention", where: "torch.device", dtype: "torch.dtype", dtype_name: str) -> dict[str, Any]:
    """Versions, device and backends, as `--json` prints them."""
    import torch

    from nsa import __version__
    from nsa.kernels.choice_text import kernels_text, slow_kernels_warning
    from nsa.kernels.cpu import describe

    choices = attention.plan(where, dtype).choices
    accelerator = torch.cuda.get_device_name(where) if where.type == "cuda" else "no GPU" if where.type == "cpu" else ""
    return {
        "nsa": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": str(where),
        "device_name": accelerator or where.type,
        "threads": torch.get_num_threads(),
        "dtype": dtype_name,
        "cpu_kernels": describe() if where.type == "cpu" else None,
        "kernels": kernels_text(choices),
        "triton_check": _verdict(attention, where, dtype, choices) if where.type == "cuda" else None,
        "backends": [
            dict(zip(("branch", "backend", "here", "why"), row, strict=True))
            for row in _rows(attention, where, dtype, choices)
        ],
        "warnings": [text for text in (slow_kernels_warning(choices, where.type), _slow_start_warning()) if text],
    }


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


def _slow_start_warning() -> str | None:
    """If torch is compiled anew by every process: its byte code is not there and will not be kept."""
    import torch

    compiled = importlib.util.cache_from_source(torch.__file__)
    if os.path.exists(compiled):
        return None
    folder = os.path.dirname(torch.__file__)
    if sys.dont_write_bytecode:
        why = "PYTHONDONTWRITEBYTECODE is set (or python -B)"
    elif not os.access(folder, os.W_OK):
        why = f"{folder} cannot be written"
    else:
        return None
    return (
        f"every start compiles torch and the training engine from source, some 15 s of CPU time per rank and per "
        f"restart: they were installed without byte code, and it is not kept because {why}. Run once, where it may be "
        f"written, e.g. in the image: python -m compileall -q {os.path.dirname(folder)}"
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
