"""The three branches: their keys and values, what attending to them gives, and the learned gates that weigh them.

B batch · S tokens · D model dim · G kv groups · R heads per group · X gates per group (R or 1) · K key dim
V value dim · N chosen blocks · 3 branches
"""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nsa.core.attention_config import GateConfig
from nsa.core.initial_values import draw

BRANCH_ORDER = ("compressed", "selected", "sliding")
ATTENTION_PARTS = ("select", *BRANCH_ORDER)
"""What NSA computes between projections, as FLOPs and times are counted."""
DENSE_PART = "dense"
"""What a layer that attends to all tokens computes there."""


class BranchStreams(NamedTuple):
    """Keys and values of the three branches: [B, S, G, K or V]."""

    k_cmp: Tensor
    v_cmp: Tensor
    k_sel: Tensor
    v_sel: Tensor
    k_win: Tensor
    v_win: Tensor


class BranchKeys(NamedTuple):
    """Keys and values of a branch, and where its queries stand on that axis (see `nsa.kernels.reference`)."""

    k: Tensor
    v: Tensor
    pos_BS: Tensor
    start_BS: Tensor


AttendedKeys = tuple[BranchKeys, BranchKeys, BranchKeys]
"""Those of the compressed, the selected and the sliding branch. A layer without selection has the same three times."""


class BranchesOutput(NamedTuple):
    """Result of an `AttentionStrategy`, in the kernels' layout."""

    out: Tensor
    """[B, S, G, R, V]."""
    blocks: Tensor | None
    """int32 [B, S, G, N]; None of a layer that selects nothing."""
    lse: tuple[Tensor, ...]
    """[B, S, G, R] per branch."""


_GATE_STD = 1e-3  # branches start almost equal, so that every one gets a gradient from the first step


class GateProjection(nn.Linear):
    """Logits of `n_gates` gates with one value per branch. `zeros`: all of them start at zero."""

    def __init__(self, dim: int, n_gates: int, n_branches: int, sliding_init: float, zeros: bool) -> None:
        super().__init__(dim, n_gates * n_branches)
        self._branches, self._sliding_init, self._zeros = BRANCH_ORDER[:n_branches], sliding_init, zeros

    def init_weights(self) -> None:
        draw(self.bias, self._start_bias)
        draw(self.weight, nn.init.zeros_ if self._zeros else partial(nn.init.normal_, std=_GATE_STD))

    def _start_bias(self, bias: Tensor) -> None:
        nn.init.zeros_(bias)
        if "sliding" in self._branches and not self._zeros:
            nn.init.constant_(bias[self._branches.index("sliding") :: len(self._branches)], self._sliding_init)


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
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        gates = self._weights(logits if self.temperature == 1 else logits / self.temperature)
        missing = len(BRANCH_ORDER) - self.n_branches
        return nn.functional.pad(gates, (0, missing)) if missing else gates

    def _weights(self, logits: Tensor) -> Tensor:
        if self.kind == "softmax":
            return logits.softmax(-1)
        if self.kind == "sigmoid":
            return logits.sigmoid()
        is_selected = torch.arange(self.n_branches, device=logits.device) == BRANCH_ORDER.index("selected")
        return torch.where(is_selected, 2 * logits.sigmoid(), logits.tanh())
