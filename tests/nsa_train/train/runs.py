"""Real runs for tests: a process of the fork server forks the ranks of each run, one run after another.

As a program: `python -m tests.nsa_train.train.runs` reads jobs as JSON from stdin and prints their exit codes.
"""

import contextlib
import io
import json
import os
import socket
import sys
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path

from proofs import import_path
from tests import fork_server

ROOT = Path(__file__).parents[3]

BASE = """\
model: {dim: 32, n_layers: 2, n_heads: 4, n_kv_groups: 2, d_k: 8, d_v: 8}
nsa: {l: 8, d: 4, l_sel: 8, n_sel: 4, w: 16}
runtime: {device: cpu, precision: fp32, threads: 1}
train: {steps: 20, seq_len: 64, batch_size: 4, lr: 3e-3, warmup_steps: 2, log_every: 1, eval_every: 0, save_every: 0}
data: {dataset: synthetic, synthetic_task: copy, prefetch: false}
parallel: {timeout_s: 60}
"""


@dataclass
class Job:
    out_dir: str
    world: int = 1
    changes: list[str] = field(default_factory=list)
    """`key=value` words on top of BASE."""
    resume: bool = False
    resume_from: str | None = None
    init_from: str | None = None
    allow: list[str] = field(default_factory=list)
    config: str | None = None
    """A config file in place of BASE."""


def run_all(*jobs: Job, timeout_s: float = 600) -> list[list[int]]:
    """Exit codes of the ranks of each run."""
    jobs_json = json.dumps([asdict(job) for job in jobs])
    done = fork_server.run(
        ["-m", "tests.nsa_train.train.runs"], cwd=ROOT, env=environment(), input=jobs_json, timeout=timeout_s
    )
    assert done.returncode == 0, done.stderr[-3000:]
    codes: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    if any(code not in (0, 2, 10, 11, 20, 21, 22, 23) for ranks in codes for code in ranks):
        raise AssertionError(f"{codes}\n{done.stderr[-5000:]}")
    return codes


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NSA_", "TORCHELASTIC"))}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "CONFIG"):
        inherited.pop(name, None)
    return {**inherited, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", **more}


def write_config(folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(BASE)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(job: Job, config_path: Path) -> int:
    from nsa.errors import NSAError
    from nsa_train.cli.train import import_exported
    from nsa_train.config import load
    from nsa_train.train.run import train
    from nsa_train.train.start_options import StartOptions

    config = load(config_path, overrides=[*job.changes, f"train.out_dir={job.out_dir}"])
    try:
        origin = Path(job.resume_from) if job.resume_from else None
        weights = Path(job.init_from) if job.init_from else None
        options = StartOptions(resume=job.resume, resume_from=origin, init_from=weights, allow=tuple(job.allow))
        return train(config, options, importer=import_exported)
    except NSAError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code


def _run(job: Job) -> list[int]:
    out = Path(job.out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    config_path = Path(job.config) if job.config else write_config(out.parent)
    port, children = free_port(), []
    for rank in range(job.world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        if job.world > 1:
            os.environ.update(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world), LOCAL_WORLD_SIZE=str(job.world),
                MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            )  # fmt: skip
        code = 1
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                code = _rank(job, config_path)
        except BaseException:  # noqa: BLE001 - a forked rank must not run the code of its parent
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


if __name__ == "__main__":
    print(json.dumps([_run(Job(**job)) for job in json.load(sys.stdin)]))
