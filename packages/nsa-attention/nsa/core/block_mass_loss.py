"""Selector loss over all blocks (`nsa.selector_blocks: all`): the target is dense attention's mass per block.

For a sample of the queries, the KL divergence from the mass that dense attention over the same keys gives each complete
block, to the scores by which blocks are chosen; both summed over the heads of a group and renormalised over all blocks
that end at or before the position up to which the query may select. In merged layers that is before the window, whose
tokens take their part of each head's mass. Only the compressed keys get a gradient.

Time is that of the scores of dense attention for the sampled queries; memory is bounded by the chunk budget, because a
chunk of queries is compared with all keys of its row before the next begins. No sum depends on the order of threads.

B batch · Q sampled queries · c queries of a chunk · T raw keys · C compressed keys · J selection blocks · t tokens of a
block · m compressed entries that overlap a block · G kv groups · R heads per group · K key dim
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.block_divergence import DivergenceSums, fake_results, register_gradient
from nsa.core.branches import BranchKeys
from nsa.core.positions import QuerySample
from nsa.geometry import Geometry
from nsa.kernels.custom_operator import custom_operator
from nsa.kernels.portable.chunk import budget
from nsa.kernels.precision import without_autocast


def block_mass_loss(
    sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, compressed: BranchKeys, selected: BranchKeys,
    pos_BS: Tensor, *, geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss and its plain mean, as `selector_loss` returns them; has a gradient in k_BCGK alone.

    k_BCGK: the compressed keys once more, made of detached hidden states. pos_BS: the queries' own positions.
    """
    per_query = (q_BSGRK, pos_BS, selected.pos_BS, selected.start_BS, compressed.start_BS)
    sampled = [x.detach().index_select(1, sample.queries_Q) for x in per_query]
    need_grad = torch.is_grad_enabled() and k_BCGK.requires_grad
    sampled.append(sample.weight_BQ)
    loss, mean, _ = _differentiable_loss(k_BCGK, selected.k.detach(), *sampled, geometry.ints, scale, need_grad)
    return loss, mean


class _RowChunk(NamedTuple):
    """Some of the sampled queries of one row, in fp32 or wider."""

    q_cGRK: Tensor
    """Times the scale of the scores."""
    pos_c: Tensor
    far_c: Tensor
    """Last position that may be selected."""
    start_c: Tensor
    first_c: Tensor
    weight_c: Tensor

    def log_mass(self, k_TGK: Tensor, n_blocks: int, g: Geometry) -> Tensor:
        """Log of dense attention's mass per block [c, G, J]; anything where the block is not complete."""
        scores_cGRT = torch.einsum("cgrk,tgk->cgrt", self.q_cGRK, k_TGK)
        at_cT = torch.arange(len(k_TGK), device=k_TGK.device) - self.start_c[:, None]
        hidden_cT = (at_cT < 0) | (at_cT > self.pos_c[:, None])
        lse_cGR1 = scores_cGRT.masked_fill(hidden_cT[:, None, None], -torch.inf).logsumexp(-1, keepdim=True)
        in_document = _shifted(scores_cGRT, self.start_c, n_blocks * g.l_sel)
        return (in_document - lse_cGR1).unflatten(-1, (n_blocks, g.l_sel)).logsumexp((2, 4))

    def log_shares(self, k_CGK: Tensor, g: Geometry) -> Tensor:
        """Logarithms of the softmax over the compressed keys of the query's document, [c, G, R, C]; −inf where it does
        not see one."""
        scores_cGRC = torch.einsum("cgrk,xgk->cgrx", self.q_cGRK, k_CGK)
        ends_C = torch.arange(len(k_CGK), device=k_CGK.device) * g.d + g.l - 1
        hidden_cC = ends_C > self.far_c[:, None]
        scores_cGRC = _shifted(scores_cGRC, self.first_c, len(k_CGK)).masked_fill(hidden_cC[:, None, None], -torch.inf)
        lse_cGR1 = scores_cGRC.logsumexp(-1, keepdim=True)
        return scores_cGRC - lse_cGR1.masked_fill(lse_cGR1 == -torch.inf, 0)

    def complete_cJ(self, n_blocks: int, g: Geometry) -> Tensor:
        ends_J = torch.arange(1, n_blocks + 1, device=self.far_c.device) * g.l_sel
        return ends_J <= self.far_c[:, None] + 1


class _BlockEntries(NamedTuple):
    """The compressed entries that overlap each block: m of them, every `stride` entries, the first `before` entry 0."""

    n_blocks: int
    stride: int
    before: int
    log_overlap_m: Tensor

    @classmethod
    def of(cls, g: Geometry, n_blocks: int, like: Tensor) -> "_BlockEntries":
        begin_m = (torch.arange((g.l + g.l_sel) // g.d - 1, device=like.device) + 1) * g.d - g.l
        overlap_m = ((begin_m + g.l).clamp(max=g.l_sel) - begin_m.clamp(min=0)) // g.d  # as `reference.overlap`
        return cls(n_blocks, g.l_sel // g.d, g.l // g.d - 1, overlap_m.to(like.dtype).log())

    def by_block(self, log_cGRC: Tensor) -> Tensor:
        """With the logarithm of their strides in the block, [c, G, R, J, m]; −inf where there is no entry."""
        m = len(self.log_overlap_m)
        after = max(0, (self.n_blocks - 1) * self.stride + m - self.before - log_cGRC.shape[-1])
        padded = F.pad(log_cGRC, (self.before, after), value=-torch.inf)
        return padded.unfold(-1, m, self.stride)[..., : self.n_blocks, :] + self.log_overlap_m

    def sum_by_entry(self, x_cGRJm: Tensor, n_entries: int) -> Tensor:
        """The way back, [c, G, R, C]: an entry's sum over the blocks that it overlaps."""
        m, last = x_cGRJm.shape[-1], (self.n_blocks - 1) * self.stride
        total = x_cGRJm.new_zeros(*x_cGRJm.shape[:3], max(last + m, self.before + n_entries))
        for place in range(m):
            total[..., place : place + last + 1 : self.stride] += x_cGRJm[..., place]
        return total[..., self.before : self.before + n_entries]


def _shifted(x_cGRX: Tensor, first_c: Tensor, length: int) -> Tensor:
    """From each query's own `first` on; places outside are moved inside."""
    at_cx = (first_c[:, None] + torch.arange(length, device=first_c.device)).clamp(0, x_cGRX.shape[-1] - 1)
    return x_cGRX.gather(-1, at_cx[:, None, None].expand(*x_cGRX.shape[:3], length))


def _add_chunk(chunk: _RowChunk, row: int, k_cmp: Tensor, k_sel: Tensor, g: Geometry, sums: DivergenceSums) -> None:
    n_blocks = len(k_sel) // g.l_sel
    entries = _BlockEntries.of(g, n_blocks, chunk.q_cGRK)
    shares_cGRC = chunk.log_shares(k_cmp, g)
    parts_cGRJm = entries.by_block(shares_cGRC)
    log_score_cGJ = parts_cGRJm.logsumexp((2, 4))
    complete_c1J = chunk.complete_cJ(n_blocks, g)[:, None]
    log_mass_cGJ = chunk.log_mass(k_sel, n_blocks, g)
    compared_cGJ, dlog_cGJ = sums.add(log_score_cGJ, log_mass_cGJ, complete_c1J, chunk.weight_c)
    if sums.dk_cmp is None:
        return
    # Of a block's score, divided among its entries and heads by what each adds to it.
    parts_cGRJm = (parts_cGRJm - log_score_cGJ.where(compared_cGJ, 0)[:, :, None, :, None]).exp()
    parts_cGRJm = (parts_cGRJm * dlog_cGJ[:, :, None, :, None]).where(compared_cGJ[:, :, None, :, None], 0)
    dshares_cGRC = entries.sum_by_entry(parts_cGRJm, len(k_cmp))
    dscores_cGRC = dshares_cGRC - shares_cGRC.exp() * dshares_cGRC.sum(-1, keepdim=True)
    number_cC = torch.arange(len(k_cmp), device=k_cmp.device) - chunk.first_c[:, None]
    dscores_cGRC = _shifted(dscores_cGRC, -chunk.first_c, len(k_cmp)).masked_fill((number_cC < 0)[:, None, None], 0)
    sums.dk_cmp[row] += torch.einsum("cgrx,cgrk->xgk", dscores_cGRC, chunk.q_cGRK)


@custom_operator("nsa::block_mass_loss", mutates_args=())
def _block_mass_loss(
    k_cmp: Tensor, k_sel: Tensor, q: Tensor, pos: Tensor, far: Tensor, start: Tensor, first: Tensor, weight: Tensor,
    sizes: list[int], scale: float, need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    per_query = (q, pos, far, start, first, weight)
    return without_autocast(q, _compute, k_cmp, k_sel, per_query, Geometry.from_ints(sizes), scale, need_grad)


def _compute(
    k_cmp: Tensor, k_sel: Tensor, per_query: tuple[Tensor, ...], g: Geometry, scale: float, need_grad: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q = per_query[0]
    sums = DivergenceSums(q, k_cmp, need_grad)
    if k_cmp.shape[1] and k_sel.shape[1] >= g.l_sel:
        size = max(1, budget(q) // max(1, q.shape[2] * q.shape[3] * k_sel.shape[1]))
        for row, (k_cmp_row, k_sel_row) in enumerate(zip(k_cmp.to(sums.wide), k_sel.to(sums.wide), strict=True)):
            for q_c, *rest in zip(*(x[row].split(size) for x in per_query), strict=True):
                _add_chunk(_RowChunk(q_c.to(sums.wide) * scale, *rest), row, k_cmp_row, k_sel_row, g, sums)
    return sums.results()


@_block_mass_loss.register_fake
def _(
    k_cmp: Tensor, k_sel: Tensor, q: Tensor, pos: Tensor, far: Tensor, start: Tensor, first: Tensor, weight: Tensor,
    sizes: list[int], scale: float, need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return fake_results(k_cmp, q, need_grad)


_differentiable_loss = register_gradient(_block_mass_loss, n_inputs=11)
