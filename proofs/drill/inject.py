"""Fault injection inside a rank: NaN and spiking gradients, collapsed gates, a slow rank, a flipped bit, a clock.

As a program it is `nsa train` or `nsa launch` with an injected fault, the only entry point that injects one: `python
-m proofs.drill.inject train|launch FAULT NPROC CONFIG KEY=VALUE …`; `launch` also takes --resume, --clear-halt and
--nodes=COUNT@HOST:PORT (number of nodes and rendezvous). `nsa train` and `nsa launch` never import this module:
training has no hook, setting or variable that could make it fail on purpose. torch and the engine are imported where a
fault is injected, since the process that describes a fault does not need them.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nsa.errors import NSAError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from nsa_train.config.schema import RunConfig
    from nsa_train.train.engine.data_loader import RowLoader
    from nsa_train.train.engine.train_module import StepSkippingTrainModule

MODULE = "proofs.drill.inject"
_BATCHES_AHEAD = 20


class FaultKind(StrEnum):
    NAN_GRADIENT = "nan_gradient"
    GATE_COLLAPSE = "gate_collapse"
    SLOW_RANK = "slow_rank"
    BENIGN_NOISE = "benign_noise"
    GRADIENT_SPIKE = "gradient_spike"
    REPLICA_DRIFT = "replica_drift"
    CLOCK_JUMP = "clock_jump"
    CHAOS = "chaos"
    """Steps of at least `seconds`, and faults requested while the run is going (`chaos.rank_commands`); all ranks."""


@dataclass(frozen=True, kw_only=True)
class PlantedFault:
    """A fault to start a rank with. Passed as JSON on a command line."""

    kind: FaultKind
    marker: str
    """File that is written, with the time in it, when the fault first takes effect."""
    first_batch: int = 0
    """First affected batch of the process, counted from 0; all later ones are affected too."""
    also: tuple[int, ...] = ()
    """Single affected batches before that."""
    rank: int = 0
    seconds: float = 0.0
    commands: str = ""
    """Folder with commands for running ranks."""
    save_every: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "PlantedFault":
        values = json.loads(text)
        return cls(**{**values, "kind": FaultKind(values["kind"]), "also": tuple(values["also"])})

    def hits(self, batch: int) -> bool:
        return batch >= self.first_batch or batch in self.also

    def mark(self) -> None:
        if not Path(self.marker).exists():
            Path(self.marker).write_text(repr(time.time()), encoding="utf-8")


def inject(fault: PlantedFault) -> None:
    """Inject the fault into this process, if it is the rank that the fault is for."""
    from nsa_train.train.distributed import RankInfo

    if fault.kind is FaultKind.CHAOS or RankInfo.from_environment().rank == fault.rank:
        _INJECTORS[fault.kind](fault)


def _nan_gradient(fault: PlantedFault) -> None:
    """Set one value of one gradient to NaN after the backward pass; the loss stays finite."""
    _around_batches(fault, after=_set_nan)


def _set_nan(module: "StepSkippingTrainModule") -> None:
    gradient = next(p.grad for p in module.model.parameters() if p.grad is not None)
    gradient.flatten()[0] = float("nan")


def _gate_collapse(fault: PlantedFault) -> None:
    """Every gate takes the first branch for every input."""
    import torch

    from nsa.core.branches import BranchGates

    @torch.no_grad()
    def before(module: "StepSkippingTrainModule") -> None:
        for gates in module.model.modules():
            if isinstance(gates, BranchGates):
                gates.proj.weight.zero_()
                gates.proj.bias.copy_(torch.tensor([30.0, 0.0, 0.0]).repeat(gates.proj.bias.numel() // 3))

    _around_batches(fault, before=before)


def _slow_rank(fault: PlantedFault) -> None:
    """The rank's computation takes longer; its communication does not."""
    from nsa_train.train.engine.mixer import NSAMixer

    forward = NSAMixer.forward

    def slowed(mixer: "nn.Module", x_BSD: "Tensor", **more: Any) -> "Tensor":
        fault.mark()
        time.sleep(fault.seconds)
        return forward(mixer, x_BSD, **more)  # type: ignore[arg-type]

    NSAMixer.forward = slowed  # type: ignore[method-assign, assignment]


def _benign_noise(fault: PlantedFault) -> None:
    """Variation of a healthy machine: steps of uneven length, now and then a batch that takes up to `seconds`."""
    from nsa_train.train.engine.data_loader import RowLoader

    chance = random.Random(7)
    read = RowLoader._read

    def uneven(loader: "RowLoader") -> Iterator[Any]:
        for number, pair in enumerate(read(loader)):
            if number % 60 == 59:
                time.sleep(chance.uniform(0.3, 1.0) * fault.seconds)
            yield pair

    RowLoader._read = uneven  # type: ignore[method-assign, assignment]
    _around_batches(fault, before=lambda module: time.sleep(chance.uniform(0.0, 0.02)))


def _gradient_spike(fault: PlantedFault) -> None:
    """All gradients of one batch are a thousand times as large."""

    def after(module: "StepSkippingTrainModule") -> None:
        for parameter in module.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1000.0)

    _around_batches(fault, after=after)


def _replica_drift(fault: PlantedFault) -> None:
    """The lowest bit of one weight of this rank is flipped: no loss shows it."""
    import torch

    flipped = False

    @torch.no_grad()
    def before(module: "StepSkippingTrainModule") -> None:
        nonlocal flipped
        if not flipped:
            next(module.model.parameters()).flatten().view(torch.int32)[0] ^= 1
        flipped = True

    _around_batches(fault, before=before)


def _clock_jump(fault: PlantedFault) -> None:
    """The wall clock jumps `seconds` ahead, and twice as far back some batches later; the monotonic one does not."""
    true_time, taken = time.time, 0

    def before(module: "StepSkippingTrainModule") -> None:
        nonlocal taken
        taken += 1
        offset = fault.seconds if taken <= _BATCHES_AHEAD else -fault.seconds
        time.time = lambda: true_time() + offset

    _around_batches(fault, before=before)


def _chaos(fault: PlantedFault) -> None:
    """Pace the steps, which changes no number, and follow the commands for this rank."""
    from nsa_train.train.distributed import RankInfo
    from proofs.drill.chaos.rank_commands import CommandFollower

    follower = CommandFollower(Path(fault.commands), RankInfo.from_environment().rank, fault.save_every)
    due = time.monotonic()

    def before(module: "StepSkippingTrainModule") -> None:
        nonlocal due
        time.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + fault.seconds
        follower.follow(module.trainer.global_step)

    def after(module: "StepSkippingTrainModule") -> None:
        if follower.nan_gradients:
            _set_nan(module)

    _around_batches(fault, before=before, after=after)


_INJECTORS: dict[FaultKind, Callable[[PlantedFault], None]] = {
    FaultKind.NAN_GRADIENT: _nan_gradient,
    FaultKind.GATE_COLLAPSE: _gate_collapse,
    FaultKind.SLOW_RANK: _slow_rank,
    FaultKind.BENIGN_NOISE: _benign_noise,
    FaultKind.GRADIENT_SPIKE: _gradient_spike,
    FaultKind.REPLICA_DRIFT: _replica_drift,
    FaultKind.CLOCK_JUMP: _clock_jump,
    FaultKind.CHAOS: _chaos,
}


def _around_batches(
    fault: PlantedFault,
    before: "Callable[[StepSkippingTrainModule], None]" = lambda module: None,
    after: "Callable[[StepSkippingTrainModule], None]" = lambda module: None,
) -> None:
    from nsa_train.train.engine.train_module import StepSkippingTrainModule

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

    StepSkippingTrainModule.train_batch = faulty  # type: ignore[method-assign, assignment]


def _config(words: list[str]) -> "RunConfig":
    from nsa_train.config import load

    return load(Path(words[0]), overrides=words[1:])


def _train(fault: str, words: list[str]) -> int:
    from nsa_train.train.run import train
    from nsa_train.train.start_options import StartOptions

    options = StartOptions(resume="--resume" in words)  # the only option that a launcher adds here
    words = [word for word in words if word != "--resume"]

    inject(PlantedFault.from_json(fault))
    return train(_config(words), options)


def _launch(fault: str, nproc: int, words: list[str]) -> int:
    from nsa_train.record import halt_file
    from nsa_train.record.run_folder import RunFolder
    from nsa_train.train.launch.launcher import LaunchSettings, launch
    from nsa_train.train.start_options import StartOptions

    options = [word for word in words if word.startswith("--")]
    words = [word for word in words if word not in options]
    folder = Path(_config(words).train.out_dir)
    if "--clear-halt" in options:
        halt_file.clear(folder, now=time.time(), step=RunFolder(folder).last_step())
    several = next((option.partition("=")[2] for option in options if option.startswith("--nodes=")), "")
    nnodes, _, endpoint = several.partition("@")
    settings = LaunchSettings(
        command=[sys.executable, "-m", MODULE, "train", fault, "1", *words],
        run_folder=folder,
        nproc=nproc,
        nnodes=nnodes or "1",
        rdzv_endpoint=endpoint or None,
        start=StartOptions(resume="--resume" in options),
    )
    return launch(settings, lambda text: _log(f"launch: {text}"))


def _log(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: list[str]) -> int:
    command, fault, nproc, *words = arguments
    try:
        if command == "launch":
            return _launch(fault, int(nproc), words)
        return _train(fault, words)
    except NSAError as error:
        _log(f"{type(error).__name__}: {error}")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
