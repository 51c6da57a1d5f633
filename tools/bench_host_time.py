"""Host time of the Triton backend without a GPU: everything runs but the kernels. `python -m tools.bench_host_time`

Triton is told of a GPU that is not there (`--gpu`), and what it would compile is replaced by a kernel that counts its
launches and returns. What remains is Python: operators, autograd, launchers, Triton's own launch. Times are minima of
many runs in CPU time of the thread, printed beside a trivial Triton launch: machines differ more than the ratio does.
Calls of Python and C functions are the same on every machine: tests/tools/test_bench_host_time.py limits them.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from nsa.bench.case import SHAPES
from nsa.core.branches import BranchKeys
from nsa.core.layer_kinds import ThreeBranches
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import plain_layout
from nsa.kernels.registry import backend_request
from nsa.kernels.triton import launch
from proofs.ptx_emulator.driver import emulated

TOKENS = 128
"""Of one row. Launchers do the same for any length that fits in one span of queries."""

IN_A_ROW = 10
"""Runs of one call before it is another one's turn: the first ones find the caches of the processor cold."""


class HostTime(NamedTuple):
    name: str
    microseconds: float
    launches: int
    trivial_launches: float
    """The time as a multiple of a trivial launch's."""
    calls: int
    """Functions called, of Python and of C."""

    def __str__(self) -> str:
        times = f"{self.microseconds:7.0f} µs of host time = {self.trivial_launches:6.1f} trivial launches"
        return f"{self.name:20} {self.launches:3d} launches, {self.calls:5d} function calls, {times}"


class CountingKernel(CompiledKernel):
    """A compiled kernel that counts its launches and does nothing."""

    def __init__(self, name: str = "") -> None:
        self.name, self.src, self.packed_metadata = name, None, None
        self.module = self.function = object()
        self._run, self.launches = self._count, 0

    def _count(self, *arguments: object) -> None:
        self.launches += 1


@contextmanager
def uncompiled_kernels(gpu: str, compiled: Callable[[str], CountingKernel]) -> Iterator[None]:
    """Inside, kernels are launched and do nothing. `compiled`: what a kernel of a name becomes."""

    def compile_nothing(kernel: Any, key: str, signature: Any, device: int, *rest: object) -> CountingKernel:
        _ = kernel.cache_key  # as compiling does: it collects the globals that are compared at every launch
        kernel.device_caches[device][0][key] = replacement = compiled(kernel.__name__)
        return replacement

    small_bytes = launch.SMALL_BYTES
    with emulated(gpu), mock.patch.object(JITFunction, "_do_compile", compile_nothing):
        launch.SMALL_BYTES = small_bytes
        triton.knobs.runtime.add_stages_inspection_hook = None  # the emulator's, which would take time at each launch
        yield


@triton.jit
def trivial_kernel(x: Any, n: int, BLOCK: tl.constexpr) -> None:
    i = tl.arange(0, BLOCK)
    tl.store(x + i, i.to(tl.float32), mask=i < n)


class _OperatorCount(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def layer_calls(length: int = TOKENS) -> dict[str, Callable[[], object]]:
    """One layer's attention of one row, base shape, bf16: forward, and with its gradients."""
    s = SHAPES["base"]
    groups, heads = s.n_kv_groups, s.heads_per_group
    device, dtype = torch.device("cpu"), torch.bfloat16
    layout = plain_layout(1, length, s.geometry, device)

    def rows(*shape: int) -> Tensor:
        return torch.zeros(1, *shape, dtype=dtype, requires_grad=True)

    def keys(n: int, start: Tensor) -> BranchKeys:
        return BranchKeys(rows(n, groups, s.d_k), rows(n, groups, s.d_v), layout.pos_BS, start)

    branches = (
        keys(layout.begin_BC.shape[1], layout.first_BS), keys(length, layout.start_BS), keys(length, layout.start_BS),
    )  # fmt: skip
    q = rows(length, groups, heads, s.d_k)
    gates = torch.rand(1, length, groups, heads, 3, requires_grad=True)
    strategy = ThreeBranches(s.kernel, backend_request("triton"), s.d_k**-0.5)
    dout = torch.ones(1, length, groups, heads, s.d_v, dtype=dtype)
    leaves = [q, gates, *(x for one in branches for x in (one.k, one.v))]

    def forward() -> Tensor:
        return strategy.attend(strategy.plan(device, dtype), q, gates, branches).out

    return {"forward": forward, "forward + backward": lambda: torch.autograd.grad(forward(), leaves, dout)}


def decode_call() -> Callable[[], object]:
    """One token of a layer over its cache."""
    s = SHAPES["base"]
    dim, heads = 768, s.n_kv_groups * s.heads_per_group
    layer = NSAAttention(dim=dim, n_heads=heads, n_kv_groups=s.n_kv_groups, d_k=s.d_k, d_v=s.d_v, kernels="triton")
    layer = layer.to(torch.bfloat16).eval()
    with torch.no_grad():
        cache, token = layer.new_cache(batch=1, max_len=4096), torch.zeros(1, 1, dim, dtype=torch.bfloat16)
        layer(torch.zeros(1, 64, dim, dtype=torch.bfloat16), cache=cache)

    @torch.no_grad()
    def decode() -> object:
        return layer(token, cache=cache)

    return decode


def function_calls(call: Callable[[], object]) -> int:
    """Functions that a call calls in this thread, of Python and of C."""
    calls = 0

    def note(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return calls


def measure(counting: CountingKernel, calls: dict[str, Callable[[], object]], repeats: int) -> Iterator[HostTime]:
    """Times of calls inside `uncompiled_kernels`; all take turns, so that a busy moment slows none of them alone."""
    x = torch.zeros(64)
    every = {"trivial launch": lambda: trivial_kernel[(1,)](x, 64, BLOCK=64), **calls}
    launches, called, best = {}, {}, dict.fromkeys(every, float("inf"))
    for name, call in every.items():
        for _ in range(10):
            call()
        before = counting.launches
        call()
        launches[name] = counting.launches - before
        called[name] = function_calls(call)
    for _ in range(repeats // IN_A_ROW):
        for name, call in every.items():
            for _ in range(IN_A_ROW):
                begin = time.thread_time()
                call()
                best[name] = min(best[name], time.thread_time() - begin)
    unit = best["trivial launch"]
    for name, seconds in best.items():
        yield HostTime(name, seconds * 1e6, launches[name], seconds / unit, called[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="sm_80")
    parser.add_argument("--repeats", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    counting = CountingKernel()
    with uncompiled_kernels(args.gpu, lambda name: counting):
        decode = decode_call()
        for result in measure(counting, {**layer_calls(args.tokens), "decode one token": decode}, args.repeats):
            print(result, flush=True)
        with _OperatorCount() as count:
            decode()
    print(f"torch operators of one token: {sum(count.names.values())}")


if __name__ == "__main__":
    main()
