"""Launches the gated sum of the three branches.

B batch · S queries · G kv groups · R heads per group · X gates per group (R, or 1 for all heads) · V value dim
"""

import torch
import triton
from torch import Tensor

from nsa.kernels.triton.device.mix import mix_backward_kernel, mix_forward_kernel
from nsa.kernels.triton.tuning import split_width

ELEMENTS = 2048
"""Elements of one branch that a program holds: 16 for each of 128 threads."""


def mix_forward(gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor) -> Tensor:
    """gate · output, summed over the branches in fp32, in the branches' dtype."""
    branches = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    gates, *outs = (x.contiguous() for x in (gates_BSGX3, *branches))
    mixed = torch.empty_like(outs[0])
    mix_forward_kernel[grid(gates, mixed)](gates, *outs, mixed, gates.numel() // 3, **constants(gates, mixed))
    return mixed


def mix_backward(
    dmixed_BSGRV: Tensor, gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    branches = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    dmixed, gates, *outs = (x.contiguous() for x in (dmixed_BSGRV, gates_BSGX3, *branches))
    dgates = torch.empty_like(gates, dtype=torch.float32)
    dcompressed, dselected, dsliding = (torch.empty_like(out) for out in outs)
    mix_backward_kernel[grid(gates, dmixed)](
        dmixed, gates, *outs, dgates, dcompressed, dselected, dsliding, gates.numel() // 3, **constants(gates, dmixed)
    )
    return dgates, dcompressed, dselected, dsliding


def grid(gates: Tensor, mixed: Tensor) -> tuple[int]:
    return (triton.cdiv(gates.numel() // 3, block_of(mixed.shape[-1])),)


def constants(gates_BSGX3: Tensor, mixed_BSGRV: Tensor) -> dict[str, int]:
    n, main, rest = split_width(mixed_BSGRV.shape[-1])
    heads = mixed_BSGRV.shape[3] // gates_BSGX3.shape[3]
    return dict(HEADS=heads, V=n, V1=main, V2=rest, BLOCK=block_of(n))


def block_of(width: int) -> int:
    """Gates of one program."""
    return max(1, ELEMENTS // split_width(width).main)
