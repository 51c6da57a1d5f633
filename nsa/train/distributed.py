"""Which process this is among those of a run, from the variables torchrun sets, and small agreements between them."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class RankInfo:
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    distributed: bool = False
    """Whether torchrun (or one like it) started this process; a world of one may be."""
    restarts: int = 0
    agent: int | None = None
    """The process that started this one and ends it, if that is torchrun or the agent of `nsa launch`."""

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
        """Whether nobody is left who would restart this process or tell it to end."""
        return self.agent is not None and os.getppid() != self.agent

    @property
    def first_here(self) -> bool:
        """The one process per node that looks at files for the others."""
        return self.local_rank == 0


class HostCollectives:
    """Answers that are the same on all ranks, from numbers on the host. All ranks must ask, in the same order.

    It has a process group of its own: the engine uses its groups from other threads at the same time.
    """

    def __init__(self, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout) if dist.is_initialized() else None

    def any(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether any rank has it set."""
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
        """What is not finite on one rank is not finite in the mean."""
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
