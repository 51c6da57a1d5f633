"""A layer's three branches, selection and mixing: one launch plan forward, one backward."""

import torch
from torch import Tensor

from nsa.kernels.interface import LayerInputs, LayerOutputs
from nsa.kernels.triton.bounds import bounds_in, bounds_length, key_bounds
from nsa.kernels.triton.launch import planned
from nsa.kernels.triton.mix import unmix
from nsa.kernels.triton.range_attention import RangeResults, range_backward, range_forward
from nsa.kernels.triton.selected import MixInputs, selected_and_mixed, sizes_of
from nsa.kernels.triton.selected_backward import selected_gradients
from nsa.kernels.triton.selection import choose_blocks


@planned
def layer_forward(x: LayerInputs) -> LayerOutputs:
    B, S, G, *_ = x.q_BSGRK.shape
    idx = torch.empty((B, S, G, x.geometry.n_sel), dtype=torch.int32, device=x.q_BSGRK.device)
    index = idx.new_empty(index_length(x, idx))
    bounds = 2 * bounds_length(x.pos_cmp)
    compressed, sliding = key_bounds(x.compressed, x.sliding, memory=index[:bounds])
    out_cmp, lse_cmp = range_forward(x.compressed, compressed)
    choose_blocks(x.q_BSGRK, x.k_cmp, x.pos_cmp, x.first_BS, compressed.hi_BS, lse_cmp, x.geometry, x.scale, idx)
    out_win, lse_win = range_forward(x.sliding, sliding)
    mix = MixInputs(x.gates_BSGX3, out_cmp, out_win)
    selected = x.selected(idx)
    out_sel, lse_sel, mixed = selected_and_mixed(selected, sizes_of(selected, x.one_document), mix, index[bounds:])
    assert mixed is not None
    return LayerOutputs(mixed, idx, lse_cmp, lse_sel, lse_win, out_cmp, out_sel, out_win, index)


def index_length(x: LayerInputs, idx_BSGN: Tensor) -> int:
    """Bounds of the compressed and of the sliding branch, and the block index."""
    return 2 * bounds_length(x.pos_cmp) + sizes_of(x.selected(idx_BSGN), x.one_document).length


@planned
def layer_backward(x: LayerInputs, y: LayerOutputs, *dlse: Tensor | None) -> tuple[Tensor, ...]:
    dlse_cmp, dlse_sel, dlse_win = dlse
    delta = torch.empty_like(y.lse_sel)
    dgates, dcmp, dsel, dwin = unmix(
        y.mixed_BSGRV, x.gates_BSGX3, y.out_cmp, y.out_sel, y.out_win, dlse_sel, delta
    )  # fmt: skip
    n = bounds_length(x.pos_cmp)
    (dq_cmp, *dkv_cmp), (dq_win, *dkv_win) = range_backward(
        RangeResults(x.compressed, y.out_cmp, y.lse_cmp, dcmp, dlse_cmp),
        RangeResults(x.sliding, y.out_win, y.lse_win, dwin, dlse_win),
        bounds=[bounds_in(y.for_backward[:n], x.pos_cmp), bounds_in(y.for_backward[n : 2 * n], x.pos_win)],
    )
    selected = x.selected(y.idx_BSGN)
    sizes = sizes_of(selected, x.one_document)
    index = y.for_backward[2 * n :]
    dq, *dkv_sel = selected_gradients(selected, sizes, y.lse_sel, dsel, delta, (dq_win, dq_cmp), index)
    return dq, dgates, *dkv_cmp, *dkv_sel, *dkv_win
