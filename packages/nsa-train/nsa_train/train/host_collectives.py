"""Small host-side collectives: flags and numbers that all ranks of a run agree on."""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist


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
