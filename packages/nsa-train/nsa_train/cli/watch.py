"""Commands that watch runs: `nsa watch`, `status`, `halt`, `smoke`; for Prometheus `nsa exporter`, `alert-rules`."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from nsa.errors import ConfigError, ExitCode
from nsa_train import names
from nsa_train.cli.early_checks import find_run
from nsa_train.cli.outputs import print_line, require_writable_file, warn_if_exposed
from nsa_train.terminal_text import duration, printable

if TYPE_CHECKING:
    from nsa_train.watch.status import RunStatus

_RUN = typer.Argument(None, metavar="RUN", help="Run folder (train.out_dir).")
_DIR = typer.Option(None, "--dir", hidden=True)  # docs/OLDER_NAMES.md
_LIMIT = typer.Option(None, "--limit", metavar="NAME=VALUE", help="Change a limit, e.g. stall_s=600. Repeatable.")


def watch(
    run: Path = _RUN,
    directory: Path = _DIR,
    halt: int = typer.Option(0, "--halt", min=0, max=1, help="1: write .HALT at a critical finding. 0: only log it."),
    interval: float = typer.Option(30.0, "--interval", min=0.1, help="Seconds between checks."),
    once: bool = typer.Option(False, "--once", help="Check once and exit; one check never halts a run for a stall."),
    limit: list[str] = _LIMIT,
) -> None:
    """Watch a run until it finishes or halts; log each finding once, and when it is resolved.

    Lines are also appended to health_check.log. A critical finding is written to .anomaly_type and, with --halt 1,
    halts the run; at a stall, stack dumps and the last collectives of all ranks are collected first. A process that
    has already ended is reported, not halted. Exit code: 0 finished, 11 halted; with --once as `nsa status`.

    **Example:** `nsa watch artifacts/run --halt 1 --interval 30`
    """
    from nsa_train.watch.conditions import changed_limits
    from nsa_train.watch.status import RunPhase
    from nsa_train.watch.watchdog import Watchdog

    folder, limits = _folder(run, directory), changed_limits(limit or [])
    watchdog = Watchdog(folder, halt=bool(halt), limits=limits, emit=_emit)
    try:
        if once:
            watchdog.begin()
            raise typer.Exit(watchdog.check().exit_code)
        ended = watchdog.run(interval_s=interval)
    finally:
        watchdog.close()
    raise typer.Exit(ExitCode.HALTED if ended == RunPhase.HALTED else 0)


def status(
    run: Path = _RUN,
    directory: Path = _DIR,
    as_json: bool = typer.Option(False, "--json", help="Print one JSON record."),
    log: bool = typer.Option(False, "--log", help="Also append one line to health_check.log."),
    pids: bool = typer.Option(False, "--pids", help="Print only the process ids of the ranks on this host, for kill."),
    limit: list[str] = _LIMIT,
) -> None:
    """Show progress and findings of a run.

    Exit code: 0 healthy or finished; 1 warning, halted, stopped, or a process gone for less than five minutes;
    2 critical, failed or hung.

    **Examples:** `nsa status artifacts/run`, and every 15 minutes from cron: `nsa status artifacts/run --log || mail …`
    To save a checkpoint now, whatever started the run: `kill -USR2 $(nsa status artifacts/run --pids)`
    """
    folder = _folder(run, directory)
    if pids:
        _print_pids(folder)
        return
    from nsa_train.watch.conditions import changed_limits
    from nsa_train.watch.health import examine
    from nsa_train.watch.run_reader import RunReader
    from nsa_train.watch.status import status_of

    with closing(RunReader(folder)) as reader:
        findings = examine(reader.update(), now=reader.now.steady, limits=changed_limits(limit or []))
        state = status_of(reader, findings)
    if as_json:
        print(json.dumps(state.as_dict(), default=str))
    else:
        _show(folder, state)
    if log:
        from nsa_train.watch.watchdog import append_health

        append_health(folder, _line(state))
    raise typer.Exit(state.exit_code)


def halt(
    run: Path = _RUN,
    directory: Path = _DIR,
    reason: str = typer.Option("manual stop", "--reason", help="Reason, recorded in .HALT and in the events."),
    wait: bool = typer.Option(False, "--wait", help="Wait until the run has saved and halted."),
    timeout: float = typer.Option(600.0, "--timeout", help="Longest wait in seconds; then exit code 1."),
) -> None:
    """Halt a run: all ranks save a checkpoint and exit after the current step.

    Continue with `nsa train --clear-halt --resume`.

    **Example:** `nsa halt artifacts/run --reason "node maintenance" --wait`
    """
    from nsa_train.record.halt_file import read, request

    folder = _folder(run, directory)
    who = f"nsa halt, process {os.getpid()} on {socket.gethostname()}"
    if request(folder, reason, who):
        print_line(f"requested halt of {folder}: {reason}")
    elif (existing := read(folder)) is not None:
        print_line(f"{names.HALT} exists already: {existing.describe(time.time())}")
    if wait:
        _wait_for_end(folder, timeout)


def smoke(
    run: Path = _RUN,
    csv: Path = typer.Option(None, "--csv", help="Path of training.csv, if not in a run folder."),
    heartbeat: Path = typer.Option(None, "--heartbeat", help="Path of heartbeat_rank0.jsonl, if not in a run folder."),
    min_steps: int = typer.Option(50, "--min-steps", help="Fewest steps that the run must have made."),
) -> None:
    """Check that a run trained: steps, finite and falling loss, key reads, complete files. Exit code 1 if not.

    **Example:** `nsa smoke artifacts/run --min-steps 100`
    """
    from nsa_train.watch.smoke import smoke as smoke_checks

    if run is None and (csv is None or heartbeat is None):
        raise ConfigError("nsa smoke needs a run folder, or both --csv and --heartbeat: it compares the two.")
    folder = _folder(run, None) if run is not None else None
    rows, beats = csv or run / names.TRAINING_CSV, heartbeat or run / names.heartbeat(0)
    checks = list(smoke_checks(training_csv=rows, heartbeat=beats, min_steps=min_steps, folder=folder))
    for check in checks:
        print_line(f"{'ok    ' if check.passed else 'FAILED'}  {check.name:16}  {check.text}")
    raise typer.Exit(0 if all(check.passed for check in checks) else 1)


def exporter(
    folders: list[Path] = typer.Argument(..., metavar="DIR", help="Run folders, or folders that contain run folders."),
    port: int = typer.Option(9400, min=0, max=65535, help="Port to listen on; 0 chooses a free one."),
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; other than loopback, the network can read the metrics."
    ),
    file_sd: Path = typer.Option(
        None, "--file-sd", help="Write the address to this file for Prometheus (file_sd_configs); removed at exit."
    ),
    limit: list[str] = _LIMIT,
) -> None:
    """Serve metrics of runs to Prometheus at /metrics until stopped. Reads run folders only; runs need no setup.

    **Example:** `nsa exporter artifacts --file-sd ops/prometheus/targets/here.json`
    """
    require_writable_file(file_sd)
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: there are no runs to serve in it. Name run folders.")

    from nsa_train.watch.conditions import changed_limits
    from nsa_train.watch.exporter import MetricsExporter

    limits = changed_limits(limit or [])

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    readable = f"read run names, losses, throughput, memory and software versions of {', '.join(map(str, folders))}"
    warn_if_exposed(host, readable)
    serving = MetricsExporter(folders, host=host, port=port, file_sd=file_sd, limits=limits)
    print(f"serving http://{serving.address}/metrics", flush=True)
    try:
        stop.wait()
    finally:
        serving.close()


def alert_rules(
    speed: float = typer.Option(1.0, min=1.0, help="Time factor for drills: alerts must hold this many times shorter."),
    limit: list[str] = _LIMIT,
) -> None:
    """Print the Prometheus alert rules, one per health condition that the exporter finds.

    **Example:** `nsa alert-rules > ops/prometheus/rules.yml`
    """
    from nsa_train.watch.conditions import alert_rules as rules
    from nsa_train.watch.conditions import changed_limits

    print(rules(changed_limits(limit or []), speed), end="")


def _wait_for_end(folder: Path, timeout_s: float) -> None:
    from nsa_train.watch.run_reader import RunReader
    from nsa_train.watch.status import phase

    reader, until, shown = RunReader(folder), time.monotonic() + timeout_s, ""
    while True:
        history = reader.update()
        logs = list(history.present.values())
        ended = bool(logs) and all(log.ended for log in logs)
        if ended and not reader.leaving():
            last = logs[0].last
            print_line(f"{phase(history, [])} at step {last.step}{f': {last.detail}' if last.detail else ''}")
            return
        if history.gone & history.present.keys():
            print(f"the process of rank {min(history.gone)} is gone without a final record")
            raise typer.Exit(1)
        if (line := f"step {history.step}, {'saving' if ended else 'waiting'}") != shown:
            shown = line
            print_line(line)
        if time.monotonic() > until:
            print_line(f"not halted within {timeout_s:g} s; the run may hang: see nsa status {folder}")
            raise typer.Exit(1)
        time.sleep(0.2)


def _print_pids(folder: Path) -> None:
    from nsa_train.watch.run_reader import RunReader

    with closing(RunReader(folder)) as reader:
        reader.update()
        pids = reader.processes()
    if not pids:
        typer.echo(f"no rank of {folder} runs on this host", err=True)
        raise typer.Exit(1)
    print(*pids)


def _show(folder: Path, status: "RunStatus") -> None:
    from rich.console import Console
    from rich.text import Text

    from nsa_train.record.record_files import describe_unreadable
    from nsa_train.watch.conditions import AlertLevel
    from nsa_train.watch.status import RunPhase, group_findings, ranks_of

    console = Console(highlight=False)
    colour = ("green", "yellow", "red")[status.exit_code]
    console.print(Text.assemble((str(status.phase), f"bold {colour}"), f"  {printable(folder)}"), soft_wrap=True)
    of = f" of {status.steps:,} ({status.step / status.steps:.1%})" if status.steps else ""
    rows = [("step", f"{status.step:,}{of}")]
    if status.loss is not None:
        how = f", mean of the last {status.loss_records} records" if status.loss_records > 1 else ""
        rows.append(("loss", f"{status.loss:.4f} nats per token{how}"))
    if status.toks_per_s is not None:
        rows.append(("throughput", f"{status.toks_per_s:,.0f} tokens/s"))
    if status.left_s is not None:
        rows[-1] = (rows[-1][0], f"{rows[-1][1]}, {duration(status.left_s)} left")
    if status.beat_age_s is not None:
        world = f" of {status.world}" if status.world and status.world != status.ranks else ""
        count = f"{status.ranks}{world} rank{'s' * (status.ranks != 1)}"
        rows.append(("heartbeat", f"{duration(status.beat_age_s)} ago, {count}"))
    rows.append(("checkpoint", status.checkpoint or "none"))
    if status.halt is not None:
        rows.append((names.HALT, status.halt))
    if status.unreadable:
        rows.append(("unreadable", describe_unreadable(status.unreadable)))
    for name, text in rows:
        console.print(f"  {name:11}{printable(text)}", markup=False, soft_wrap=True)
    for same in group_findings(status.findings):
        first, ranks = same[0], ranks_of(same)
        colour = "red" if first.level == AlertLevel.CRITICAL else "yellow"
        where = f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})" if ranks else ""
        console.print(f"[{colour}]{first.level}[/] {first.name}{where}")
        console.print(f"  {printable(first.message)}", markup=False)
        console.print(f"  → {first.condition.advice}", markup=False)
    if status.phase == RunPhase.EMPTY:
        console.print("no heartbeat file in this folder")
    elif not status.findings:
        console.print("no findings")


def _line(status: "RunStatus") -> str:
    from nsa_train.watch.status import describe_findings, group_findings

    word = ("OK", "WARNING", "CRITICAL")[status.exit_code]
    loss = f", loss {status.loss:.4f}" if status.loss is not None else ""
    wrong = "".join(f"; {describe_findings(same)}" for same in group_findings(status.findings))
    return f"{word} {status.phase} at step {status.step}{loss}{wrong}"


def _folder(run: Path | None, directory: Path | None) -> Path:
    path = run or directory
    if path is None:
        raise ConfigError("the run folder is missing: give it, e.g. artifacts/run (train.out_dir of its config).")
    folder = find_run(path)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder: a run writes its heartbeat into train.out_dir. Check the path.")
    return folder


def _emit(line: str) -> None:
    print_line(f"[{time.strftime('%H:%M:%S')}] {line}")
