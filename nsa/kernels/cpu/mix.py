"""The three branches mixed by their gates: one pass over memory each way, where tensor operations take eight.

B batch · S tokens · G kv groups · R heads per group · X gates per group, R or 1 · V value dim
"""

import torch
from torch import Tensor

from nsa.kernels.cpu import library


def mix_forward(gates_BSGX3: Tensor, *branches_BSGRV: Tensor) -> Tensor:
    gates, branches = gates_BSGX3.float().contiguous(), [x.contiguous() for x in branches_BSGRV]
    out = torch.empty_like(branches[0])
    made = _described(gates, branches)
    made.out = out.data_ptr()
    library.call("nsa_mix", made)
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
    made = _described(gates, branches)
    made.dout, made.dgates = dout.data_ptr(), dgates.data_ptr()
    made.dbranches[:] = [x.data_ptr() for x in dbranches]
    library.call("nsa_mix", made)
    return dgates.to(gates_BSGX3.dtype), dbranches[0], dbranches[1], dbranches[2]


def _described(gates: Tensor, branches: list[Tensor]) -> library.Mix:
    *_, R, V = branches[0].shape
    dtype, isa = branches[0].dtype, library.isa_for(branches[0].dtype)
    made = library.Mix(library.DTYPES[dtype], isa, torch.get_num_threads(), gates.numel() // 3, R // gates.shape[-2], V)
    made.gates = gates.data_ptr()
    made.branches[:] = [x.data_ptr() for x in branches]
    return made
