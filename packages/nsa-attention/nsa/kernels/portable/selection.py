"""Top-n block selection: compressed probabilities → mass per selection block → the best n_sel, exact.

Shapes as in `nsa.kernels.reference`; additionally c queries of a chunk · U keys that it sees · J blocks.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.geometry import Geometry
from nsa.kernels.portable.chunk import group_rows, may_read, scores, softmax
from nsa.kernels.portable.range_attention import compressed_bounds, key_ranges, outside, per_group


def select(
    q_BSGRK: Tensor, k_BCGK: Tensor, pos_BS: Tensor, first_BS: Tensor, geometry: Geometry, scale: float
) -> Tensor:
    B, S, G, R, _ = q_BSGRK.shape
    l_sel = geometry.l_sel
    idx_BSGN = torch.full((B, S, G, geometry.n_sel), -1, dtype=torch.int32, device=q_BSGRK.device)
    weight = _overlap_weights(geometry, q_BSGRK.device)
    n = k_BCGK.shape[1]
    lo_BS, hi_BS = compressed_bounds(pos_BS, first_BS, geometry, n)
    most_blocks = None if may_read(q_BSGRK) else _most_blocks(n, pos_BS, geometry)
    for at, lo, hi in key_ranges(q_BSGRK, lo_BS, hi_BS, n, n):
        pos, first = pos_BS[:, at], first_BS[:, at]
        n_blocks = max(0, int(pos.max()) // l_sel + 1) if most_blocks is None else most_blocks
        if n_blocks <= geometry.n_sel:  # everything that is visible is chosen, whatever its score
            idx_BSGN[:, at, :, :n_blocks] = _all_blocks(pos, l_sel, n_blocks)
            continue
        q_BGMK = group_rows(q_BSGRK[:, at])
        hidden = outside(lo_BS[:, at], hi_BS[:, at], lo, hi)
        e_BGMU, total_BGM1, _ = softmax(scores(q_BGMK, per_group(k_BCGK[:, lo:hi]), scale), hidden)
        mass_BcGU = (e_BGMU / total_BGM1).unflatten(2, (-1, R)).sum(3).transpose(1, 2)
        mass_BcGU = _rebase(mass_BcGU, first - lo)
        score_BcGJ = _per_block(mass_BcGU, weight, n_blocks, geometry)
        idx_BSGN[:, at] = _select_top(score_BcGJ, pos, geometry)
    return idx_BSGN


def _most_blocks(n_compressed: int, pos_BS: Tensor, geometry: Geometry) -> int:
    """Blocks of the longest row that has so many compressed keys."""
    longest = (n_compressed - 1) * geometry.d + geometry.l + geometry.d - 1
    n_blocks = geometry.n_blocks(longest)
    torch._assert_async(
        (pos_BS < n_blocks * geometry.l_sel).all(), "a query's position is past all blocks of the compressed keys"
    )
    return n_blocks


def _overlap_weights(geometry: Geometry, device: torch.device) -> Tensor:
    """Strides a block shares with the compressed blocks beginning −(l/d − 1) … l_sel/d − 1 strides after it."""
    l, d, l_sel = geometry.l, geometry.d, geometry.l_sel
    begin = torch.arange(1 - l // d, l_sel // d, device=device) * d
    return (torch.clamp(begin + l, max=l_sel) - begin.clamp(min=0)).float() / d


def _rebase(mass_BcGU: Tensor, first_Bc: Tensor) -> Tensor:
    """Column 0 becomes compressed block 0 of the query's own document, which lies at column `first`."""
    U = mass_BcGU.shape[-1]
    if U == 0 or (may_read(first_Bc) and not bool(first_Bc.any())):
        return mass_BcGU
    source_BcU = torch.arange(U, device=mass_BcGU.device) + first_Bc[..., None]
    inside_BcU = (source_BcU >= 0) & (source_BcU < U)
    index = source_BcU.clamp(0, U - 1)[:, :, None].expand_as(mass_BcGU)
    return mass_BcGU.gather(-1, index) * inside_BcU[:, :, None]


def _per_block(mass_BcGU: Tensor, weight: Tensor, n_blocks: int, geometry: Geometry) -> Tensor:
    per_l, per_l_sel = geometry.l // geometry.d, geometry.l_sel // geometry.d
    columns = per_l_sel * n_blocks
    padded = F.pad(mass_BcGU, (per_l - 1, columns - mass_BcGU.shape[-1]))
    return padded.unfold(-1, per_l_sel + per_l - 1, per_l_sel) @ weight.to(padded.dtype)


def _all_blocks(pos_Bc: Tensor, l_sel: int, n_blocks: int) -> Tensor:
    j_J = torch.arange(n_blocks, dtype=torch.int32, device=pos_Bc.device)
    return torch.where(j_J <= (pos_Bc // l_sel)[..., None], j_J, -1)[:, :, None]


def _select_top(score_BcGJ: Tensor, pos_Bc: Tensor, geometry: Geometry) -> Tensor:
    n_blocks = score_BcGJ.shape[-1]
    j_J = torch.arange(n_blocks, device=pos_Bc.device)
    own_Bc1 = (pos_Bc // geometry.l_sel)[..., None]
    forced_BcJ = (j_J == 0) | (j_J == own_Bc1) | (j_J == own_Bc1 - 1)
    score = score_BcGJ.float().nan_to_num(0.0).masked_fill(forced_BcJ[:, :, None], torch.inf)
    score = score.masked_fill((j_J > own_Bc1)[:, :, None], -torch.inf)
    # Scores are ≥ 0 or ±inf, so their bits order as integers do. With the index below them no two keys are equal:
    # the choice is exact and the same on every device, and ties go to the lower index.
    key = score.view(torch.int32).long() << 32 | (n_blocks - j_J)
    key = key.topk(geometry.n_sel, dim=-1).values
    block = n_blocks - (key & 0xFFFFFFFF)
    block = block.masked_fill(key < 0, n_blocks).sort(-1).values
    return block.masked_fill(block == n_blocks, -1).to(torch.int32)
