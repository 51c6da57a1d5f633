"""Runs the portable backend on fake CUDA tensors and records every operation, inside the custom operators too.

A fake tensor has no values: reading one raises, as does an operation whose result's shape depends on values.
"""

import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.core.nsa_attention import NSAAttention
from nsa.geometry import Geometry
from nsa.kernels import portable, precision
from nsa.kernels.interface import BranchInputs

# Floating-point sums whose order on CUDA is that in which threads arrive (torch.use_deterministic_algorithms lists
# them); `accumulate` of index_put and put is seen in the arguments.
ATOMIC_ON_CUDA = (
    "index_add", "scatter_add", "scatter_reduce", "index_reduce", "cumsum", "bincount", "histc", "put_",
    "embedding_dense_backward", "_embedding_bag_dense_backward", "segment_reduce",
)  # fmt: skip


_PLAIN = {
    Tensor.copy_: torch.ops.aten.copy_,
    Tensor.__invert__: torch.bitwise_not,
    Tensor.contiguous: torch.ops.aten.contiguous,
}


class IndexingWithoutDevice(TorchFunctionMode):
    """`x[...]` and the like as the operations they consist of: in a CPU build of torch such methods ask for a CUDA
    device even of a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__getitem__:
            return _indexed(*args)
        if func is Tensor.to and isinstance(args[1], torch.device):
            return torch.ops.aten._to_copy(args[0], device=args[1])
        if func is Tensor.__setitem__:
            x, index, value = args
            parts = index if isinstance(index, tuple) else (index,)
            if any(isinstance(part, Tensor) for part in parts):
                return x.index_put_(parts, value)
            func, args = Tensor.copy_, (_indexed(x, index), value)
        return _PLAIN.get(func, func)(*args, **(kwargs or {}))


def _indexed(x: Tensor, index: Any) -> Tensor:
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [part for part in parts if not isinstance(part, Tensor)]:
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        named = sum(part is not None for part in parts) - 1
        parts[at : at + 1] = [slice(None)] * (x.dim() - named)
    dim, tensors = 0, []
    for part in parts:
        if part is None:
            x = x.unsqueeze(dim)
        elif isinstance(part, int):
            x = x.select(dim, part)
            continue
        elif isinstance(part, slice) and part != slice(None):
            x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
        tensors.append(part if isinstance(part, Tensor) else None)
        dim += 1
    return torch.ops.aten.index(x, tensors) if any(part is not None for part in tensors) else x


class RecordedOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.atomic: list[str] = []
        self.uploads: list[str] = []
        self.products: list[tuple[str, tuple[torch.dtype, ...], torch.dtype]] = []
        """Of matrices: operation, dtypes of the operands and of the result."""
        self.new_bytes = 0
        """Of all tensors that operations made."""
        self.live_bytes = self.peak_bytes = 0
        """Of those that exist, now and at most."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "nsa":
            with torch._C._EnableTorchFunction(), IndexingWithoutDevice(), self:
                return _inside(func, args)
        result = func(*args, **kwargs)
        name, inputs = func.__name__, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        if name.startswith(("mm", "bmm", "mv", "addmm", "baddbmm")):
            self.products.append((name, tuple(x.dtype for x in inputs), outputs[0].dtype))
        devices = {x.device.type for x in (*inputs, *outputs)}
        if len(devices) > 1 and any(x.is_cpu for x in inputs) and not _makes_rotations():
            self.uploads.append(name)
        if _is_atomic(func, args, kwargs, outputs):
            self.atomic.append(name)
        input_storages = {x.untyped_storage()._cdata for x in inputs}
        for x in outputs:
            if x.untyped_storage()._cdata not in input_storages:
                self._made(x)
        return result

    def _made(self, x: Tensor) -> None:
        self.new_bytes += x.nbytes
        self.live_bytes += x.nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(x.untyped_storage(), self._freed, x.nbytes)

    def _freed(self, n_bytes: int) -> None:
        self.live_bytes -= n_bytes


def _makes_rotations() -> bool:
    """Whether `RotaryEmbedding` makes its table, once per device; it does not keep one of fake tensors."""
    return any(frame.name == "_device_table" for frame in traceback.extract_stack(limit=60))


def _inside(func: Any, args: tuple[Any, ...]) -> Any:
    """Find the function that the custom operator runs on real tensors."""
    if func.__name__ == "attend.default":
        q, k, v, idx, pos, start, branch, sizes, scale, _ = args
        return portable.attend_forward(BranchInputs(branch, q, k, v, idx, pos, start, Geometry.from_ints(sizes), scale))
    if func.__name__ == "attend_backward.default":
        dout, q, k, v, idx, pos, start, out, lse, dlse, branch, sizes, scale, _ = args
        x = BranchInputs(branch, q, k, v, idx, pos, start, Geometry.from_ints(sizes), scale)
        return portable.attend_backward(x, out, lse, dout, dlse)
    assert func.__name__ == "select.default", func
    q, k, pos, first, sizes, scale, _ = args
    return portable.select(q, k, pos, first, Geometry.from_ints(sizes), scale)


def _is_atomic(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: list[Tensor]) -> bool:
    name = func.__name__.split(".")[0]
    if name.rstrip("_") in ("index_put", "_index_put_impl"):
        return bool(kwargs.get("accumulate", args[3] if len(args) > 3 else False))
    return name.startswith(ATOMIC_ON_CUDA) and any(x.is_floating_point() for x in outputs)


@contextmanager
def recorded_on_meta() -> Iterator[RecordedOperations]:
    """Record code that needs autograd, which in a CPU build of torch aborts for fake CUDA tensors: meta tensors have
    no values either, and are not on the CPU."""
    with RecordedOperations() as recorded:
        yield recorded


@contextmanager
def fake_gpu() -> Iterator[RecordedOperations]:
    with IndexingWithoutDevice(), FakeTensorMode(), RecordedOperations() as recorded:
        yield recorded


@contextmanager
def wide_products_on_cpu() -> Iterator[None]:
    """The CPU as a device that multiplies bf16 and fp16 in fp32: such products are exact there, as in tensor cores, so
    that only the order of sums may differ from a GPU's."""

    def product(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
        return a.to(out_dtype) @ b.to(out_dtype)

    with mock.patch.object(precision, "WIDE_PRODUCTS", ("cpu",)), torch.library._scoped_library("aten", "IMPL") as ops:
        for name in ("mm.dtype", "bmm.dtype"):
            ops.impl(name, product, "CPU")
        yield


def meta_attention(**options: Any) -> NSAAttention:
    with torch.device("meta"):
        return NSAAttention(**options, kernels="portable")


def fake_attention(dtype: torch.dtype = torch.float32, device: str = "cuda", **options: Any) -> NSAAttention:
    """A module with uninitialised weights on the fake device; call it inside `fake_gpu`."""
    module = meta_attention(**options)
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, device=device, dtype=dtype)
            setattr(part, name, nn.Parameter(empty))
    return module
