"""Training check: selective activation checkpointing gives the same bits and computes no kernel twice."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa.bench.case import TORCH_DTYPES
from nsa.check.gpu_check.check_result import CheckResult, GpuCheck, MeasuredTable, bounded
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens
from nsa.kernels.checkpoint_policy import NAMESPACE, keep_operators


def checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes[-1:]:
        yield GpuCheck("training", f"selective checkpointing, {dtype}", partial(_selective, scope, dtype))


class _OperatorCounter(TorchDispatchMode):
    """Counts our operators as they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == NAMESPACE:
            self.seen[func.name()] += 1
        return func(*args, **(kwargs or {}))


def _selective(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module = attention(scope, TORCH_DTYPES[dtype])
    x = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    leaves = (x, *module.parameters())
    with _OperatorCounter() as plain:
        want = torch.autograd.grad(module(x).float().square().sum(), leaves)
    with _OperatorCounter() as kept:
        out = checkpoint(module, x, use_reentrant=False, context_fn=keep_operators)
        got = torch.autograd.grad(out.float().square().sum(), leaves)
    differing = sum(int((a != b).sum()) for a, b in zip(got, want, strict=True))
    yield bounded(f"gradients that differ under selective checkpointing, {dtype}", differing, 0)
    again = kept.seen - plain.seen
    yield bounded(f"kernels computed twice under selective checkpointing, {dtype}", sum(again.values()), 0,
                  ", ".join(again))  # fmt: skip
