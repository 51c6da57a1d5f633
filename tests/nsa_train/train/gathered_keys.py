"""Ways of gathering keys that give right gradients: two ranks on gloo, each with its own queries over all keys.

Context and tensor parallelism use the ways that do; run by test_hazards.py as `python -m`.
"""

import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

WORLD = 2


def keys_gradient(rank: int, gather) -> torch.Tensor:
    """The gradient of this rank's part of the keys, when every rank's loss uses all of them."""
    torch.manual_seed(0)
    keys, queries = torch.randn(8, 4, dtype=torch.float64), torch.randn(WORLD, 5, 4, dtype=torch.float64)
    mine = keys.chunk(WORLD)[rank].clone().requires_grad_()
    (queries[rank] @ gather(mine).T).square().sum().backward()
    assert mine.grad is not None
    return mine.grad


def right_gradient(rank: int) -> torch.Tensor:
    torch.manual_seed(0)
    keys, queries = torch.randn(8, 4, dtype=torch.float64), torch.randn(WORLD, 5, 4, dtype=torch.float64)
    keys.requires_grad_()
    sum((queries[r] @ keys.T).square().sum() for r in range(WORLD)).backward()
    return keys.grad.chunk(WORLD)[rank]


def check(rank: int, rendezvous: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))

    def whole(local, **how):
        return DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()]).to_local(**how)

    right = right_gradient(rank)
    partial = keys_gradient(rank, lambda k: whole(k, grad_placements=[Partial()]))
    careless = keys_gradient(rank, whole)
    functional = keys_gradient(rank, lambda k: collectives.all_gather_tensor_autograd(k, 0, dist.group.WORLD))
    assert torch.allclose(partial, right), "to_local(grad_placements=[Partial()])"
    assert torch.allclose(functional, right), "all_gather_tensor_autograd"
    assert not torch.allclose(careless, right), "the hazard is gone: to_local() alone now gives right gradients"

    plain = torch.nn.Parameter(torch.ones(4))
    sharded = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Shard(0)]))
    plain.grad, sharded.grad = torch.ones(4), DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="mixed"):
        torch.nn.utils.clip_grad_norm_([plain, sharded], 1.0)
    dist.destroy_process_group()


if __name__ == "__main__":
    children = []
    for number in range(WORLD):
        child = os.fork()
        if not child:
            check(number, sys.argv[1])
            os._exit(0)
        children.append(child)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
