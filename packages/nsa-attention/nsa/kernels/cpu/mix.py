"""Gated sum of the three branches, forward and backward: one pass over memory, where tensor operations take eight.

B batch · S tokens · G kv groups · R heads per group · X gates per group, R or 1 · V value dim
"""

from ctypes import byref

import torch
from torch import Tensor

from nsa.errors import ConfigError
from nsa.kernels.cpu import library


def mix_forward(gates_BSGX3: Tensor, *branches_BSGRV: Tensor) -> Tensor:
    gates, branches = gates_BSGX3.float().contiguous(), [x.contiguous() for x in branches_BSGRV]
    out = torch.empty_like(branches[0])
    arguments = _arguments(gates, branches)
    arguments.out = out.data_ptr()
    library.check(library.load().nsa_mix(byref(arguments)))
    return out


def mix_backward(
    dout_BSGRV: Tensor, gates_BSGX3: Tensor, *branches_BSGRV: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dout, gates, branches = (
        dout_BSGRV.contiguous(),
        gates_BSGX3.float().contiguous(),
        [x.contiguous() for x in branches_BSGRV],
    )
    dgates, dbranches = torch.empty_like(gates), [torch.empty_like(x) for x in branches]
    arguments = _arguments(gates, branches)
    library.require("gradients of the mix", dout, branches[0].shape, branches[0].dtype)
    arguments.dout, arguments.dgates = dout.data_ptr(), dgates.data_ptr()
    arguments.dbranches[:] = [x.data_ptr() for x in dbranches]
    library.check(library.load().nsa_mix(byref(arguments)))
    return dgates.to(gates_BSGX3.dtype), dbranches[0], dbranches[1], dbranches[2]


def _arguments(gates: Tensor, branches: list[Tensor]) -> library.GateMix:
    first = branches[0]
    dtype = first.dtype
    if first.dim() != 5 or first.shape[3] < 1 or dtype not in library.DTYPES:
        raise ConfigError(f"a branch is {dtype} of shape {list(first.shape)}: it must be [B, S, G, R, V].")
    *_, R, V = first.shape
    for branch in branches:
        library.require("branches", branch, first.shape, dtype)
    n_gates = 1 if gates.dim() == 5 and gates.shape[3] == 1 else R
    library.require("gates", gates, (*first.shape[:3], n_gates, 3), torch.float32)
    arguments = library.GateMix(
        library.DTYPES[dtype], library.isa_for(dtype), torch.get_num_threads(), gates.numel() // 3, R // n_gates, V
    )
    arguments.gates = gates.data_ptr()
    arguments.branches[:] = [x.data_ptr() for x in branches]
    return arguments
