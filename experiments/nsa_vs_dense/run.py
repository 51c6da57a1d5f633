"""Train the runs of a table that are not finished; a run that was interrupted goes on from its newest checkpoint.

    python -m experiments.nsa_vs_dense.run far_recall
    python -m experiments.nsa_vs_dense.run far_recall --variants dense,nsa --seeds 0 --at-once 1

Runs share the cores: as many at once as `--at-once` says, each with the same number of threads. A run's output is in
log.txt of its folder. Times of runs can be compared only if every run of a table had the same company: use --at-once 1.
"""

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from experiments.nsa_vs_dense.tables import StudyRun, read_tables


def train(run: StudyRun, threads: int) -> tuple[StudyRun, int, float]:
    """(the run, exit code, seconds)."""
    run.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    begin = time.monotonic()
    with open(run.folder / "log.txt", "a", encoding="utf-8") as log:
        command = [sys.executable, "-m", "nsa_train.cli", *run.command]
        code = subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    return run, code, time.monotonic() - begin


def main() -> int:
    tables = read_tables()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=tables)
    parser.add_argument("--variants", type=lambda text: text.split(","), help="only these")
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], help="only these")
    parser.add_argument("--at-once", type=int, default=2, help="runs at a time (default 2)")
    parser.add_argument("--threads", type=int, help="of each run (default: the cores divided by --at-once)")
    options = parser.parse_args()
    runs = tables[options.table].chosen(options.variants, options.seeds)
    open_runs = [run for run in runs if not run.finished]
    print(f"{options.table}: {len(runs) - len(open_runs)} of {len(runs)} runs are finished", flush=True)
    threads = options.threads or max(1, (os.cpu_count() or 1) // options.at_once)
    failed = 0
    with ThreadPoolExecutor(options.at_once) as pool:
        for run, code, seconds in pool.map(lambda run: train(run, threads), open_runs):
            failed += code != 0
            outcome = "finished" if code == 0 else f"exit code {code}, see {run.folder / 'log.txt'}"
            print(f"{run.variant}, seed {run.seed}: {outcome} after {seconds:,.0f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
