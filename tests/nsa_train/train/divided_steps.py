"""A step that is divided among passes and ranks, compared with one pass on one rank.

As a program: `python -m tests.nsa_train.train.divided_steps` reads {name: case} as JSON from stdin and prints {name:
fields of `DividedResult`}.
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


@dataclass
class DividedResult:
    """What rank 0 saw of a step."""

    loss: float
    """Its share of the step's loss."""
    exact_loss: float
    """The sum over its labels in a pass of its own, divided by the labels of the step per rank."""
    summed_by_ddp: int
    """Elements of gradients that ddp summed over the ranks."""
    parameters: int
    tables: list[str]
    """Dtypes of the RoPE tables that layers received."""
    differences: dict[str, float] = field(default_factory=dict)
    """Of each parameter's gradient, relative to its largest in one pass on one rank."""


def divided_results(cases: dict[str, DividedStep]) -> dict[str, DividedResult]:
    text = json.dumps({name: asdict(case) for name, case in cases.items()})
    done = fork_server.run(
        ["-m", "tests.nsa_train.train.divided_steps"], cwd=ROOT, env=environment(), input=text, timeout=600
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return {name: DividedResult(**values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}


def _step(case: DividedStep, folder: Path, rank: int) -> tuple[dict, dict]:
    """Gradients, and the first fields of the result."""
    import torch
    import torch.distributed as dist
    from olmo_core.data.utils import split_batch
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    from torch.distributed.tensor import DTensor

    from nsa_train.config import load
    from nsa_train.train.datasets import training_rows, vocabulary
    from nsa_train.train.distributed import RankInfo
    from nsa_train.train.engine.build import build_train_module
    from nsa_train.train.engine.data_loader import to_engine
    from nsa_train.train.engine.mixer import NSAMixer

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

    summed, tables = [], set()
    if config.parallel.data == "ddp" and case.world > 1:

        def counted(state, bucket):
            summed.append(bucket.buffer().numel())
            return allreduce_hook(state, bucket)

        module.model.register_comm_hook(dist.group.WORLD, counted)
    for holder in module.model.modules():
        if isinstance(holder, NSAMixer):
            holder.register_forward_pre_hook(
                lambda mixer, args, kwargs: tables.update(str(table.dtype) for table in kwargs["positions"].tables),
                with_kwargs=True,
            )
    with torch.no_grad():
        sums = [
            module._forward(part, loss_reduction="sum").ce_loss
            for part in split_batch(batch, module.rank_microbatch_size // SEQ_LEN)
        ]
    module.train_batch(batch)
    options = module._loss_divisor(batch["labels"])
    per_rank = options["loss_div_factor"] / options["averaged_ranks"]
    gradients = {}
    for name, parameter in module.model.named_parameters():
        gradient = parameter.grad
        gradients[name.removeprefix("module.")] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    result = dict(
        loss=module.step_loss.item(),
        exact_loss=torch.stack([loss / per_rank for loss in sums]).sum().item(),
        summed_by_ddp=sum(summed),
        parameters=sum(parameter.numel() for parameter in module.model.parameters()),
        tables=sorted(tables),
    )
    return gradients, result


def _ranks(case: DividedStep) -> tuple[dict, dict]:
    """`_step` of rank 0 of forked ranks."""
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
                    step = _step(case, Path(name), rank)
                if rank == 0:
                    torch.save(step, Path(name) / "step")
                os._exit(0)
            except BaseException:  # noqa: BLE001 - a forked rank must not run the code of its parent
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(codes):
            sys.exit(f"{case}: {codes}")
        return torch.load(Path(name) / "step", weights_only=True)


def main() -> None:
    results, whole = {}, {}
    for name, fields in json.load(sys.stdin).items():
        case = DividedStep(**fields)
        alone = tuple(change for change in case.changes if not change.startswith("parallel."))
        if alone not in whole:
            whole[alone] = _ranks(DividedStep(changes=list(alone)))[0]
        divided, result = _ranks(case)
        assert divided.keys() == whole[alone].keys()
        differences = {
            parameter: float((divided[parameter] - want).abs().max() / want.abs().max())
            for parameter, want in whole[alone].items()
        }
        results[name] = asdict(DividedResult(**result, differences=differences))
    print(json.dumps(results))


if __name__ == "__main__":
    main()
