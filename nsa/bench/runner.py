"""One contender at work on one case: what is timed, and how its results read in the case's own layout."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Results = dict[str, Tensor]
"""`out` and gradients by input name, laid out as in `Case`."""


@dataclass
class BenchRunner:
    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """What the backward pass makes gradients for, in the contender's own layout."""
    dout: Tensor | None = None
    to_case: Callable[[Results], Results] = lambda results: results
    chosen: Callable[[Tensor], Tensor] | None = None
    """The blocks that these query rows select: [rows] → [1, rows, G, N]. None: nothing is selected."""
    note: str = ""
    """What a reader should know about how it runs here."""

    def forward_only(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def forward_backward(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        out = self.forward()
        return out, torch.autograd.grad(out, tuple(self.leaves.values()), self.dout)

    def results(self, backward: bool) -> Results:
        if not backward:
            return self.to_case({"out": self.forward_only()})
        out, gradients = self.forward_backward()
        return self.to_case({"out": out.detach(), **dict(zip(self.leaves, gradients, strict=True))})


def leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()
