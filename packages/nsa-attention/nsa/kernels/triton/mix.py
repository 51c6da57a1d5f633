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
from nsa.kernels.triton.tile import VARYING, load_rows, store_rows
from nsa.kernels.triton.tuning import split_width


@triton.jit
def _load_gates(gates, gate, ok):
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
    c, s, w = _load_gates(gates, gate, ok)
    for head in tl.range(0, HEADS):
        row = gate * HEADS + head
        _mix_columns(compressed, selected, sliding, mixed, row, ok, c, s, w, V, 0, V1)
        if V2 > 0:
            _mix_columns(compressed, selected, sliding, mixed, row, ok, c, s, w, V, V1, V2)


@triton.jit
def _unmix_columns(dmixed_MX, branch, dbranch, row, ok, gate_M, V: tl.constexpr, AT: tl.constexpr,
                  WIDTH: tl.constexpr):  # fmt: skip
    """Stores the branch's gradient, returns what these columns add to its gate's."""
    store_rows(dbranch, row * V, ok, gate_M[:, None] * dmixed_MX, V, AT, WIDTH)
    return tl.sum(dmixed_MX * load_rows(branch, row * V, ok, V, AT, WIDTH, True), 1)


@triton.jit(do_not_specialize=VARYING)
def mix_backward_kernel(
    dmixed, gates, compressed, selected, sliding, dgates, dcompressed, dselected, dsliding, n_gates,
    HEADS: tl.constexpr, V: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    gate = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = gate < n_gates
    c, s, w = _load_gates(gates, gate, ok)
    dc, ds, dw = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for head in tl.range(0, HEADS):
        row = gate * HEADS + head
        d1 = load_rows(dmixed, row * V, ok, V, 0, V1, True)
        dc += _unmix_columns(d1, compressed, dcompressed, row, ok, c, V, 0, V1)
        ds += _unmix_columns(d1, selected, dselected, row, ok, s, V, 0, V1)
        dw += _unmix_columns(d1, sliding, dsliding, row, ok, w, V, 0, V1)
        if V2 > 0:
            d2 = load_rows(dmixed, row * V, ok, V, V1, V2, True)
            dc += _unmix_columns(d2, compressed, dcompressed, row, ok, c, V, V1, V2)
            ds += _unmix_columns(d2, selected, dselected, row, ok, s, V, V1, V2)
            dw += _unmix_columns(d2, sliding, dsliding, row, ok, w, V, V1, V2)
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
    branches = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    dmixed, gates, *outs = (x.contiguous() for x in (dmixed_BSGRV, gates_BSGX3, *branches))
    dgates = torch.empty_like(gates, dtype=torch.float32)
    dcompressed, dselected, dsliding = (torch.empty_like(out) for out in outs)
    tensors = (dmixed, gates, *outs, dgates, dcompressed, dselected, dsliding)
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
