"""Gated sum of the three branches, forward and backward: every output is read once, in the inputs' own precision.

A program has BLOCK gates; a gate belongs to HEADS heads (one, or all of a group), which are processed in turn. The
program that has a gate sees all its heads, so that its gradient has one writer that adds in a fixed order.

B batch · S queries · G kv groups · R heads per group · X gates per group (R, or 1 for all heads) · V value dim
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nsa.kernels.triton.launch import launch, planned
from nsa.kernels.triton.tile import VARYING, load_rows, narrowed, store_rows
from nsa.kernels.triton.tuning import split_width


@triton.jit
def load_gates(gates, gate, ok):
    at = gates + gate * 3
    return tl.load(at, mask=ok, other=0.0), tl.load(at + 1, mask=ok, other=0.0), tl.load(at + 2, mask=ok, other=0.0)


@triton.jit
def _mix_columns(compressed, selected, sliding, mixed, row, ok, c, s, w, V: tl.constexpr, AT: tl.constexpr,
                WIDTH: tl.constexpr):  # fmt: skip
    total = c[:, None] * load_rows(compressed, row * V, ok, V, AT, WIDTH, True)
    total += s[:, None] * load_rows(selected, row * V, ok, V, AT, WIDTH, True)
    total += w[:, None] * load_rows(sliding, row * V, ok, V, AT, WIDTH, True)
    store_rows(mixed, row * V, ok, total, V, AT, WIDTH)


@triton.jit(do_not_specialize=VARYING)
def mix_forward_kernel(
    gates, compressed, selected, sliding, mixed, n_gates,
    HEADS: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = gate < n_gates
    c, s, w = load_gates(gates, gate, ok)
    for head in tl.range(0, HEADS):
        row = gate * HEADS + head
        _mix_columns(compressed, selected, sliding, mixed, row, ok, c, s, w, V, 0, V1)
        if V2 > 0:
            _mix_columns(compressed, selected, sliding, mixed, row, ok, c, s, w, V, V1, V2)


@triton.jit
def _unmix_columns(dmixed_MX, branch, dbranch, row, ok, gate_M, V: tl.constexpr, AT: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Stores the branch's gradient, returns what these columns add to its gate's, and gradient · output."""
    dout = narrowed(gate_M[:, None] * dmixed_MX, dbranch.dtype.element_ty)
    store_rows(dbranch, row * V, ok, dout, V, AT, WIDTH)
    out = load_rows(branch, row * V, ok, V, AT, WIDTH, True)
    return tl.sum(dmixed_MX * out, 1), tl.sum(dout.to(tl.float32) * out, 1)


@triton.jit(do_not_specialize=VARYING)
def mix_backward_kernel(
    dmixed, gates, compressed, selected, sliding, dgates, dcompressed, dselected, dsliding, dlse, delta, n_gates,
    HEADS: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`delta`: what the selected branch's backward pass takes from every score's gradient, or None. `dlse`: the
    gradient of that branch's log-sum-exps, or None."""
    gate = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = gate < n_gates
    c, s, w = load_gates(gates, gate, ok)
    dc, ds, dw = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for head in tl.range(0, HEADS):
        row = gate * HEADS + head
        d1 = load_rows(dmixed, row * V, ok, V, 0, V1, True)
        to_c, _ = _unmix_columns(d1, compressed, dcompressed, row, ok, c, V, 0, V1)
        to_s, delta_M = _unmix_columns(d1, selected, dselected, row, ok, s, V, 0, V1)
        to_w, _ = _unmix_columns(d1, sliding, dsliding, row, ok, w, V, 0, V1)
        dc, ds, dw = dc + to_c, ds + to_s, dw + to_w
        if V2 > 0:
            d2 = load_rows(dmixed, row * V, ok, V, V1, V2, True)
            to_c, _ = _unmix_columns(d2, compressed, dcompressed, row, ok, c, V, V1, V2)
            to_s, more = _unmix_columns(d2, selected, dselected, row, ok, s, V, V1, V2)
            to_w, _ = _unmix_columns(d2, sliding, dsliding, row, ok, w, V, V1, V2)
            dc, ds, dw, delta_M = dc + to_c, ds + to_s, dw + to_w, delta_M + more
        if delta is not None:
            if dlse is not None:
                delta_M -= tl.load(dlse + row, mask=ok, other=0.0)
            tl.store(delta + row, delta_M, mask=ok)
    at = dgates + gate * 3
    tl.store(at, dc, mask=ok)
    tl.store(at + 1, ds, mask=ok)
    tl.store(at + 2, dw, mask=ok)


_ELEMENTS = 2048
"""Elements of one branch that a program holds: 16 for each of 128 threads."""


@planned
def mix_forward(gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor) -> Tensor:
    """gate · output, summed over the branches in fp32, in the branches' dtype."""
    branches = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    gates, *outs = (x.contiguous() for x in (gates_BSGX3, *branches))
    mixed = torch.empty_like(outs[0])
    tensors = (gates, *outs, mixed)
    launch(mix_forward_kernel, grid(gates, mixed), *tensors, gates.numel() // 3, **constants(gates, mixed))
    return mixed


@planned
def mix_backward(
    dmixed_BSGRV: Tensor, gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return unmix(dmixed_BSGRV, gates_BSGX3, compressed_BSGRV, selected_BSGRV, sliding_BSGRV, None, None)


def unmix(
    dmixed_BSGRV: Tensor, gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor,
    dlse_BSGR: Tensor | None, delta_BSGR: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the gates and of the branches' outputs. `delta`, if any, is written: the selected branch's."""
    branches = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    dmixed, gates, *outs = (x.contiguous() for x in (dmixed_BSGRV, gates_BSGX3, *branches))
    dgates = torch.empty_like(gates, dtype=torch.float32)
    dcompressed, dselected, dsliding = (torch.empty_like(out) for out in outs)
    dlse = None if dlse_BSGR is None else dlse_BSGR.contiguous()
    tensors = (dmixed, gates, *outs, dgates, dcompressed, dselected, dsliding, dlse, delta_BSGR)
    launch(mix_backward_kernel, grid(gates, dmixed), *tensors, gates.numel() // 3, **constants(gates, dmixed))
    return dgates, dcompressed, dselected, dsliding


def grid(gates: Tensor, mixed: Tensor) -> tuple[int]:
    return (triton.cdiv(gates.numel() // 3, block_of(mixed.shape[-1])),)


def constants(gates_BSGX3: Tensor, mixed_BSGRV: Tensor) -> dict[str, int]:
    n, main, rest = split_width(mixed_BSGRV.shape[-1])
    heads = mixed_BSGRV.shape[3] // gates_BSGX3.shape[3]
    return dict(HEADS=heads, V=n, V1=main, V2=rest, BLOCK=block_of(n))


def block_of(width: int) -> int:
    """Gates of one program."""
    return max(1, _ELEMENTS // split_width(width).main)
