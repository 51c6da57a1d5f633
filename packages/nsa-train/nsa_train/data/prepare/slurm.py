"""`nsa data prepare --slurm-partition`: an array of Slurm jobs over the unfinished tasks, then one for the manifest.

The plan, the output and the tasks are written to a file in the log folder, which all nodes share. Submitting again runs
only what is not done. A job runs `python -m nsa_train.data.prepare.slurm FILE tasks ELEMENT`, the last `FILE manifest`.
"""

import json
import shlex
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

from nsa.errors import ConfigError, NSAError
from nsa.files import storage_errors, write_atomic
from nsa_train.data.prepare.plan import PreparePlan, is_finished, record_plan
from nsa_train.data.prepare.run import write_manifest
from nsa_train.data.prepare.task import done_tasks, run_task
from nsa_train.storage import StorageFolder

_MOST_ELEMENTS = 1000
"""Elements of an array of n jobs, of which the i-th runs tasks i, i + n, i + 2n, …; Slurm's default limit is 1,001."""
_MEMORY = "4G"


def submit(
    plan: PreparePlan,
    out_url: str,
    *,
    log_folder: Path,
    partition: str,
    time_limit: str,
    workers: int | None = None,
    env_command: str | None = None,
) -> list[str]:
    """Submit the jobs and return their ids, of the manifest's last; none if the set is finished.

    `workers` limits the number of tasks that run at once. `env_command` activates the Python environment on a node;
    without it the interpreter that runs now is used.
    """
    if plan.dedup:
        raise ConfigError("--dedup does not run on Slurm: it compares all documents first. Prepare on one machine.")
    out = StorageFolder(out_url)
    if is_finished(plan, out):
        return []
    record_plan(plan, out)
    tasks = sorted(set(range(len(plan.tasks()))) - done_tasks(out))
    elements = min(len(tasks), _MOST_ELEMENTS)
    file = log_folder.resolve() / f"job-{uuid.uuid4().hex[:8]}.json"
    with storage_errors(f"the jobs cannot be written to {log_folder}", fix="Set --slurm-log to a writable folder."):
        log_folder.mkdir(parents=True, exist_ok=True)
        content = {"plan": asdict(plan), "out": out_url, "tasks": tasks, "elements": elements}
        write_atomic(file, json.dumps(content))
    python = sys.executable if env_command is None else "python"
    options = [
        f"--partition={partition}", f"--time={time_limit}", f"--mem-per-cpu={_MEMORY}", "--cpus-per-task=1",
        "--nodes=1", "--ntasks=1", "--requeue",
    ]  # fmt: skip

    def submit_job(what: str, *more: str) -> str:
        command = shlex.join([python, "-m", __spec__.name, str(file), what])
        script = f"#!/bin/bash\nset -e\n{env_command or ''}\nexec {command} $SLURM_ARRAY_TASK_ID\n"
        words = ["sbatch", "--parsable", *options, f"--job-name=nsa-prepare-{what}", *more]
        try:
            answer = subprocess.run(words, input=script, capture_output=True, text=True, check=True).stdout
        except FileNotFoundError as error:
            raise ConfigError("sbatch is not installed here. Run this on a login node of the cluster.") from error
        except subprocess.CalledProcessError as error:
            raise ConfigError(f"sbatch refused the job: {error.stderr.strip()}. Check the --slurm options.") from error
        return answer.strip().partition(";")[0]  # a cluster's name may follow

    ids: list[str] = []
    if tasks:
        at_once = f"%{workers}" if workers else ""
        array = f"--array=0-{elements - 1}{at_once}"
        ids.append(submit_job("tasks", array, f"--output={log_folder.resolve()}/%A_%a.out"))
    after = [f"--dependency=afterok:{ids[0]}", "--kill-on-invalid-dep=yes"] if ids else []
    ids.append(submit_job("manifest", *after, f"--output={log_folder.resolve()}/%j.out"))
    return ids


def main(file: str, what: str, element: str = "0") -> None:
    """Run what one job has to do; `element` is its place in the array."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    plan, out = PreparePlan(**job["plan"]), StorageFolder(job["out"])
    if what == "manifest":
        write_manifest(plan, out)
        return
    for rank in job["tasks"][int(element) :: job["elements"]]:
        run_task(plan, out, rank)
        print(f"task {rank} of {len(plan.tasks())} is done", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except NSAError as error:
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
