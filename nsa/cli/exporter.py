"""`nsa exporter` and `nsa alert-rules`: runs as Prometheus sees them, and what it should say about them."""

import signal
import threading
from pathlib import Path

import typer

from nsa.cli.outputs import require_writable_file
from nsa.cli.terminal import complain


def exporter(
    folders: list[Path] = typer.Argument(..., metavar="DIR", help="Run folders, or folders that hold run folders."),
    port: int = typer.Option(9400, help="Port to listen on; 0 takes a free one."),
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Others than loopback let others read."),
    file_sd: Path = typer.Option(
        None, "--file-sd", help="File to tell Prometheus the address in (file_sd_configs); removed at the end."
    ),
) -> None:
    """Serve the figures of runs to Prometheus, at /metrics, until stopped. Runs need not know of it.

    **Example:** `nsa exporter artifacts --file-sd ops/prometheus/targets/here.json`
    """
    require_writable_file(file_sd)

    from nsa.observe.export.exporter import MetricsExporter, is_loopback

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if not is_loopback(host):
        complain(
            f"WARNING: listening on {host}, not on loopback: whoever reaches this machine on that address can read run "
            f"names, losses, throughput, memory and software versions of {', '.join(map(str, folders))}, without a "
            f"password and unencrypted. Use --host 127.0.0.1 and an ssh tunnel, or a firewall."
        )
    serving = MetricsExporter(folders, host=host, port=port, file_sd=file_sd)
    print(f"serving http://{serving.address}/metrics", flush=True)
    try:
        stop.wait()
    finally:
        serving.close()


def alert_rules(
    speed: float = typer.Option(1.0, min=1.0, help="For drills: one second stands for this many."),
) -> None:
    """Print the alert rules for Prometheus: one for each condition of the health table.

    **Example:** `nsa alert-rules > ops/prometheus/rules.yml`
    """
    from nsa.observe.export.alert_rules import rule_file

    print(rule_file(speed), end="")
