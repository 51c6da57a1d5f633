"""Rank and world size from torchrun's environment, and small host-side collectives."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from nsa_train.config.schema import ParallelConfig


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
    ranks_per_row: int = 1
    """Consecutive ranks that work on the same rows, by tensor and context parallelism."""

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

    def divided(self, parallel: ParallelConfig) -> "RankInfo":
        """Return the ranks with rows divided as these settings say."""
        return replace(self, ranks_per_row=parallel.ranks_per_row)

    @property
    def data_rank(self) -> int:
        """Number of the share of a global batch that this rank works on."""
        return self.rank // self.ranks_per_row

    @property
    def data_world(self) -> int:
        """Number of shares of a global batch."""
        return self.world // self.ranks_per_row

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
        """Gather as many integers from every rank, in the order of the ranks."""
        if self._group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.int64, device="cpu")
        answers = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(answers, mine, group=self._group)
        return [answer.tolist() for answer in answers]
