"""The same bits every time: outputs, choice of blocks, gradients of every weight and of the input."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.bench.device import wait_for
from nsa.bench.gpu_check.row import Check, Measured, Row, bounded, needs_gpu
from nsa.bench.gpu_check.scope import Scope, attention, tokens
from nsa.bench.gpu_check.telling import TellingAttention
from nsa.core.geometry import Geometry

Bits = dict[str, Tensor]


def checks(scope: Scope) -> Iterator[Check]:
    for dtype in scope.module_dtypes:
        yield Check("determinism", f"runs again, {dtype}", partial(_runs, scope, dtype, scope.module.geometry, ""))
    dtype = scope.module_dtypes[0]
    ratio = scope.overlapping.l // scope.overlapping.d
    name = f" (blocks overlapping {ratio} times)"
    yield Check("determinism", f"runs again{name}, {dtype}", partial(_runs, scope, dtype, scope.overlapping, name))


def _runs(scope: Scope, dtype: str, geometry: Geometry, suffix: str) -> Iterator[Row | Measured]:
    module = attention(scope, TORCH_DTYPES[dtype], TellingAttention, **vars(geometry))
    x = tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    run = partial(_run, module, x)
    first = run()
    stream = f"values that differ on a second stream, {dtype}{suffix}"
    yield _compared(f"values that differ between two runs, {dtype}{suffix}", first, run())
    if not suffix:
        _make_noise(scope.device)
        yield _compared(f"values that differ in memory that held NaN, {dtype}", first, run())
        yield _compared(stream, first, _on_second_stream(scope, run)) if scope.is_gpu else needs_gpu(stream)


def _run(module: TellingAttention, x: Tensor) -> Bits:
    out = module(x)
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out.float().square().sum(), (x, *weights))
    return {"out": out.detach(), "choice": module.idx_BSGN, **dict(zip(("x", *names), gradients, strict=True))}


def _compared(claim: str, want: Bits, got: Bits) -> Row:
    differing = {name: int((got[name] != want[name]).sum()) for name in want}
    return bounded(claim, sum(differing.values()), 0, ", ".join(f"{name}: {n}" for name, n in differing.items() if n))


def _make_noise(device: torch.device) -> None:
    """Leave freed memory full of NaN behind, in pieces of many sizes: the next allocations get it."""
    pieces = [torch.full((1 << power,), torch.nan, device=device) for power in range(4, 22) for _ in range(4)]
    wait_for(device)
    pieces.clear()


def _on_second_stream(scope: Scope, run: Callable[[], Bits]) -> Bits:
    stream = torch.cuda.Stream(scope.device)
    stream.wait_stream(torch.cuda.current_stream(scope.device))
    with torch.cuda.stream(stream):
        bits = run()
    wait_for(scope.device)
    return bits
