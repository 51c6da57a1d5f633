"""`ThreeBranches`: compressed, selected and sliding attention mixed by gates, as in the paper.

B batch · S tokens · G kv groups · R heads per group · X gates per group (R or 1) · K key dim · V value dim
N chosen blocks
"""

from collections.abc import Callable

from torch import Tensor

from nsa.core.attention_strategy import AttentionStrategy
from nsa.core.branches import AttendedKeys, BranchesOutput
from nsa.kernels.interface import TokenDecoder
from nsa.kernels.registry import KernelPlan


class ThreeBranches(AttentionStrategy):
    """Attends to the compressed entries, to the blocks that they choose and to the sliding window, if the layer has
    one, and mixes the three by gates."""

    def attend(
        self, run: KernelPlan, q_BSGRK: Tensor, gates_BSGR3: Tensor | None, keys: AttendedKeys,
        blocks_BSGN: Tensor | None = None,
    ) -> BranchesOutput:  # fmt: skip
        """The one sequence of kernel calls. blocks: to attend to in place of the selection. Without a window the first
        two branches are mixed, and the window's log-sum-exp is missing."""
        assert gates_BSGR3 is not None
        compressed, (k_sel, v_sel, pos, start), window = keys
        options, run_coarse = self.selection.options, self.plan_coarse(q_BSGRK)
        if blocks_BSGN is not None:
            compressed_out, lse_cmp = run.functions.compressed(q_BSGRK, *compressed, **options, return_lse=True)
        elif run_coarse is None:
            compressed_out, blocks_BSGN, lse_cmp = run.compressed_and_select(
                q_BSGRK, *compressed, **options, return_lse=True
            )
        else:
            compressed_out, blocks_BSGN, lse_cmp = self.selection.attend(run_coarse, q_BSGRK, compressed)
        selected_out, lse_sel = run.functions.selected(
            q_BSGRK, k_sel, v_sel, blocks_BSGN, pos, start, **options, return_lse=True
        )
        if "sliding" not in self.branches:
            mixed = _mix_two(gates_BSGR3, compressed_out, selected_out)
            return BranchesOutput(mixed, blocks_BSGN, (lse_cmp, lse_sel))
        sliding_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
        mixed = run.mix(gates_BSGR3, compressed_out, selected_out, sliding_out)
        return BranchesOutput(mixed, blocks_BSGN, (lse_cmp, lse_sel, lse_win))

    def decoder_maker(self, run: KernelPlan) -> Callable[..., TokenDecoder] | None:
        return run.decoder


def _mix_two(gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor) -> Tensor:
    compressed_BSGX1, selected_BSGX1 = gates_BSGX3[..., 0, None], gates_BSGX3[..., 1, None]
    return (compressed_BSGX1 * compressed_BSGRV + selected_BSGX1 * selected_BSGRV).to(compressed_BSGRV.dtype)
