"""One chunk of queries and its keys: scores, softmax, output, gradients.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
`hidden` broadcasts to the scores with their rows unflattened to (c, R).
"""

from math import frexp

import torch
from torch import Tensor

from nsa.kernels.interface import Gradients
from nsa.kernels.precision import multiplies_wide

# Elements of the largest temporary. On a CPU it should stay in the second-level cache; elsewhere launches dominate.
CPU_ELEMENTS = 1 << 19
OTHER_ELEMENTS = 1 << 25

READABLE_DEVICES = ("cpu",)
"""Where the host reads values for nothing, and ranges and shapes follow the data. Elsewhere a read makes the host wait
for all work before it, so they follow from shapes alone."""


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    e, total, top = softmax(scores(q, k, scale), hidden)
    return product(e.to(v.dtype), v) / total, (top + total.log()).squeeze(-1)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> Gradients:
    p = scores(q, k, scale).sub_(lse.masked_fill(lse == -torch.inf, 0)).exp_()
    p = _hide(p, hidden, 0)  # afterwards: the log-sum-exp may be NaN, and hidden keys get no gradient even then
    dv = product(p.to(dout.dtype).transpose(-1, -2), dout)
    ds = product(dout, v.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
    del p  # as large as ds
    ds = ds.to(k.dtype)
    return product(ds, k), product(ds.transpose(-1, -2), q), dv


def row_correction(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """`delta` of `gradients`: what the softmax takes off every score's gradient, less what `dlse` adds to it."""
    delta = (wide(dout) * wide(out)).sum(-1, keepdim=True)
    return delta if dlse is None else delta.sub_(dlse)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    k = k.transpose(-1, -2)
    if multiplies_wide(q) and frexp(scale)[0] != 0.5:  # unless it is a power of two, scaled queries are rounded
        return product(q, k).mul_(scale)
    return product(q * scale, k)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in fp32 or wider."""
    if not multiplies_wide(a):
        return a @ b
    out = torch.bmm(a.flatten(0, -3), b.flatten(0, -3), out_dtype=torch.float32)
    return out.view(*a.shape[:-2], *out.shape[-2:])


def _hide(s: Tensor, hidden: Tensor, value: float = -torch.inf) -> Tensor:
    per_query = s.unflatten(-2, (hidden.shape[-3], -1))
    per_query.masked_fill_(hidden, value)
    return s


def softmax(s: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s − top), its row sums, and top. Where a row sees nothing, all exponentials are 0, their sum is given as 1,
    and top is −inf."""
    s = _hide(s, hidden)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    e = s.sub_(top.masked_fill(top == -torch.inf, 0)).exp_()
    total = e.sum(-1, keepdim=True)
    return e, total.masked_fill(total == 0, 1), top


def group_rows(x_BcGRX: Tensor) -> Tensor:
    return operand(x_BcGRX).transpose(1, 2).flatten(2, 3)


def query_rows(x_BGMX: Tensor, heads_per_group: int) -> Tensor:
    return x_BGMX.unflatten(2, (-1, heads_per_group)).transpose(1, 2)


def operand(x: Tensor) -> Tensor:
    """x as `product` takes it: as it is where that is multiplied in fp32, else in fp32 or wider."""
    return x if multiplies_wide(x) else wide(x)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def budget(x: Tensor) -> int:
    return CPU_ELEMENTS if x.device.type == "cpu" else OTHER_ELEMENTS


def may_read(x: Tensor) -> bool:
    return x.device.type in READABLE_DEVICES
