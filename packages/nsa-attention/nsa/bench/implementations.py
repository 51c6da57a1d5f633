"""Implementations to benchmark: dense SDPA, every registered backend, and installed third-party NSA packages.

Third-party packages are never a dependency.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
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


_FLA_PACKAGES = (("fla", "flash-linear-attention"), ("triton", "triton"), ("einops", "einops"))


def _selected_only(packages: tuple[tuple[str, str], ...], task: BenchTask) -> str | None:
    """Why a package that is timed on the selected part alone is not timed."""
    for package, install in packages:
        if find_spec(package) is None:
            return f"not installed: {install if ' ' in install else f'pip install {install}'}"
    if task.op != "attention" or task.part != "selected":
        return "it is compared on the selected part"
    return None


def _fla_naive_why_not(task: BenchTask) -> str | None:
    if task.device != "cpu":
        return "its kernels are timed on a GPU, not its loop over queries"
    return _selected_only(_FLA_PACKAGES, task)


def _fla_why_not(task: BenchTask) -> str | None:
    heads = task.shape.heads_per_group
    if task.device == "cpu":
        return "its kernels need a GPU"
    if reason := _selected_only(_FLA_PACKAGES, task):
        return reason
    return None if heads >= 16 and heads & (heads - 1) == 0 else "heads per group must be a power of two from 16 on"


def _fsa_why_not(task: BenchTask) -> str | None:
    if task.device == "cpu":
        return "its kernels need a GPU"
    return _selected_only((("fsa", "from github.com/Relaxed-System-Lab/Flash-Sparse-Attention"),), task)


def peer_versions() -> dict[str, str]:
    """Versions of packages that compute dense or sparse attention on a GPU; those that are absent say so."""
    versions = {name: "not installed" for name, *_ in _PEERS}
    for name, *distributions in _PEERS:
        for distribution in distributions:
            with suppress(PackageNotFoundError):
                versions[name] = version(distribution)
    cudnn = torch.backends.cudnn.version()
    return versions | {"cuDNN": str(cudnn) if cudnn else "not installed"}


_PEERS = (
    ("FlashAttention 2", "flash-attn"),
    ("FlashAttention 4", "flash-attn-4"),
    ("cuDNN", "nvidia-cudnn-cu13"),
    ("cuDNN frontend", "nvidia-cudnn-frontend"),
    ("fla", "fla-core", "flash-linear-attention"),
    ("FSA", "fsa", "flash-sparse-attention"),
)
"""Name, and distributions that have it."""


def _fla_needs_bytes(task: BenchTask) -> int:
    s, g = task.shape, task.shape.geometry
    per_query = g.n_sel * g.l_sel * s.n_heads * (s.d_k + s.d_v) * 4
    return 6 * task.length * s.n_heads * (s.d_k + s.d_v) * 4 + (2 * task.length * per_query if task.backward else 0)


def _selected(
    attend: Callable[[BenchCase, Tensor, Tensor, Tensor, Tensor], Tensor], case: BenchCase, task: BenchTask
) -> BenchRunner:
    """A package's selected part: queries [B, S, H, K], keys, values; the blocks are chosen by our portable backend."""
    leaves = {name: leaf(case.inputs()[name]) for name in ("q", "k_sel", "v_sel")}
    choose = chooser(case, "portable")
    idx_BSGN = choose(torch.arange(case.length))

    def forward() -> Tensor:
        q, k, v = leaves.values()
        out = attend(case, q.flatten(2, 3), k, v, idx_BSGN)
        return out.unflatten(2, (case.shape.n_kv_groups, -1))

    return BenchRunner(forward, leaves, case.dout_BSGRV, chosen=choose)


def _fla_naive(case: BenchCase, q: Tensor, k: Tensor, v: Tensor, idx_BSGN: Tensor) -> Tensor:
    """A loop over queries in Python."""
    select: Any = import_module("fla.ops.nsa.naive").naive_nsa_selection
    out: Tensor = select(q, k, v, idx_BSGN.long(), case.shape.geometry.l_sel, case.scale)
    return out


def _fla(case: BenchCase, q: Tensor, k: Tensor, v: Tensor, idx_BSGN: Tensor) -> Tensor:
    g, parallel = case.shape.geometry, import_module("fla.ops.nsa.parallel")
    out: Tensor = parallel.parallel_nsa(
        q, k, v, block_indices=idx_BSGN.long(), block_counts=g.n_sel, block_size=g.l_sel, scale=case.scale
    )
    return out


def _fsa(case: BenchCase, q: Tensor, k: Tensor, v: Tensor, idx_BSGN: Tensor) -> Tensor:
    module: Any = import_module("fsa.ops.FSA_topk_sparse_attention")
    n = case.length
    ends = torch.tensor([0, n], dtype=torch.int32, device=case.device)
    idx = idx_BSGN[0].transpose(0, 1).int().contiguous()
    out = module.FSATopkSparseAttention.apply(
        q[0], k[0], v[0], idx, case.shape.geometry.l_sel, ends, ends, n, n, case.scale
    )
    tensor: Tensor = out[0] if isinstance(out, tuple) else out
    return tensor[None]


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
        BenchImplementation("fla naive", "nsa", {"attention": partial(_selected, _fla_naive)}, _fla_naive_why_not,
                            _fla_needs_bytes),
        BenchImplementation("fla", "nsa", {"attention": partial(_selected, _fla)}, _fla_why_not, dense.needs_bytes),
        BenchImplementation("FSA", "nsa", {"attention": partial(_selected, _fsa)}, _fsa_why_not, dense.needs_bytes),
    ]  # fmt: skip
    return {implementation.name: implementation for implementation in every}
