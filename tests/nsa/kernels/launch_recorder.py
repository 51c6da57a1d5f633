"""Records Triton launches instead of running them: kernel, grid, arguments, and the key Triton would compile it under.

Needs no GPU: tensors may be on the CPU (the key then holds the alignment of their addresses) or fake ones on CUDA.
Results of recorded kernels are whatever memory held.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

import nsa.kernels.triton as backend
from nsa.kernels.triton import tuning
from nsa.kernels.triton.launch import unplanned

GPU = "sm_80"
_TARGET = make_backend(GPUTarget("cuda", 80, 32))
_binders: dict[str, Any] = {}


@dataclass(frozen=True)
class RecordedLaunch:
    kernel: str
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    special: dict[str, tuple[str, Any]]
    """Of each argument: its type, and what the compiler assumes of its value (D: divisible by 16). Empty for fake
    tensors."""
    options: dict[str, Any]
    function: JITFunction

    @property
    def key(self) -> str:
        """Key by which the compiled kernel is looked up."""
        return f"{self.special} {self.options}"


@contextmanager
def recorded_launches(on_launch: Callable[[], None] = lambda: None) -> Iterator[list[RecordedLaunch]]:
    """`on_launch` is called at every launch."""
    assert not triton.knobs.runtime.interpret, "kernels are interpreted: there is nothing to compile"
    launches: list[RecordedLaunch] = []

    def run(kernel: JITFunction, *args: Any, grid: tuple[int, ...], warmup: bool, **kwargs: Any) -> None:
        on_launch()
        name = kernel.fn.__name__
        if name not in _binders:
            _binders[name] = create_function_from_signature(kernel.signature, kernel.params, _TARGET)
        names = [parameter.name for parameter in kernel.params]
        if any(isinstance(x, FakeTensor) for x in args):  # they have no address
            constants = {key: kwargs.pop(key) for key in list(kwargs) if key in names}
            arguments, special, options = dict(zip(names, args, strict=False)) | constants, {}, kwargs
        else:
            bound, specialization, options = _binders[name](*args, **kwargs)
            special = dict(zip(names, specialization, strict=True))
            arguments = {key: _without_memory(x) for key, x in bound.items()}
        launches.append(RecordedLaunch(name, grid, arguments, special, options, kernel))

    with (
        unplanned(),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(backend, "_interpreted", return_value=True),  # CPU tensors are admitted
        mock.patch.object(tuning, "gpu_here", return_value=GPU),
    ):
        yield launches


def _without_memory(argument: Any) -> Any:
    """A tensor's shape, strides and dtype: the tensors of thousands of launches would take gigabytes."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")


def keys_by_kernel(launches: Sequence[RecordedLaunch]) -> dict[str, set[str]]:
    keys: dict[str, set[str]] = {}
    for launch in launches:
        keys.setdefault(launch.kernel, set()).add(launch.key)
    return keys


def launch_counts(launches: Sequence[RecordedLaunch]) -> Counter[str]:
    return Counter(launch.kernel.removesuffix("_kernel") for launch in launches)


def tensors_of(launch: RecordedLaunch) -> list[torch.Tensor]:
    return [x for x in launch.arguments.values() if isinstance(x, torch.Tensor)]
