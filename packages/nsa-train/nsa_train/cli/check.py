"""`nsa doctor`: this machine and its kernel backends; `nsa gpu-check`: a GPU's kernels, as two files to commit."""

import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from nsa.errors import ConfigError
from nsa_train.cli.outputs import print_json, require_writable_folder
from nsa_train.cli.startup import sigterm_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console

    from nsa.check.comparison import CheckResult
    from nsa.check.gpu_check import GpuCheckRunner
    from nsa.check.gpu_check_report import GpuCheckReport

_INTERRUPTED = 130  # exit code of a shell for SIGINT
_WIDTH = 240  # of a table that goes to a file


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
    full: bool = typer.Option(False, "--full", help="Also benchmark 2k to 64k tokens against dense attention."),
    rehearse: bool = typer.Option(False, "--rehearse", help="The same checks without a GPU: interpreted, tiny shapes."),
    only: list[str] = typer.Option(None, "--only", metavar="SUBJECT", help="Only this subject (may be repeated)."),
    out: Path = typer.Option(None, "--out", metavar="DIR", help="Folder for the files (default: bench/results)."),
) -> None:
    """Check the kernels on this GPU: parity, autocast, determinism, compile, decode, training; `--full` adds speed.

    Each row shows the measured value and its limit. A check that fails, crashes or hangs does not stop the others.
    Exit code 0 only if all hold, else 1. Writes `gpu_NAME.json` and `gpu_NAME.md`, ready to commit; Ctrl-C keeps what
    is finished. Subjects: environment, self-check, parity, autocast, causality, determinism, compile, decode, long
    (8k tokens), devices (a second GPU), training (a few steps of configs/train_50k.yaml), speed.

    `--rehearse` runs the same code on a CPU under Triton's interpreter: rows that need a GPU are marked, and its files
    do not count as a result.

    **Example:** `nsa gpu-check --full`
    """
    from rich.console import Console

    from nsa.bench.machine import describe_machine
    from nsa.check.gpu_check import GpuCheckRequest, GpuCheckRunner
    from nsa.check.gpu_check_report import GpuCheckReport, refuse_rehearsal_among_results
    from nsa_train.config.env import without_settings

    require_writable_folder(out)
    if rehearse:
        refuse_rehearsal_among_results(out)
    else:
        _require_gpu()
    if find_spec("triton") is None:
        raise ConfigError("the package triton is not installed, and its kernels are what is checked. It comes with "
                          "torch's GPU builds; for a rehearsal: pip install triton==3.7.1.")  # fmt: skip
    request = GpuCheckRequest(rehearse, full, tuple(only or ()))
    environ = {name: value for name, value in without_settings().items() if name != "TRITON_INTERPRET"}
    runner = GpuCheckRunner(request, environ | ({"TRITON_INTERPRET": "1"} if rehearse else {}))
    record = GpuCheckReport(
        shlex.join(["nsa", *sys.argv[1:]]), describe_machine(), rehearse, full, request.only, traces=runner.traces
    )
    console = Console(width=None if Console().is_terminal else _WIDTH, highlight=False, markup=False, soft_wrap=True)
    try:
        with sigterm_as_interrupt():
            _run_checks(runner, record, console)
        record.complete = True
    except KeyboardInterrupt:
        console.print("interrupted")
    files = record.write(out)
    console.print(f"{record.title()}\n{record.summary()}\nwrote {files[0]} and {files[1]}")
    if not record.flaws():
        console.print(f"to keep it: git add {files[0]} {files[1]} && git commit -m 'GPU check: {record.stem()}'")
    raise typer.Exit(0 if record.holds else 1 if record.complete else _INTERRUPTED)


def _require_gpu() -> None:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"nsa gpu-check needs a GPU and torch {torch.__version__} sees none here: what it proves cannot be proven "
            f"elsewhere. Run it on a machine with one and torch's GPU build, or add --rehearse to run the same checks "
            f"interpreted on this CPU."
        )


def _run_checks(runner: "GpuCheckRunner", record: "GpuCheckReport", console: "Console") -> None:
    """Print each result as it arrives; on a terminal, the current check below."""
    from nsa.check.comparison import CheckResult
    from nsa.check.gpu_check_report import GpuCheck

    n, begun, began = len(runner.checks), 0, time.monotonic()
    with console.status("starting") as status:
        for result in runner.run():
            if isinstance(result, GpuCheck):
                begun += 1
                status.update(f"{begun} of {n}, {time.monotonic() - began:.0f} s · {result.subject}: {result.name}")
                continue
            record.add(result)
            if isinstance(result, CheckResult):
                console.print(_line(result), style=_style(result))


def _line(row: "CheckResult") -> str:
    from nsa.check.gpu_check_report import cells

    verdict, subject, claim, measured, limit, seconds, note = cells(row)
    bound = f"{measured:>9} {f'≤ {limit}' if limit else '':8}" if row.verdict != "fact" else f"{measured:18}"
    return f"{verdict:11} {subject:11} {claim:78} {bound} {seconds:>6} s  {note}".rstrip()


def _style(row: "CheckResult") -> str | None:
    return {"FAILS": "bold red", "needs a GPU": "dim", "fact": "dim"}.get(row.verdict)
