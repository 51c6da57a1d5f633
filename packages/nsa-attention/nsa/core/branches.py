"""The three branches: their keys and values, the learned gates that weigh them, and the order of kernel calls.

B batch · S tokens · D model dim · G kv groups · R heads per group · X gates per group (R or 1) · K key dim
V value dim · N chosen blocks · 3 branches
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa.core.attention_config import GateConfig
from nsa.geometry import Geometry
from nsa.kernels.reference import ScoreOptions
from nsa.kernels.registry import KernelPlan

BRANCH_ORDER = ("compressed", "selected", "sliding")
ATTENTION_PARTS = ("select", *BRANCH_ORDER)
"""What NSA computes between projections, as FLOPs and times are counted."""
DENSE_PART = "dense"
"""The same of a layer that attends to all tokens."""


class BranchStreams(NamedTuple):
    """Keys and values of the three branches: [B, S, G, K or V]."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


class BranchKeys(NamedTuple):
    """What a branch attends over, and where its queries stand on that axis (see `nsa.kernels.reference`)."""

    k: Tensor
    v: Tensor
    pos_BS: Tensor
    start_BS: Tensor


class BranchesOutput(NamedTuple):
    """Of `attend_branches`, in the kernels' layout."""

    out: Tensor
    """[B, S, G, R, V]."""
    blocks: Tensor | None
    """int32 [B, S, G, N]; None of a layer that selects nothing."""
    lse: tuple[Tensor, ...]
    """[B, S, G, R] per branch."""


class CompressedOutput(NamedTuple):
    """Of the compressed branch and the selection."""

    out: Tensor
    """[B, S, G, R, V]."""
    blocks: Tensor
    lse: Tensor


AttendCompressed = Callable[[Tensor, BranchKeys], CompressedOutput]


def attend_branches(
    run: KernelPlan,
    q_BSGRK: Tensor,
    gates_BSGX3: Tensor,
    compressed: BranchKeys,
    selected: BranchKeys,
    window: BranchKeys | None,
    *,
    geometry: Geometry,
    scale: float,
    blocks: Tensor | None = None,
    attend_compressed: AttendCompressed | None = None,
) -> BranchesOutput:
    """The one sequence of kernel calls: compress-attend, select, attend to the selection and the window, mix.

    `nsa_attention` and `NSAAttention` (with and without a cache) both end here. Without a window the first two branches
    are mixed by their gates, and the window's log-sum-exp is missing. `attend_compressed` replaces the first two steps.
    """
    options: ScoreOptions = {"geometry": geometry, "scale": scale}
    if attend_compressed is not None:
        compressed_out, blocks, lse_cmp = attend_compressed(q_BSGRK, compressed)
    elif blocks is None:
        compressed_out, blocks, lse_cmp = run.compressed_and_select(q_BSGRK, *compressed, **options, return_lse=True)
    else:
        compressed_out, lse_cmp = run.functions.compressed(q_BSGRK, *compressed, **options, return_lse=True)
    k, v, pos, start = selected
    selected_out, lse_sel = run.functions.selected(q_BSGRK, k, v, blocks, pos, start, **options, return_lse=True)
    if window is None:
        mixed = _mix_two(gates_BSGX3, compressed_out, selected_out)
        return BranchesOutput(mixed, blocks, (lse_cmp, lse_sel))
    sliding_out, lse_win = run.functions.sliding(q_BSGRK, *window, **options, return_lse=True)
    mixed = run.mix(gates_BSGX3, compressed_out, selected_out, sliding_out)
    return BranchesOutput(mixed, blocks, (lse_cmp, lse_sel, lse_win))


def _mix_two(gates_BSGX3: Tensor, compressed_BSGRV: Tensor, selected_BSGRV: Tensor) -> Tensor:
    compressed_BSGX1, selected_BSGX1 = gates_BSGX3[..., 0, None], gates_BSGX3[..., 1, None]
    return (compressed_BSGX1 * compressed_BSGRV + selected_BSGX1 * selected_BSGRV).to(compressed_BSGRV.dtype)


GATE_STD = 1e-3  # branches start almost equal, so that every one gets a gradient from the first step


class GateProjection(nn.Linear):
    """Logits of `n_gates` gates with one value per branch. `zeros`: all of them start at zero."""

    def __init__(self, dim: int, n_gates: int, n_branches: int, sliding_init: float, zeros: bool) -> None:
        super().__init__(dim, n_gates * n_branches)
        self._branches, self._sliding_init, self._zeros = BRANCH_ORDER[:n_branches], sliding_init, zeros

    def init_weights(self) -> None:
        nn.init.zeros_(self.bias)
        if self._zeros:
            nn.init.zeros_(self.weight)
            return
        nn.init.normal_(self.weight, std=GATE_STD)
        if "sliding" in self._branches:
            nn.init.constant_(self.bias[self._branches.index("sliding") :: len(self._branches)], self._sliding_init)


class BranchGates(nn.Module):
    """`softmax`: shares that sum to one. `sigmoid`: independent, as in the paper. `tanh`: twice a sigmoid for the
    selected branch, a hyperbolic tangent for the others; logits start at zero, so that the layer starts as the selected
    branch alone and every gate has a gradient. In fp32, also under autocast, but for the projection, which is a linear
    layer like any other.

    n_branches: how many branches, the first of BRANCH_ORDER, have a gate; the others' are 0.
    """

    def __init__(
        self,
        dim: int,
        n_groups: int,
        heads_per_group: int,
        gate: GateConfig,
        n_branches: int = len(BRANCH_ORDER),
    ) -> None:
        super().__init__()
        self.kind, self.temperature = gate.kind, gate.temperature
        self.n_groups, self.gates_per_group = n_groups, heads_per_group if gate.per == "head" else 1
        self.n_branches = n_branches
        n_gates = n_groups * self.gates_per_group
        self.proj = GateProjection(dim, n_gates, n_branches, gate.sliding_init, zeros=gate.kind == "tanh")

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, G, R or 1, 3], fp32, branches in BRANCH_ORDER."""
        logits = self.proj(x_BSD).unflatten(-1, (self.n_groups, self.gates_per_group, self.n_branches))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        gates = self._weights(logits)
        missing = len(BRANCH_ORDER) - self.n_branches
        return nn.functional.pad(gates, (0, missing)) if missing else gates

    def _weights(self, logits: Tensor) -> Tensor:
        if self.kind == "softmax":
            return logits.softmax(-1)
        if self.kind == "sigmoid":
            return logits.sigmoid()
        is_selected = torch.arange(self.n_branches, device=logits.device) == BRANCH_ORDER.index("selected")
        return torch.where(is_selected, 2 * logits.sigmoid(), logits.tanh())
