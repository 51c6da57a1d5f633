"""The attention module with its projections taken out: what is left, exactly as it runs in a model, is measured."""

import torch
from torch import Tensor, nn

from nsa.bench.case import BenchCase
from nsa.core.kv_cache import BranchStreams, LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.registry import BackendRequest


class _GivenTensor(nn.Module):
    """Stands where the gates' projection was."""

    value: Tensor

    def __init__(self) -> None:
        super().__init__()
        vars(self)["value"] = torch.empty(0)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.value


class GivenAttention(NSAAttention):
    """`NSAAttention` whose queries, keys, values and gates are set from outside; its output is not projected."""

    def __init__(self, case: BenchCase, backend: str) -> None:
        s, g = case.shape, case.shape.geometry
        super().__init__(
            1,
            s.n_heads,
            s.n_kv_groups,
            s.d_k,
            s.d_v,
            g.l,
            g.d,
            g.l_sel,
            g.n_sel,
            g.w,
            kernels=BackendRequest(*[backend] * 4),
        )
        self.to(case.device, case.dtype)
        self.w_out = nn.Identity()  # type: ignore[assignment]
        self.gates = _GivenTensor()  # type: ignore[assignment]
        self.given: tuple[Tensor, BranchStreams, tuple[Tensor, Tensor] | None] | None = None
        """Queries, streams, and compressed keys and values to use as they are; None: φ makes them, as in the module."""

    def give(self, q: Tensor, streams: BranchStreams, gates: Tensor, compressed: tuple[Tensor, Tensor] | None) -> None:
        vars(self)["given"] = q, streams, compressed  # past nn.Module's bookkeeping, which would be timed
        vars(self.gates)["value"] = gates

    def fill(self, cache: LayerCache, streams: BranchStreams) -> None:
        """Let a cache take in tokens without attending to anything."""
        cache.append(streams, None, super()._compress)

    def _project(self, x_BSD: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, BranchStreams]:
        assert self.given is not None
        return self.given[0], self.given[1]

    def _compress(self, k: Tensor, v: Tensor, begin_BC: Tensor, block_pos_BC: Tensor) -> tuple[Tensor, Tensor]:
        return (self.given and self.given[2]) or super()._compress(k, v, begin_BC, block_pos_BC)
