"""Second level of the compressed branch: coarse blocks of compressed entries are scored first, and a query attends only
to the entries of the best ones, among which its selection blocks are chosen too.

A coarse block is to compressed entries what a selection block is to tokens: choosing coarse blocks and attending to
their entries are the same operators, called with the entries in place of tokens. The key of a coarse block is the mean
of its entries' keys. The first coarse block and the two nearest the query are always read.

B batch · S tokens · C compressed entries · M coarse blocks · G kv groups · R heads per group · K key dim
n chosen coarse blocks · m entries of a coarse block · b selection blocks that these cover · c queries of a chunk
N chosen blocks · x places in a block
"""

import torch
from torch import Tensor

from nsa.core.branches import BranchKeys
from nsa.core.compression import mean_of_blocks
from nsa.geometry import CoarseLevel, Geometry
from nsa.kernels.custom_operator import custom_operator
from nsa.kernels.portable.chunk import budget
from nsa.kernels.precision import einsum, without_autocast
from nsa.kernels.reference import overlap
from nsa.kernels.registry import KernelPlan


def attend_coarse(
    run: KernelPlan, q_BSGRK: Tensor, compressed: BranchKeys, *, geometry: Geometry, coarse: CoarseLevel, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`KernelPlan.compressed_and_select` in two levels: output, chosen blocks, log-sum-exps.

    `run`: the backends for blocks of `coarse.geometry`.
    """
    k_BCGK, v_BCGV, pos_BS, first_BS = compressed
    entry_BS = _last_visible_entry(pos_BS, geometry)
    k_BMGK = _coarse_keys(k_BCGK.detach(), first_BS, coarse)
    options = {"geometry": coarse.geometry, "scale": scale}
    chosen_BSGn = run.functions.select(q_BSGRK, k_BMGK, entry_BS, first_BS // coarse.entries, **options)
    out, lse = run.functions.selected(
        q_BSGRK, k_BCGK, v_BCGV, chosen_BSGn, entry_BS, first_BS, **options, return_lse=True
    )
    inputs = [x.detach() for x in (q_BSGRK, k_BCGK, chosen_BSGn, pos_BS, first_BS)]
    blocks = _select_among_read(*inputs, geometry.ints, coarse.ints, scale)
    return out, blocks, lse


def _last_visible_entry(pos_BS: Tensor, geometry: Geometry) -> Tensor:
    """Number, in its document, of the last compressed entry that a query sees; −1: none."""
    return ((pos_BS - geometry.l + 1) // geometry.d).clamp(min=-1)


def _coarse_keys(k_BCGK: Tensor, first_BS: Tensor, coarse: CoarseLevel) -> Tensor:
    """The mean key of every complete coarse block: [B, C // m, G, K].

    Block j of a document whose entries begin at `first` lies in slot first // m + j. No two blocks share a slot: they
    share no entries, so their first entries are m apart or more. Slots without a complete block are seen by no query.
    """
    m, (n_rows, n_entries) = coarse.entries, k_BCGK.shape[:2]
    # Where the document of each entry begins: the last beginning at or before it. One more place for documents that
    # have no entries and come last.
    begins_BC = torch.zeros(n_rows, n_entries + 1, dtype=torch.int64, device=k_BCGK.device)
    at_BS = first_BS.long().clamp(0, n_entries)
    document_BC = begins_BC.scatter(1, at_BS, at_BS).cummax(1).values
    last_M = torch.arange(n_entries // m, device=k_BCGK.device) * m + m - 1  # in the block of its slot, if there is one
    document_BM = document_BC.index_select(1, last_M)
    begin_BM = (document_BM + (last_M - document_BM) // m * m).clamp(0, max(0, n_entries - m))
    return mean_of_blocks(k_BCGK, begin_BM, m, m)


@custom_operator("nsa::select_among_read", mutates_args=())
def _select_among_read(
    q: Tensor, k: Tensor, chosen: Tensor, pos: Tensor, first: Tensor, sizes: list[int], coarse_sizes: list[int],
    scale: float,
) -> Tensor:  # fmt: skip
    """Top-n block selection as `reference.select_blocks`, by the entries of the chosen coarse blocks alone: int32
    [B, S, G, n_sel], ascending, −1 past the last. Blocks that none of these entries covers are chosen only if they are
    always in, or if there are no more than n_sel blocks."""
    geometry, coarse = Geometry.from_ints(sizes), CoarseLevel.from_ints(coarse_sizes)
    return without_autocast(q, _select_in_chunks, q, k, (chosen, pos, first), geometry, coarse, scale)


@_select_among_read.register_fake
def _(
    q: Tensor, k: Tensor, chosen: Tensor, pos: Tensor, first: Tensor, sizes: list[int], coarse_sizes: list[int],
    scale: float,
) -> Tensor:  # fmt: skip
    return chosen.new_empty(*chosen.shape[:3], Geometry.from_ints(sizes).n_sel)


def _select_in_chunks(
    q_BSGRK: Tensor, k_BCGK: Tensor, per_query: tuple[Tensor, ...], geometry: Geometry, coarse: CoarseLevel,
    scale: float,
) -> Tensor:  # fmt: skip
    chosen_BSGn, pos_BS, first_BS = per_query
    row_B1 = torch.arange(len(q_BSGRK), device=q_BSGRK.device)[:, None]
    first_BS = first_BS + row_B1 * k_BCGK.shape[1]  # rows of the batch one after the other
    weight = overlap(coarse.entries, geometry.n_blocks((coarse.entries - 1) * geometry.d + geometry.l), geometry)
    weight_mb = weight.to(q_BSGRK.device, torch.promote_types(q_BSGRK.dtype, torch.float32))
    n_groups, width = k_BCGK.shape[2:]
    k_CGK = k_BCGK.flatten(0, 1) if k_BCGK.shape[1] else k_BCGK.new_zeros(1, n_groups, width)  # read, and hidden
    size = max(1, budget(q_BSGRK) // max(1, n_groups * chosen_BSGn.shape[3] * coarse.entries * width))
    chunked = [x.flatten(0, 1).split(size) for x in (q_BSGRK, chosen_BSGn.long(), pos_BS, first_BS)]
    blocks = [
        _select_chunk(k_CGK, q, chosen, pos, first, weight_mb, geometry, coarse, scale)
        for q, chosen, pos, first in zip(*chunked, strict=True)
    ]
    return torch.cat(blocks).view(*chosen_BSGn.shape[:3], geometry.n_sel)


def _select_chunk(
    k_CGK: Tensor, q_cGRK: Tensor, chosen_cGn: Tensor, pos_c: Tensor, first_c: Tensor, weight_mb: Tensor,
    geometry: Geometry, coarse: CoarseLevel, scale: float,
) -> Tensor:  # fmt: skip
    """Select for some queries of the batch's concatenated rows. first: the document's entry 0 in those rows."""
    entry_cGnm = chosen_cGn[..., None] * coarse.entries + torch.arange(coarse.entries, device=k_CGK.device)
    last_c111 = _last_visible_entry(pos_c, geometry)[:, None, None, None]
    hidden_cG1nm = ((entry_cGnm < 0) | (entry_cGnm > last_c111))[:, :, None]
    wide = torch.promote_types(q_cGRK.dtype, torch.float32)
    k_cGnmK = keys_at(k_CGK, first_c[:, None, None, None] + entry_cGnm).to(wide)
    score_cGRnm = einsum("cgrk,cgnmk->cgrnm", q_cGRK.to(wide) * scale, k_cGnmK)
    share_cGRx = score_cGRnm.masked_fill(hidden_cG1nm, -torch.inf).flatten(-2).softmax(-1)
    # The probability of every entry read, summed over the heads of a group; 0 where a query sees none.
    mass_cGnm = share_cGRx.view_as(score_cGRnm).masked_fill(hidden_cG1nm, 0).sum(2)
    score_cGnb, per_coarse = mass_cGnm @ weight_mb, coarse.entries * geometry.d // geometry.l_sel
    number_cGnb = chosen_cGn[..., None] * per_coarse + torch.arange(score_cGnb.shape[-1], device=k_CGK.device)
    number_cGnb = number_cGnb.masked_fill(chosen_cGn[..., None] < 0, -1)
    # The last entries also cover blocks of the next coarse block. If that was chosen too, they are counted there.
    follows_cGn1 = ((chosen_cGn[..., 1:] == chosen_cGn[..., :-1] + 1) & (chosen_cGn[..., :-1] >= 0))[..., None]
    beyond = score_cGnb.shape[-1] - per_coarse
    score_cGnb[..., 1:, :beyond] += score_cGnb[..., :-1, per_coarse:].where(follows_cGn1, 0)
    number_cGnb[..., :-1, per_coarse:].masked_fill_(follows_cGn1, -1)
    return _best_numbers(score_cGnb.flatten(2), number_cGnb.flatten(2), pos_c // geometry.l_sel, geometry.n_sel)


def keys_at(k_XGK: Tensor, at_cGNx: Tensor) -> Tensor:
    """Keys of each query's own group at these places, [c, G, N, x, K]; places outside are moved inside."""
    rows = row_numbers(at_cGNx, *k_XGK.shape[:2])
    width = k_XGK.shape[-1]
    return k_XGK.reshape(-1, width).index_select(0, rows.flatten()).view(*rows.shape, width)


def row_numbers(at_cGNx: Tensor, n: int, n_groups: int) -> Tensor:
    """Indices of those keys among all keys of all groups, flattened from [n, G]."""
    group_G11 = torch.arange(n_groups, device=at_cGNx.device)[:, None, None]
    return at_cGNx.clamp(0, n - 1) * n_groups + group_G11


def _best_numbers(score_cGX: Tensor, number_cGX: Tensor, own_c: Tensor, n_sel: int) -> Tensor:
    """The blocks always in (the first, the query's own, the one before it) and the best of the others, ascending.

    number: of each scored block; below 0: none. own: the query's own block; below 0: it selects nothing.
    """
    own_c11 = own_c[:, None, None]
    forced_c13 = torch.cat([own_c11.clamp(max=0), own_c11 - 1, own_c11], -1)
    repeated_c13 = torch.cat([own_c11 < 0, own_c11 < 2, own_c11 < 1], -1)  # of what stands before them
    always_cGX = (number_cGX[..., None] == forced_c13[:, :, None]).any(-1)
    dropped_cGX = (number_cGX < 0) | always_cGX | (number_cGX > own_c11)
    shape = (*score_cGX.shape[:2], 3)
    number = torch.cat([forced_c13.expand(shape), number_cGX], -1)
    forced_scores = torch.full(shape, torch.inf, device=score_cGX.device)
    score = torch.cat([forced_scores, score_cGX.float().nan_to_num(0.0)], -1)
    score = score.masked_fill(torch.cat([repeated_c13.expand(shape), dropped_cGX], -1), -torch.inf)
    # Scores are ≥ 0 or ±inf, so their bits order as integers do; ties go to lower numbers, as in the portable backend.
    most = 2**31 - 1
    key = score.view(torch.int32).long() << 32 | (most - number.clamp(min=0))
    key = torch.nn.functional.pad(key, (0, max(0, n_sel - key.shape[-1])), value=-1)
    key = key.topk(n_sel, dim=-1).values
    block = (most - (key & 0xFFFFFFFF)).masked_fill(key < 0, most).sort(-1).values
    every_n = torch.arange(n_sel, device=key.device)
    block = block.where(own_c11 >= n_sel, every_n.where(every_n <= own_c11, most))
    return block.masked_fill(block == most, -1).to(torch.int32)
