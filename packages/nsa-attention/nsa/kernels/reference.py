"""Reference implementation of the three branches in plain PyTorch; every backend is tested against it.

One softmax with three rules for which keys a query sees.

B batch · S queries · T raw keys · C compressed keys · N selected blocks · J selection blocks
G kv groups · R query heads per group · K key dim · V value dim

`pos_BS` is the position of each query in its own document. `start_BS` is the index on the key axis where position 0 of
that document lies (`first_BS`: where its compressed block 0 lies). The pair covers every case with one rule: plain
sequences (start 0), packed documents (start = the document's offset), and caches that dropped old keys (start < 0).

Computed in fp32, or fp64 for fp64 inputs, also under autocast; plain autograd, so `gradcheck` goes through. Memory is
O(S·T): for tests.
"""

from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.custom_operator import is_mapped
from nsa.kernels.precision import einsum, require_one_dtype, without_autocast

Attended = Tensor | tuple[Tensor, Tensor]


class ScoreOptions(TypedDict):
    """Keyword arguments of all branches and of the selection."""

    geometry: Geometry
    scale: float
    """Factor of the scores."""


class _AttendOptions(ScoreOptions, total=False):
    """Keyword arguments of a branch: also whether to return (output, log-sum-exps)."""

    return_lse: bool


def sliding_attention(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, pos_BS: Tensor, start_BS: Tensor, **options: Unpack[_AttendOptions]
) -> Attended:
    """Attend to the query's own token and the w - 1 before it."""
    at_BST = _index_in_document(k_BTGK, start_BS)
    age_BST = pos_BS[..., None] - at_BST
    visible_BST = (at_BST >= 0) & (age_BST >= 0) & (age_BST < options["geometry"].w)
    return _attend(q_BSGRK, k_BTGK, v_BTGV, visible_BST[:, :, None], options)


def compressed_attention(
    q_BSGRK: Tensor, k_BCGK: Tensor, v_BCGV: Tensor, pos_BS: Tensor, first_BS: Tensor, **options: Unpack[_AttendOptions]
) -> Attended:
    """Attend to every compressed block whose last token is not after the query."""
    visible_BSC = _visible_compressed(k_BCGK, pos_BS, first_BS, options["geometry"])
    return _attend(q_BSGRK, k_BCGK, v_BCGV, visible_BSC[:, :, None], options)


def select_blocks(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, **options: Unpack[ScoreOptions]
) -> Tensor:
    """Top-n block selection per query and group: int32 [B, S, G, n_sel], ascending, −1 past the last.

    A block's score is the compressed branch's own probability mass on it, summed over the group's heads. Block 0 and
    the two blocks nearest the query are always in. Ties go to the lower index. A score that is NaN ranks as 0, the
    lowest: a query that sees a key which is not finite chooses the first blocks.
    """
    require_one_dtype(q_BSGRK, k_BCGK)
    geometry, scale = options["geometry"], options["scale"]
    with torch.no_grad():
        visible_BSC = _visible_compressed(k_BCGK, pos_BS, first_BS, geometry)
        p_BSGRC = _softmax(_scores(q_BSGRK, k_BCGK, scale), visible_BSC[:, :, None, None])[0]
        mass_BSGC = _from_document_start(p_BSGRC.sum(3), first_BS)
        n_blocks = max(0, int(pos_BS.max()) // geometry.l_sel + 1) if pos_BS.numel() else 0
        weight_CJ = overlap(mass_BSGC.shape[-1], n_blocks, geometry).to(mass_BSGC)
        mass_BSGJ = without_autocast(mass_BSGC, torch.matmul, mass_BSGC, weight_CJ)
        score_BSGJ = _force(mass_BSGJ.nan_to_num(0.0), pos_BS, geometry.l_sel)
        return _best(score_BSGJ, geometry.n_sel)


def selected_attention(
    q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, idx_BSGN: Tensor, pos_BS: Tensor, start_BS: Tensor,
    **options: Unpack[_AttendOptions],
) -> Attended:  # fmt: skip
    """Attend to the tokens of the chosen blocks that are not after the query."""
    at_BST = _index_in_document(k_BTGK, start_BS)
    block_BS1T = (at_BST // options["geometry"].l_sel)[:, :, None]
    visible_BST = (at_BST >= 0) & (at_BST <= pos_BS[..., None])
    chosen_BSGT = torch.zeros_like(block_BS1T, dtype=torch.bool).expand(-1, -1, idx_BSGN.shape[2], -1)
    for idx_BSG in idx_BSGN.unbind(-1):
        chosen_BSGT = chosen_BSGT | (block_BS1T == idx_BSG[..., None])
    return _attend(q_BSGRK, k_BTGK, v_BTGV, chosen_BSGT & visible_BST[:, :, None], options)


def mix(gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor, sliding_BSGRV: Tensor) -> Tensor:
    """The branches' outputs, each times its gate (one per head, or X = 1 per group), summed in the gates' dtype."""
    outs = (compressed_BSGRV, selected_BSGRV, sliding_BSGRV)
    mixed = sum(gate[..., None] * out for gate, out in zip(gates_BSGX3.unbind(-1), outs, strict=True))
    assert isinstance(mixed, Tensor)
    return mixed.to(compressed_BSGRV.dtype)


def overlap(n_compressed: int, n_blocks: int, geometry: Geometry) -> Tensor:
    """Strides of compressed block c that lie in selection block j: [C, J]. The paper's Eq. 9 for any l, d, l_sel."""
    g = geometry
    begin_C1 = torch.arange(n_compressed)[:, None] * g.d
    begin_J = torch.arange(n_blocks)[None, :] * g.l_sel
    shared_CJ = torch.minimum(begin_C1 + g.l, begin_J + g.l_sel) - torch.maximum(begin_C1, begin_J)
    return shared_CJ.clamp(min=0) // g.d


def _attend(q_BSGRK: Tensor, k_BTGK: Tensor, v_BTGV: Tensor, visible_BSGT: Tensor, options: _AttendOptions) -> Attended:
    require_one_dtype(q_BSGRK, k_BTGK, v_BTGV)
    score, mix = _scores, _weighted_sum
    inputs = q_BSGRK, k_BTGK, v_BTGV
    readable = not torch.compiler.is_compiling() and not any(map(is_mapped, inputs))
    if readable and not all(x.isfinite().all() for x in inputs):
        score, mix = partial(_visible_scores, visible_BSGT), partial(_visible_sum, visible_BSGT)
    p_BSGRT, lse_BSGR = _softmax(score(q_BSGRK, k_BTGK, options["scale"]), visible_BSGT[:, :, :, None])
    out_BSGRV = mix(p_BSGRT, v_BTGV.to(p_BSGRT.dtype)).to(q_BSGRK.dtype)
    return (out_BSGRV, lse_BSGR) if options.get("return_lse") else out_BSGRV


def _weighted_sum(p_BSGRT: Tensor, v_BTGV: Tensor) -> Tensor:
    return einsum("bsgrt,btgv->bsgrv", p_BSGRT, v_BTGV)


def _visible_sum(visible_BSGT: Tensor, p_BSGRT: Tensor, v_BTGV: Tensor) -> Tensor:
    """`_weighted_sum` where a hidden value may be NaN or infinite, which a weight of 0 does not remove: hidden values
    are removed from every query's own copy. O(S·T·V) memory."""
    v_BSGTV = v_BTGV.transpose(1, 2)[:, None].where(visible_BSGT[..., None], 0)
    return (p_BSGRT[..., None] * v_BSGTV[:, :, :, None]).sum(-2)


def _visible_scores(visible_BSGT: Tensor, q_BSGRK: Tensor, k_BTGK: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(q_BSGRK.dtype, torch.float32)
    k_BSGTK = k_BTGK.to(wide).transpose(1, 2)[:, None].where(visible_BSGT[..., None], 0)
    return (q_BSGRK.to(wide)[..., None, :] * k_BSGTK[:, :, :, None]).sum(-1) * scale


def _scores(q_BSGRK: Tensor, k_BTGK: Tensor, scale: float) -> Tensor:
    wide = torch.promote_types(q_BSGRK.dtype, torch.float32)
    return einsum("bsgrk,btgk->bsgrt", q_BSGRK.to(wide), k_BTGK.to(wide)) * scale


def _softmax(scores: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over what is visible, and its log-sum-exp. A row that sees nothing is all zeros with lse −inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.detach().masked_fill(~visible, -torch.inf).amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0)
    # Hidden scores are moved to `top` before exp: whatever they hold, they cannot overflow into a gradient.
    e = (scores.where(visible, top) - top).exp().where(visible, 0)
    total = e.sum(-1, keepdim=True)
    nothing = total == 0
    lse = (top + total.masked_fill(nothing, 1).log()).masked_fill(nothing, -torch.inf)
    return (e / total.masked_fill(nothing, 1)).where(visible, 0), lse.squeeze(-1)


def _index_in_document(k_BTGK: Tensor, start_BS: Tensor) -> Tensor:
    return torch.arange(k_BTGK.shape[1], device=start_BS.device) - start_BS[..., None]


def _visible_compressed(k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry) -> Tensor:
    at_BSC = _index_in_document(k_BCGK, first_BS)
    return (at_BSC >= 0) & (at_BSC * geometry.d + geometry.l - 1 <= pos_BS[..., None])


def _from_document_start(mass_BSGC: Tensor, first_BS: Tensor) -> Tensor:
    """Shift each query's row so that column 0 is the first compressed block of its own document."""
    n = mass_BSGC.shape[-1]
    if n == 0:
        return mass_BSGC
    source_BSC = torch.arange(n, device=mass_BSGC.device) + first_BS[..., None]
    inside_BSC = (source_BSC >= 0) & (source_BSC < n)
    source_BSGC = source_BSC.clamp(0, n - 1)[:, :, None].expand_as(mass_BSGC)
    return mass_BSGC.gather(-1, source_BSGC) * inside_BSC[:, :, None]


def _force(score_BSGJ: Tensor, pos_BS: Tensor, l_sel: int) -> Tensor:
    """+inf for block 0 and the two local blocks; −inf (never 0: a valid score may underflow to it) after the query."""
    j_J = torch.arange(score_BSGJ.shape[-1], device=score_BSGJ.device)
    own_BS1 = (pos_BS // l_sel)[..., None]
    forced_BSJ = (j_J == 0) | (j_J == own_BS1) | (j_J == own_BS1 - 1)
    score_BSGJ = score_BSGJ.masked_fill(forced_BSJ[:, :, None], torch.inf)
    return score_BSGJ.masked_fill((j_J > own_BS1)[:, :, None], -torch.inf)


def _best(score_BSGJ: Tensor, n_sel: int) -> Tensor:
    n_blocks = score_BSGJ.shape[-1]
    score, block = score_BSGJ.sort(dim=-1, descending=True, stable=True)
    block = block.masked_fill(score == -torch.inf, n_blocks)[..., :n_sel].sort(-1).values
    block = torch.nn.functional.pad(block, (0, max(0, n_sel - n_blocks)), value=n_blocks)
    return block.masked_fill(block == n_blocks, -1).to(torch.int32)
