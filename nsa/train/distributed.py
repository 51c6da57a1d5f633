"""Rank and world size from torchrun's environment, small host-side collectives, and checks of the world size."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from nsa.config.schema import RunConfig
from nsa.errors import ConfigError


@dataclass(frozen=True)
class RankInfo:
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    distributed: bool = False
    """Whether torchrun (or a launcher like it) started this process, perhaps with a world size of one."""
    restarts: int = 0
    agent: int | None = None
    """Process id of the parent, if that is torchrun or the agent of `nsa launch`."""

    @classmethod
    def from_environment(cls) -> "RankInfo":
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        world = int(os.environ["WORLD_SIZE"])
        return cls(
            rank=int(os.environ["RANK"]),
            world=world,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world=int(os.environ.get("LOCAL_WORLD_SIZE", str(world))),
            distributed=True,
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            agent=os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None,
        )

    @property
    def first(self) -> bool:
        return self.rank == 0

    def agent_gone(self) -> bool:
        """Whether the agent, which would restart or end this process, has died."""
        return self.agent is not None and os.getppid() != self.agent

    @property
    def first_here(self) -> bool:
        """The first process of this node; it reads files for the others."""
        return self.local_rank == 0


class HostCollectives:
    """Small all-reduces and gathers of numbers on the host. All ranks must call them in the same order.

    They use a process group of their own: the engine uses its groups from other threads at the same time.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """Logical or of each flag over all ranks."""
        if self._group is None:
            return list(flags)
        answer = torch.tensor([int(flag) for flag in flags], device="cpu")
        dist.all_reduce(answer, dist.ReduceOp.MAX, group=self._group)
        return [bool(flag) for flag in answer.tolist()]

    def sum(self, values: Sequence[float]) -> list[float]:
        if self._group is None:
            return list(values)
        answer = torch.tensor(values, dtype=torch.float64, device="cpu")
        dist.all_reduce(answer, group=self._group)
        return [float(value) for value in answer.tolist()]

    def mean(self, value: float) -> float:
        return self.means([value])[0]

    def means(self, values: Sequence[float]) -> list[float]:
        """A value that is not finite on one rank makes the mean non-finite."""
        world = dist.get_world_size(self._group) if self._group is not None else 1
        return [total / world for total in self.sum(values)]

    def gather(self, values: Sequence[int]) -> list[list[int]]:
        """The same number of integers from every rank, in the order of the ranks."""
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        answers = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(answers, mine, group=self._group)
        return [answer.tolist() for answer in answers]


def check_world_size(config: RunConfig, ranks: RankInfo) -> None:
    """Raise for settings that this number of ranks cannot run. Needs no engine, so a launcher can check it first."""
    train, parallel = config.train, config.parallel
    if train.batch_size % ranks.world:
        fitting = -(-train.batch_size // ranks.world) * ranks.world
        raise ConfigError(
            f"train.batch_size ({train.batch_size}) must be a multiple of the number of ranks ({ranks.world}): every "
            f"rank gets the same number of rows. Set e.g. train.batch_size={fitting}."
        )
    if parallel.data == "hsdp" and ranks.world % (parallel.shard_ranks or ranks.local_world):
        raise ConfigError(
            f"parallel.shard_ranks ({parallel.shard_ranks}) must divide the number of ranks ({ranks.world}): hsdp "
            f"makes groups of that size. Set e.g. parallel.shard_ranks={ranks.local_world}."
        )
    if train.replica_check_every and parallel.data == "fsdp" and ranks.world > 1:
        raise ConfigError(
            f"train.replica_check_every is {train.replica_check_every} and parallel.data is fsdp: every rank holds "
            f"a different shard of the weights, so there are no replicas to compare. Set train.replica_check_every=0."
        )
