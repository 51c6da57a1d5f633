"""Counts of a step on every rank of a real gloo run, and of the same rank simulated.

As a program: `python -m tests.nsa_train.train.engine.counted_steps` reads {name: [world, key=value, …]} as JSON from
stdin and prints, for each name, the counts of all real ranks and of the simulated rank 0.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from nsa_train.planning.collective_bytes import StepCounts
from tests.nsa_train.train.runs import BASE, ROOT, environment

VOCAB = 96


def counted(**cases: list) -> dict[str, tuple[list[StepCounts], StepCounts]]:
    # A new interpreter: in one forked from the fork server garbage is collected at other moments, which moves the peak.
    command = [sys.executable, "-m", "tests.nsa_train.train.engine.counted_steps"]
    done = subprocess.run(
        command, input=json.dumps(cases), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    return {
        name: ([StepCounts.from_json(each) for each in real], StepCounts.from_json(fake))
        for name, (real, fake) in counts.items()
    }


def _real(config, rank: int, world: int, rendezvous: str) -> StepCounts:
    import torch
    import torch.distributed as dist

    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module
    from nsa_train.train.engine.simulated_rank import count_step

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    ranks = RankInfo(rank=rank, world=world, local_rank=rank, local_world=world, distributed=True)
    module = build_train_module(config, VOCAB, ranks.divided(config.parallel), torch.device("cpu"))
    rows = config.train.batch_size // ranks.divided(config.parallel).data_world
    return count_step(module, config, torch.randint(VOCAB, (rows, config.train.seq_len)))


def _simulated(config, world: int) -> StepCounts:
    from nsa_train.train.engine.simulated_rank import simulate_step

    return simulate_step(config, VOCAB, world, world)


def _forked(act) -> tuple[int, Path]:
    """Process and result file of `act()` in a child."""
    out = Path(tempfile.mkstemp()[1])
    if child := os.fork():
        return child, out
    try:
        with contextlib.redirect_stdout(sys.stderr):
            out.write_text(json.dumps(act().as_json()))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - a forked rank must not run the code of its parent
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def _counts(world: int, *changes: str) -> tuple[list, dict]:
    from nsa_train.config import load

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(BASE)
        config = load(path, overrides=list(changes))
        rendezvous = f"{folder}/rendezvous"
        children = [
            *(_forked(lambda rank=rank: _real(config, rank, world, rendezvous)) for rank in range(world)),
            _forked(lambda: _simulated(config, world)),
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, _ in children]
        if any(codes):
            sys.exit(f"{changes}: exit codes {codes}")
        *real, fake = (json.loads(out.read_text()) for _, out in children)
        return real, fake


if __name__ == "__main__":
    import nsa_train.train.engine.simulated_rank  # noqa: F401 - once, for all

    print(json.dumps({name: _counts(*case) for name, case in json.load(sys.stdin).items()}))
