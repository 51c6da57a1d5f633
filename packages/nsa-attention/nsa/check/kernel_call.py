"""Inputs of one call of the three branches, computed three ways: reference in fp64 or fp32, a backend, plain PyTorch.

B batch · S queries · T keys of the branch · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nsa.kernels.interface import KernelShape
from nsa.kernels.ops import KernelFunctions
from nsa.kernels.registry import BACKENDS

CPU = torch.device("cpu")
NAMES = ("out", "dq", "dk", "dv")
ALL_NAMES = (*NAMES, "lse", "dq, lse used", "dk, lse used")
"""With the log-sum-exps, and the gradients when the log-sum-exps have one too."""
REFERENCE = BACKENDS["reference"].functions


class QueryPositions(NamedTuple):
    """Positions of queries, as in `nsa.kernels.reference`."""

    pos_BS: Tensor
    start_BS: Tensor
    first_BS: Tensor


class _CallPart(NamedTuple):
    """One row of the batch and one kv group: they do not see each other, and memory grows with both."""

    row: slice
    group: slice

    def of(self, x: Tensor) -> Tensor:
        """[B, S or T, …], with groups in the third dimension if there is one."""
        return x[self.row] if x.dim() == 2 else x[self.row, :, self.group]


_WHOLE = _CallPart(slice(None), slice(None))


class KernelCall:
    """Inputs drawn on the CPU and rounded to the dtype; the selected blocks are always the reference's.

    `n_keys`, `n_compressed`: lengths of the key axes. `strided`: queries, keys and values are given to a backend as
    views of larger tensors, as projections give them.
    """

    def __init__(
        self, shape: KernelShape, layout: QueryPositions, n_keys: int, n_compressed: int, dtype: torch.dtype, *,
        seed: int = 0, strided: bool = False,
    ) -> None:  # fmt: skip
        self.geometry, self.dtype, self.scale = shape.geometry, dtype, float(shape.d_k**-0.5)
        self.layout, self.strided = layout, strided
        generator = torch.Generator().manual_seed(seed)
        batch, length = layout.pos_BS.shape

        def tensor(*sizes: int) -> Tensor:
            return torch.randn(batch, *sizes, generator=generator).to(dtype)

        def keys(n: int) -> tuple[Tensor, Tensor]:
            return tensor(n, shape.n_kv_groups, shape.d_k), tensor(n, shape.n_kv_groups, shape.d_v)

        heads = (shape.n_kv_groups, shape.heads_per_group)
        self.q_BSGRK, self.dout_BSGRV = (tensor(length, *heads, width) for width in (shape.d_k, shape.d_v))
        self.raw, self.compressed = keys(n_keys), keys(n_compressed)
        self.dlse_BSGR = tensor(length, *heads).float()
        self.choosing: dict[str, Any] = dict(geometry=shape.geometry, scale=self.scale)
        self.idx_BSGN = REFERENCE.select(
            self.q_BSGRK.double(), self.compressed[0].double(), layout.pos_BS, layout.first_BS, **self.choosing
        )

    def truth(
        self, branch: str, dtype: torch.dtype = torch.float64, names: tuple[str, ...] = NAMES
    ) -> list[Tensor]:  # fmt: skip
        """Compute NAMES or ALL_NAMES by the reference on the CPU."""
        return self._in_parts(partial(self._run, REFERENCE, branch, return_lse=True), branch, CPU, dtype, names)

    def by_kernel(
        self, backend: str, branch: str, device: torch.device, names: tuple[str, ...] = NAMES
    ) -> list[Tensor]:
        attend = partial(self._run, BACKENDS[backend].functions, branch, return_lse=True)
        return self._differentiated(attend, branch, device, self.dtype, names, _WHOLE)

    def by_plain_pytorch(self, branch: str, device: torch.device, names: tuple[str, ...] = NAMES) -> list[Tensor]:
        """The formula with PyTorch's operators, every intermediate rounded to the dtype."""

        def attend(part: _CallPart, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return plain_attention(q, k, v, self._visible(branch, part).to(device), scale=self.scale)

        return self._in_parts(attend, branch, device, self.dtype, names)

    def _in_parts(
        self, attend: Callable[..., Any], branch: str, device: torch.device, dtype: torch.dtype, names: tuple[str, ...]
    ) -> list[Tensor]:
        """Row by row and group by group."""
        rows = []
        for row in range(self.q_BSGRK.shape[0]):
            parts = (_CallPart(slice(row, row + 1), slice(g, g + 1)) for g in range(self.q_BSGRK.shape[2]))
            groups = [self._differentiated(attend, branch, device, dtype, names, part) for part in parts]
            rows.append([torch.cat(results, 2) for results in zip(*groups, strict=True)])
        return [torch.cat(results) for results in zip(*rows, strict=True)]

    def _differentiated(
        self, attend: Callable[..., Any], branch: str, device: torch.device, dtype: torch.dtype,
        names: tuple[str, ...], part: _CallPart,
    ) -> list[Tensor]:  # fmt: skip
        leaves = self.leaves(branch, device, dtype, part)
        dout, dlse = part.of(self.dout_BSGRV).to(device, dtype), part.of(self.dlse_BSGR).to(device)
        out, lse = attend(part, *leaves)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=names != NAMES)]
        if names != NAMES:
            both = torch.autograd.grad((out, lse), leaves[:2], (dout, dlse.to(lse.dtype)))
            results += [lse.detach(), *both]
        return results

    def leaves(
        self, branch: str, device: torch.device, dtype: torch.dtype | None = None, part: _CallPart = _WHOLE
    ) -> list[Tensor]:
        """Queries, keys and values that gradients are taken of."""
        tensors = [self.q_BSGRK, *(self.compressed if branch == "compressed" else self.raw)]
        tensors_of_part = [part.of(x).detach().to(device, dtype or self.dtype) for x in tensors]
        return [(_view_of_projection(x) if self.strided else x).requires_grad_() for x in tensors_of_part]

    def positions(self, device: torch.device, part: _CallPart = _WHOLE) -> list[Tensor]:
        """Return the part's `layout`: position, start, first block."""
        return [_on_device(part.of(x), device) for x in self.layout]

    def _run(
        self, functions: KernelFunctions, branch: str, part: _CallPart, q: Tensor, k: Tensor, v: Tensor, **options: bool
    ) -> Any:
        pos, start, first = self.positions(q.device, part)
        if branch == "selected":
            idx = part.of(self.idx_BSGN).to(q.device)
            return functions.selected(q, k, v, idx, pos, start, **self.choosing, **options)
        where = first if branch == "compressed" else start
        return getattr(functions, branch)(q, k, v, pos, where, **self.choosing, **options)

    def _visible(self, branch: str, part: _CallPart) -> Tensor:
        """Mask of the keys that each query sees, [B, S, G, T], read off the reference: where its output takes unit
        values from.

        With queries of zero every visible key has the same weight, so that none underflows.
        """
        k = part.of((self.compressed if branch == "compressed" else self.raw)[0]).float()
        unit_BTGT = torch.eye(k.shape[1])[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
        q = torch.zeros_like(part.of(self.q_BSGRK)[:, :, :, :1], dtype=torch.float32)
        out: Tensor = self._run(REFERENCE, branch, part, q, k, unit_BTGT)
        return out[:, :, :, 0] > 0


def plain_attention(q: Tensor, k: Tensor, v: Tensor, visible_BSGT: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps by PyTorch's operators, every intermediate in the inputs' dtype."""
    visible_BSG1T = visible_BSGT[:, :, :, None]
    nothing = ~visible_BSG1T.any(-1, keepdim=True)
    scores = torch.einsum("bsgrk,btgk->bsgrt", q, k) * scale
    scores = scores.masked_fill(~visible_BSG1T, torch.finfo(q.dtype).min)
    p = scores.softmax(-1).masked_fill(nothing, 0.0)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.sum(-1)
    return torch.einsum("bsgrt,btgv->bsgrv", p, v), lse.masked_fill(nothing[..., 0], -torch.inf)


def _on_device(x_BS: Tensor, device: torch.device) -> Tensor:
    """A copy with its stride of 0, if it has one: `to` would lose it, by which kernels know rows of one document."""
    return x_BS.to(device) if x_BS.stride(1) else x_BS[:, :1].to(device).expand_as(x_BS)


def _view_of_projection(x: Tensor) -> Tensor:
    """The second of three that lie side by side for each token."""
    fused = x.new_full((*x.shape[:2], 3, *x.shape[2:]), torch.nan)
    fused[:, :, 1] = x
    return fused[:, :, 1]
