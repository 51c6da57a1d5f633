"""Periodic bitwise comparison of replicated weights across ranks (silent data corruption check).

Replicas begin equal and get equal gradients, so a difference is a hardware fault (or a bug of ours) that no loss shows.
A check reads all weights of the rank once and sums them as integers on their device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from nsa.errors import ReplicaError
from nsa_train.train.engine import Callback
from nsa_train.train.host_collectives import HostCollectives

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class ReplicaCheckCallback(Callback):
    priority: ClassVar[int] = 5  # before the save (1): differing weights are not saved

    every: int
    collectives: HostCollectives

    def post_train_batch(self) -> None:
        if self.step % self.every:
            return
        parameters = list(self.trainer.train_module.model.parameters())
        answers = self.collectives.gather([fingerprint(parameters), shard(parameters[0])])
        if odd := _odd_ones_out([(place, print_) for print_, place in answers]):
            who = ", ".join(map(str, odd))
            raise ReplicaError(
                f"step {self.step}: the weights of rank {who} differ from their replicas', which got the same "
                f"gradients: suspect hardware. Take the node out and resume from a checkpoint of step "
                f"{self.step - self.every} or before, when they were last equal."
            )


def _odd_ones_out(answers: Sequence[tuple[int, int]]) -> list[int]:
    """Ranks that differ from most others of their shard; all of them where there is no majority.

    `answers` are (shard, fingerprint) by rank.
    """
    by_shard: dict[int, list[int]] = defaultdict(list)
    for rank, (place, _) in enumerate(answers):
        by_shard[place].append(rank)
    odd: list[int] = []
    for ranks in by_shard.values():
        (most, votes), *_ = Counter(answers[rank][1] for rank in ranks).most_common()
        trusted = most if 2 * votes > len(ranks) else None
        odd += [rank for rank in ranks if answers[rank][1] != trusted]
    return sorted(odd)


@torch.no_grad()
def fingerprint(parameters: Iterable[Tensor]) -> int:
    """A checksum that any single flipped bit changes: odd factors modulo 2^64 lose nothing."""
    sums = torch.stack([_local(p).view(_BITS[p.element_size()]).sum(dtype=torch.int64) for p in parameters])
    factors = torch.arange(1, 2 * len(sums), 2, device=sums.device)
    return int((sums * factors).sum())


def shard(parameter: Tensor) -> int:
    """Number of the part of the weights that this rank holds; 0 where it holds all."""
    if not isinstance(parameter, DTensor):
        return 0
    mesh, place = parameter.device_mesh, 0
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            place = place * mesh.size(dim) + coordinates[dim]
    return place


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.detach()
