"""Selection quality of a layer: does it choose the blocks that hold the attention mass of dense attention?

"Mass" is what dense attention over the selected branch's own keys would give each block, summed over the heads of a
group. Blocks that are always chosen (the first one and the two nearest the query) say nothing about the choice: the hit
rate is about the others, for queries that could not choose all of them.

B batch · S tokens · Q sampled queries · T keys · G kv groups · R heads per group · K key dim · N chosen · n all blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.core.branches import BranchKeys
from nsa.core.probe import Probe
from nsa.geometry import FORCED_BLOCKS, Geometry
from nsa.kernels.precision import einsum

LOCAL_BLOCKS = FORCED_BLOCKS - 1


@dataclass
class SelectionCounts:
    """Sums over queries and groups of one layer."""

    queries: int = 0
    """Queries (of every group) that chose among more blocks than they could take."""
    hits: int = 0
    """Of those, how many chose the block with the largest mass among the blocks that are not always chosen."""
    expected_hits: float = 0.0
    """How many would have by chance."""
    mass_caught: float = 0.0
    """Share of the dense mass that lies in chosen blocks, summed over the same queries."""

    def add(self, other: "SelectionCounts") -> None:
        self.queries += other.queries
        self.hits += other.hits
        self.expected_hits += other.expected_hits
        self.mass_caught += other.mass_caught


@dataclass
class SelectionProbe(Probe):
    """Attach with `probing(model, SelectionProbe)`. Compares the choices of some queries with dense attention.

    every: one query in so many; dense attention is computed for those alone.
    """

    every: int = 16
    counts: SelectionCounts = field(default_factory=SelectionCounts)
    keep: Sequence[int] = (-1,)
    """Queries whose choices are kept; the last one of each row, if not set."""
    chosen_BQGN: Tensor | None = None
    """The blocks that those queries chose in the last forward pass; None for a layer that selects nothing."""

    @torch.no_grad()
    def record_selection(
        self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: BranchKeys, geometry: Geometry, scale: float
    ) -> None:
        self.chosen_BQGN = idx_BSGN[:, list(self.keep)]
        at_Q = torch.arange(self.every - 1, q_BSGRK.shape[1], self.every, device=q_BSGRK.device)
        for row in range(len(q_BSGRK)):
            q, idx, pos, start = (x[row].index_select(0, at_Q) for x in (q_BSGRK, idx_BSGN, keys.pos_BS, keys.start_BS))
            self.counts.add(_compared(q, idx, pos, start, keys.k[row], geometry, scale))


def _compared(
    q_QGRK: Tensor, idx_QGN: Tensor, pos_Q: Tensor, start_Q: Tensor, k_TGK: Tensor, g: Geometry, scale: float
) -> SelectionCounts:
    mass_QGn = block_mass(q_QGRK, pos_Q, start_Q, k_TGK, g.l_sel, scale)
    number_n = torch.arange(mass_QGn.shape[-1], device=mass_QGn.device)
    own_Q1 = (pos_Q // g.l_sel)[:, None]
    free_Qn = (number_n >= 1) & (number_n <= own_Q1 - LOCAL_BLOCKS)
    n_free_Q = free_Qn.sum(-1)
    room = g.n_sel - FORCED_BLOCKS
    counted_Q = n_free_Q > room
    if not counted_Q.any():
        return SelectionCounts()
    one_more = torch.zeros_like(mass_QGn[..., :1])  # where −1 (no block) goes
    chosen_QGn = torch.cat((torch.zeros_like(mass_QGn), one_more), -1).scatter(
        -1, torch.where(idx_QGN < 0, mass_QGn.shape[-1], idx_QGN).long(), 1.0
    )[..., :-1]
    top_QG1 = mass_QGn.masked_fill(~free_Qn[:, None], -1).argmax(-1, keepdim=True)
    hit_QG = chosen_QGn.gather(-1, top_QG1)[..., 0] > 0
    caught_QG = (mass_QGn * chosen_QGn).sum(-1) / mass_QGn.sum(-1)
    n_groups = q_QGRK.shape[1]
    return SelectionCounts(
        queries=int(counted_Q.sum()) * n_groups,
        hits=int(hit_QG[counted_Q].sum()),
        expected_hits=float((room / n_free_Q[counted_Q]).sum()) * n_groups,
        mass_caught=float(caught_QG[counted_Q].sum()),
    )


def chance_of_block(query: int, block: int, l_sel: int, n_sel: int) -> float | None:
    """Chance that a random choice takes a block; None if it is always taken, or if the query can take every block.

    query: its position in the document.
    """
    last_free, room = query // l_sel - LOCAL_BLOCKS, n_sel - FORCED_BLOCKS
    return room / last_free if 1 <= block <= last_free and room < last_free else None


def block_mass(q_QGRK: Tensor, pos_Q: Tensor, start_Q: Tensor, k_TGK: Tensor, l_sel: int, scale: float) -> Tensor:
    """Attention mass of each block of the query's document under dense attention, heads of a group added: [Q, G, n]."""
    wide = torch.promote_types(q_QGRK.dtype, torch.float32)
    place_QT = torch.arange(k_TGK.shape[0], device=pos_Q.device) - start_Q[:, None]  # position in the query's document
    seen_QT = (place_QT >= 0) & (place_QT <= pos_Q[:, None])
    scores_QGRT = einsum("qgrk,tgk->qgrt", q_QGRK.to(wide), k_TGK.to(wide)) * scale
    mass_QGT = scores_QGRT.masked_fill(~seen_QT[:, None, None], -torch.inf).softmax(-1).sum(2)
    n_blocks = -(-k_TGK.shape[0] // l_sel)
    block_QT = (place_QT // l_sel).clamp(0, n_blocks - 1)  # tokens outside have no mass
    empty_QGn = mass_QGT.new_zeros(*mass_QGT.shape[:2], n_blocks)
    return empty_QGn.scatter_add(-1, block_QT[:, None].expand_as(mass_QGT), mass_QGT)
