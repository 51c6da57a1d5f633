"""Exporter and views under load.

    python -m proofs.load.observers exporter --runs 200 --scrapers 50   scrapes per second, seconds per scrape, memory
    python -m proofs.load.observers views --steps 500000                seconds and memory of report, status and monitor

Run folders are written first (a healthy run of twelve layers, one record per step). Times include other load on the
machine. A scrape is a real HTTP request to a real `nsa exporter`; while scrapers run, every run gets new records.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from nsa_train.watch.exporter import SHARED_S
from proofs.load.process_figures import process_figures
from proofs.load.run_folders import append_steps, write_run_folder

_START_S = 60.0
_RUN = re.compile(r'nsa_step\{[^}]*run="([^"]+)"[^}]*\} (\S+)')


def measure_exporter(runs: int, scrapers: int, steps: int, seconds: float) -> dict[str, Any]:
    """Scrape from many threads while the runs go on; every answer must name every run, and no step may go back."""
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        for number in range(runs):
            write_run_folder(folder / f"run{number:04}", steps)
        process = subprocess.Popen(
            [sys.executable, "-m", "nsa_train.cli", "exporter", str(folder), "--port", "0"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            return _scrape(process, folder, runs, scrapers, steps, seconds)
        finally:
            process.terminate()
            process.wait(60)


def _scrape(
    process: "subprocess.Popen[str]", folder: Path, runs: int, scrapers: int, steps: int, seconds: float
) -> dict[str, Any]:
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    sockets = _sockets(process.pid)
    began = time.monotonic()
    _read(url)
    first_s = time.monotonic() - began
    before = _figures_at_rest(process.pid, sockets)
    took: list[float] = []
    wrong: list[str] = []
    until = time.monotonic() + seconds

    def scrape() -> None:
        seen: dict[str, float] = {}
        while time.monotonic() < until:
            at = time.monotonic()
            try:
                steps = {run: float(step) for run, step in _RUN.findall(_read(url))}
            except OSError as error:
                wrong.append(f"no answer: {error}")
                continue
            took.append(time.monotonic() - at)
            if len(steps) != runs:
                wrong.append(f"{len(steps)} of {runs} runs")
            wrong.extend(f"{run} went back" for run, step in steps.items() if step < seen.get(run, 0))
            seen = steps

    threads = [threading.Thread(target=scrape) for _ in range(scrapers)]
    for thread in threads:
        thread.start()
    step = steps
    while time.monotonic() < until:
        for path in folder.iterdir():
            append_steps(path, step + 1, 1)
        step += 1
        time.sleep(1)
    for thread in threads:
        thread.join()
    time.sleep(2 * SHARED_S)
    last = {run: float(value) for run, value in _RUN.findall(_read(url))}
    wrong += [f"{run} is at {value:g}, not {step}" for run, value in last.items() if value != step]
    took.sort()
    after = _figures_at_rest(process.pid, sockets)
    return {
        "runs": runs,
        "scrapers": scrapers,
        "records per run": steps,
        "first scrape s": round(first_s, 2),
        "scrapes": len(took),
        "scrapes per s": round(len(took) / seconds, 1),
        "median s": round(median(took), 2) if took else None,
        "99 % s": round(took[int(0.99 * (len(took) - 1))], 2) if took else None,
        "processor share": round(_processor_s(process.pid) / (time.monotonic() - began), 2),
        "memory MiB before, after": [round(before["MiB"]), round(after["MiB"])],
        "open files before, after": [before["open files"], after["open files"]],
        "wrong": wrong[:5],
    }


def measure_views(steps: int) -> list[dict[str, Any]]:
    """`nsa report`, `nsa status` and `nsa monitor --once` of one long run: seconds, largest memory."""
    with tempfile.TemporaryDirectory() as text:
        run = write_run_folder(Path(text) / "run", steps)
        size = (run / "heartbeat_rank0.jsonl").stat().st_size
        rows = []
        for words in (["report", str(run)], ["status", str(run)], ["monitor", str(run), "--once"]):
            began = time.monotonic()
            child = subprocess.Popen([sys.executable, "-m", "nsa_train.cli", *words], stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(child.pid, 0)
            rows.append(
                {
                    "command": f"nsa {words[0]}",
                    "steps": steps,
                    "heartbeat MB": round(size / 1e6),
                    "exit code": os.waitstatus_to_exitcode(status),
                    "s": round(time.monotonic() - began, 1),
                    "processor s": round(usage.ru_utime + usage.ru_stime, 1),
                    "largest memory MiB": usage.ru_maxrss // 1024,
                }
            )
        rows[0]["page MB"] = round((run / "report.html").stat().st_size / 1e6, 2)
        return rows


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=300) as answer:
        text: str = answer.read().decode()
    return text


def _figures_at_rest(pid: int, sockets: int) -> dict[str, float]:
    """Figures of the process once it has closed the connections of answered requests, or 10 s later."""
    until = time.monotonic() + 10
    while _sockets(pid) > sockets and time.monotonic() < until:
        time.sleep(0.1)
    return process_figures([pid])


def _sockets(pid: int) -> int:
    count = 0
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(file).startswith("socket:")
    return count


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    exporter = commands.add_parser("exporter")
    exporter.add_argument("--runs", type=int, default=200)
    exporter.add_argument("--scrapers", type=int, default=50)
    exporter.add_argument("--steps", type=int, default=2000, help="records that each run has at first")
    exporter.add_argument("--seconds", type=float, default=60.0)
    views = commands.add_parser("views")
    views.add_argument("--steps", type=int, default=500_000)
    options = parser.parse_args(arguments)
    if options.command == "exporter":
        rows = [measure_exporter(options.runs, options.scrapers, options.steps, options.seconds)]
    else:
        rows = measure_views(options.steps)
    for row in rows:
        print(json.dumps(row))
    return 1 if any(row.get("wrong") or row.get("exit code") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
