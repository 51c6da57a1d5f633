"""Runs as in `tests.nsa_train.train.runs`, with a fault planted before the ranks are forked.

As a program it reads pairs of a job and a fault as JSON from stdin and prints the exit codes.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from unittest import mock

from tests import fork_server
from tests.nsa_train.train.runs import ROOT, Job, _run, environment


@dataclass
class Fault:
    kind: str = "none"
    """forward: the loss is NaN where it arises, and so are all gradients; loss: only the number told is infinite;
    gradient: one gradient of one rank, after the exchange; spike: gradients a thousandfold; left_out: no optimizer
    step; gap: not in the data; weight: one bit of a weight, after the step."""
    batches: list[int] = field(default_factory=list)
    rank: int | None = None
    deferred: bool = False
    """With the fused optimizer and the decision on the device, as on a GPU."""

    def hits(self, module):
        rows = module.trainer.data_loader
        batch = rows.state_dict()["cursor"]["next_row"] // rows.global_rows - 1
        return batch in self.batches and self.rank in (None, rows.ranks.rank)


def run_faulty(*pairs: tuple[Job, Fault], timeout_s: float = 240) -> list[list[int]]:
    jobs = json.dumps([[asdict(job), asdict(fault)] for job, fault in pairs])
    words = ["-m", "tests.nsa_train.train.faulty_runs"]
    done = fork_server.run(words, cwd=ROOT, env=environment(), input=jobs, timeout=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    codes: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    assert not any(code in (1, 20) or code < 0 for ranks in codes for code in ranks), f"{codes}\n{done.stderr[-20000:]}"
    return codes


def _plant(fault: Fault, planted: ExitStack) -> None:
    import torch

    from nsa_train.train.engine.data_loader import RowLoader
    from nsa_train.train.engine.train_module import StepSkippingTrainModule as Module

    train_batch, optim_step, forward, read = (
        Module.train_batch, Module.optim_step, Module.model_forward, RowLoader._read,
    )  # fmt: skip

    def faulty_forward(module, *args, **kwargs):
        output = forward(module, *args, **kwargs)
        if fault.kind == "forward" and module.trainer.global_step and fault.hits(module):
            output = output._replace(loss=output.loss * float("nan"), ce_loss=output.ce_loss * float("nan"))
        return output

    def faulty_train_batch(module, batch, dry_run=False):
        if dry_run or not fault.hits(module):
            return train_batch(module, batch, dry_run)
        train_batch(module, batch)
        parameters = list(module.model.parameters())
        if fault.kind == "loss":
            module.step_loss.fill_(float("inf"))
        if fault.kind == "gradient":
            parameters[3].grad.flatten()[5] = float("inf")
        if fault.kind == "spike":
            for parameter in parameters:
                parameter.grad.mul_(1000)
        return None

    def faulty_optim_step(module):
        if fault.kind == "left_out" and fault.hits(module):
            return
        optim_step(module)
        if fault.kind == "weight" and fault.hits(module):
            from nsa_train.train.callbacks.replica_check import _local

            with torch.no_grad():
                _local(next(iter(module.model.parameters()))).view(torch.int32)[0, 0] ^= 1

    def read_with_gap(loader):
        for number, pair in enumerate(read(loader)):
            if number not in fault.batches:
                yield pair

    planted.enter_context(mock.patch.object(Module, "model_forward", faulty_forward))
    planted.enter_context(mock.patch.object(Module, "train_batch", faulty_train_batch))
    planted.enter_context(mock.patch.object(Module, "optim_step", faulty_optim_step))
    if fault.deferred:
        from nsa_train.train.engine import build

        fused = partial(_fused, build._EagerAdamWConfig)
        planted.enter_context(mock.patch.object(build, "_EagerAdamWConfig", fused))
    if fault.kind == "gap":
        planted.enter_context(mock.patch.object(RowLoader, "_read", read_with_gap))


def _fused(config, **options):
    return config(**{**options, "fused": True})


def _main() -> None:
    codes = []
    for job, fault in json.load(sys.stdin):
        with ExitStack() as planted:
            _plant(Fault(**fault), planted)
            codes.append(_run(Job(**job)))
    print(json.dumps(codes))


if __name__ == "__main__":
    _main()
