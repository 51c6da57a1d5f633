"""`CompressedScores`: NSA's choice of blocks, by the scores of compressed keys, and the loss that trains it.

B batch · S tokens · G kv groups · R heads per group · K key dim · C compressed blocks
"""

from dataclasses import replace

import torch
from torch import Tensor

from nsa.core.attention_config import SelectorBlocks
from nsa.core.block_mass_loss import block_mass_loss
from nsa.core.branches import AttendedKeys, BranchesOutput, BranchKeys, CompressedOutput
from nsa.core.coarse_attention import attend_coarse
from nsa.core.positions import QuerySample
from nsa.core.selector_loss import selector_loss
from nsa.geometry import CoarseLevel, Geometry
from nsa.kernels.reference import ScoreOptions
from nsa.kernels.registry import KernelPlan


class CompressedScores:
    """Chooses the blocks whose compressed keys have the highest scores.

    Arguments `run_coarse` are the backends for blocks of the second level of compressed keys; None without one.
    """

    def __init__(
        self,
        geometry: Geometry,
        scale: float,
        coarse: CoarseLevel | None = None,
        loss_blocks: SelectorBlocks = "chosen",
    ) -> None:
        self.options: ScoreOptions = {"geometry": geometry, "scale": scale}
        self.coarse, self.loss_blocks = coarse, loss_blocks

    def attend(self, run_coarse: KernelPlan, q_BSGRK: Tensor, compressed: BranchKeys) -> CompressedOutput:
        """The compressed branch and the chosen blocks, in two levels."""
        assert self.coarse is not None
        return attend_coarse(run_coarse, q_BSGRK, compressed, coarse=self.coarse, **self.options)

    def select(self, run: KernelPlan, run_coarse: KernelPlan | None, q_BSGRK: Tensor, compressed: BranchKeys) -> Tensor:
        """The chosen blocks alone; with coarse blocks, among those that the entries of the best of them cover."""
        k, _, pos_BS, first_BS = compressed
        if run_coarse is not None:
            with torch.no_grad():
                return self.attend(run_coarse, q_BSGRK, BranchKeys(k, k, pos_BS, first_BS)).blocks
        return run.functions.select(q_BSGRK, k, pos_BS, first_BS, **self.options)

    def loss(
        self, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor, output: BranchesOutput, keys: AttendedKeys
    ) -> tuple[Tensor, Tensor]:
        """The selector loss and its plain mean over queries; `output.lse` begins with those of the compressed and of
        the selected branch. k_BCGK: the compressed keys, which alone have a gradient."""
        compressed, selected, window = keys
        if self.loss_blocks == "all":
            return block_mass_loss(sample, q_BSGRK, k_BCGK, compressed, selected, window.pos_BS, **self.options)
        return selector_loss(sample, q_BSGRK, k_BCGK, output, compressed, selected, **self.options)

    def loss_of_selection_alone(
        self, run: KernelPlan, run_coarse: KernelPlan | None, sample: QuerySample, q_BSGRK: Tensor, k_BCGK: Tensor,
        output: BranchesOutput, keys: AttendedKeys,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`loss` where nothing attends to compressed keys, and `output.lse` begins with those of the selected branch:
        the log-sum-exps of the compressed scores are computed here, of the sampled queries."""
        if self.loss_blocks == "all":
            return self.loss(sample, q_BSGRK, k_BCGK, output, keys)
        assert output.blocks is not None
        sampled_Q = sample.queries_Q
        compressed, selected = (_of_queries(each, sampled_Q) for each in keys[:2])
        q_BQGRK, blocks, lse_sel = (
            x.detach().index_select(1, sampled_Q) for x in (q_BSGRK, output.blocks, output.lse[0])
        )
        with torch.no_grad():
            entries = BranchKeys(compressed.k, compressed.k, *compressed[2:])
            if run_coarse is None:
                _, lse_cmp = run.functions.compressed(q_BQGRK, *entries, **self.options, return_lse=True)
            else:
                lse_cmp = self.attend(run_coarse, q_BQGRK, entries).lse
        every_query = replace(sample, queries_Q=torch.arange(len(sampled_Q), device=sampled_Q.device))
        sampled = BranchesOutput(output.out, blocks, (lse_cmp, lse_sel))
        return self.loss(every_query, q_BQGRK, k_BCGK, sampled, (compressed, selected, keys[2]))


def _of_queries(keys: BranchKeys, queries_Q: Tensor) -> BranchKeys:
    pos, start = (x.index_select(1, queries_Q) for x in (keys.pos_BS, keys.start_BS))
    return BranchKeys(keys.k, keys.v, pos, start)
