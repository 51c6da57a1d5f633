"""Torch operators and kernel launches of one decoded token of a layer, by the function that calls them.

    python -m tools.decode_operators                    Triton's kernels, launched without a GPU and not run
    python -m tools.decode_operators --backend cpu      C++ kernels

An operator counts as a launch if it computes or copies (on a GPU a kernel of its own); views and allocations do not.
What a model computes once for all its layers (positions, RoPE) is listed as such.
"""

import argparse
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import nsa
from nsa.bench.case import SHAPES
from nsa.core.nsa_attention import NSAAttention
from proofs.perf_model.torch_ops import OperationTally
from tools.bench_host_time import CountingKernel, uncompiled_kernels

PACKAGE = str(Path(nsa.__file__).parent)
STEPS = 4
"""Tokens before the one that is counted."""


def calling_function() -> str:
    """The innermost function of the package on the stack, or a part of the layer that torch runs."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            return frame.f_code.co_qualname.removesuffix(".<locals>.<genexpr>")
        frame = frame.f_back
    return "(outside)"


class OperatorsByOrigin(OperationTally):
    """Counts launches and other operators by the function that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.launching: Counter[str] = Counter()
        self.every: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.launches
        out = super().__torch_dispatch__(func, types, args, kwargs)
        origin = calling_function()
        self.every[origin] += 1
        self.launching[origin] += self.launches - before
        return out


@contextmanager
def kernel_launches(names: Counter[str]) -> Iterator[None]:
    """Count launches of Triton kernels by name."""
    run = JITFunction.run

    def counted(kernel: Any, *args: Any, **constants: Any) -> Any:
        names[kernel.fn.__name__] += 1
        return run(kernel, *args, **constants)

    with mock.patch.object(JITFunction, "run", counted):
        yield


def decoding(backend: str, options: dict[str, Any]) -> tuple[Callable[[], object], Callable[[Any], object]]:
    """Locate a token of a layer of the base shape over a cache, and decode one there."""
    s = SHAPES["base"]
    sizes: dict[str, Any] = dict(dim=768, n_heads=s.n_kv_groups * s.heads_per_group, n_kv_groups=s.n_kv_groups)
    sizes |= dict(d_k=s.d_k, d_v=s.d_v)
    layer = NSAAttention(**sizes, **options, kernels=backend).to(torch.bfloat16).eval()
    cache = layer.new_cache(batch=1, max_len=4096)
    token = torch.zeros(1, 1, sizes["dim"], dtype=torch.bfloat16)
    layer(torch.zeros(1, 64, sizes["dim"], dtype=torch.bfloat16), cache=cache)
    return lambda: layer.locate(token, cache=cache), lambda where: layer(token, cache=cache, where=where)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", choices=("triton", "cpu"))
    parser.add_argument("--phi", default="softmax")
    parser.add_argument("--kv", default="per_branch")
    args = parser.parse_args()
    launches: Counter[str] = Counter()
    with uncompiled_kernels("sm_80", CountingKernel) if args.backend == "triton" else nullcontext():
        locate, decode = decoding(args.backend, {"phi": args.phi, "kv": args.kv})
        for _ in range(STEPS):
            decode(locate())
        with kernel_launches(launches):
            with OperatorsByOrigin() as of_model:
                where = locate()
            with OperatorsByOrigin() as of_layer:
                decode(where)
    for what, counted in (("once per model", of_model), ("per layer", of_layer)):
        print(f"{what:40} {'launch':>7} {'all':>7}")
        for origin, n in sorted(counted.every.items(), key=lambda item: -item[1]):
            print(f"  {origin:38} {counted.launching[origin]:7d} {n:7d}")
        print(f"  {'sum':38} {counted.launches:7d} {counted.every.total():7d}")
    print(f"Triton launches per layer: {launches.total()} ({', '.join(launches)})")


if __name__ == "__main__":
    main()
