"""`nsa exporter` and `nsa alert-rules`: serve runs to Prometheus, and print its alert rules."""

import signal
import threading
from pathlib import Path

import typer

from nsa.errors import ConfigError
from nsa_train.cli.outputs import print_error, require_writable_file
from nsa_train.cli.watch import LIMIT_OPTION


def exporter(
    folders: list[Path] = typer.Argument(..., metavar="DIR", help="Run folders, or folders that contain run folders."),
    port: int = typer.Option(9400, min=0, max=65535, help="Port to listen on; 0 chooses a free one."),
    host: str = typer.Option(
        "127.0.0.1", help="Address to listen on; other than loopback, the network can read the metrics."
    ),
    file_sd: Path = typer.Option(
        None, "--file-sd", help="Write the address to this file for Prometheus (file_sd_configs); removed at exit."
    ),
    limit: list[str] = LIMIT_OPTION,
) -> None:
    """Serve metrics of runs to Prometheus at /metrics until stopped. Reads run folders only; runs need no setup.

    **Example:** `nsa exporter artifacts --file-sd ops/prometheus/targets/here.json`
    """
    require_writable_file(file_sd)
    for folder in folders:
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is not a folder: there are no runs to serve in it. Name run folders.")

    from nsa_train.watch.conditions import changed_limits
    from nsa_train.watch.exporter import MetricsExporter, is_loopback

    limits = changed_limits(limit or [])

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    if not is_loopback(host):
        print_error(
            f"WARNING: listening on {host}, not on loopback: whoever reaches this machine on that address can read run "
            f"names, losses, throughput, memory and software versions of {', '.join(map(str, folders))}, without a "
            f"password and unencrypted. Use --host 127.0.0.1 and an ssh tunnel, or a firewall."
        )
    serving = MetricsExporter(folders, host=host, port=port, file_sd=file_sd, limits=limits)
    print(f"serving http://{serving.address}/metrics", flush=True)
    try:
        stop.wait()
    finally:
        serving.close()


def alert_rules(
    speed: float = typer.Option(1.0, min=1.0, help="Time factor for drills: alerts must hold this many times shorter."),
    limit: list[str] = LIMIT_OPTION,
) -> None:
    """Print the Prometheus alert rules, one per health condition that the exporter finds.

    **Example:** `nsa alert-rules > ops/prometheus/rules.yml`
    """
    from nsa_train.watch.conditions import alert_rules as rules
    from nsa_train.watch.conditions import changed_limits

    print(rules(changed_limits(limit or []), speed), end="")
