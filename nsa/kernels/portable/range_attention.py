"""Sliding and compressed attention: the queries of a chunk share one range of keys.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · M = c·R rows.
"""

from collections.abc import Iterator
from math import isqrt

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.portable.chunk import (
    Gradients,
    attend,
    attend_backward,
    budget,
    group_rows,
    new_outputs,
    query_rows,
    row_correction,
    wide,
    wide_zeros,
)


def sliding_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor, geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bounds = window_bounds(pos_BS, start_BS, geometry, k_BTGK.shape[1])
    return _forward(q_BSGRK, k_BTGK, v_BTGV, bounds, geometry.w, scale)


def sliding_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    bounds = window_bounds(pos_BS, start_BS, geometry, k_BTGK.shape[1])
    return _backward(dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV, out_BSGRV, lse_BSGR, dlse_BSGR, bounds, geometry.w, scale)


def compressed_forward(
    q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bounds = compressed_bounds(pos_BS, first_BS, geometry, k_BCGK.shape[1])
    return _forward(q_BSGRK, k_BCGK, v_BCGV, bounds, k_BCGK.shape[1], scale)


def compressed_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, dlse_BSGR: Tensor | None, geometry: Geometry, scale: float,
) -> Gradients:  # fmt: skip
    bounds = compressed_bounds(pos_BS, first_BS, geometry, k_BCGK.shape[1])
    n = k_BCGK.shape[1]
    return _backward(dout_BSGRV, q_BSGRK, k_BCGK, v_BCGV, out_BSGRV, lse_BSGR, dlse_BSGR, bounds, n, scale)


def _forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, bounds: tuple[Tensor, Tensor], keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    out_BSGRV, lse_BSGR = new_outputs(q_BSGRK, v_BTGV)
    lo_BS, hi_BS = bounds
    for at, lo, hi in key_ranges(q_BSGRK, lo_BS, hi_BS, keys):
        hidden = outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        k, v = per_group(k_BTGK[:, lo:hi]), per_group(v_BTGV[:, lo:hi])
        out_BGMV, lse_BGM = attend(group_rows(q_BSGRK[:, at]), k, v, hidden, scale)
        out_BSGRV[:, at] = query_rows(out_BGMV, q_BSGRK.shape[3])
        lse_BSGR[:, at] = query_rows(lse_BGM[..., None], q_BSGRK.shape[3])[..., 0]
    return out_BSGRV, lse_BSGR


def _backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor,
    dlse_BSGR: Tensor | None, bounds: tuple[Tensor, Tensor], keys: int, scale: float,
) -> Gradients:  # fmt: skip
    dq_BSGRK = torch.empty_like(q_BSGRK)
    dk_BTGK, dv_BTGV = wide_zeros(k_BTGK), wide_zeros(v_BTGV)
    lo_BS, hi_BS = bounds
    for at, lo, hi in key_ranges(q_BSGRK, lo_BS, hi_BS, keys):
        hidden = outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        k, v = per_group(k_BTGK[:, lo:hi]), per_group(v_BTGV[:, lo:hi])
        dout_BGMV = group_rows(dout_BSGRV[:, at])
        dlse_BGM1 = None if dlse_BSGR is None else group_rows(dlse_BSGR[:, at, ..., None])
        delta_BGM1 = row_correction(dout_BGMV, group_rows(out_BSGRV[:, at]), dlse_BGM1)
        lse_BGM1 = group_rows(lse_BSGR[:, at, ..., None])
        q_BGMK = group_rows(q_BSGRK[:, at])
        dq, dk, dv = attend_backward(dout_BGMV, q_BGMK, k, v, hidden, lse_BGM1, delta_BGM1, scale)
        dq_BSGRK[:, at] = query_rows(dq, q_BSGRK.shape[3])
        dk_BTGK[:, lo:hi] += dk.transpose(1, 2)
        dv_BTGV[:, lo:hi] += dv.transpose(1, 2)
    return dq_BSGRK, dk_BTGK.to(k_BTGK.dtype), dv_BTGV.to(v_BTGV.dtype)


def window_bounds(pos_BS: Tensor, start_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    end_BS = start_BS + pos_BS + 1
    first_BS = start_BS + (pos_BS - geometry.w + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), end_BS.clamp(0, n_keys)


def compressed_bounds(pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, n_keys: int) -> tuple[Tensor, Tensor]:
    n_complete_BS = ((pos_BS + 1 - geometry.l) // geometry.d + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), (first_BS + n_complete_BS).clamp(0, n_keys)


def key_ranges(q_BSGRK: Tensor, lo_BS: Tensor, hi_BS: Tensor, keys: int) -> Iterator[tuple[slice, int, int]]:
    """Chunks of queries, as long as the element budget allows, with the range of keys that each needs."""
    B, S, G, R, _ = q_BSGRK.shape
    if S == 0:
        return
    rows = budget(q_BSGRK) // (B * G * R)
    chunk = min(S, max(1, min(rows // max(1, keys), isqrt(rows))))  # a window of keys grows with the chunk itself
    starts = range(0, S, chunk)
    # One transfer for all chunks, so that an accelerator is not synchronized at each.
    lo = torch.stack([x.amin() for x in lo_BS.split(chunk, 1)]).tolist()
    hi = torch.stack([x.amax() for x in hi_BS.split(chunk, 1)]).tolist()
    for s, first, end in zip(starts, lo, hi, strict=True):
        yield slice(s, min(S, s + chunk)), first, max(first, end)


def outside(lo_Bc: Tensor, hi_Bc: Tensor, lo: int, hi: int) -> Tensor:
    """True where key lo + u is hidden from this query: [B, 1, c, 1, U]."""
    at_U = torch.arange(lo, hi, device=lo_Bc.device)
    return ((at_U < lo_Bc[..., None]) | (at_U >= hi_Bc[..., None]))[:, None, :, None]


def per_group(x_BUGX: Tensor) -> Tensor:
    return wide(x_BUGX).transpose(1, 2)
