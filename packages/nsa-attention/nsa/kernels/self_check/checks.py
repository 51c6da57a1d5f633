"""What the self-check runs: every function of a backend, forward and backward, three times.

Once, compared with the reference in fp32 on the CPU; again in memory that held NaN, and again under autocast, where
every bit must be the same.

B batch · S queries · G kv groups · R heads per group · X gates per group · V value dim
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from nsa.kernels import reference
from nsa.kernels.registry import BACKENDS, Mixing
from nsa.kernels.self_check.cases import SelfCheckSizes
from nsa.kernels.self_check.comparison import (
    SELECTION_LIMIT,
    SMALLEST_RMS,
    CheckedFigure,
    blocks_error,
    differing_values,
    limit_for,
    poisoned_memory,
    relative_rms,
)
from nsa.kernels.self_check.decode_case import DecodeCase, MergedDecodeCase
from nsa.kernels.self_check.kernel_call import ALL_NAMES, NAMES, KernelCall

ATTENTION = ("compressed", "selected", "sliding")
Results = dict[str, Tensor]


class CheckedPart(NamedTuple):
    """One group of kernels: `run` gives all results, `judge` compares them with the reference."""

    name: str
    run: Callable[[], Results]
    judge: Callable[[Results], list[CheckedFigure]]


def parts(sizes: SelfCheckSizes, device: torch.device, dtype: torch.dtype, backend: str) -> Iterator[CheckedPart]:
    """In the order in which they are checked."""
    call = sizes.call(dtype)
    for branch in ATTENTION:
        run, judge = partial(_attention, call, branch, device, backend), partial(_judge_attention, call, branch, device)
        yield CheckedPart(branch, run, partial(judge, branch))
        if branch == "selected" and backend == "triton":
            yield CheckedPart("selected in spans", partial(_in_spans, run), partial(judge, "selected in spans"))
    fused = partial(_compressed_and_select, call, device, backend)
    yield CheckedPart("compressed_and_select", fused, partial(_judge_fused, call, device))
    yield CheckedPart("select", partial(_select, call, device, backend), partial(_judge_blocks, call, "select"))
    for n_gates, gate_dtype in dict.fromkeys((
        (sizes.shape.heads_per_group, torch.float32), (sizes.shape.heads_per_group, dtype), (1, torch.float32)
    )):  # fmt: skip
        mix = _MixCase(sizes, dtype, n_gates, gate_dtype)
        name = f"mix, {n_gates} gates per group in {str(gate_dtype).removeprefix('torch.')}"
        run_mix = partial(mix.run, BACKENDS[backend].mix, device)
        yield CheckedPart(name, run_mix, partial(mix.figures, name, device))
    for decode in (DecodeCase(sizes, dtype), MergedDecodeCase(sizes, dtype)):
        yield CheckedPart(decode.name, partial(decode.run, backend, device), partial(decode.figures, device=device))


def check_part(part: CheckedPart, device: torch.device) -> list[CheckedFigure]:
    """Compared with the reference; if that holds, again, bit by bit."""
    first = part.run()
    verdict = part.judge(first)
    if not all(figure.right for figure in verdict):
        return verdict
    with poisoned_memory():
        again = part.run()
    verdict.append(_bits("again in memory that held NaN", part, again, first))
    with torch.autocast(device.type, torch.bfloat16):
        cast = part.run()
    verdict.append(_bits("under autocast", part, cast, first))
    return verdict


def _bits(how: str, part: CheckedPart, got: Results, want: Results) -> CheckedFigure:
    figure = differing_values(got, want)
    where = f" ({figure.name})" if figure.name else ""
    return CheckedFigure(f"{part.name}, values that differ {how}{where}", figure.error, figure.limit)


def _attention(call: KernelCall, branch: str, device: torch.device, backend: str) -> Results:
    return dict(zip(ALL_NAMES, call.by_kernel(backend, branch, device, ALL_NAMES), strict=True))


def _judge_attention(
    call: KernelCall, branch: str, device: torch.device, label: str, got: Results
) -> list[CheckedFigure]:
    truth = dict(zip(ALL_NAMES, call.whole_truth(branch, torch.float32), strict=True))
    half = call.dtype != torch.float32
    plain = call.by_plain_pytorch(branch, device, ALL_NAMES) if half else list(truth.values())
    return _compared(label, call.dtype, got, truth, dict(zip(ALL_NAMES, plain, strict=True)))


def _compared(label: str, dtype: torch.dtype, got: Results, truth: Results, plain: Results) -> list[CheckedFigure]:
    error = partial(relative_rms, smallest=SMALLEST_RMS)
    return [
        CheckedFigure(f"{label} {name}", error(got[name], want), limit_for(dtype, error(plain[name], want)))
        for name, want in truth.items()
    ]


def _compressed_and_select(call: KernelCall, device: torch.device, backend: str) -> Results:
    """As the model calls them: one pass for both."""
    both = BACKENDS[backend].compressed_and_select
    assert both is not None
    leaves = call.leaves("compressed", device)
    pos, _, first = call.positions(device)
    out, idx = both(*leaves, pos, first, **call.choosing)
    gradients = torch.autograd.grad(out, leaves, call.dout_BSGRV.to(device))
    return dict(zip((*NAMES, "blocks"), (out.detach(), *gradients, idx), strict=True))


def _judge_fused(call: KernelCall, device: torch.device, got: Results) -> list[CheckedFigure]:
    truth = dict(zip(NAMES, call.truth("compressed", torch.float32), strict=True))
    plain = dict(zip(NAMES, call.by_plain_pytorch("compressed", device), strict=True))
    label = "compressed_and_select"
    return [*_compared(label, call.dtype, got, truth, plain), *_judge_blocks(call, label, got)]


def _select(call: KernelCall, device: torch.device, backend: str) -> Results:
    q, k, _ = call.leaves("compressed", device)
    pos, _, first = call.positions(device)
    return {"blocks": BACKENDS[backend].functions.select(q, k, pos, first, **call.choosing)}


def _judge_blocks(call: KernelCall, label: str, got: Results) -> list[CheckedFigure]:
    where = (call.layout.pos_BS, call.layout.first_BS)
    error = blocks_error(call.q_BSGRK, call.compressed[0], *where, got["blocks"], call.geometry, call.scale)
    return [CheckedFigure(f"{label} blocks", float(error.max()), SELECTION_LIMIT)]


def _in_spans(run: Callable[[], Results]) -> Results:
    with small_slots():
        return run()


@contextmanager
def small_slots() -> Iterator[None]:
    """Inside, the selected branch takes the queries in spans, as it does where rows are long."""
    from nsa.kernels.triton import selected

    before = selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS
    selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS = 1, 1  # room for one block of each query
    try:
        yield
    finally:
        selected.SLOT_BYTES, selected.QUERIES_OF_SLOTS = before


class _MixCase:
    def __init__(self, sizes: SelfCheckSizes, dtype: torch.dtype, n_gates: int, gate_dtype: torch.dtype) -> None:
        s, generator = sizes.shape, torch.Generator().manual_seed(2)
        self.dtype, length = dtype, min(sizes.length, 101)
        gates = torch.rand(2, length, s.n_kv_groups, n_gates, 3, generator=generator).to(gate_dtype)
        heads = (2, length, s.n_kv_groups, s.heads_per_group, s.d_v)
        branches = [torch.randn(heads, generator=generator).to(dtype) for _ in ATTENTION]
        self.inputs, self.dout = (gates, *branches), torch.randn(heads, generator=generator).to(dtype)

    def run(self, mix: Mixing, device: torch.device, to: torch.dtype | None = None) -> Results:
        leaves = [x.to(device, to or x.dtype).requires_grad_() for x in self.inputs]
        out = mix(*leaves)
        gradients = torch.autograd.grad(out, leaves, self.dout.to(device, out.dtype))
        names = ("out", "dgates", *(f"d{branch}" for branch in ATTENTION))
        return dict(zip(names, (out.detach(), *gradients), strict=True))

    def figures(self, name: str, device: torch.device, got: Results) -> list[CheckedFigure]:
        truth, plain = self.run(reference.mix, torch.device("cpu"), torch.float32), self.run(reference.mix, device)
        return _compared(name, self.dtype, got, truth, plain)
