"""Inputs of one kernel call, computed three ways: reference in fp64, the kernel, plain PyTorch.

B batch · S queries · T keys of the branch · G kv groups · R heads per group · K key dim · V value dim
"""

from typing import Any

import torch
from torch import Tensor

from nsa.core.document_layout import packed_layout, plain_layout
from nsa.kernels.ops import KernelFunctions
from nsa.kernels.registry import BACKENDS
from nsa.verify.gpu_check.sizes import KernelSizes

CPU = torch.device("cpu")


class KernelCall:
    """Inputs drawn on the CPU and rounded to the dtype; the selected blocks are always the reference's."""

    def __init__(self, sizes: KernelSizes, dtype: torch.dtype) -> None:
        s, g = sizes.shape, sizes.shape.geometry
        self.geometry, self.dtype, self.scale = g, dtype, float(s.d_k**-0.5)
        generator = torch.Generator().manual_seed(sizes.length)
        if sizes.documents:
            self.layout = packed_layout(torch.tensor(sizes.documents), sizes.length, g)
        else:
            self.layout = plain_layout(1, sizes.length, g, CPU)

        def tensor(*shape: int) -> Tensor:
            return torch.randn(1, *shape, generator=generator).to(dtype)

        def keys(n: int) -> tuple[Tensor, Tensor]:
            return tensor(n, s.n_kv_groups, s.d_k), tensor(n, s.n_kv_groups, s.d_v)

        heads = (s.n_kv_groups, s.heads_per_group)
        self.q_BSGRK, self.dout_BSGRV = (tensor(sizes.length, *heads, width) for width in (s.d_k, s.d_v))
        self.raw, self.compressed = keys(sizes.length), keys(self.layout.begin_BC.shape[1])
        self.choosing: dict[str, Any] = dict(geometry=g, scale=self.scale)
        self.idx_BSGN = BACKENDS["reference"].functions.select(
            self.q_BSGRK.double(),
            self.compressed[0].double(),
            self.layout.pos_BS,
            self.layout.first_BS,
            **self.choosing,
        )

    def truth(self, branch: str) -> list[Tensor]:
        """Output, dq, dk, dv by the reference in fp64 on the CPU."""
        return self._by(BACKENDS["reference"].functions, branch, CPU, torch.float64)

    def by_kernel(self, backend: str, branch: str, device: torch.device) -> list[Tensor]:
        return self._by(BACKENDS[backend].functions, branch, device, self.dtype)

    def by_plain_pytorch(self, branch: str, device: torch.device) -> list[Tensor]:
        """The formula with PyTorch's operators, every intermediate rounded to the dtype."""
        q, k, v = self._leaves(branch, device, self.dtype)
        visible_BSG1T = self._visible(branch).to(device)[:, :, :, None]
        scores = torch.einsum("bsgrk,btgk->bsgrt", q, k) * self.scale
        p = scores.masked_fill(~visible_BSG1T, torch.finfo(self.dtype).min).softmax(-1)
        out = torch.einsum("bsgrt,btgv->bsgrv", p * visible_BSG1T.any(-1, keepdim=True), v)
        return [out, *torch.autograd.grad(out, (q, k, v), self.dout_BSGRV.to(device))]

    def _by(self, functions: KernelFunctions, branch: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        leaves = self._leaves(branch, device, dtype)
        out = self._run(functions, branch, *leaves)
        return [out, *torch.autograd.grad(out, leaves, self.dout_BSGRV.to(device, dtype))]

    def _leaves(self, branch: str, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
        tensors = (self.q_BSGRK, *(self.compressed if branch == "compressed" else self.raw))
        return [x.detach().to(device, dtype).requires_grad_() for x in tensors]

    def _run(self, functions: KernelFunctions, branch: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        g, scale = self.geometry, self.scale
        pos, start, first = (x.to(q.device) for x in self.layout[:3])
        if branch == "sliding":
            out = functions.sliding(q, k, v, pos, start, geometry=g, scale=scale)
        elif branch == "compressed":
            out = functions.compressed(q, k, v, pos, first, geometry=g, scale=scale)
        else:
            out = functions.selected(q, k, v, self.idx_BSGN.to(q.device), pos, start, geometry=g, scale=scale)
        assert isinstance(out, Tensor)
        return out

    def _visible(self, branch: str) -> Tensor:
        """Which keys each query sees, [B, S, G, T], read off the reference: where its output takes unit values from.

        With queries of zero every visible key has the same weight, so that none underflows.
        """
        k = (self.compressed if branch == "compressed" else self.raw)[0].double()
        n = k.shape[1]
        unit_BTGT = torch.eye(n, dtype=torch.float64)[None, :, None].expand(-1, -1, k.shape[2], -1)
        q = torch.zeros_like(self.q_BSGRK[:, :, :, :1], dtype=torch.float64)
        return self._run(BACKENDS["reference"].functions, branch, q, k, unit_BTGT)[:, :, :, 0] > 0
