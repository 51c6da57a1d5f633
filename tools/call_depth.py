"""Python functions of ours between `NSAAttention.forward` and the kernel, printed for each kernel call of a pass.

    python -m tools.call_depth                         C++ kernels: a pass without a cache, a prompt, a decode step
    TRITON_INTERPRET=1 python -m tools.call_depth      Triton's kernels too, interpreted

Functions of torch between ours are not counted. The call itself is made by ctypes or by Triton.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import nsa
from nsa.core.nsa_attention import NSAAttention
from nsa.kernels.cpu import library
from nsa.kernels.registry import BACKENDS, BackendRequest

ROOT = Path(__file__).parents[1]
PACKAGE = str(Path(nsa.__file__).parent)
SIZES: dict[str, Any] = dict(n_heads=4, n_kv_groups=2, d_k=16, d_v=16, l=8, d=4, l_sel=16, n_sel=4, w=24)

Calls = dict[str, tuple[str, ...]]
"""Names of our functions on the way to each kernel, `forward` first."""


def own_functions() -> tuple[str, ...]:
    """Names of the package's functions on the caller's stack, from `NSAAttention.forward` on."""
    frame, names = inspect.currentframe(), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_qualname)
        if frame.f_code is NSAAttention.forward.__code__:
            return tuple(reversed(names))
        frame = frame.f_back
    return ()


@contextmanager
def c_calls(calls: Calls) -> Iterator[None]:
    """Record every call into the C++ library, once it has been asked for the machine's instruction set."""
    library.best_isa()
    real = library.load()

    class Recorder:
        def __getattr__(self, name: str) -> Callable[..., int]:
            function = getattr(real, name)

            def call(*arguments: Any) -> int:
                calls[name] = max(calls.get(name, ()), own_functions(), key=len)
                return int(function(*arguments))

            return call

    with mock.patch.object(library, "load", functools.cache(Recorder)):
        yield


@contextmanager
def triton_launches(calls: Calls) -> Iterator[None]:
    """Record every launch of a Triton kernel, under the interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def recorded(kernel: Any, *arguments: Any, **constants: Any) -> Any:
        name = kernel.fn.__name__
        calls[name] = max(calls.get(name, ()), own_functions(), key=len)
        return run(kernel, *arguments, **constants)

    with mock.patch.object(InterpretedFunction, "run", recorded):
        yield


def measure(backend: str, recording: Callable[[Calls], Any]) -> dict[str, Calls]:
    """Calls of a pass without a cache, of a prompt into a cache, and of a decode step."""
    torch.manual_seed(0)
    layer = NSAAttention(64, **SIZES, kernels=BackendRequest(*[backend] * 4)).requires_grad_(False)
    x, passes = torch.randn(1, 65, 64), dict[str, Calls]()
    cache = layer.new_cache(1, 65)
    for name, run in {
        "no cache": lambda: layer(x),
        "prompt": lambda: layer(x[:, :64], cache=cache),
        "decode step": lambda: layer(x[:, 64:], cache=cache),
    }.items():
        passes[name] = {}
        with recording(passes[name]):
            run()
    return passes


def main() -> int:
    backends: dict[str, Callable[[Calls], Any]] = {"cpu": c_calls}
    shape = NSAAttention(64, **SIZES).strategy.shape
    if BACKENDS["triton"].why_not("sliding", torch.device("cpu"), torch.float32, shape) is None:  # interpreted
        backends["triton"] = triton_launches
    for backend, recording in backends.items():
        for name, calls in measure(backend, recording).items():
            for kernel, functions in sorted(calls.items()):
                print(f"{backend:7} {name:12} {kernel:26} {len(functions)}  {' → '.join(functions)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
