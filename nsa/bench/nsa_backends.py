"""Our backends as contenders: the module's own code between its projections, on tensors that are given."""

from collections.abc import Callable

import torch
from torch import Tensor

from nsa.bench.case import GRADIENTS, TORCH_DTYPES, BenchCase, BenchTask
from nsa.bench.given import GivenAttention
from nsa.bench.runner import BenchRunner, Results, leaf
from nsa.core.document_layout import plain_layout
from nsa.core.kv_cache import BranchStreams
from nsa.core.nsa_attention import Positions
from nsa.kernels.registry import BACKENDS, BRANCHES

PREFILL_CHUNK = 2048
_NOWHERE = Positions(None, ())  # type: ignore[arg-type]  # nothing is rotated here: the tensors are given


def attention(backend: str) -> Callable[[BenchCase, BenchTask], BenchRunner]:
    """Select, attend in three branches, mix by gates; or one of these parts alone."""

    def make(case: BenchCase, task: BenchTask) -> BenchRunner:
        return _whole(case, backend) if task.part == "all" else _part(case, backend, task.part)

    return make


def _whole(case: BenchCase, backend: str) -> BenchRunner:
    module = GivenAttention(case, backend)
    leaves = {name: leaf(x) for name, x in case.inputs().items()}
    q, k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = leaves.values()
    streams = BranchStreams(case.raw.k_cmp, case.raw.v_cmp, k_sel, v_sel, k_win, v_win)
    module.give(q, streams, gates, (k_cmp, v_cmp))
    nothing_B_S_1 = case.q_BSGRK.new_empty(1, case.length, 1)
    where = Positions(plain_layout(1, case.length, case.shape.geometry, case.device), ())  # type: ignore[arg-type]

    def forward() -> Tensor:
        return module(nothing_B_S_1, where=where)

    return BenchRunner(
        forward, leaves, case.dout_BSGRV.flatten(2), lambda results: _unflatten(results, case), chooser(case, backend)
    )


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
    return BenchRunner(forwards[part], leaves, case.dout_BSGRV, chosen=choose)  # type: ignore[arg-type]


def prefill(backend: str) -> Callable[[BenchCase, BenchTask], BenchRunner]:
    """A new cache takes in the prompt in chunks, φ included, and each chunk attends."""

    def make(case: BenchCase, task: BenchTask) -> BenchRunner:
        module = GivenAttention(case, backend)
        parts = [slice(at, at + PREFILL_CHUNK) for at in range(0, case.length, PREFILL_CHUNK)]
        given = [_rows(case, part) for part in parts]

        def forward() -> Tensor:
            cache, outputs = module.new_cache(1, case.length), []
            for q, streams, gates, nothing in given:
                module.give(q, streams, gates, None)
                outputs.append(module(nothing, cache=cache, where=_NOWHERE))
            return torch.cat(outputs, 1)

        return BenchRunner(
            forward, to_case=lambda results: _unflatten(results, case), chosen=chooser(case, backend, True)
        )

    return make


def decode(backend: str) -> Callable[[BenchCase, BenchTask], BenchRunner]:
    """One token at a time after as many as the task says: append, φ where a block is full, select, attend, mix.

    The cache grows by as many tokens as the case has room for, then its counters are set back; what its rings hold
    from then on is no longer the case's data, so results are judged on the first pass.
    """

    def make(case: BenchCase, task: BenchTask) -> BenchRunner:
        module = GivenAttention(case, backend)
        cache = module.new_cache(1, case.length)
        module.fill(cache, _rows(case, slice(0, task.length))[1])
        counters = [(counter, counter.clone()) for counter in (cache.length_B, cache.n_compressed_B)]
        steps = [_rows(case, slice(t, t + 1)) for t in range(task.length, case.length)]
        step = 0

        def forward() -> Tensor:
            nonlocal step
            if step == len(steps):
                step = 0
                for counter, at_first in counters:
                    counter.copy_(at_first)
            q, streams, gates, nothing = steps[step]
            step += 1
            module.give(q, streams, gates, None)
            return module(nothing, cache=cache, where=_NOWHERE)

        return BenchRunner(
            forward, to_case=lambda results: _unflatten(results, case), chosen=chooser(case, backend, True)
        )

    return make


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
    """What the mean over each block gives, apart from the module's own code: it is what that code is judged by."""
    g = case.shape.geometry
    k, v = (
        x.double().unfold(1, g.l, g.d).mean(-1).to(case.dtype) if x.shape[1] >= g.l else x[:, :0]
        for x in (case.raw.k_cmp, case.raw.v_cmp)
    )
    return k, v


def _rows(case: BenchCase, part: slice) -> tuple[Tensor, BranchStreams, Tensor, Tensor]:
    q = case.q_BSGRK[:, part]
    return q, BranchStreams(*(x[:, part] for x in case.raw)), case.gates_BSGR3[:, part], q.new_empty(1, q.shape[1], 1)


def _unflatten(results: Results, case: BenchCase) -> Results:
    heads = (case.shape.n_kv_groups, case.shape.heads_per_group, case.shape.d_v)
    return results | {"out": results["out"].unflatten(-1, heads)}


def needs_bytes(backend: str) -> Callable[[BenchTask], int]:
    """Inputs, three branches' outputs and gradients, the mix in fp32; for the reference all scores, several times."""

    def needed(task: BenchTask) -> int:
        s = task.shape
        linear = task.length * s.n_heads * max(s.d_k, s.d_v) * (16 * TORCH_DTYPES[task.dtype].itemsize + 24)
        all_scores = 40 * s.n_heads * task.length**2 if backend == "reference" else 0
        return linear + all_scores

    return needed
