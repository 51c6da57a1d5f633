"""Learned gates: the weight of each branch per head, computed from the hidden state.

B batch · S tokens · D model dim · G kv groups · R heads per group (1 if gates are per group) · 3 branches
"""

import torch
from torch import Tensor, nn

from nsa.attention_rules import broken_option
from nsa.errors import ConfigError, require_rules
from nsa.options import GATES, GATES_PER

BRANCH_ORDER = ("compressed", "selected", "sliding")


class BranchGates(nn.Module):
    """`softmax`: shares that sum to one. `sigmoid`: independent, as in the paper. In fp32, also under autocast, but for
    the projection, which is a linear layer like any other."""

    def __init__(self, dim: int, n_groups: int, heads_per_group: int, kind: str, per: str, temperature: float) -> None:
        super().__init__()
        require_rules([*broken_option("nsa.gate", kind, GATES), *broken_option("nsa.gate_per", per, GATES_PER)])
        if temperature <= 0:
            raise ConfigError(f"nsa.gate_temperature is {temperature}: gates are divided by it. Set it above 0.")
        self.kind, self.temperature = kind, temperature
        self.n_groups, self.gates_per_group = n_groups, heads_per_group if per == "head" else 1
        self.proj = nn.Linear(dim, n_groups * self.gates_per_group * len(BRANCH_ORDER))

    def forward(self, x_BSD: Tensor) -> Tensor:
        """[B, S, G, R or 1, 3], fp32, branches in BRANCH_ORDER."""
        logits = self.proj(x_BSD).unflatten(-1, (self.n_groups, self.gates_per_group, len(BRANCH_ORDER)))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        return logits.softmax(-1) if self.kind == "softmax" else logits.sigmoid()
