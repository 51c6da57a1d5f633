"""Stand-ins for FlashAttention 2 and 4, with their documented signatures and results, in dense arithmetic on a CPU.

The packages need a GPU to be imported. Signatures are those of flash-attn 2.8.3 and flash-attn-4 4.0.0b36
(`test_flash.py` compares them with the sources where these are on the path). As there: attention of segments that end
together, and whose rows see keys back to a window; log-sum-exps [H, N]; FlashAttention 2 has one width for keys and
values and no gradient of log-sum-exps. What no segment writes keeps what it held.

N rows of queries, M of keys · H heads · G kv groups
"""

from itertools import pairwise
from types import SimpleNamespace

import torch

ONE_WIDTH = "FlashAttention 2 has one width, a multiple of 8"


def _segments(cu_q, cu_k):
    assert cu_q.dtype == cu_k.dtype == torch.int32
    segments = zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True)
    return [(slice(*rows), slice(*keys)) for rows, keys in segments]


def _weights(q, k, scale, left):
    """Scores of one segment [H, n, m], −inf where hidden; left: keys before the own one, None: all."""
    n, m = q.shape[0], k.shape[0]
    scores = torch.einsum("nhk,mhk->hnm", q.double(), k.double()) * scale
    age = torch.arange(n)[:, None] + m - n - torch.arange(m)
    return scores.masked_fill((age < 0) | (age > (m if left is None else left)), -torch.inf)


def _forward(q, k, v, cu_q, cu_k, scale, left, empty_lse):
    heads = q.shape[1] // k.shape[1]
    out = torch.full((*q.shape[:2], v.shape[-1]), torch.nan, dtype=q.dtype)
    lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
    for rows, keys in _segments(cu_q, cu_k):
        k_, v_ = (x[keys].repeat_interleave(heads, 1) for x in (k, v))
        scores = _weights(q[rows], k_, scale, left)
        p = scores.softmax(-1).nan_to_num(0.0)
        out[rows] = torch.einsum("hnm,mhv->nhv", p, v_.double()).to(q.dtype)
        lse[:, rows] = scores.logsumexp(-1).float().masked_fill((p.sum(-1) == 0), empty_lse)
    return out, lse


def _backward(dout, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, scale, left, dlse=None):
    heads, groups = q.shape[1] // k.shape[1], k.shape[1]
    delta = (dout.double() * out.double()).sum(-1).t() - (0 if dlse is None else dlse.double())
    for rows, keys in _segments(cu_q, cu_k):
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        k_, v_ = (x[keys].repeat_interleave(heads, 1).double() for x in (k, v))
        p = (_weights(q[rows], k_, scale, left) - lse[:, rows, None].double()).exp()
        ds = p * (torch.einsum("nhv,mhv->hnm", dout[rows].double(), v_) - delta[:, rows, None]) * scale
        dq[rows] = torch.einsum("hnm,mhk->nhk", ds, k_).to(dq.dtype)
        dk[keys] = torch.einsum("hnm,nhk->mhk", ds, q[rows].double()).unflatten(1, (groups, -1)).sum(2).to(dk.dtype)
        dv[keys] = torch.einsum("hnm,nhv->mhv", p, dout[rows].double()).unflatten(1, (groups, -1)).sum(2).to(dv.dtype)


def _flash_attn_varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    assert q.shape[-1] == k.shape[-1] == v.shape[-1], ONE_WIDTH
    assert q.shape[-1] % 8 == 0, ONE_WIDTH
    assert (causal, window_size_right, dropout_p, softcap, alibi_slopes) == (True, 0, 0.0, 0.0, None)
    left = None if window_size_left == -1 else window_size_left
    assert max_seqlen_q >= cu_seqlens_q.diff().max()
    assert max_seqlen_k >= cu_seqlens_k.diff().max()
    out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, left, torch.inf)
    return out, lse, None, None


def _flash_attn_varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    assert {x.shape[-1] for x in (dout, q, k, v, out, dq, dk, dv)} == {q.shape[-1]}, ONE_WIDTH
    assert q.shape[-1] % 8 == 0, ONE_WIDTH
    assert (causal, window_size_right, dropout_p, softcap, alibi_slopes) == (True, 0, 0.0, 0.0, None)
    assert deterministic
    assert softmax_lse.dtype == torch.float32
    left = None if window_size_left == -1 else window_size_left
    _backward(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, softmax_scale, left)
    return torch.empty(0)


def _flash_attn_fwd(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
    max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
    window_size_left=None, window_size_right=None, learnable_sink=None, tile_mn=None, mma_pv_is_rs=None,
    intra_wg_overlap=None, num_threads=384, num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None,
    block_sparse_tensors=None, return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None,
    q_descale=None, k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None,
    seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False,
):  # fmt: skip
    assert return_lse
    assert (causal, window_size_right) == (True, 0)
    assert window_size_left is None or window_size_left >= 0
    out, lse = _forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left, -torch.inf)
    return out, lse, None, None, None


def _flash_attn_bwd(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
    window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, pack_gqa=False, num_stages_Q=2,
    num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2,
    AtomLayoutMdQ=2, V_in_regs=False, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
    max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None,
    score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, dlse=None,
    learnable_sink=None,
):  # fmt: skip
    assert deterministic
    assert causal
    assert lse.shape == (q.shape[1], q.shape[0])
    _backward(
        dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, softmax_scale, window_size_left, dlse
    )  # fmt: skip
    return dq, dk, dv


PACKAGES = {
    "flash-attn 2.8.3": {"flash_attn.flash_attn_interface": (_flash_attn_varlen_forward, _flash_attn_varlen_backward)},
    "flash-attn-4 4.0.0b36": {"flash_attn.cute.interface": (_flash_attn_fwd, _flash_attn_bwd)},
}


def modules_of(package):
    """The package's modules by name."""
    return {
        name: SimpleNamespace(**{function.__name__: function for function in functions})
        for name, functions in PACKAGES[package].items()
    }
