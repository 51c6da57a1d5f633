"""A layer's three branches, selection and mixing: one launch plan forward, one backward."""

from torch import Tensor

from nsa.kernels.interface import LayerInputs, LayerOutputs
from nsa.kernels.triton.bounds import key_bounds
from nsa.kernels.triton.launch import planned
from nsa.kernels.triton.mix import mix_backward, mix_forward
from nsa.kernels.triton.range_attention import range_backward, range_forward
from nsa.kernels.triton.selected import selected_forward
from nsa.kernels.triton.selected_backward import selected_backward
from nsa.kernels.triton.selection import choose_blocks


@planned
def layer_forward(x: LayerInputs) -> LayerOutputs:
    bounds = key_bounds(x.compressed)
    out_cmp, lse_cmp = range_forward(x.compressed, bounds)
    idx = choose_blocks(x.q_BSGRK, x.k_cmp, x.pos_cmp, x.first_BS, bounds.hi_BS, lse_cmp, x.geometry, x.scale)
    out_sel, lse_sel = selected_forward(x.selected(idx))
    out_win, lse_win = range_forward(x.sliding)
    mixed = mix_forward(x.gates_BSGX3, out_cmp, out_sel, out_win)
    return LayerOutputs(mixed, idx, lse_cmp, lse_sel, lse_win, out_cmp, out_sel, out_win)


@planned
def layer_backward(x: LayerInputs, y: LayerOutputs, *dlse: Tensor | None) -> tuple[Tensor, ...]:
    dlse_cmp, dlse_sel, dlse_win = dlse
    dgates, dcmp, dsel, dwin = mix_backward(y.mixed_BSGRV, x.gates_BSGX3, y.out_cmp, y.out_sel, y.out_win)
    dq, dk_win, dv_win = range_backward(x.sliding, y.out_win, y.lse_win, dwin, dlse_win)
    dq_sel, dk_sel, dv_sel = selected_backward(x.selected(y.idx_BSGN), y.out_sel, y.lse_sel, dsel, dlse_sel)
    dq.add_(dq_sel)
    dq_cmp, dk_cmp, dv_cmp = range_backward(x.compressed, y.out_cmp, y.lse_cmp, dcmp, dlse_cmp)
    dq.add_(dq_cmp)
    return dq, dgates, dk_cmp, dv_cmp, dk_sel, dv_sel, dk_win, dv_win
