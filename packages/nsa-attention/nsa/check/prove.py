"""Quick correctness checks of attention on this device with the kernels that would run here (`nsa doctor --prove`).

Each compares with a definition (dense attention, the whole sequence, counted reads), not with another backend.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.branches import BRANCH_ORDER
from nsa.core.nsa_attention import NSAAttention
from nsa.core.probe import probing
from nsa.core.rope import rotate

_LENGTH = 601  # odd, several chunks and blocks
_DENSE: dict[str, dict[str, int]] = {"sliding": dict(w=_LENGTH), "selected": dict(n_sel=10)}  # attend to all keys
AUTOCAST_LIMIT = 2.0
_SHARP = 2.0  # standard deviation of queries and keys: logits of ±10 and more, sensitive to rounded scores


@dataclass(frozen=True)
class ProofResult:
    claim: str
    measured: float
    limit: float
    """The claim holds while measured ≤ limit."""

    @property
    def holds(self) -> bool:
        return self.measured <= self.limit


def prove(
    device: torch.device, dtype: torch.dtype, n_heads: int, n_kv_groups: int, d_k: int, d_v: int
) -> Iterator[ProofResult]:
    """Yield each result as soon as it is known. Errors are relative to the largest value."""
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 2e-2)

    def module(**changes: Any) -> NSAAttention:
        torch.manual_seed(0)
        sizes: dict[str, Any] = dict(l=32, d=16, l_sel=64, n_sel=4, w=128) | changes
        return NSAAttention(n_heads * d_k, n_heads, n_kv_groups, d_k, d_v, **sizes).to(device, dtype)

    x = torch.randn(1, _LENGTH, n_heads * d_k, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    with torch.no_grad():
        window, blocks = (_against_dense(module(**sizes), branch, x) for branch, sizes in _DENSE.items())
        yield ProofResult("window over everything = dense attention", window, tolerance)
        yield ProofResult("all blocks selected = dense attention", blocks, tolerance)
        yield ProofResult("token by token = whole", _against_whole(module(), x), tolerance)
        yield ProofResult("packed documents = each alone", _packed_against_alone(module(), x), tolerance)
        yield ProofResult("values that differ when the future changes", _bits_changed_by_the_future(module(), x), 0)
        yield ProofResult("reads counted − reads predicted", _read_difference(module(), x), 0)
    yield ProofResult("gradients that differ between two runs", _gradient_bits_changed(module(), x), 0)
    ratios = [autocast_error(module(**sizes).float(), branch, x.float()) for branch, sizes in _DENSE.items()]
    yield ProofResult("error under autocast, × PyTorch attention's", max(ratios), AUTOCAST_LIMIT)


def _error(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def _against_dense(module: NSAAttention, branch: str, x: Tensor) -> float:
    """One branch alone (gate 1, others 0) against PyTorch attention in fp64 over that branch's keys and values."""
    _open_one_gate(module, branch)
    dense = _dense(module, *(y.double() for y in _projected(module, branch, x)))
    return _error(module(x), F.linear(dense.flatten(2), module.w_out.weight.double()))


def autocast_error(module: NSAAttention, branch: str, x: Tensor) -> float:
    """Error under bf16 autocast of a branch that attends to all keys, fp32 weights, divided by the error of PyTorch's
    attention on the same inputs in the same mode: the worst of output, dq, dk and dv."""
    with torch.no_grad(), torch.autocast(x.device.type, torch.bfloat16):
        for weight in (module.w_q.weight, module.w_k.weight):
            weight *= _SHARP / (weight.std() * weight.shape[1] ** 0.5)
        q, k, v = _projected(module, branch, x)
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    truth = _output_and_gradients(_dense, module, [y.detach().double().requires_grad_() for y in leaves])
    with torch.autocast(x.device.type, torch.bfloat16):
        ours = _output_and_gradients(partial(_branch, branch=branch), module, leaves)
        plain = _output_and_gradients(_dense, module, leaves)
    return max(
        ((mine - want).norm() / (its - want).norm()).item() for mine, its, want in zip(ours, plain, truth, strict=True)
    )


def _open_one_gate(module: NSAAttention, branch: str) -> None:
    assert module.gates is not None
    module.gates.proj.weight.zero_()
    module.gates.proj.bias.view(-1, len(BRANCH_ORDER)).fill_(-1e4)[:, BRANCH_ORDER.index(branch)] = 1e4


def _projected(module: NSAAttention, branch: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A branch's queries [B, S, G, R, K], keys [B, S, G, K] and values [B, S, G, V]."""
    b, groups = BRANCH_ORDER.index(branch), module.n_kv_groups
    tables = module.rotary.tables(torch.arange(x.shape[1], device=x.device)[None])
    q = rotate(module.w_q(x).unflatten(-1, (groups, -1, module.d_k)), tables)
    k, v = (
        w(x).unflatten(-1, (groups, -1, width)) for w, width in ((module.w_k, module.d_k), (module.w_v, module.d_v))
    )
    k, v = (streams[..., min(b, streams.shape[-2] - 1), :] for streams in (k, v))  # shared, or one per branch
    return q, rotate(k, tables), v


def _dense(module: NSAAttention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch attention, [B, S, G, R, V]; its fused kernels need one width for keys and values."""
    k, v = (y.repeat_interleave(module.strategy.shape.heads_per_group, 2) for y in (k, v))
    width = max(module.d_k, module.d_v)
    q, k, v = (F.pad(y.transpose(1, 2), (0, width - y.shape[-1])) for y in (q.flatten(2, 3), k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=module.scale)[..., : module.d_v]
    return out.transpose(1, 2).unflatten(2, (module.n_kv_groups, -1))


def _branch(module: NSAAttention, q: Tensor, k: Tensor, v: Tensor, branch: str) -> Tensor:
    """One branch by the kernels that run here."""
    run, g = module.plan(q.device, q.dtype).functions, module.geometry
    pos_BS = torch.arange(q.shape[1], device=q.device).expand(q.shape[:2])
    start_BS = torch.zeros_like(pos_BS)
    if branch == "sliding":
        out = run.sliding(q, k, v, pos_BS, start_BS, geometry=g, scale=module.scale)
    else:
        block_N, own_BS11 = torch.arange(g.n_sel, device=q.device), (pos_BS // g.l_sel)[..., None, None]
        idx_BSGN = block_N.where(block_N <= own_BS11, -1).expand(-1, -1, q.shape[2], -1).to(torch.int32)
        out = run.selected(q, k, v, idx_BSGN, pos_BS, start_BS, geometry=g, scale=module.scale)
    assert isinstance(out, Tensor)
    return out


def _output_and_gradients(run: Callable[..., Tensor], module: NSAAttention, leaves: list[Tensor]) -> list[Tensor]:
    out = run(module, *leaves)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    return [x.detach().double() for x in (out, *torch.autograd.grad((out * weight).sum(), leaves))]


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
