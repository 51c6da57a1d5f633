"""Portable backend: exact attention on any device in chunks of queries, without compiled code.

Never allocates an S×S or S×S/d tensor. On a CPU the keys that a chunk reads follow from its values; elsewhere shapes
are static, the host reads no value, and every sum has one writer and a fixed order (`chunk.READABLE_DEVICES`).

Plain matrix products instead of `scaled_dot_product_attention`: it returns no log-sum-exp, has no kernel for
d_k ≠ d_v, and its causal flag is aligned to the wrong corner for unequal lengths. Scores are kept in fp32 whatever the
inputs are; only inputs and outputs are rounded. Backward recomputes each chunk from the saved log-sum-exp. A GPU
multiplies bf16 and fp16 as they are, with a result in fp32 (`chunk.product`): there probabilities and the gradients of
scores are rounded to that dtype before they are multiplied, as in the Triton kernels.

Numbers that are not finite: what a query does not see is multiplied by a weight of 0, and 0 · NaN is NaN. So inputs
that are not finite are replaced by 0, and what they belong to is marked by one NaN that a mask removes: a key is NaN
where its value is not finite, a log-sum-exp where its query, output or gradient is not. A query that sees such a key is
NaN, and one that does not has the bits that it has without it. Where the host may read values, nothing is copied if all
are finite. Elsewhere all is copied but a cache, which has more keys than queries and one document a row. Shapes as in
`nsa.kernels.reference`.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.portable.chunk import attend, gradients, may_read, row_correction, wide_zeros
from nsa.kernels.portable.range_attention import KeysByQuery, RangeChunk, range_chunks
from nsa.kernels.portable.selected import (
    BlockChunk,
    copied_chunks,
    few_queries,
    selected_chunks,
    windows_backward,
    windows_forward,
)
from nsa.kernels.portable.selection import select as select


def attend_forward(x: BranchInputs) -> tuple[Tensor, Tensor]:
    if not x.k_BTGK.shape[1]:  # no keys, as where rows are shorter than a compressed block
        return _unseen(x)
    x = _forward_inputs(x)
    if may_read(x.q_BSGRK):
        return _forward(x, selected_chunks(x) if x.branch == "selected" else range_chunks(x))
    if x.branch == "selected":
        return _forward(x, copied_chunks(x)) if few_queries(x) else windows_forward(x)
    if x.branch == "compressed" or _one_window(x):
        return _forward(x, range_chunks(x))
    by_query = KeysByQuery.of(x)
    return _forward(_with_keys_by_query(x, by_query), by_query.chunks(x))


def attend_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    if not x.k_BTGK.shape[1]:
        return torch.zeros_like(x.q_BSGRK), torch.zeros_like(x.k_BTGK), torch.zeros_like(x.v_BTGV)
    x, results = _backward_inputs(x, (out_BSGRV, lse_BSGR, dout_BSGRV, dlse_BSGR))
    if may_read(x.q_BSGRK):
        return _backward(x, selected_chunks(x) if x.branch == "selected" else range_chunks(x), *results)
    if x.branch == "selected":
        return windows_backward(x, *results)
    if x.branch == "compressed" or _one_window(x):
        return _backward(x, range_chunks(x), *results)
    by_query = KeysByQuery.of(x)
    dq, dk, dv = _backward(_with_keys_by_query(x, by_query), by_query.chunks(x), *results)
    return dq, by_query.take_back(dk), by_query.take_back(dv)


def _unseen(x: BranchInputs) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps of queries that see nothing."""
    shape, dtype = x.q_BSGRK.shape[:-1], torch.promote_types(x.q_BSGRK.dtype, torch.float32)
    return x.q_BSGRK.new_zeros((*shape, x.v_BTGV.shape[-1])), x.q_BSGRK.new_full(shape, -torch.inf, dtype=dtype)


def _one_window(x: BranchInputs) -> bool:
    """Whether all keys are hardly more than one query sees, as in a ring that holds the window."""
    return x.q_BSGRK.shape[1] == 0 or x.k_BTGK.shape[1] <= x.geometry.w


def _with_keys_by_query(x: BranchInputs, by_query: KeysByQuery) -> BranchInputs:
    return x._replace(k_BTGK=by_query.lay_out(x.k_BTGK), v_BTGV=by_query.lay_out(x.v_BTGV))


def _forward(x: BranchInputs, chunks: Iterator[RangeChunk | BlockChunk]) -> tuple[Tensor, Tensor]:
    R, wide = x.q_BSGRK.shape[3], torch.promote_types(x.q_BSGRK.dtype, torch.float32)
    out_BSGRV = x.q_BSGRK.new_empty((*x.q_BSGRK.shape[:-1], x.v_BTGV.shape[-1]))
    lse_BSGR = x.q_BSGRK.new_empty(x.q_BSGRK.shape[:-1], dtype=wide)
    for chunk in chunks:
        k, v = chunk.keys(x.k_BTGK), chunk.keys(x.v_BTGV)
        out, lse = attend(chunk.rows(x.q_BSGRK), k, v, chunk.hidden, x.scale)
        out_BSGRV[:, chunk.at] = chunk.unrows(out, R)
        lse_BSGR[:, chunk.at] = chunk.unrows(lse[..., None], R)[..., 0]
    return out_BSGRV, lse_BSGR


def _backward(
    x: BranchInputs, chunks: Iterator[RangeChunk | BlockChunk], out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor,
    dlse_BSGR: Tensor | None,
) -> Gradients:  # fmt: skip
    dq_BSGRK = x.q_BSGRK.new_empty(x.q_BSGRK.shape)
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


_GivenToBackward = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Outputs, log-sum-exps, and the gradients of both."""


def _forward_inputs(x: BranchInputs) -> BranchInputs:
    if _nothing_to_clean(x, x.v_BTGV):
        return x
    return x._replace(k_BTGK=x.k_BTGK + _spoiled(x.v_BTGV), v_BTGV=_cleaned(x.v_BTGV))


def _backward_inputs(x: BranchInputs, saved: _GivenToBackward) -> tuple[BranchInputs, _GivenToBackward]:
    """A query that sees a spoiled key needs no mark: its log-sum-exp is NaN since the forward pass."""
    out, lse, dout, dlse = saved
    if _nothing_to_clean(x, x.q_BSGRK, x.k_BTGK, x.v_BTGV, out, dout, *([] if dlse is None else [dlse])):
        return x, saved
    spoiled = sum(_spoiled(y).squeeze(-1) for y in (x.q_BSGRK, out, dout)) + lse
    if dlse is not None:
        spoiled, dlse = spoiled + dlse * 0, _cleaned(dlse)
    q, k, v = (_cleaned(y) for y in (x.q_BSGRK, x.k_BTGK, x.v_BTGV))
    return x._replace(q_BSGRK=q, k_BTGK=k, v_BTGV=v), (_cleaned(out), spoiled.to(lse.dtype), _cleaned(dout), dlse)


def _nothing_to_clean(x: BranchInputs, *tensors: Tensor) -> bool:
    if may_read(x.q_BSGRK):
        return all(bool(y.isfinite().all()) for y in tensors)
    return x.k_BTGK.shape[1] > x.q_BSGRK.shape[1]


def _spoiled(x: Tensor) -> Tensor:
    """NaN for a row with a number that is not finite, else 0: [..., 1]."""
    return (x * 0).sum(-1, keepdim=True)


def _cleaned(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0, 0.0, 0.0)
