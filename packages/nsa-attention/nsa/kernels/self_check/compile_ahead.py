"""Compiles the kernels that the self-check uses in several threads, before any of them runs.

Launchers read no data, so a pass in which every launch compiles and nothing runs meets the same kernels. Gradients are
taken by calling the backend's functions, not by autograd, whose threads would compile one kernel after the other.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from nsa.kernels import triton as backend
from nsa.kernels.interface import BranchInputs
from nsa.kernels.self_check.cases import SelfCheckSizes
from nsa.kernels.self_check.checks import ATTENTION, small_slots
from nsa.kernels.self_check.decode_case import DecodeCase, MergedDecodeCase


def compile_ahead(sizes: SelfCheckSizes, device: torch.device, dtype: torch.dtype, threads: int) -> None:
    with _launches_compile(threads):
        for branch in ATTENTION:
            _branch(sizes, branch, device, dtype)
        with small_slots():
            _branch(sizes, "selected", device, dtype)
        _selection(sizes, device, dtype)
        _mix(sizes, device, dtype)
        for case in (DecodeCase(sizes, dtype), MergedDecodeCase(sizes, dtype)):
            case.run("triton", device)


@contextmanager
def _launches_compile(threads: int) -> Iterator[None]:
    """Inside, a launch submits its kernel to the compiling threads and runs nothing; they are done at the end."""
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **options)

    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool):
        JITFunction.run = compile_only
        try:
            yield
        finally:
            JITFunction.run = launch


def _inputs(sizes: SelfCheckSizes, branch: str, device: torch.device, dtype: torch.dtype) -> BranchInputs:
    """As `SelfCheckSizes.call` gives them, but for their values."""
    s, g, n, batch = sizes.shape, sizes.shape.geometry, sizes.length, len(sizes.documents)
    n_keys = g.n_compressed(n) if branch == "compressed" else n

    def view(*shape: int) -> torch.Tensor:
        return torch.empty(batch, shape[0], 3, *shape[1:], device=device, dtype=dtype)[:, :, 1]

    pos, start = (torch.zeros(batch, n, dtype=torch.int64, device=device) for _ in range(2))
    idx = torch.empty(batch, n, s.n_kv_groups, g.n_sel, dtype=torch.int32, device=device)
    q = view(n, s.n_kv_groups, s.heads_per_group, s.d_k)
    k, v = (view(n_keys, s.n_kv_groups, width) for width in (s.d_k, s.d_v))
    return BranchInputs(branch, q, k, v, idx, pos, start, g, float(s.d_k**-0.5))


def _branch(sizes: SelfCheckSizes, branch: str, device: torch.device, dtype: torch.dtype) -> None:
    x = _inputs(sizes, branch, device, dtype)
    out, lse = backend.attend_forward(x)
    for dlse in (None, torch.empty_like(lse)):
        backend.attend_backward(x, out, lse, torch.empty_like(out), dlse)


def _selection(sizes: SelfCheckSizes, device: torch.device, dtype: torch.dtype) -> None:
    x = _inputs(sizes, "compressed", device, dtype)
    backend.compressed_and_select(x)
    backend.select(x.q_BSGRK, x.k_BTGK, x.pos_BS, x.start_BS, x.geometry, x.scale)


def _mix(sizes: SelfCheckSizes, device: torch.device, dtype: torch.dtype) -> None:
    s = sizes.shape
    branches = [torch.empty(2, 7, s.n_kv_groups, s.heads_per_group, s.d_v, device=device, dtype=dtype)] * 3
    for n_gates, gate_dtype in {(s.heads_per_group, torch.float32), (s.heads_per_group, dtype), (1, torch.float32)}:
        gates = torch.empty(2, 7, s.n_kv_groups, n_gates, 3, device=device, dtype=gate_dtype)
        backend.mix_backward(backend.mix_forward(gates, *branches), gates, *branches)
