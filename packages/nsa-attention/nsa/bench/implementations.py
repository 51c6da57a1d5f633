"""Implementations to benchmark: dense SDPA, every registered backend, and installed third-party NSA packages.

Third-party packages are never a dependency.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from nsa.bench import dense, nsa_backends
from nsa.bench.case import BenchCase, BenchRunner, BenchTask, leaf
from nsa.bench.machine import free_bytes
from nsa.bench.nsa_backends import chooser
from nsa.kernels.registry import BACKENDS
from nsa.token_counts import spell

DENSE = "dense SDPA"


@dataclass(frozen=True)
class BenchImplementation:
    name: str
    kind: str
    """`dense`, `nsa`, or `other`: computes a different function, so it is timed and gets no ratio."""
    make: dict[str, Callable[[BenchCase, BenchTask], BenchRunner]]
    """By operation: case and task → runner. A decode case has the task's length plus room to grow."""
    why_not: Callable[[BenchTask], str | None]
    needs_bytes: Callable[[BenchTask], int]
    differs: str = ""

    def refusal(self, task: BenchTask) -> str | None:
        """Why it cannot be timed here, or None. Memory counts: a benchmark must not exhaust the machine."""
        if reason := self.why_not(task):
            return reason
        if task.op not in self.make:
            return f"it has no {task.op}"
        needed, available = self.needs_bytes(task), free_bytes(torch.device(task.device))
        if needed > 0.8 * available:
            return (
                f"about {needed / 2**30:.0f} GiB would be needed at {spell(task.length)} and "
                f"{available / 2**30:.0f} GiB are free"
            )
        return None


_LUCIDRAINS = "native_sparse_attention_pytorch"
_LUCIDRAINS_DIFFERS = (
    "it computes another function: a memory slot in the compressed branch, scores averaged over selection blocks "
    "instead of the paper's overlap, no forced blocks, one set of keys and values for all branches"
)


def _lucidrains_why_not(task: BenchTask) -> str | None:
    if find_spec(_LUCIDRAINS) is None:
        return "not installed: pip install native-sparse-attention-pytorch"
    if task.op != "attention" or task.part != "all":
        return "it is compared as a whole, forward and backward"
    if task.shape.d_k != task.shape.d_v:
        return "it has one width for keys and values"
    return None


def _lucidrains_needs_bytes(task: BenchTask) -> int:
    """The package gathers every query's keys with an int64 index as large as they are."""
    g, s = task.shape.geometry, task.shape
    gathered = task.length * (g.n_sel + 1) * g.l_sel * s.d_k * s.n_kv_groups
    return gathered * (16 + (24 if task.backward else 8))


def _lucidrains(case: BenchCase, task: BenchTask) -> BenchRunner:
    """Run its module without projections and with the mean as compression, like ours."""
    s, g = case.shape, case.shape.geometry
    width = (s.n_heads + 2 * s.n_kv_groups) * s.d_k
    module = import_module(_LUCIDRAINS).SparseAttention(
        dim=width, dim_head=s.d_k, heads=s.n_heads, kv_heads=s.n_kv_groups, sliding_window_size=g.w,
        compress_block_size=g.l, compress_block_sliding_stride=g.d, selection_block_size=g.l_sel,
        num_selected_blocks=g.n_sel, causal=True, norm=False, compress_mlp=_BlockMean(),
    ).to(case.device, case.dtype)  # fmt: skip
    gates = leaf(case.gates_BSGR3.flatten(2, 3).transpose(1, 2).to(case.dtype))
    module.to_qkv, module.combine_heads, module.to_strategy_combine = nn.Identity(), nn.Identity(), _ConstantGate(gates)
    x = leaf(torch.cat([y.flatten(2) for y in (case.q_BSGRK, case.raw.k_sel, case.raw.v_sel)], -1))
    return BenchRunner(lambda: module(x), {"x": x, "gates": gates}, case.dout_BSGRV.flatten(2))


class _BlockMean(nn.Module):
    def forward(self, x_bhwnd: Tensor) -> Tensor:
        return x_bhwnd.mean(-2)


class _ConstantGate(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        return self.value


def _fla_why_not(task: BenchTask) -> str | None:
    for package, install in (("fla", "flash-linear-attention"), ("triton", "triton"), ("einops", "einops")):
        if find_spec(package) is None:
            return f"not installed: pip install {install}"
    if task.op != "attention" or task.part != "selected":
        return "its naive form has the selected part alone without a GPU (flash-attn computes its window)"
    return None


def _fla_needs_bytes(task: BenchTask) -> int:
    s, g = task.shape, task.shape.geometry
    per_query = g.n_sel * g.l_sel * s.n_heads * (s.d_k + s.d_v) * 4
    return 6 * task.length * s.n_heads * (s.d_k + s.d_v) * 4 + (2 * task.length * per_query if task.backward else 0)


def _fla(case: BenchCase, task: BenchTask) -> BenchRunner:
    """A loop over queries in Python; the blocks are chosen by our portable backend."""
    select: Any = import_module("fla.ops.nsa.naive").naive_nsa_selection
    leaves = {name: leaf(case.inputs()[name]) for name in ("q", "k_sel", "v_sel")}
    choose = chooser(case, "portable")
    idx_BSGN = choose(torch.arange(case.length)).long()

    def forward() -> Tensor:
        q, k, v = leaves.values()
        out: Tensor = select(q.flatten(2, 3), k, v, idx_BSGN, case.shape.geometry.l_sel, case.scale)
        return out.unflatten(2, (case.shape.n_kv_groups, -1))

    return BenchRunner(forward, leaves, case.dout_BSGRV, chosen=choose)


def all_implementations() -> dict[str, BenchImplementation]:
    """Dense first; backends in the registry's order of preference."""

    def operations(module: ModuleType, *first: str) -> dict[str, Callable[[BenchCase, BenchTask], BenchRunner]]:
        return {op: partial(getattr(module, op), *first) for op in ("attention", "prefill", "decode")}

    every = [
        BenchImplementation(DENSE, "dense", operations(dense), dense.why_not, dense.needs_bytes),
        *(
            BenchImplementation(name, "nsa", operations(nsa_backends, name), partial(nsa_backends.why_not, name),
                                partial(nsa_backends.needs_bytes, name))
            for name in BACKENDS
        ),
        BenchImplementation("lucidrains", "other", {"attention": _lucidrains}, _lucidrains_why_not,
                            _lucidrains_needs_bytes, differs=_LUCIDRAINS_DIFFERS),
        BenchImplementation("fla naive", "nsa", {"attention": _fla}, _fla_why_not, _fla_needs_bytes),
    ]  # fmt: skip
    return {implementation.name: implementation for implementation in every}
