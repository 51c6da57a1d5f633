"""NSA backends to benchmark: the functional attention, its parts, and a cached forward between its projections."""

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.bench.case import GRADIENTS, TORCH_DTYPES, BenchCase, BenchRunner, BenchTask, leaf
from nsa.core.branches import BranchStreams
from nsa.core.functional import nsa_attention
from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import plain_layout
from nsa.kernels import flash
from nsa.kernels.registry import BACKENDS, BRANCHES

_PREFILL_CHUNK = 2048


def attention(backend: str, case: BenchCase, task: BenchTask) -> BenchRunner:
    """Select, attend in three branches, mix by gates; or one of these parts alone."""
    if task.part != "all":
        return _part(case, backend, task.part)
    leaves = {name: leaf(x) for name, x in case.inputs().items()}
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = leaves.values()

    def forward() -> Tensor:
        out = nsa_attention(
            q.flatten(2, 3), (None, k_sel, k_win), (None, v_sel, v_win), gates.flatten(2, 3),
            compressed=(k_cmp, v_cmp), geometry=case.shape.geometry, scale=case.scale, kernels=backend,
        )  # fmt: skip
        assert isinstance(out, Tensor)
        return out.view(case.dout_BSGRV.shape)

    return BenchRunner(forward, leaves, case.dout_BSGRV, chosen=chooser(case, backend))


def _part(case: BenchCase, backend: str, part: str) -> BenchRunner:
    g, run, scale = case.shape.geometry, BACKENDS[backend].functions, case.scale
    pos_BS, zero_BS, *_ = plain_layout(1, case.length, g, case.device)
    every = {name: leaf(x) for name, x in case.inputs().items()}
    names = dict(zip(BRANCHES, (GRADIENTS[:3], GRADIENTS[:2], ("q", *GRADIENTS[3:5]), ("q", *GRADIENTS[5:7])),
                     strict=True))  # fmt: skip
    leaves = {name: every[name] for name in names[part]}
    q, *keys = leaves.values()
    idx_BSGN = chooser(case, backend)(pos_BS[0]) if part == "selected" else None
    forwards: dict[str, Callable[[], object]] = {
        "compressed": lambda: run.compressed(q, *keys, pos_BS, zero_BS, geometry=g, scale=scale),
        "select": lambda: run.select(q, *keys, pos_BS, zero_BS, geometry=g, scale=scale),
        "selected": lambda: run.selected(q, *keys, idx_BSGN, pos_BS, zero_BS, geometry=g, scale=scale),
        "sliding": lambda: run.sliding(q, *keys, pos_BS, zero_BS, geometry=g, scale=scale),
    }  # fmt: skip
    choose = chooser(case, backend) if part in ("select", "selected") else None
    note = flash.package_for(case.device) or "FlexAttention" if backend == "flash" else ""
    return BenchRunner(forwards[part], leaves, case.dout_BSGRV, chosen=choose, note=note)  # type: ignore[arg-type]


def prefill(backend: str, case: BenchCase, task: BenchTask) -> BenchRunner:
    """Append the prompt to a new cache in chunks, φ included; each chunk attends."""
    module = _module(case, backend)
    chunks = [_rows(case, slice(at, at + _PREFILL_CHUNK)) for at in range(0, case.length, _PREFILL_CHUNK)]

    def forward() -> Tensor:
        cache = module.new_cache(1, case.length)
        return torch.cat([_attend(module, cache, *chunk) for chunk in chunks], 1)

    return BenchRunner(forward, chosen=chooser(case, backend, True))


def decode(backend: str, case: BenchCase, task: BenchTask) -> BenchRunner:
    """One token at a time after `task.length` tokens: append, φ where a block is full, select, attend, mix.

    The cache grows by as many tokens as the case has room for, then its counters are set back; what its rings hold
    from then on is no longer the case's data, so results are checked on the first pass.
    """
    module = _module(case, backend)
    cache = module.new_cache(1, case.length)
    with torch.no_grad():
        cache.append(_rows(case, slice(0, task.length))[1], None, module.compress)
    counters = [(counter, counter.clone()) for counter in (cache.length_B, cache.n_compressed_B)]
    steps = [_rows(case, slice(t, t + 1)) for t in range(task.length, case.length)]
    step = 0

    def forward() -> Tensor:
        nonlocal step
        if step == len(steps):
            step = 0
            for counter, at_first in counters:
                counter.copy_(at_first)
        step += 1
        return _attend(module, cache, *steps[step - 1])

    return BenchRunner(forward, chosen=chooser(case, backend, True))


def _module(case: BenchCase, backend: str) -> NSAAttention:
    """Build a module for its cache and φ; its projections are not used."""
    s, g = case.shape, case.shape.geometry
    sizes = (s.n_heads, s.n_kv_groups, s.d_k, s.d_v, g.l, g.d, g.l_sel, g.n_sel, g.w)
    return NSAAttention(1, *sizes, phi="avg", kv="per_branch", kernels=backend).to(case.device, case.dtype)


def _attend(module: NSAAttention, cache: LayerCache, q: Tensor, new: BranchStreams, gates: Tensor) -> Tensor:
    with torch.no_grad(), cache.exclusive:
        return module.append(q, new, cache)[0](q, gates)[0]


def chooser(case: BenchCase, backend: str, by_phi: bool = False) -> Callable[[Tensor], Tensor]:
    """The backend's own choice of blocks for these query rows."""
    g = case.shape.geometry
    k_BCGK = compressed_by_phi(case)[0] if by_phi else case.k_BCGK

    def choose(rows: Tensor) -> Tensor:
        rows = rows.to(case.device)
        return BACKENDS[backend].functions.select(
            case.q_BSGRK[:, rows], k_BCGK, rows[None], torch.zeros_like(rows)[None],
            geometry=g, scale=case.scale,
        )  # fmt: skip

    return choose


def compressed_by_phi(case: BenchCase) -> tuple[Tensor, Tensor]:
    """Means over each block, computed apart from the module's own code, which is checked against them."""
    g = case.shape.geometry
    k, v = (
        x.double().unfold(1, g.l, g.d).mean(-1).to(case.dtype) if x.shape[1] >= g.l else x[:, :0]
        for x in (case.raw.k_cmp, case.raw.v_cmp)
    )
    return k, v


def _rows(case: BenchCase, part: slice) -> tuple[Tensor, BranchStreams, Tensor]:
    return case.q_BSGRK[:, part], BranchStreams(*(x[:, part] for x in case.raw)), case.gates_BSGR3[:, part]


def needs_bytes(backend: str, task: BenchTask) -> int:
    """Inputs, three branches' outputs and gradients, the mix in fp32; for the reference all scores, several times."""
    s = task.shape
    linear = task.length * s.n_heads * max(s.d_k, s.d_v) * (16 * TORCH_DTYPES[task.dtype].itemsize + 24)
    return linear + (40 * s.n_heads * task.length**2 if backend == "reference" else 0)


def why_not(backend: str, task: BenchTask) -> str | None:
    for branch in BRANCHES if task.part == "all" else (task.part,):
        if reason := BACKENDS[backend].why_not(
            branch, torch.device(task.device), TORCH_DTYPES[task.dtype], task.shape.kernel
        ):
            return f"{branch}: {reason}"
    return "selection has no gradient" if task.part == "select" and task.backward else None
