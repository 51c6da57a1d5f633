"""Attention of each branch, forward and backward, one chunk of queries at a time.

Shapes as in `nsa.kernels.reference`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.portable.chunk import QueryChunk, attend, gradients, row_correction, wide_zeros
from nsa.kernels.portable.range_attention import range_chunks
from nsa.kernels.portable.selected import selected_chunks


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    x, chunks = _chunks(x)
    R, wide = x.q_BSGRK.shape[3], torch.promote_types(x.q_BSGRK.dtype, torch.float32)
    out_BSGRV = x.q_BSGRK.new_empty((*x.q_BSGRK.shape[:-1], x.v_BTGV.shape[-1]))
    lse_BSGR = x.q_BSGRK.new_empty(x.q_BSGRK.shape[:-1], dtype=wide)
    for chunk in chunks:
        k, v = chunk.keys(x.k_BTGK), chunk.keys(x.v_BTGV)
        out, lse = attend(chunk.rows(x.q_BSGRK), k, v, chunk.hidden, x.scale)
        out_BSGRV[:, chunk.at] = chunk.unrows(out, R)
        lse_BSGR[:, chunk.at] = chunk.unrows(lse[..., None], R)[..., 0]
    return out_BSGRV, lse_BSGR


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    x, chunks = _chunks(x)
    dq_BSGRK = torch.empty_like(x.q_BSGRK)
    dk_BTGK, dv_BTGV = wide_zeros(x.k_BTGK), wide_zeros(x.v_BTGV)
    for chunk in chunks:
        dout, lse = chunk.rows(dout_BSGRV), chunk.rows(lse_BSGR[..., None])
        dlse = None if dlse_BSGR is None else chunk.rows(dlse_BSGR[..., None])
        delta = row_correction(dout, chunk.rows(out_BSGRV), dlse)
        k, v = chunk.keys(x.k_BTGK), chunk.keys(x.v_BTGV)
        dq, dk, dv = gradients(dout, chunk.rows(x.q_BSGRK), k, v, chunk.hidden, lse, delta, x.scale)
        dq_BSGRK[:, chunk.at] = chunk.unrows(dq, x.q_BSGRK.shape[3])
        chunk.add(dk_BTGK, dk)
        chunk.add(dv_BTGV, dv)
    return dq_BSGRK, dk_BTGK.to(x.k_BTGK.dtype), dv_BTGV.to(x.v_BTGV.dtype)


def _chunks(x: BranchInputs) -> tuple[BranchInputs, Iterator[QueryChunk]]:
    """The queries in chunks, and the inputs as these read them: chosen blocks are rows of contiguous keys."""
    if x.branch != "selected":
        return x, range_chunks(x)
    x = x._replace(k_BTGK=x.k_BTGK.contiguous(), v_BTGV=x.v_BTGV.contiguous())
    return x, selected_chunks(x)
