"""Gradients of a step that is divided among passes and ranks, compared with those of one pass on one rank.

As a program: `python -m tests.nsa_train.train.divided_steps` reads {name: case} as JSON from stdin and prints {name:
{parameter: largest difference, relative to the parameter's largest gradient}}.
"""

import contextlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

from tests import fork_server
from tests.nsa_train.train.runs import BASE, ROOT, environment

ROWS = 8
SEQ_LEN = 128
STEP = 3  # of the sampling


@dataclass
class DividedStep:
    passes: int = 1
    world: int = 1
    changes: list[str] = field(default_factory=list)
    """`key=value` words on top of BASE."""


def differences(cases: dict[str, DividedStep]) -> dict[str, dict[str, float]]:
    text = json.dumps({name: asdict(case) for name, case in cases.items()})
    done = fork_server.run(
        ["-m", "tests.nsa_train.train.divided_steps"], cwd=ROOT, env=environment(), input=text, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def _gradients(case: DividedStep, folder: Path, rank: int) -> dict:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    from nsa_train.config import load
    from nsa_train.train.datasets import training_rows, vocabulary
    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module
    from nsa_train.train.engine.data_loader import to_engine

    torch.set_num_threads(1)
    if case.world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=case.world)
    (folder / f"{rank}.yaml").write_text(BASE)
    sizes = [f"train.seq_len={SEQ_LEN}", f"train.batch_size={ROWS // case.passes}"]
    sizes.append(f"train.accumulate_grad_batches={case.passes}")
    config = load(folder / f"{rank}.yaml", overrides=[*sizes, *case.changes, f"train.out_dir={folder}/run"])
    ranks = RankInfo(rank=rank, world=case.world, local_rank=rank, local_world=case.world, distributed=case.world > 1)
    ranks, vocab_size = ranks.divided(config.parallel), vocabulary(config)
    module = build_train_module(config, vocab_size, ranks, torch.device("cpu"))

    module._trainer = SimpleNamespace(global_step=STEP)
    stream = training_rows(config, vocab_size).open()
    batch = to_engine(stream.next_batch(ROWS, ranks.data_rank, ranks.data_world))
    stream.close()
    module.train_batch(batch)
    gradients = {}
    for name, parameter in module.model.named_parameters():
        gradient = parameter.grad
        gradients[name.removeprefix("module.")] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return gradients


def _ranks(case: DividedStep) -> dict:
    """Gradients of rank 0 of forked ranks."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        children = []
        for rank in range(case.world):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:
                with contextlib.redirect_stdout(sys.stderr):
                    gradients = _gradients(case, Path(name), rank)
                if rank == 0:
                    torch.save(gradients, Path(name) / "gradients")
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a forked rank must not run the code of its parent
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{case}: {codes}")
        return torch.load(Path(name) / "gradients", weights_only=True)


def main() -> None:
    results, whole = {}, {}
    for name, fields in json.load(sys.stdin).items():
        case = DividedStep(**fields)
        alone = tuple(change for change in case.changes if not change.startswith("parallel."))
        if alone not in whole:
            whole[alone] = _ranks(DividedStep(changes=list(alone)))
        divided = _ranks(case)
        assert divided.keys() == whole[alone].keys()
        results[name] = {
            parameter: float((divided[parameter] - want).abs().max() / want.abs().max())
            for parameter, want in whole[alone].items()
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
