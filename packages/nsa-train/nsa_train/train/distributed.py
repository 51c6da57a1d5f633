"""Rank and world size from torchrun's environment. Needs no torch."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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

    def divided(self, parallel: "ParallelConfig") -> "RankInfo":
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
