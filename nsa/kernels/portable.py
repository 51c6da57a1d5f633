"""Any device, no compiled code: exact attention in chunks of queries, never an S×S or S×S/d tensor.

Plain matrix products instead of `scaled_dot_product_attention`: that one returns no log-sum-exp, has no kernel for
d_k ≠ d_v, and its causal flag is aligned to the wrong corner for unequal lengths. Scores are kept in fp32 whatever the
inputs are; only inputs and outputs are rounded. Backward recomputes each chunk from the saved log-sum-exp.

Shapes as in `reference`; additionally c queries of one chunk · U keys that a chunk sees · M = c·R rows.
"""

from collections.abc import Iterator
from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor

# Elements of the largest temporary. On a CPU it should stay in the second-level cache; elsewhere launches dominate.
_CPU_ELEMENTS = 1 << 19
_OTHER_ELEMENTS = 1 << 24

Gradients = tuple[Tensor, Tensor, Tensor]


def sliding_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor, sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bounds = _window_bounds(pos_BS, start_BS, sizes, k_BTGK.shape[1])
    return _shared_forward(q_BSGRK, k_BTGK, v_BTGV, bounds, sizes[0], scale)


def sliding_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx: None, pos_BS: Tensor, start_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, sizes: list[int], scale: float,
) -> Gradients:  # fmt: skip
    bounds = _window_bounds(pos_BS, start_BS, sizes, k_BTGK.shape[1])
    return _shared_backward(dout_BSGRV, q_BSGRK, k_BTGK, v_BTGV, out_BSGRV, lse_BSGR, bounds, sizes[0], scale)


def compressed_forward(
    q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor, sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    bounds = _compressed_bounds(pos_BS, first_BS, sizes, k_BCGK.shape[1])
    return _shared_forward(q_BSGRK, k_BCGK, v_BCGV, bounds, k_BCGK.shape[1], scale)


def compressed_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, idx: None, pos_BS: Tensor, first_BS: Tensor,
    out_BSGRV: Tensor, lse_BSGR: Tensor, sizes: list[int], scale: float,
) -> Gradients:  # fmt: skip
    bounds = _compressed_bounds(pos_BS, first_BS, sizes, k_BCGK.shape[1])
    n = k_BCGK.shape[1]
    return _shared_backward(dout_BSGRV, q_BSGRK, k_BCGK, v_BCGV, out_BSGRV, lse_BSGR, bounds, n, scale)


def selected_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor,
    sizes: list[int], scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    out_BSGRV, lse_BSGR = _new_outputs(q_BSGRK, v_BTGV)
    k_XK, v_XV = _rows(k_BTGK), _rows(v_BTGV)
    for at in _gather_chunks(q_BSGRK, k_BTGK, idx_BSGN, *sizes):
        row_BcGU, hidden_BcGU = _chosen_rows(idx_BSGN[:, at], pos_BS[:, at], start_BS[:, at], k_BTGK.shape, *sizes)
        out, lse = _attend(
            _wide(q_BSGRK[:, at]), _take(k_XK, row_BcGU), _take(v_XV, row_BcGU), hidden_BcGU[..., None, None, :], scale
        )
        out_BSGRV[:, at], lse_BSGR[:, at] = out, lse
    return out_BSGRV, lse_BSGR


def selected_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor,
    start_BS: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor, sizes: list[int], scale: float,
) -> Gradients:  # fmt: skip
    dq_BSGRK = torch.empty_like(q_BSGRK)
    k_XK, v_XV = _rows(k_BTGK), _rows(v_BTGV)
    dk_XK, dv_XV = _wide_zeros(k_XK), _wide_zeros(v_XV)
    for at in _gather_chunks(q_BSGRK, k_BTGK, idx_BSGN, *sizes):
        row_BcGU, hidden_BcGU = _chosen_rows(idx_BSGN[:, at], pos_BS[:, at], start_BS[:, at], k_BTGK.shape, *sizes)
        dout = _wide(dout_BSGRV[:, at])
        delta = (dout * out_BSGRV[:, at]).sum(-1, keepdim=True)
        dq, dk, dv = _attend_backward(
            dout, _wide(q_BSGRK[:, at]), _take(k_XK, row_BcGU), _take(v_XV, row_BcGU),
            hidden_BcGU[..., None, None, :], lse_BSGR[:, at, ..., None], delta, scale,
        )  # fmt: skip
        dq_BSGRK[:, at] = dq
        dk_XK.index_add_(0, row_BcGU.flatten(), dk.flatten(0, -2))
        dv_XV.index_add_(0, row_BcGU.flatten(), dv.flatten(0, -2))
    return dq_BSGRK, dk_XK.view(k_BTGK.shape).to(k_BTGK.dtype), dv_XV.view(v_BTGV.shape).to(v_BTGV.dtype)


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, l: int, d: int, l_sel: int, n_sel: int,
    scale: float,
) -> Tensor:  # fmt: skip
    B, S, G, R, _ = q_BSGRK.shape
    idx_BSGN = torch.full((B, S, G, n_sel), -1, dtype=torch.int32, device=q_BSGRK.device)
    weight = _overlap_weights(l, d, l_sel).to(q_BSGRK.device)
    n = k_BCGK.shape[1]
    lo_BS, hi_BS = _compressed_bounds(pos_BS, first_BS, [l, d], n)
    for at, lo, hi in _shared_chunks(q_BSGRK, lo_BS, hi_BS, n):
        pos, first = pos_BS[:, at], first_BS[:, at]
        n_blocks = int(pos.max()) // l_sel + 1
        if n_blocks <= n_sel:  # everything that is visible is chosen, whatever its score
            idx_BSGN[:, at, :, :n_blocks] = _all_blocks(pos, l_sel, n_blocks)
            continue
        q_BGMK = _group_rows(q_BSGRK[:, at])
        hidden = _outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        e_BGMU, total_BGM1, _ = _softmax(_scores(q_BGMK, _per_group(k_BCGK[:, lo:hi]), scale), hidden)
        mass_BcGU = (e_BGMU / total_BGM1).unflatten(2, (-1, R)).sum(3).transpose(1, 2)
        mass_BcGU = _rebase(mass_BcGU, first - lo)
        score_BcGJ = _per_block(mass_BcGU, weight, n_blocks, l // d, l_sel // d)
        idx_BSGN[:, at] = _top(score_BcGJ, pos, l_sel, n_sel)
    return idx_BSGN


# One chunk of rows against its keys. `hidden` broadcasts to the scores with their rows unflattened to (c, R).


def _attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    e, total, top = _softmax(_scores(q, k, scale), hidden)
    return (e @ v) / total, (top + _log_of_sum(e, total)).squeeze(-1)


def _attend_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor, lse: Tensor, delta: Tensor, scale: float
) -> Gradients:
    s = _hide(_scores(q, k, scale), hidden)
    p = s.sub_(lse.masked_fill(lse == -torch.inf, 0)).exp_()
    dv = p.transpose(-1, -2) @ dout
    ds = (dout @ v.transpose(-1, -2)).sub_(delta).mul_(p).mul_(scale)
    return ds @ k, ds.transpose(-1, -2) @ q, dv


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    return (q * scale) @ k.transpose(-1, -2)


def _hide(s: Tensor, hidden: Tensor) -> Tensor:
    per_query = s.unflatten(-2, (hidden.shape[-3], -1))
    per_query.masked_fill_(hidden, -torch.inf)
    return s


def _softmax(s: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(s − top), its row sums (1 where a row sees nothing: its exponentials are all 0), and top."""
    s = _hide(s, hidden)
    top = s.amax(-1, keepdim=True) if s.shape[-1] else s.new_full((*s.shape[:-1], 1), -torch.inf)
    top = top.masked_fill(top == -torch.inf, 0)
    e = s.sub_(top).exp_()
    total = e.sum(-1, keepdim=True)
    return e, total.masked_fill(total == 0, 1), top


def _log_of_sum(e: Tensor, total: Tensor) -> Tensor:
    # A visible row holds its own maximum, exp(0) = 1; only a row that sees nothing is all zeros.
    sees_nothing = e.amax(-1, keepdim=True) == 0 if e.shape[-1] else torch.ones_like(total, dtype=torch.bool)
    return total.log().masked_fill(sees_nothing, -torch.inf)


# Sliding and compressed: the queries of a chunk share one run of keys [lo, hi).


def _shared_forward(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, bounds: tuple[Tensor, Tensor], keys: int, scale: float
) -> tuple[Tensor, Tensor]:
    out_BSGRV, lse_BSGR = _new_outputs(q_BSGRK, v_BTGV)
    lo_BS, hi_BS = bounds
    for at, lo, hi in _shared_chunks(q_BSGRK, lo_BS, hi_BS, keys):
        hidden = _outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        k, v = _per_group(k_BTGK[:, lo:hi]), _per_group(v_BTGV[:, lo:hi])
        out_BGMV, lse_BGM = _attend(_group_rows(q_BSGRK[:, at]), k, v, hidden, scale)
        out_BSGRV[:, at] = _query_rows(out_BGMV, q_BSGRK.shape[3])
        lse_BSGR[:, at] = _query_rows(lse_BGM[..., None], q_BSGRK.shape[3])[..., 0]
    return out_BSGRV, lse_BSGR


def _shared_backward(
    dout_BSGRV: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, out_BSGRV: Tensor, lse_BSGR: Tensor,
    bounds: tuple[Tensor, Tensor], keys: int, scale: float,
) -> Gradients:  # fmt: skip
    dq_BSGRK = torch.empty_like(q_BSGRK)
    dk_BTGK, dv_BTGV = _wide_zeros(k_BTGK), _wide_zeros(v_BTGV)
    lo_BS, hi_BS = bounds
    for at, lo, hi in _shared_chunks(q_BSGRK, lo_BS, hi_BS, keys):
        hidden = _outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        k, v = _per_group(k_BTGK[:, lo:hi]), _per_group(v_BTGV[:, lo:hi])
        dout_BGMV = _group_rows(dout_BSGRV[:, at])
        delta_BGM1 = (dout_BGMV * _group_rows(out_BSGRV[:, at])).sum(-1, keepdim=True)
        lse_BGM1 = _group_rows(lse_BSGR[:, at, ..., None])
        q_BGMK = _group_rows(q_BSGRK[:, at])
        dq, dk, dv = _attend_backward(dout_BGMV, q_BGMK, k, v, hidden, lse_BGM1, delta_BGM1, scale)
        dq_BSGRK[:, at] = _query_rows(dq, q_BSGRK.shape[3])
        dk_BTGK[:, lo:hi] += dk.transpose(1, 2)
        dv_BTGV[:, lo:hi] += dv.transpose(1, 2)
    return dq_BSGRK, dk_BTGK.to(k_BTGK.dtype), dv_BTGV.to(v_BTGV.dtype)


def _window_bounds(pos_BS: Tensor, start_BS: Tensor, sizes: list[int], n_keys: int) -> tuple[Tensor, Tensor]:
    (w,) = sizes
    end_BS = start_BS + pos_BS + 1
    first_BS = start_BS + (pos_BS - w + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), end_BS.clamp(0, n_keys)


def _compressed_bounds(pos_BS: Tensor, first_BS: Tensor, sizes: list[int], n_keys: int) -> tuple[Tensor, Tensor]:
    l, d = sizes
    n_complete_BS = ((pos_BS + 1 - l) // d + 1).clamp(min=0)
    return first_BS.clamp(0, n_keys), (first_BS + n_complete_BS).clamp(0, n_keys)


def _shared_chunks(q_BSGRK: Tensor, lo_BS: Tensor, hi_BS: Tensor, keys: int) -> Iterator[tuple[slice, int, int]]:
    """Runs of queries with the keys they need; as many queries as keep the scores within the element budget."""
    B, S, G, R, _ = q_BSGRK.shape
    rows = _budget(q_BSGRK) // (B * G * R)
    chunk = min(S, max(1, min(rows // max(1, keys), isqrt(rows))))  # a window of keys grows with the chunk itself
    starts = range(0, S, chunk)
    # One transfer for all chunks, so that an accelerator is not stopped at each.
    lo = torch.stack([x.amin() for x in lo_BS.split(chunk, 1)]).tolist()
    hi = torch.stack([x.amax() for x in hi_BS.split(chunk, 1)]).tolist()
    for s, first, end in zip(starts, lo, hi, strict=True):
        yield slice(s, min(S, s + chunk)), first, max(first, end)


def _outside(lo_Bc: Tensor, hi_Bc: Tensor, lo: int, hi: int) -> Tensor:
    """True where key lo + u is not for this query: [B, 1, c, 1, U]."""
    at_U = torch.arange(lo, hi, device=lo_Bc.device)
    return ((at_U < lo_Bc[..., None]) | (at_U >= hi_Bc[..., None]))[:, None, :, None]


def _group_rows(x_BcGRX: Tensor) -> Tensor:
    return _wide(x_BcGRX).transpose(1, 2).flatten(2, 3)


def _query_rows(x_BGMX: Tensor, heads_per_group: int) -> Tensor:
    return x_BGMX.unflatten(2, (-1, heads_per_group)).transpose(1, 2)


def _per_group(x_BUGX: Tensor) -> Tensor:
    return _wide(x_BUGX).transpose(1, 2)


# Selected: every query has its own keys, gathered as rows of [B·T·G, X].


def _gather_chunks(q_BSGRK: Tensor, k_BTGK: Tensor, idx_BSGN: Tensor, l_sel: int) -> Iterator[slice]:
    B, S, G, _, K = q_BSGRK.shape
    keys = idx_BSGN.shape[3] * l_sel
    chunk = max(1, 4 * _budget(q_BSGRK) // (B * G * keys * K))
    for s in range(0, S, chunk):
        yield slice(s, min(S, s + chunk))


def _chosen_rows(
    idx_BcGN: Tensor, pos_Bc: Tensor, start_Bc: Tensor, k_shape: torch.Size, l_sel: int
) -> tuple[Tensor, Tensor]:
    B, T, G, _ = k_shape
    dev = idx_BcGN.device
    at_BcGU = (idx_BcGN.long()[..., None] * l_sel + torch.arange(l_sel, device=dev)).flatten(-2)
    hidden_BcGU = (at_BcGU < 0) | (at_BcGU > pos_Bc[..., None, None])
    key_BcGU = (at_BcGU + start_Bc[..., None, None]).masked_fill(hidden_BcGU, 0)
    batch_B111 = torch.arange(B, device=dev)[:, None, None, None]
    group_G1 = torch.arange(G, device=dev)[:, None]
    return (batch_B111 * T + key_BcGU) * G + group_G1, hidden_BcGU


def _rows(x_BTGX: Tensor) -> Tensor:
    return x_BTGX.contiguous().flatten(0, 2)


def _take(x_XK: Tensor, row: Tensor) -> Tensor:
    return _wide(x_XK.index_select(0, row.flatten())).view(*row.shape, -1)


# Selection.


def _overlap_weights(l: int, d: int, l_sel: int) -> Tensor:
    """Strides a block shares with the compressed blocks beginning −(l/d − 1) … l_sel/d − 1 strides after it."""
    begin = torch.arange(1 - l // d, l_sel // d) * d
    return (torch.clamp(begin + l, max=l_sel) - begin.clamp(min=0)).float() / d


def _rebase(mass_BcGU: Tensor, first_Bc: Tensor) -> Tensor:
    """Column 0 becomes compressed block 0 of the query's own document, which lies at column `first`."""
    U = mass_BcGU.shape[-1]
    if U == 0 or not bool(first_Bc.any()):
        return mass_BcGU
    source_BcU = torch.arange(U, device=mass_BcGU.device) + first_Bc[..., None]
    inside_BcU = (source_BcU >= 0) & (source_BcU < U)
    index = source_BcU.clamp(0, U - 1)[:, :, None].expand_as(mass_BcGU)
    return mass_BcGU.gather(-1, index) * inside_BcU[:, :, None]


def _per_block(mass_BcGU: Tensor, weight: Tensor, n_blocks: int, per_l: int, per_l_sel: int) -> Tensor:
    columns = per_l_sel * n_blocks
    padded = F.pad(mass_BcGU, (per_l - 1, columns - mass_BcGU.shape[-1]))
    return padded.unfold(-1, per_l_sel + per_l - 1, per_l_sel) @ weight.to(padded.dtype)


def _all_blocks(pos_Bc: Tensor, l_sel: int, n_blocks: int) -> Tensor:
    j_J = torch.arange(n_blocks, dtype=torch.int32, device=pos_Bc.device)
    return torch.where(j_J <= (pos_Bc // l_sel)[..., None], j_J, -1)[:, :, None]


def _top(score_BcGJ: Tensor, pos_Bc: Tensor, l_sel: int, n_sel: int) -> Tensor:
    n_blocks = score_BcGJ.shape[-1]
    j_J = torch.arange(n_blocks, device=pos_Bc.device)
    own_Bc1 = (pos_Bc // l_sel)[..., None]
    forced_BcJ = (j_J == 0) | (j_J == own_Bc1) | (j_J == own_Bc1 - 1)
    score = score_BcGJ.float().masked_fill(forced_BcJ[:, :, None], torch.inf)
    score = score.masked_fill((j_J > own_Bc1)[:, :, None], -torch.inf)
    # Scores are ≥ 0 or ±inf, so their bits order as integers do. With the index below them no two keys are equal:
    # the choice is exact and the same on every device, and ties go to the lower index.
    key = score.view(torch.int32).long() << 32 | (n_blocks - j_J)
    key = key.topk(n_sel, dim=-1).values
    block = n_blocks - (key & 0xFFFFFFFF)
    block = block.masked_fill(key < 0, n_blocks).sort(-1).values
    return block.masked_fill(block == n_blocks, -1).to(torch.int32)


def _new_outputs(q_BSGRK: Tensor, v_BTGV: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q_BSGRK.dtype, torch.float32)
    return q_BSGRK.new_empty((*q_BSGRK.shape[:-1], v_BTGV.shape[-1])), q_BSGRK.new_empty(q_BSGRK.shape[:-1], dtype=wide)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _wide_zeros(x: Tensor) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)


def _budget(x: Tensor) -> int:
    return _CPU_ELEMENTS if x.device.type == "cpu" else _OTHER_ELEMENTS
