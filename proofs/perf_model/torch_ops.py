"""Work of torch operations around the kernels: the launchers' functions run on meta tensors and counted.

The sum of the branches' dq is one, and so are casts of sums over spans. Each is a launch that reads its inputs and
writes its outputs once, except where CUDA is known to do more.

B batch · S tokens · G kv groups · R heads per group · K key dim
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa.bench.case import TORCH_DTYPES
from proofs.perf_model.selected_kernels import index_of
from proofs.perf_model.work import KernelWork, LaunchSizes

SHORT_ROW = 4096
"""Longer rows are sorted by radix, one pass over keys and indices per 8 bits; shorter ones within a block."""
_RADIX_BITS = 8
_MORE_LAUNCHES = {"masked_fill": 2, "constant_pad_nd": 2, "sort": 3}
_ONLY_WRITE = ("fill", "zero", "full", "zeros", "ones", "arange", "ones_like", "zeros_like", "new_zeros")
_NOTHING = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view")
_SCANS = ("cummax", "cummin", "_cummax_helper", "_cummin_helper")


class OperationTally(TorchDispatchMode):
    """Counts the operations that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.moved, self.sorted_keys, self.scanned = 0, 0.0, 0.0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if is_view or name in _NOTHING or func.namespace == "prim":  # prim::device and the like ask, and launch nothing
            return out
        self.launches += _MORE_LAUNCHES.get(name, 1)
        written = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        read = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor) and name not in _ONLY_WRITE]
        if name == "sort":
            self._count_sort(written[0], written[1])
            return out
        if name in _SCANS:
            self.scanned += read[0].shape[-1]
        self.moved += sum(map(stored_bytes, (*read, *written))) * _MORE_LAUNCHES.get(name, 1)
        return out

    def _count_sort(self, keys: Tensor, index: Tensor) -> None:
        pair = keys.element_size() + index.element_size()
        if keys.shape[-1] <= SHORT_ROW:
            self.moved += keys.numel() * 3 * pair  # copied, numbered, sorted in place
            self.sorted_keys += keys.numel()
        else:
            passes = keys.element_size() * 8 // _RADIX_BITS
            self.moved += keys.numel() * (2 * pair * passes + keys.element_size())


def stored_bytes(x: Tensor) -> int:
    """An expanded dimension is stored once."""
    n = x.element_size()
    for size, stride in zip(x.shape, x.stride(), strict=True):
        n *= size if stride else 1
    return n


def traced(name: str, backward: bool, run: Callable[[], object]) -> KernelWork:
    with OperationTally() as tally:
        run()
    return KernelWork(
        name, backward, l2_bytes=tally.moved, hbm_bytes=tally.moved, launches=tally.launches,
        sorted_keys=tally.sorted_keys, scanned=tally.scanned,
    )  # fmt: skip


def backward(sizes: LaunchSizes) -> Iterator[KernelWork]:
    if index_of(sizes).n_spans > 1:
        yield traced("sums of spans, torch", True, _PlainRow(sizes).narrow_sums)


class _PlainRow:
    """The torch calls of launchers and module for one unpacked row, on the meta device."""

    def __init__(self, sizes: LaunchSizes) -> None:
        s, meta = sizes.shape, torch.device("meta")
        self.sizes, self.shape = sizes, s
        shape = (1, sizes.length, s.n_kv_groups, s.heads_per_group, s.d_k)
        self.q_BSGRK = torch.empty(shape, dtype=TORCH_DTYPES[sizes.dtype], device=meta)

    def narrow_sums(self) -> None:
        """dk and dv of selected keys, after the last span."""
        for width in (self.shape.d_k, self.shape.d_v):
            shape = (1, self.sizes.length, self.shape.n_kv_groups, width)
            torch.empty(shape, dtype=torch.float32, device="meta").to(self.q_BSGRK.dtype)
