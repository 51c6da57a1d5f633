"""Launches the decode step, one new token per row: four kernels for any lengths.

The host reads shapes only, so the step may be captured in a CUDA graph and replayed as the cache fills up. Shapes as
in `nsa.kernels.reference`; a row's keys must hold its position 0 (start ≥ 0), as a cache's do.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.interface import CachedKeys, CacheView, KeyPages, device_of
from nsa.kernels.triton.device.decode import (
    decode_compressed_kernel,
    decode_merge_kernel,
    decode_raw_kernel,
    decode_score_kernel,
)
from nsa.kernels.triton.mix import mix_forward
from nsa.kernels.triton.range_attention import row_strides, rows_contiguous
from nsa.kernels.triton.tuning import TileSizes, choose, is_wide, split_width, widths

PROGRAMS = 128
"""Programs per row: GPUs have 108 to 148 SMs. Not more, because each leaves a part to be merged."""
WINDOW_PART = 64  # keys
STRETCHES = 16  # of blocks, each ranked by one program; a power of two
BLOCKS_AT_ONCE = 64
HEADS_AT_ONCE = 16
MERGED_AT_ONCE = 16  # parts


class DecodeConstants(NamedTuple):
    """Compile-time constants of each kernel."""

    compressed: dict[str, Any]
    score: dict[str, Any]
    raw: dict[str, Any]
    merge: dict[str, Any]


class TritonDecoder:
    """`nsa.kernels.interface.TokenDecoder`; the cache appends tokens by itself.

    merged: one softmax over selected blocks and window, whose compressed keys have no values, without gates.
    """

    append = None

    def __init__(
        self,
        cache: CacheView,
        *,
        heads_per_group: int,
        means: bool,
        geometry: Geometry,
        scale: float,
        merged: bool = False,
    ) -> None:
        self._keys = (cache.compressed, cache.selected, cache.window)
        self._geometry, self._scale, self._merged = geometry, scale, merged

    def attend(self, q_B1GRK: Tensor, gates_B1GR3: Tensor | None) -> tuple[Tensor, Tensor]:
        if (gates_B1GR3 is None) != self._merged:
            raise ConfigError(
                f"gates are {'missing' if gates_B1GR3 is None else 'given'}: they mix the branches, and a merged layer "
                f"has none. Pass them to a decoder that was made with merged=False, and only to that."
            )
        with device_of(q_B1GRK):
            if gates_B1GR3 is None:
                return decode_merged(q_B1GRK, *self._keys, geometry=self._geometry, scale=self._scale)
            branches, idx_B1GN = decode(q_B1GRK, *self._keys, geometry=self._geometry, scale=self._scale)
            return mix_forward(gates_B1GR3, *branches), idx_B1GN


def decode(
    q_B1GRK: Tensor,
    compressed: CachedKeys,
    selected: CachedKeys,
    window: CachedKeys,
    *,
    geometry: Geometry,
    scale: float,
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """The compressed, selected and sliding branch's outputs, and the chosen blocks; the cache is read in place."""
    out, idx = _launch(q_B1GRK, compressed, selected, window, geometry, scale, merged=False)
    return (out[0], out[1], out[2]), idx


def decode_merged(
    q_B1GRK: Tensor,
    compressed: CachedKeys,
    selected: CachedKeys,
    window: CachedKeys,
    *,
    geometry: Geometry,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The output of one softmax over the window and blocks chosen among the tokens before it, and these blocks."""
    far_B1 = (selected.pos_B1 - geometry.w).clamp(min=-1)
    k, _, table_BP = compressed.pages
    entries = compressed._replace(pages=KeyPages(k, k, table_BP), pos_B1=far_B1)  # values are not read
    out, idx = _launch(q_B1GRK, entries, selected._replace(pos_B1=far_B1), window, geometry, scale, merged=True)
    return out[0], idx


def _launch(
    q_B1GRK: Tensor, compressed: CachedKeys, selected: CachedKeys, window: CachedKeys, geometry: Geometry, scale: float,
    *, merged: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Outputs of all branches, [3 or 1, B, 1, G, R, V], and the chosen blocks."""
    B, _, G, R, K = q_B1GRK.shape
    V = selected.pages.v.shape[-1]
    (q,) = rows_contiguous(q_B1GRK)
    in_cmp, in_sel, in_win = (_laid_out(keys) for keys in (compressed, selected, window))
    pos_cmp, first_cmp = in_cmp[3:]
    C, T = compressed.pages.n_entries, selected.pages.n_entries

    tiles = choose("decode", max(K, V), element_size=q.dtype.itemsize)
    fixed = constants(G, R, K, V, geometry, tiles, wide=is_wide(q.dtype), merged=merged)
    keep, block_m = fixed.score["KEEP"], fixed.compressed["BLOCK_M"]
    n_cmp = min(fixed.compressed["PARTS"], max(1, triton.cdiv(C, tiles.n)))  # any further would always be empty
    n_raw = geometry.n_sel + fixed.raw["WINDOW_PARTS"]
    n_parts = n_cmp + n_raw
    row_tiles = triton.cdiv(R, block_m)

    part = q.new_empty((B, G, n_parts, R, V), dtype=torch.float32)
    part_lse = q.new_empty((B, G, n_parts, R), dtype=torch.float32)
    scores = q.new_empty((B, G, R, C), dtype=torch.float32)
    best = q.new_empty((B, G, STRETCHES, keep), dtype=torch.int64)
    idx = q.new_empty((B, 1, G, geometry.n_sel), dtype=torch.int32)
    out = q.new_empty((1 if merged else 3, B, 1, G, R, V))
    q_strides = row_strides(q[:, 0])

    decode_compressed_kernel[(n_cmp, B * G, row_tiles)](
        q, *in_cmp, scores, part, part_lse, scale, C, n_parts, in_cmp[2].stride(0),
        *q_strides, *row_strides(*in_cmp[:2]), PAGE=_page(compressed), **fixed.compressed, **tiles.options,
    )  # fmt: skip
    decode_score_kernel[(STRETCHES, B * G)](
        scores, part_lse, pos_cmp, first_cmp, best, C, n_cmp, n_parts, **fixed.score
    )
    decode_raw_kernel[(n_raw, B * G, row_tiles)](
        q, *in_sel, *in_win, best, idx, part, part_lse,
        scale, T, window.pages.n_entries, n_cmp, n_parts, in_sel[2].stride(0), in_win[2].stride(0),
        *q_strides, *row_strides(*in_sel[:2], *in_win[:2]), PAGE=_page(selected), WINDOW_PAGE=_page(window),
        **fixed.raw, **tiles.options,
    )  # fmt: skip
    decode_merge_kernel[(len(out) * R, B * G)](part, part_lse, out, n_cmp, n_parts, B * G * R, **fixed.merge)
    return out, idx


def constants(
    G: int, R: int, K: int, V: int, geometry: Geometry, tiles: TileSizes, *, wide: bool, merged: bool = False
) -> DecodeConstants:
    """They depend on the model alone, so that a row has the same bits in any batch and any cache."""
    l, d, l_sel, n_sel, w = geometry.ints
    parts = triton.next_power_of_2(triton.cdiv(PROGRAMS, G))
    window_parts = min(parts, triton.cdiv(w, WINDOW_PART))
    block_m = min(tiles.m, max(16, triton.next_power_of_2(R)))
    keep = triton.next_power_of_2(n_sel)
    heads = dict(G=G, R=R)
    attend = dict(**heads, **widths(K, V), BLOCK_M=block_m, BLOCK_N=tiles.n, WIDE=wide)
    blocks = dict(L_SEL=l_sel, KEEP=keep, STRETCHES=STRETCHES)
    v_width = split_width(V)
    return DecodeConstants(
        compressed=dict(**attend, L=l, D=d, PARTS=parts, VALUES=not merged),
        score=dict(**heads, **blocks, L=l, D=d, PARTS=parts, BLOCK_R=HEADS_AT_ONCE, BLOCK_J=max(BLOCKS_AT_ONCE, keep)),
        raw=dict(
            **attend, **blocks, N_SEL=n_sel, W=w, WINDOW_PARTS=window_parts
        ),
        merge=dict(
            R=R, V=V, V1=v_width.main, V2=v_width.rest, N_SEL=n_sel,
            PARTS=triton.next_power_of_2(n_sel + window_parts if merged else max(parts, n_sel)),
            AT_ONCE=MERGED_AT_ONCE, ONE_BRANCH=merged,
        ),
    )  # fmt: skip


def _laid_out(keys: CachedKeys) -> tuple[Tensor, ...]:
    """Keys, values, block table, positions, starts."""
    k, v, table_BP = keys.pages
    return (*rows_contiguous(k, v, table_BP), keys.pos_B1.contiguous(), keys.start_B1.contiguous())


def _page(keys: CachedKeys) -> int:
    return keys.pages.k.shape[2]
