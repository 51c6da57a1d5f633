"""Selection quality of a layer: does it choose the blocks that hold the attention mass of dense attention?

"Mass" is what dense attention over the selected branch's own keys would give each block, summed over the heads of a
group. Blocks that are always chosen (the first one and the two nearest the query) say nothing about the choice: the hit
rate is about the others, for queries that could not choose all of them.

B batch · S tokens · Q sampled queries · T keys · G kv groups · R heads per group · K key dim · N chosen · n all blocks
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from nsa.core.branches import AttendedKeys
from nsa.core.probe import Probe
from nsa.geometry import FORCED_BLOCKS, Geometry
from nsa.kernels.precision import einsum

_LOCAL_BLOCKS = FORCED_BLOCKS - 1


@dataclass
class SelectionCounts:
    """Sums over queries and groups of one layer."""

    queries: int = 0
    """Queries (of every group) that chose among more blocks than they could take."""
    hits: int = 0
    """How many of them chose the block with the largest mass among the blocks that are not always chosen."""
    expected_hits: float = 0.0
    """How many would have by chance."""
    mass_caught: float = 0.0
    """Share of the dense mass that lies in chosen blocks, summed over the same queries."""
    window_mass: float = 0.0
    """Share of the mass of dense attention over all keys, those of the window included, that lies in the window."""
    forced_mass: float = 0.0
    """Before the window, in blocks that are always chosen."""
    scored_mass: float = 0.0
    """Before the window, in blocks that were chosen by their scores."""

    def add(self, other: "SelectionCounts") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


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
        self, q_BSGRK: Tensor, idx_BSGN: Tensor, keys: AttendedKeys, geometry: Geometry, scale: float, window: int
    ) -> None:
        self.chosen_BQGN = idx_BSGN[:, list(self.keep)]
        at_Q = torch.arange(self.every - 1, q_BSGRK.shape[1], self.every, device=q_BSGRK.device)
        selected, own_BS = keys[1], keys[2 if window else 1].pos_BS
        per_query = q_BSGRK, idx_BSGN, selected.pos_BS, selected.start_BS, own_BS
        for row in range(len(q_BSGRK)):
            q, idx, pos, start, own = (x[row].index_select(0, at_Q) for x in per_query)
            can_miss_Q = _free_blocks(pos, geometry) > geometry.n_sel - FORCED_BLOCKS
            if can_miss_Q.any():
                q, idx, pos, start, own = (x[can_miss_Q] for x in (q, idx, pos, start, own))
                self.counts.add(_compare(q, idx, pos, start, own, selected.k[row], geometry, scale, window))


def _free_blocks(pos_Q: Tensor, g: Geometry) -> Tensor:
    """Number of blocks that a query chooses among by score."""
    return (pos_Q // g.l_sel - _LOCAL_BLOCKS).clamp(min=0)


def _compare(
    q_QGRK: Tensor, idx_QGN: Tensor, pos_Q: Tensor, start_Q: Tensor, own_pos_Q: Tensor, k_TGK: Tensor, g: Geometry,
    scale: float, window: int,
) -> SelectionCounts:  # fmt: skip
    """Compare chosen blocks with attention mass, for queries of one row that cannot take every block. They choose up to
    `pos`; a window of so many tokens ends at their own positions."""
    n_groups = q_QGRK.shape[1]
    mass_QGn = _block_mass(q_QGRK, pos_Q, start_Q, k_TGK, g.l_sel, scale)
    number_n = torch.arange(mass_QGn.shape[-1], device=mass_QGn.device)
    n_free_Q = _free_blocks(pos_Q, g)
    free_Qn = (number_n >= 1) & (number_n <= n_free_Q[:, None])
    one_more = torch.zeros_like(mass_QGn[..., :1])  # where −1 (no block) goes
    chosen_QGn = torch.cat((torch.zeros_like(mass_QGn), one_more), -1).scatter(
        -1, torch.where(idx_QGN < 0, mass_QGn.shape[-1], idx_QGN).long(), 1.0
    )[..., :-1]
    top_QG1 = mass_QGn.masked_fill(~free_Qn[:, None], -1).argmax(-1, keepdim=True)
    caught_QG = (mass_QGn * chosen_QGn).sum(-1) / mass_QGn.sum(-1)
    # Shares of dense attention over all keys: in the window, and of the tokens before it in each block.
    place_QT = _places(k_TGK, start_Q)
    mass_QGT = _token_mass(q_QGRK, own_pos_Q, start_Q, k_TGK, scale) / q_QGRK.shape[2]
    near_QT = place_QT > (own_pos_Q - window)[:, None]
    read_QGn = _by_block(mass_QGT.masked_fill(near_QT[:, None], 0), place_QT, g.l_sel) * chosen_QGn
    return SelectionCounts(
        queries=len(n_free_Q) * n_groups,
        hits=int((chosen_QGn.gather(-1, top_QG1) > 0).sum()),
        expected_hits=float(((g.n_sel - FORCED_BLOCKS) / n_free_Q).sum()) * n_groups,
        mass_caught=float(caught_QG.sum()),
        window_mass=float((mass_QGT * near_QT[:, None]).sum(-1).sum()),
        forced_mass=float((read_QGn * ~free_Qn[:, None]).sum()),
        scored_mass=float((read_QGn * free_Qn[:, None]).sum()),
    )


def chance_of_block(query: int, block: int, l_sel: int, n_sel: int) -> float | None:
    """Chance that a random choice takes a block; None if it is always taken, or if the query can take every block.

    query: its position in the document.
    """
    last_free, room = query // l_sel - _LOCAL_BLOCKS, n_sel - FORCED_BLOCKS
    return room / last_free if 1 <= block <= last_free and room < last_free else None


def _block_mass(q_QGRK: Tensor, pos_Q: Tensor, start_Q: Tensor, k_TGK: Tensor, l_sel: int, scale: float) -> Tensor:
    """Attention mass of each block of the query's document under dense attention, heads of a group added: [Q, G, n]."""
    return _by_block(_token_mass(q_QGRK, pos_Q, start_Q, k_TGK, scale), _places(k_TGK, start_Q), l_sel)


def _token_mass(q_QGRK: Tensor, pos_Q: Tensor, start_Q: Tensor, k_TGK: Tensor, scale: float) -> Tensor:
    """Mass of each key [Q, G, T]; 0 outside the query's document and after pos_Q."""
    wide = torch.promote_types(q_QGRK.dtype, torch.float32)
    place_QT = _places(k_TGK, start_Q)
    seen_QT = (place_QT >= 0) & (place_QT <= pos_Q[:, None])
    scores_QGRT = einsum("qgrk,tgk->qgrt", q_QGRK.to(wide), k_TGK.to(wide)) * scale
    return scores_QGRT.masked_fill(~seen_QT[:, None, None], -torch.inf).softmax(-1).sum(2)


def _places(k_TGK: Tensor, start_Q: Tensor) -> Tensor:
    """Position of every key in the query's document [Q, T]."""
    return torch.arange(k_TGK.shape[0], device=start_Q.device) - start_Q[:, None]


def _by_block(mass_QGT: Tensor, place_QT: Tensor, l_sel: int) -> Tensor:
    n_blocks = -(-mass_QGT.shape[-1] // l_sel)
    block_QT = (place_QT // l_sel).clamp(0, n_blocks - 1)  # tokens outside have no mass
    empty_QGn = mass_QGT.new_zeros(*mass_QGT.shape[:2], n_blocks)
    return empty_QGn.scatter_add(-1, block_QT[:, None].expand_as(mass_QGT), mass_QGT)
