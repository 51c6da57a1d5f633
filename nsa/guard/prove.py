"""Proofs that the attention is right on this device, with the kernels that would run here: seconds, not a test suite.

Each measures something against its definition rather than against another implementation of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.gating import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.core.rope import rotate

_LENGTH = 601  # odd, several chunks and blocks


@dataclass(frozen=True)
class Proof:
    claim: str
    measured: float
    limit: float
    """The claim holds while measured ≤ limit."""

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


def prove(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_groups: int, d_k: int, d_v: int
) -> Iterator[Proof]:
    """Yield each proof as it is finished. Errors are relative to the largest value."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 2e-2)

    def module(**changes: Any) -> NSAAttention:
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(l=32, d=16, l_sel=64, n_sel=4, w=128) | changes
        return NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v, **sizes).to(device, dtype)

    x = torch.randn(1, _LENGTH, n_heads * d_k, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with torch.no_grad():
        yield Proof(
            "window over everything = dense attention", _against_dense(module(w=_LENGTH), "sliding", x), tolerance
        )
        yield Proof("all blocks selected = dense attention", _against_dense(module(n_sel=10), "selected", x), tolerance)
        yield Proof("token by token = whole", _against_whole(module(), x), tolerance)
        yield Proof("packed documents = each alone", _packed_against_alone(module(), x), tolerance)
        yield Proof("values that differ when the future changes", _bits_changed_by_the_future(module(), x), 0)
        yield Proof("reads counted − reads predicted", _read_difference(module(), x), 0)
    yield Proof("gradients that differ between two runs", _gradient_bits_changed(module(), x), 0)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def _against_dense(module: NSAAttention, branch: str, x: Tensor) -> float:
    """One branch let through whole, against PyTorch's attention in fp32 over that branch's keys and values."""
    b, groups, per_group = BRANCH_ORDER.index(branch), module.n_kv_groups, module.shape.heads_per_group
    module.gates.proj.weight.zero_()
    module.gates.proj.bias.view(-1, len(BRANCH_ORDER)).fill_(-1e4)[:, b] = 1e4
    tables = module.rotary.tables(torch.arange(x.shape[1], device=x.device)[None])
    q = rotate(module.w_q(x).unflatten(-1, (module.n_heads, -1)), tables)
    k = rotate(module.w_k(x).unflatten(-1, (groups, 3, -1))[..., b, :], tables).repeat_interleave(per_group, 2)
    v = module.w_v(x).unflatten(-1, (groups, 3, -1))[..., b, :].repeat_interleave(per_group, 2)
    q, k, v = (y.transpose(1, 2).double() for y in (q, k, v))
    dense = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return _error(module(x), F.linear(dense.transpose(1, 2).flatten(2), module.w_out.weight.double()))


def _against_whole(module: NSAAttention, x: Tensor) -> float:
    cache = module.new_cache(1, x.shape[1])
    sizes = [300, 37, x.shape[1] - 377, *[1] * 40]
    return _error(torch.cat([module(part, cache=cache) for part in x.split(sizes, 1)], 1), module(x))


def _packed_against_alone(module: NSAAttention, x: Tensor) -> float:
    lengths = [5, 200, 1, x.shape[1] - 206]
    ends = torch.tensor([0, *lengths], device=x.device).cumsum(0).int()
    return _error(module(x, cu_doc_lens=ends), torch.cat([module(part) for part in x.split(lengths, 1)], 1))


def _bits_changed_by_the_future(module: NSAAttention, x: Tensor) -> float:
    clean, changed = module(x), 0
    for cut in (1, 64, 333, x.shape[1] - 1):
        poisoned = x.clone()
        poisoned[:, cut:] = 1e4
        changed += int((module(poisoned)[:, :cut] != clean[:, :cut]).sum())
    return changed


def _read_difference(module: NSAAttention, x: Tensor) -> float:
    with probing(module) as probes:
        module(x)
    figures = probes[""].figures
    return abs(int(figures["reads_act_total"]) - int(figures["reads_pred"]))


def _gradient_bits_changed(module: NSAAttention, x: Tensor) -> float:
    def gradients() -> tuple[Tensor, ...]:
        return torch.autograd.grad(module(x).float().square().sum(), list(module.parameters()))

    return sum(int((a != b).sum()) for a, b in zip(gradients(), gradients(), strict=True))
