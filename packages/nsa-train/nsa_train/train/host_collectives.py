"""Small host-side collectives: flags, numbers and kernels that all ranks of a run agree on."""

import socket
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from nsa.errors import KernelUnavailable
from nsa.kernels.choice_text import kernels_text
from nsa.kernels.registry import BackendChoice


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

    def gather_texts(self, texts: Sequence[str]) -> list[list[str]]:
        """Gather texts from every rank, in the order of the ranks."""
        if self._group is None:
            return [list(texts)]
        answers: list[list[str]] = [[] for _ in range(dist.get_world_size(self._group))]
        dist.all_gather_object(answers, list(texts), group=self._group)
        return answers


class _RankKernels(NamedTuple):
    """The kernels of one rank; `problem` if a backend that was requested cannot run there."""

    host: str
    backends: str
    why: str
    problem: str


def agree_on_kernels(
    choose: Callable[[], tuple[BackendChoice, ...]], collectives: HostCollectives
) -> tuple[BackendChoice, ...]:
    """Choose the backends of this rank; raise on all ranks, naming the odd ones, unless all have the same.

    One rank with slower kernels would slow the whole run down, and replicas would round differently.
    """
    choices: tuple[BackendChoice, ...] = ()
    own = _RankKernels(socket.gethostname(), "", "", "")
    try:
        choices = choose()
        backends = ", ".join(f"{choice.branch} {choice.backend}" for choice in choices)
        own = own._replace(backends=backends, why=kernels_text(choices))
    except KernelUnavailable as error:
        own = own._replace(problem=str(error))
    every = [_RankKernels(*texts) for texts in collectives.gather_texts(own)]
    if problem := _disagreement(every):
        raise KernelUnavailable(problem)
    return choices


def _disagreement(every: Sequence[_RankKernels]) -> str | None:
    """Which ranks compute with other kernels than most, or with none, and why."""
    for rank, one in enumerate(every):
        if one.problem:
            return one.problem if len(every) == 1 else f"rank {rank} on {one.host}: {one.problem}"
    ((most, count),) = Counter(one.backends for one in every).most_common(1)
    odd = [(rank, one) for rank, one in enumerate(every) if one.backends != most]
    if not odd:
        return None
    common = next(one for one in every if one.backends == most)
    names = ", ".join(f"rank {rank} on {one.host}" for rank, one in odd[:8]) + (", …" if len(odd) > 8 else "")
    return (
        f"the ranks would compute with different kernels. {names}: {odd[0][1].why}. The other {count}: {common.why}. "
        f"Correct what that reason says there (`nsa doctor` on that machine shows it), or set a backend that all have, "
        f"e.g. kernels.selected=portable, in every branch."
    )
