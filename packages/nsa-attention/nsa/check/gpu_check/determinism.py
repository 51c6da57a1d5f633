"""Bitwise checks of the module. Determinism: outputs, selected blocks and all gradients are equal between runs.
Causality: later tokens change no bit of earlier outputs and get no gradient from them.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from nsa.bench.case import TORCH_DTYPES
from nsa.bench.machine import wait_for
from nsa.check.gpu_check.check_result import CheckResult, CheckStatus, GpuCheck, MeasuredTable, bounded, needs_gpu
from nsa.check.gpu_check.near_ties import ForwardRecorder
from nsa.check.gpu_check.sizes import CheckSizes, attention, tokens
from nsa.core.compression import BlockCompressor
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import plain_layout

Bits = dict[str, Tensor]

_REPEATS = 20  # a random order may be the same by chance
_LARGE = 30.0  # the changed future is this many times larger than the past, and still finite in fp16


def determinism_checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("determinism", f"runs again, {dtype}", partial(_runs, scope, dtype))
    dtype = scope.module_dtypes[0]
    yield GpuCheck("determinism", f"compression of overlapping blocks, {dtype}", partial(_overlapping, scope, dtype))


def _runs(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module = attention(scope, TORCH_DTYPES[dtype], ForwardRecorder())
    run = partial(_run, module, tokens(scope, TORCH_DTYPES[dtype]).requires_grad_())
    first = run()
    yield _compared(f"values that differ between two runs, {dtype}", first, run())
    _poison_free_memory(scope.device)
    yield _compared(f"values that differ in memory that held NaN, {dtype}", first, run())
    stream = f"values that differ on a second stream, {dtype}"
    yield _compared(stream, first, _on_second_stream(scope, run)) if scope.is_gpu else needs_gpu(stream)


def _overlapping(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    """The gradient of a token in three or more blocks is a sum that depends on its order."""
    g, m = scope.overlapping, scope.module
    raw = tokens(scope, TORCH_DTYPES[dtype]).unflatten(-1, (m.shape.n_heads, m.shape.d_k)).requires_grad_()
    phi = BlockCompressor("avg", g.l, g.d, m.shape.n_heads, m.shape.d_k, pos_emb=False)
    begin_BC = plain_layout(1, m.length, g, scope.device).begin_BC

    def run() -> Bits:
        out = phi(raw, begin_BC)
        return {"out": out.detach(), "gradient": torch.autograd.grad(out.float().square().sum(), raw)[0]}

    first = run()
    for _ in range(_REPEATS):
        again = _compared(f"compression: values that differ, a token in {g.l // g.d} blocks, {dtype}", first, run())
        if again.verdict is CheckStatus.FAILS:
            break
    yield again


def _run(module: NSAAttention, x: Tensor) -> Bits:
    out = module(x)
    assert isinstance(module.probe, ForwardRecorder)
    names, weights = zip(*module.named_parameters(), strict=True)
    gradients = torch.autograd.grad(out.float().square().sum(), (x, *weights))
    return {"out": out.detach(), "choice": module.probe.idx_BSGN, **dict(zip(("x", *names), gradients, strict=True))}


def _compared(claim: str, want: Bits, got: Bits) -> CheckResult:
    differing = {name: int((got[name] != want[name]).sum()) for name in want}
    return bounded(claim, sum(differing.values()), 0, ", ".join(f"{name}: {n}" for name, n in differing.items() if n))


def _poison_free_memory(device: torch.device) -> None:
    """Fill memory of many sizes with NaN and free it, so that the next allocations reuse it."""
    pieces = [torch.full((1 << power,), torch.nan, device=device) for power in range(4, 22) for _ in range(4)]
    wait_for(device)
    pieces.clear()


def _on_second_stream(scope: CheckSizes, run: Callable[[], Bits]) -> Bits:
    stream = torch.cuda.Stream(scope.device)
    stream.wait_stream(torch.cuda.current_stream(scope.device))
    with torch.cuda.stream(stream):
        bits = run()
    wait_for(scope.device)
    return bits


def causality_checks(scope: CheckSizes) -> Iterator[GpuCheck]:
    for dtype in scope.module_dtypes:
        yield GpuCheck("causality", f"forward, {dtype}", partial(_causal_outputs, scope, dtype))
        yield GpuCheck("causality", f"backward, {dtype}", partial(_causal_gradients, scope, dtype))


def _causal_outputs(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module, x = attention(scope, TORCH_DTYPES[dtype]), tokens(scope, TORCH_DTYPES[dtype])
    changed, ignored = 0, []
    with torch.no_grad():
        clean = module(x)
        for cut in scope.module.cuts:
            other = x.clone()
            other[:, cut:] = _LARGE * tokens(scope, TORCH_DTYPES[dtype], seed=2)[:, cut:]
            out = module(other)
            changed += int((out[:, :cut] != clean[:, :cut]).sum())
            if torch.equal(out[:, cut:], clean[:, cut:]):
                ignored.append(cut)
    yield bounded(f"values before a changed token that change, {dtype}", changed, 0)
    yield bounded(f"changed tokens that change nothing after them, {dtype}", len(ignored), 0)


def _causal_gradients(scope: CheckSizes, dtype: str) -> Iterator[CheckResult | MeasuredTable]:
    module, x = attention(scope, TORCH_DTYPES[dtype]), tokens(scope, TORCH_DTYPES[dtype]).requires_grad_()
    after, before = 0, 0
    out = module(x)
    for cut in scope.module.cuts:
        (dx,) = torch.autograd.grad(out[:, :cut].float().square().sum(), x, retain_graph=True)
        after += int((dx[:, cut:] != 0).sum())
        before += int((dx[:, :cut] == 0).all())
    yield bounded(f"gradients that reach a later token, {dtype}", after, 0)
    yield bounded(f"losses without any gradient, {dtype}", before, 0)
