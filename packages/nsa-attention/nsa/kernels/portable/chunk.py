"""One chunk of queries and its keys: scores, softmax, output, gradients.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
`hidden` broadcasts to the scores with their rows unflattened to (c, R).
"""

import torch
from torch import Tensor

from nsa.kernels.interface import Gradients

# Elements of the largest temporary. On a CPU it should stay in the second-level cache; elsewhere launches dominate.
CPU_ELEMENTS = 1 << 19
OTHER_ELEMENTS = 1 << 25

READABLE_DEVICES = ("cpu",)
"""Where the host reads values for nothing, and ranges and shapes follow the data. Elsewhere a read makes the host wait
for all work before it, so they follow from shapes alone."""


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    e, total, top = softmax(scores(q, k, scale), hidden)
    return (e @ v) / total, (top + _log_of_sum(e, total)).squeeze(-1)


def gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> Gradients:
    p = scores(q, k, scale).sub_(lse.masked_fill(lse == -torch.inf, 0)).exp_()
    p = _hide(p, hidden, 0)  # afterwards: the log-sum-exp may be NaN, and hidden keys get no gradient even then
    dv = p.transpose(-1, -2) @ dout
    ds = (dout @ v.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
    return ds @ k, ds.transpose(-1, -2) @ q, dv


def row_correction(dout: Tensor, out: Tensor, dlse: Tensor | None) -> Tensor:
    """`delta` of `gradients`: what the softmax takes off every score's gradient, less what `dlse` adds to it."""
    delta = (dout * out).sum(-1, keepdim=True)
    return delta if dlse is None else delta.sub_(dlse)


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.transpose(-1, -2)


def _hide(s: Tensor, hidden: Tensor, value: float = -torch.inf) -> Tensor:
    per_query = s.unflatten(-2, (hidden.shape[-3], -1))
    per_query.masked_fill_(hidden, value)
    return s


def softmax(s: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s − top), its row sums (1 where a row sees nothing: its exponentials are all 0), and top."""
    s = _hide(s, hidden)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    top = top.masked_fill(top == -torch.inf, 0)
    e = s.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    return e, total.masked_fill(total == 0, 1), top


def _log_of_sum(e: Tensor, total: Tensor) -> Tensor:
    # A visible row holds its own maximum, exp(0) = 1; only a row that sees nothing is all zeros.
    sees_nothing = e.amax(-1, keepdim=True) == 0 if e.shape[-1] else torch.ones_like(total, dtype=torch.bool)
    return total.log().masked_fill(sees_nothing, -torch.inf)


def group_rows(x_BcGRX: Tensor) -> Tensor:
    return wide(x_BcGRX).transpose(1, 2).flatten(2, 3)


def query_rows(x_BGMX: Tensor, heads_per_group: int) -> Tensor:
    return x_BGMX.unflatten(2, (-1, heads_per_group)).transpose(1, 2)


def wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def budget(x: Tensor) -> int:
    return CPU_ELEMENTS if x.device.type == "cpu" else OTHER_ELEMENTS


def may_read(x: Tensor) -> bool:
    return x.device.type in READABLE_DEVICES
