"""Launches sliding and compressed attention.

Shapes as in `nsa.kernels.reference`. Each query sees the keys lo ≤ t < hi of the key axis, whatever the branch.
"""

import torch
import triton
from torch import Tensor

from nsa.kernels.interface import BranchInputs, Gradients
from nsa.kernels.triton.autotune import Launch, Work, run, tuned
from nsa.kernels.triton.bounds import KeyBounds, key_bounds, seen_by
from nsa.kernels.triton.device.range_backward import add_parts_kernel, range_dkv_kernel, range_dq_kernel
from nsa.kernels.triton.device.range_forward import range_forward_kernel
from nsa.kernels.triton.tuning import TileSizes, is_wide, widths


def range_forward(x: BranchInputs, bounds: KeyBounds | None = None) -> tuple[Tensor, Tensor]:
    """`bounds`: the branch's, if the caller has them."""
    B, S, G, R, K = x.q_BSGRK.shape
    V = x.v_BTGV.shape[-1]
    q, k, v = rows_contiguous(x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    out = q.new_empty((B, S, G, R, V))
    lse = q.new_empty((B, S, G, R), dtype=torch.float32)
    lo, hi, *_ = bounds or key_bounds(x)

    def prepare(tiles: TileSizes) -> Work:
        arguments = (q, k, v, lo, hi, out, lse, x.scale, S, k.shape[1], *row_strides(q, k, v))
        constants = dict(G=G, R=R, **widths(K, V), BLOCK_M=tiles.m, BLOCK_N=tiles.n, WIDE=is_wide(q.dtype))
        grid = (triton.cdiv(S * R, tiles.m), B * G)
        return Work([Launch(range_forward_kernel, grid, arguments, {**constants, **tiles.options})])

    for kernel, grid, arguments, constants in tuned("range_forward", q, V, prepare).launches:
        kernel[grid](*arguments, **constants)
    return out, lse


def range_backward(
    x: BranchInputs, out_BSGRV: Tensor, lse_BSGR: Tensor, dout_BSGRV: Tensor, dlse_BSGR: Tensor | None
) -> Gradients:
    B, S, G, R, K = x.q_BSGRK.shape
    T, V = x.v_BTGV.shape[1], x.v_BTGV.shape[-1]
    dout, q, k, v = rows_contiguous(dout_BSGRV, x.q_BSGRK, x.k_BTGK, x.v_BTGV)
    out, lse = out_BSGRV.contiguous(), lse_BSGR.contiguous()
    dlse = None if dlse_BSGR is None else dlse_BSGR.contiguous()
    bounds = key_bounds(x)
    lo, hi, *_ = bounds
    dq, delta = torch.empty(q.shape, dtype=q.dtype, device=q.device), torch.empty_like(lse)
    strides = row_strides(dout, q, k, v)
    common = dict(G=G, R=R, **widths(K, V), WIDE=is_wide(q.dtype))

    def prepare_dq(tiles: TileSizes) -> Work:
        arguments = (dout, q, k, v, lo, hi, out, lse, dlse, dq, delta, x.scale, S, T, *strides)
        constants = dict(BLOCK_M=tiles.m, BLOCK_N=tiles.n, **common, **tiles.options)
        return Work([Launch(range_dq_kernel, (triton.cdiv(S * R, tiles.m), B * G), arguments, constants)])

    def prepare_dkv(tiles: TileSizes) -> Work:
        n_tiles, parts = triton.cdiv(T, tiles.n), _parts(q, T, tiles)
        seen = seen_by(bounds, n_tiles, tiles.n)
        dk, dv = (x.new_empty(x.shape) for x in (k, v))
        sums = (dk, dv) if parts == 1 else [x.new_empty((parts, *x.shape), dtype=torch.float32) for x in (k, v)]
        arguments = (dout, q, k, v, lo, hi, lse, delta, *sums, *seen, x.scale, S, T, n_tiles, parts, *strides)
        constants = dict(BLOCK_M=tiles.m, BLOCK_N=tiles.n, **common, **tiles.options)
        launches = [Launch(range_dkv_kernel, (n_tiles, B * G, parts), arguments, constants)]
        if parts > 1:
            grid = (triton.cdiv(B * T * G, ROWS_ADDED), 2)
            of_sums = dict(**widths(K, V), BLOCK_M=ROWS_ADDED)
            launches.append(Launch(add_parts_kernel, grid, (*sums, dk, dv, B * T * G, parts), of_sums))
        return Work(launches, (dk, dv))

    run(tuned("range_dq", q, V, prepare_dq))
    of_keys = tuned("range_dkv", q, V, prepare_dkv)
    run(of_keys)
    dk, dv = of_keys.results
    return dq, dk, dv


def _parts(q_BSGRK: Tensor, n_keys: int, tiles: TileSizes) -> int:
    """Keys that many queries share are worked on by several programs: enough for every unit of a large GPU."""
    B, S, G, R, _ = q_BSGRK.shape
    programs = triton.cdiv(n_keys, tiles.n) * B * G
    return max(1, min(_PROGRAMS_WANTED // max(1, programs), triton.cdiv(S * R, 8 * tiles.m)))


_PROGRAMS_WANTED = 1024
ROWS_ADDED = 32
"""Keys whose partial gradients one program adds."""


def rows_contiguous(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Views of fused projections pass as they are; only rows with gaps are copied."""
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in tensors)


def row_strides(*tensors: Tensor) -> list[int]:
    """Strides of every axis but the last; 0 where an axis has one element, whose stride may be any number that the
    compiler would specialize on."""
    return [s if n > 1 else 0 for x in tensors for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True)]
