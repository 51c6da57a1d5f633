"""`nsa gpu-check`: correctness and speed of the kernels on a GPU, written as two files to commit."""

import shlex
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError
from nsa_train.cli.outputs import require_writable_folder
from nsa_train.cli.startup import sigterm_as_interrupt

if TYPE_CHECKING:
    from rich.console import Console

    from nsa.check.comparison import CheckResult
    from nsa.check.gpu_check import GpuCheckRunner
    from nsa.check.gpu_check_report import GpuCheckReport

_INTERRUPTED = 130  # exit code of a shell for SIGINT
_WIDTH = 240  # of a table that goes to a file


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
