"""Layers of kind `merged`: one softmax over the selected blocks and the window; compressed keys only choose the blocks.

With one set of keys and values this is dense causal attention for the first n_sel · l_sel + w tokens of a document, so
a dense model's weights start as they are (`nsa convert`).

B batch · S tokens · Q sampled queries · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from nsa.core.attention_config import AttentionConfig
from nsa.core.branches import BRANCH_ORDER, BranchesOutput, BranchKeys, BranchStreams
from nsa.core.kv_cache import LayerCache
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import Positions, QuerySample
from nsa.core.rope import Tables
from nsa.core.token_caches import MergedCache
from nsa.kernels.interface import TokenDecoder
from nsa.kernels.reference import ScoreOptions
from nsa.kernels.registry import KernelPlan
from nsa.options import AttentionKind

_Keys = tuple[BranchKeys, BranchKeys, BranchKeys]


class MergedAttention(NSAAttention):
    """Causal attention over the window and over selected blocks of the tokens before it, in one softmax.

    Blocks are chosen, and read, as by the query that stands w tokens earlier, so that no token is read twice: block 0
    and the two blocks nearest the window are always in. Keys and values are one set, whatever `kv` says. φ of the keys
    is trained by the selector loss alone, on the attention mass of the selected blocks before the window, or of all.
    """

    kind: ClassVar[AttentionKind] = "merged"
    branches: ClassVar[tuple[str, ...]] = BRANCH_ORDER[1:]
    cache_type: ClassVar[type[LayerCache]] = MergedCache

    @classmethod
    def _own_config(cls, config: AttentionConfig) -> AttentionConfig:
        """One set of keys and values; no selector loss for a φ without weights, which is all that it would train."""
        learned = config.compression.operator.has_weights
        return config.changed(kv="shared", selector_loss=config.selector.loss if learned else 0.0)

    @torch.no_grad()
    def compress(
        self, k: Tensor, v: Tensor, begin_BC: Tensor, block_pos_BC: Tensor, tables: Tables | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().compress(k, v, begin_BC, block_pos_BC, tables)

    def compress_values(self, v: Tensor, begin_BC: Tensor) -> Tensor:
        """Nothing reads them: of width 0."""
        return v.new_empty(*begin_BC.shape, v.shape[2], 0)

    def _selectable(self, n_tokens: int) -> int:
        return max(0, n_tokens - self.geometry.w)

    def _visible(self, keys: _Keys) -> _Keys:
        compressed, selected, window = keys
        far_BS = (selected.pos_BS - self.geometry.w).clamp(min=-1)
        return compressed._replace(pos_BS=far_BS), selected._replace(pos_BS=far_BS), window

    def attend(
        self,
        q_BSGRK: Tensor,
        gates_BSGR3: Tensor | None,
        compressed: BranchKeys,
        selected: BranchKeys,
        window: BranchKeys,
    ) -> BranchesOutput:
        run = self.plan(q_BSGRK.device, q_BSGRK.dtype)
        options: ScoreOptions = {"geometry": self.geometry, "scale": self.scale}
        blocks = self._choose(run, q_BSGRK, compressed)
        k, v, far, start = selected
        selected_out, lse_sel = run.functions.selected(q_BSGRK, k, v, blocks, far, start, **options, return_lse=True)
        window_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
        return BranchesOutput(merge(selected_out, lse_sel, window_out, lse_win), blocks, (lse_sel, lse_win))

    def _decoder_maker(self, run: KernelPlan) -> Callable[..., TokenDecoder] | None:
        return run.merged_decoder

    def _choose(self, run: KernelPlan, q_BSGRK: Tensor, compressed: BranchKeys) -> Tensor:
        """The chosen blocks; with coarse blocks, among those that the entries of the best of them cover."""
        k, _, far, first = compressed
        if self.coarse is not None:
            with torch.no_grad():
                return self._attend_coarse(q_BSGRK, BranchKeys(k, k, far, first)).blocks
        return run.functions.select(q_BSGRK, k, far, first, geometry=self.geometry, scale=self.scale)

    def _selector_loss(
        self, sample: QuerySample, x_BSD: Tensor, q_BSGRK: Tensor, streams: BranchStreams, made: BranchesOutput,
        keys: _Keys, where: Positions,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """As NSA's, for which the log-sum-exps of the compressed scores are computed here, of the sampled queries."""
        if self.selector_blocks == "all":
            return super()._selector_loss(sample, x_BSD, q_BSGRK, streams, made, keys, where)
        assert made.blocks is not None
        sampled_Q = sample.queries_Q
        compressed, selected = (_of_queries(each, sampled_Q) for each in keys[:2])
        q_BQGRK, blocks, lse_sel = (x.detach().index_select(1, sampled_Q) for x in (q_BSGRK, made.blocks, made.lse[0]))
        with torch.no_grad():
            run = self.plan(q_BQGRK.device, q_BQGRK.dtype)
            given = BranchKeys(compressed.k, compressed.k, *compressed[2:])
            options: ScoreOptions = {"geometry": self.geometry, "scale": self.scale}
            if self.coarse is None:
                _, lse_cmp = run.functions.compressed(q_BQGRK, *given, **options, return_lse=True)
            else:
                lse_cmp = self._attend_coarse(q_BQGRK, given).lse
        every_query = replace(sample, queries_Q=torch.arange(len(sampled_Q), device=sampled_Q.device))
        sampled = BranchesOutput(made.out, blocks, (lse_cmp, lse_sel))
        keys = compressed, selected, keys[2]
        return super()._selector_loss(every_query, x_BSD, q_BQGRK, streams, sampled, keys, where)


def merge(one_BSGRV: Tensor, lse_one_BSGR: Tensor, other_BSGRV: Tensor, lse_other_BSGR: Tensor) -> Tensor:
    """Attention over the keys of both, of which none is in both, from the outputs and log-sum-exps over each."""
    nothing = lse_other_BSGR == -torch.inf  # else −inf minus −inf
    share_BSGR1 = (lse_one_BSGR - lse_other_BSGR).masked_fill(nothing, torch.inf).sigmoid()[..., None]
    return (share_BSGR1 * one_BSGRV + (1 - share_BSGR1) * other_BSGRV).to(one_BSGRV.dtype)


def _of_queries(keys: BranchKeys, queries_Q: Tensor) -> BranchKeys:
    pos, start = (x.index_select(1, queries_Q) for x in (keys.pos_BS, keys.start_BS))
    return BranchKeys(keys.k, keys.v, pos, start)
