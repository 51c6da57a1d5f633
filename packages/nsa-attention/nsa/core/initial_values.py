"""Initial values of a parameter that is whole or sharded (DTensor), in place."""

from collections.abc import Callable

import torch
from torch import Tensor


@torch.no_grad()
def draw(parameter: Tensor, start: Callable[[Tensor], object]) -> None:
    """Set the values that `start` writes into a tensor. Of a sharded parameter every rank draws all of them and keeps
    its part: ranks with the same random state have together the values of one rank."""
    if not _is_sharded(parameter):
        start(parameter)
        return
    whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
    start(whole)
    fill(parameter, whole)


@torch.no_grad()
def fill(parameter: Tensor, whole: Tensor) -> None:
    """Copy this rank's part of a whole parameter into it. Nothing is sent: every rank must have the same values."""
    if not _is_sharded(parameter):
        parameter.copy_(whole)
        return
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(parameter, DTensor)
    # torch cannot scatter a tensor whose axis is sharded by two kinds of parallelism into parts of different sizes.
    mesh, placements = parameter.device_mesh, parameter.placements
    part = distribute_tensor(whole.to(parameter.device), mesh, placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())


def _is_sharded(parameter: Tensor) -> bool:
    """Whether it is a DTensor, whose import takes part of a second."""
    return hasattr(parameter, "device_mesh")
