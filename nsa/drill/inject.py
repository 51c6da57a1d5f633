"""Faults that only arise inside a rank. They are planted by the drill's own entry point (`nsa.drill.faulty_rank`).

A run started by `nsa train` or `nsa launch` never imports this module: training has no hook, no setting and no
variable that could make it fail on purpose.
"""

import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nsa.core.gates import BranchGates
from nsa.drill.fault import FaultKind, PlantedFault
from nsa.train.distributed import RankInfo
from nsa.train.engine.bad_step_hook import StepSkippingTrainModule
from nsa.train.engine.data_loader import RowLoader
from nsa.train.engine.mixer import NSAMixer


def plant(fault: PlantedFault) -> None:
    """For the rest of this process, if it is the rank that the fault is for."""
    if RankInfo.from_environment().rank == fault.rank:
        _PLANTS[fault.kind](fault)


def _nan_gradient(fault: PlantedFault) -> None:
    """One value of one gradient, after the backward pass: nothing in the loss shows it."""

    def after(module: StepSkippingTrainModule) -> None:
        gradient = next(p.grad for p in module.model.parameters() if p.grad is not None)
        gradient.flatten()[0] = float("nan")

    _around_batches(fault, after=after)


def _gate_collapse(fault: PlantedFault) -> None:
    """Every gate takes the first branch, whatever it sees."""

    @torch.no_grad()
    def before(module: StepSkippingTrainModule) -> None:
        for gates in module.model.modules():
            if isinstance(gates, BranchGates):
                gates.proj.weight.zero_()
                gates.proj.bias.copy_(torch.tensor([30.0, 0.0, 0.0]).repeat(gates.proj.bias.numel() // 3))

    _around_batches(fault, before=before)


def _slow_rank(fault: PlantedFault) -> None:
    """The rank's own computing takes longer; what it sends and receives does not."""
    forward = NSAMixer.forward

    def slowed(mixer: nn.Module, x_BSD: Tensor, **more: Any) -> Tensor:
        fault.mark()
        time.sleep(fault.seconds)
        return forward(mixer, x_BSD, **more)  # type: ignore[arg-type]

    NSAMixer.forward = slowed  # type: ignore[method-assign, assignment]


def _benign_noise(fault: PlantedFault) -> None:
    """What healthy machines do: steps of uneven length, now and then a batch that takes up to `seconds` to come."""
    chance = random.Random(7)
    read = RowLoader._read

    def uneven(loader: RowLoader) -> Iterator[Any]:
        for number, pair in enumerate(read(loader)):
            if number % 60 == 59:
                time.sleep(chance.uniform(0.3, 1.0) * fault.seconds)
            yield pair

    RowLoader._read = uneven  # type: ignore[method-assign, assignment]
    _around_batches(fault, before=lambda module: time.sleep(chance.uniform(0.0, 0.02)))


_PLANTS: dict[FaultKind, Callable[[PlantedFault], None]] = {
    FaultKind.NAN_GRADIENT: _nan_gradient,
    FaultKind.GATE_COLLAPSE: _gate_collapse,
    FaultKind.SLOW_RANK: _slow_rank,
    FaultKind.BENIGN_NOISE: _benign_noise,
}


def _around_batches(
    fault: PlantedFault,
    before: Callable[[StepSkippingTrainModule], None] = lambda module: None,
    after: Callable[[StepSkippingTrainModule], None] = lambda module: None,
) -> None:
    train_batch, taken = StepSkippingTrainModule.train_batch, 0

    def faulty(module: StepSkippingTrainModule, batch: dict[str, Any], dry_run: bool = False) -> None:
        nonlocal taken
        hit = not dry_run and fault.hits(taken)
        taken += not dry_run
        if hit:
            fault.mark()
            before(module)
        train_batch(module, batch, dry_run=dry_run)
        if hit:
            after(module)

    StepSkippingTrainModule.train_batch = faulty
