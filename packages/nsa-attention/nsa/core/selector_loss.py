"""The selector loss as an operator: KL divergence from the attention mass of blocks to the scores that choose them.

Both are summed over the heads of a group and renormalised over the blocks that end at or before the query. Which blocks
are compared (`nsa.selector_blocks`):

chosen  the mass that the selected branch gave each chosen block. The log-sum-exps that normalise each head's scores
        come from the attention kernels and are constants, so nothing outside the chosen blocks is read: time and memory
        are linear in the queries, whatever the backend.
all     the mass that dense attention over the same keys gives each block that may be selected; in merged layers that is
        before the window, whose tokens take their part of each head's mass. Time is that of the scores of dense
        attention for the sampled queries; memory is bounded by the chunk budget, because a chunk of queries is compared
        with all keys of its row before the next begins.

Only the compressed keys get a gradient. No sum depends on the order of threads.

B batch · Q sampled queries · c queries of a chunk · T raw keys · C compressed keys · N chosen blocks · J all blocks
t tokens of a block · m compressed entries that overlap a block · G kv groups · R heads per group · K key dim
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nsa.core.branches import AttendedKeys, BranchesOutput
from nsa.core.coarse_attention import keys_at, row_numbers
from nsa.core.positions import QuerySample
from nsa.geometry import Geometry
from nsa.kernels.custom_operator import ReverseModeFunction, custom_operator, with_gradient
from nsa.kernels.portable.chunk import budget
from nsa.kernels.precision import autocast_off


class SelectorLossFunction(ReverseModeFunction):
    subject = "the selector loss"
    instead = "Train without it (selector_loss=0), or call eval() first."


def selector_loss_of_queries(
    sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, keys: AttendedKeys, output: BranchesOutput | None,
    *, geometry: Geometry, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The weighted sum over sampled queries with two comparable blocks or more, averaged over groups, which has a
    gradient in k_BCGK alone; and the plain mean over these queries and groups, for the record.

    k_BCGK: the compressed keys once more, made of detached hidden states. output: of the branches, with the chosen
    blocks and the log-sum-exps of the compressed and the selected branch; None to compare all blocks.
    """
    compressed, selected, window = keys
    chosen = (None,) * 3 if output is None else (output.blocks, *output.lse[:2])
    per_query = (q_BSGRK, window.pos_BS, selected.pos_BS, selected.start_BS, compressed.start_BS, *chosen)
    sampled = [None if x is None else x.detach().index_select(1, sample.queries_Q) for x in per_query]
    need_grad = torch.is_grad_enabled() and k_BCGK.requires_grad
    loss, mean, _ = _differentiable_divergence(
        k_BCGK, selected.k.detach(), sample.weight_BQ, *sampled, geometry.ints, scale, need_grad
    )
    return loss, mean


@custom_operator("nsa::selector_loss", mutates_args=())
def _divergence(
    k_cmp: Tensor, k_sel: Tensor, weight: Tensor, q: Tensor, pos: Tensor, far: Tensor, start: Tensor, first: Tensor,
    blocks: Tensor | None, lse_cmp: Tensor | None, lse_sel: Tensor | None, sizes: list[int], scale: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss, its plain mean, and the gradient of the first for the compressed keys, empty if it is not needed.

    far: up to which each query selects. blocks: the chosen ones; None to compare all.
    """
    sums, g = _DivergenceSums(q, k_cmp, need_grad), Geometry.from_ints(sizes)
    with autocast_off(q):
        if blocks is None:
            _compare_all(k_cmp, k_sel, (q, pos, far, start, first, weight), g, scale, sums)
        else:
            assert lse_cmp is not None
            assert lse_sel is not None
            per_query = (q, far, start, first, weight, blocks.long(), lse_cmp, lse_sel)
            _compare_chosen(k_cmp, k_sel, per_query, g, scale, sums)
    return sums.results()


@_divergence.register_fake
def _(
    k_cmp: Tensor, k_sel: Tensor, weight: Tensor, q: Tensor, pos: Tensor, far: Tensor, start: Tensor, first: Tensor,
    blocks: Tensor | None, lse_cmp: Tensor | None, lse_sel: Tensor | None, sizes: list[int], scale: float,
    need_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    wide = torch.promote_types(q.dtype, torch.float32)
    loss, mean = q.new_empty((), dtype=wide), q.new_empty((), dtype=wide)
    return loss, mean, k_cmp.new_empty(k_cmp.shape if need_grad else 0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[2])


def _differentiate(
    ctx: Any, dloss: Tensor | None, _: Tensor | None, of_gradient: Tensor | None
) -> tuple[Tensor | None, ...]:
    SelectorLossFunction.refuse_second(of_gradient)
    (dk_cmp,) = ctx.saved_tensors
    return None if dloss is None else (dk_cmp * dloss).to(dk_cmp.dtype), *[None] * 13


_differentiable_divergence = with_gradient(_divergence, _save, _differentiate, SelectorLossFunction)


class _DivergenceSums:
    """Divergences of queries, summed in fp32 or wider, and the gradient of the compressed keys if it is needed."""

    def __init__(self, q: Tensor, k_cmp: Tensor, need_grad: bool) -> None:
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self._sums, self._dtype, self._groups = q.new_zeros(3, dtype=self.wide), k_cmp.dtype, max(1, k_cmp.shape[2])
        self._no_gradient = k_cmp.new_empty(0)
        self.dk_cmp = k_cmp.new_zeros(k_cmp.shape, dtype=self.wide) if need_grad else None

    def add(
        self, log_score_cGN: Tensor, log_target_cGN: Tensor, complete_cGN: Tensor, weight_c: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Add the queries with two comparable blocks or more, each renormalised over these; returns which blocks they
        are and the gradient of `log_score`.

        log_target_cGN: logarithms of the attention mass. complete_cGN: whether a block ends at or before the query.
        """
        compared_cGN = complete_cGN & (log_score_cGN > -torch.inf)
        counted_cG1 = compared_cGN.sum(-1, keepdim=True) > 1
        compared_cGN = compared_cGN & counted_cG1
        lowest = torch.finfo(log_score_cGN.dtype).min
        log_p_cGN = log_score_cGN.masked_fill(~compared_cGN, lowest).log_softmax(-1)
        log_target_cGN = log_target_cGN.masked_fill(~compared_cGN, lowest).log_softmax(-1)
        target_cGN = log_target_cGN.exp()
        divergence_cG = (target_cGN * (log_target_cGN - log_p_cGN)).where(compared_cGN, 0).sum(-1)
        weight_c1 = weight_c.to(self.wide)[:, None]
        weighted = (divergence_cG * weight_c1).sum()
        self._sums += torch.stack([weighted, divergence_cG.sum(), counted_cG1.sum().to(self.wide)])
        return compared_cGN, (log_p_cGN.exp() - target_cGN).where(compared_cGN, 0) * weight_c1[..., None]

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        weighted, total, counted = self._sums
        loss, mean = weighted / self._groups, total / counted.clamp(min=1)
        if self.dk_cmp is None:
            return loss, mean, self._no_gradient
        return loss, mean, (self.dk_cmp / self._groups).to(self._dtype)


def _overlaps(g: Geometry, like: Tensor) -> tuple[Tensor, Tensor]:
    """The compressed entries that overlap a block: where each begins, relative to the block, and the logarithm of the
    strides that it has there, as `reference.overlap`. [m]"""
    begin_m = (torch.arange((g.l + g.l_sel) // g.d - 1, device=like.device) + 1) * g.d - g.l
    overlap_m = ((begin_m + g.l).clamp(max=g.l_sel) - begin_m.clamp(min=0)) // g.d
    return begin_m, overlap_m.to(like.dtype).log()


class _ChosenBlocks(NamedTuple):
    """Sampled queries with their chosen blocks, in fp32 or wider; rows of the batch one after the other."""

    q_cGRK: Tensor
    """Times the scale of the scores."""
    pos_c: Tensor
    start_c: Tensor
    """Index of the document's position 0 among the raw keys of all rows of the batch."""
    first_c: Tensor
    """Index of the document's block 0 among the compressed keys of all rows of the batch."""
    weight_c: Tensor
    blocks_cGN: Tensor
    lse_cmp_cGR: Tensor
    lse_sel_cGR: Tensor

    def log_mass_read(self, k_sel_TGK: Tensor, geometry: Geometry) -> Tensor:
        """Log of the selected branch's mass per chosen block [c, G, N]; anything where the block is not complete."""
        token_t = torch.arange(geometry.l_sel, device=self.pos_c.device)
        at_cGNt = self.start_c[:, None, None, None] + self.blocks_cGN[..., None] * geometry.l_sel + token_t
        scores_cGRNt = self._scores(keys_at(k_sel_TGK, at_cGNt), self.lse_sel_cGR)
        return scores_cGRNt.logsumexp((2, 4))

    def selector_scores(self, k_cmp_CGK: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Logarithms of what the entries add to the scores of the chosen blocks, [c, G, R, N, m], −inf where an entry
        is not visible to the query; and where those entries lie, [c, G, N, m]."""
        g = geometry
        begin_m, log_overlap_m = _overlaps(g, self.q_cGRK)
        number_cGNm = self.blocks_cGN[..., None] * (g.l_sel // g.d) + begin_m // g.d
        hidden_cGNm = (number_cGNm < 0) | (number_cGNm * g.d + g.l - 1 > self.pos_c[:, None, None, None])
        at_cGNm = self.first_c[:, None, None, None] + number_cGNm
        scores_cGRNm = self._scores(keys_at(k_cmp_CGK, at_cGNm), self.lse_cmp_cGR) + log_overlap_m
        return scores_cGRNm.masked_fill_(hidden_cGNm[:, :, None], -torch.inf), at_cGNm

    def complete_cGN(self, geometry: Geometry) -> Tensor:
        """Whether a chosen block ends at or before the query."""
        ends_cGN = (self.blocks_cGN + 1) * geometry.l_sel
        return (self.blocks_cGN >= 0) & (ends_cGN <= self.pos_c[:, None, None] + 1)

    def _scores(self, k_cGNxK: Tensor, lse_cGR: Tensor) -> Tensor:
        scores = torch.einsum("cgrk,cgnxk->cgrnx", self.q_cGRK, k_cGNxK.to(self.q_cGRK.dtype))
        return scores.sub_(lse_cGR[..., None, None])


def _compare_chosen(
    k_cmp: Tensor, k_sel: Tensor, per_query: tuple[Tensor, ...], g: Geometry, scale: float, sums: _DivergenceSums
) -> None:
    q, pos, start, first, weight, blocks, lse_cmp, lse_sel = per_query
    row_B1 = torch.arange(len(q), device=q.device)[:, None]
    start, first = start + row_B1 * k_sel.shape[1], first + row_B1 * k_cmp.shape[1]
    k_cmp_rows, k_sel_rows = k_cmp.flatten(0, 1), k_sel.flatten(0, 1)
    if not len(k_cmp_rows):
        return
    size = max(1, budget(q) // max(1, blocks.shape[2] * blocks.shape[3] * g.l_sel * q.shape[-1]))
    parts = (q, pos, start, first, weight, blocks, lse_cmp, lse_sel)
    for q_c, *rest in zip(*(x.flatten(0, 1).split(size) for x in parts), strict=True):
        _add_chosen(_ChosenBlocks(q_c.to(sums.wide) * scale, *rest), k_cmp_rows, k_sel_rows, g, sums)


def _add_chosen(chunk: _ChosenBlocks, k_cmp: Tensor, k_sel: Tensor, g: Geometry, sums: _DivergenceSums) -> None:
    scores_cGRNm, at_cGNm = chunk.selector_scores(k_cmp, g)
    log_score_cGN = scores_cGRNm.logsumexp((2, 4))
    complete_cGN = chunk.complete_cGN(g)
    compared_cGN, dlog_cGN = sums.add(log_score_cGN, chunk.log_mass_read(k_sel, g), complete_cGN, chunk.weight_c)
    if sums.dk_cmp is None:
        return
    # Of a block's score, divided among its entries and heads by what each adds to it.
    parts_cGRNm = (scores_cGRNm - log_score_cGN.where(compared_cGN, 0)[:, :, None, :, None]).exp_()
    dscores_cGRNm = parts_cGRNm.mul_(dlog_cGN[:, :, None, :, None]).where(compared_cGN[:, :, None, :, None], 0)
    dk_cGNmK = torch.einsum("cgrnm,cgrk->cgnmk", dscores_cGRNm, chunk.q_cGRK)
    rows = row_numbers(at_cGNm, *k_cmp.shape[:2])
    _add_rows(sums.dk_cmp.view(-1, sums.dk_cmp.shape[-1]), rows.flatten(), dk_cGNmK.flatten(0, -2))


def _add_rows(total_nX: Tensor, rows_m: Tensor, part_mX: Tensor) -> None:
    """Add each row of `part` to a row of `total`, in an order that does not depend on threads: on a GPU `index_put_`
    sorts and `index_add_` does not; on a CPU `index_add_` takes one row after the other and `index_put_` does not."""
    if total_nX.is_cpu:
        total_nX.index_add_(0, rows_m, part_mX)
    else:
        total_nX.index_put_((rows_m,), part_mX, accumulate=True)


class _AllBlocks(NamedTuple):
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


def _shifted(x_cGRX: Tensor, first_c: Tensor, length: int) -> Tensor:
    """From each query's own `first` on; places outside are moved inside."""
    at_cx = (first_c[:, None] + torch.arange(length, device=first_c.device)).clamp(0, x_cGRX.shape[-1] - 1)
    return x_cGRX.gather(-1, at_cx[:, None, None].expand(*x_cGRX.shape[:3], length))


def _by_block(log_cGRC: Tensor, n_blocks: int, g: Geometry) -> Tensor:
    """Each block's entries with the logarithm of their strides in it, [c, G, R, J, m]; −inf where there is no entry."""
    log_overlap_m, stride, before = _overlaps(g, log_cGRC)[1], g.l_sel // g.d, g.l // g.d - 1
    after = max(0, (n_blocks - 1) * stride + len(log_overlap_m) - before - log_cGRC.shape[-1])
    padded = F.pad(log_cGRC, (before, after), value=-torch.inf)
    return padded.unfold(-1, len(log_overlap_m), stride)[..., :n_blocks, :] + log_overlap_m


def _sum_by_entry(x_cGRJm: Tensor, n_entries: int, g: Geometry) -> Tensor:
    """The way back, [c, G, R, C]: an entry's sum over the blocks that it overlaps."""
    stride, before = g.l_sel // g.d, g.l // g.d - 1
    m, last = x_cGRJm.shape[-1], (x_cGRJm.shape[-2] - 1) * stride
    total = x_cGRJm.new_zeros(*x_cGRJm.shape[:3], max(last + m, before + n_entries))
    for place in range(m):
        total[..., place : place + last + 1 : stride] += x_cGRJm[..., place]
    return total[..., before : before + n_entries]


def _compare_all(
    k_cmp: Tensor, k_sel: Tensor, per_query: tuple[Tensor, ...], g: Geometry, scale: float, sums: _DivergenceSums
) -> None:
    q = per_query[0]
    if not k_cmp.shape[1] or k_sel.shape[1] < g.l_sel:
        return
    size = max(1, budget(q) // max(1, q.shape[2] * q.shape[3] * k_sel.shape[1]))
    for row, (k_cmp_row, k_sel_row) in enumerate(zip(k_cmp.to(sums.wide), k_sel.to(sums.wide), strict=True)):
        for q_c, *rest in zip(*(x[row].split(size) for x in per_query), strict=True):
            _add_all(_AllBlocks(q_c.to(sums.wide) * scale, *rest), row, k_cmp_row, k_sel_row, g, sums)


def _add_all(chunk: _AllBlocks, row: int, k_cmp: Tensor, k_sel: Tensor, g: Geometry, sums: _DivergenceSums) -> None:
    n_blocks = len(k_sel) // g.l_sel
    shares_cGRC = chunk.log_shares(k_cmp, g)
    parts_cGRJm = _by_block(shares_cGRC, n_blocks, g)
    log_score_cGJ = parts_cGRJm.logsumexp((2, 4))
    complete_c1J = chunk.complete_cJ(n_blocks, g)[:, None]
    log_mass_cGJ = chunk.log_mass(k_sel, n_blocks, g)
    compared_cGJ, dlog_cGJ = sums.add(log_score_cGJ, log_mass_cGJ, complete_c1J, chunk.weight_c)
    if sums.dk_cmp is None:
        return
    # Of a block's score, divided among its entries and heads by what each adds to it.
    parts_cGRJm = (parts_cGRJm - log_score_cGJ.where(compared_cGJ, 0)[:, :, None, :, None]).exp()
    parts_cGRJm = (parts_cGRJm * dlog_cGJ[:, :, None, :, None]).where(compared_cGJ[:, :, None, :, None], 0)
    dshares_cGRC = _sum_by_entry(parts_cGRJm, len(k_cmp), g)
    dscores_cGRC = dshares_cGRC - shares_cGRC.exp() * dshares_cGRC.sum(-1, keepdim=True)
    number_cC = torch.arange(len(k_cmp), device=k_cmp.device) - chunk.first_c[:, None]
    dscores_cGRC = _shifted(dscores_cGRC, -chunk.first_c, len(k_cmp)).masked_fill((number_cC < 0)[:, None, None], 0)
    sums.dk_cmp[row] += torch.einsum("cgrx,cgrk->xgk", dscores_cGRC, chunk.q_cGRK)
