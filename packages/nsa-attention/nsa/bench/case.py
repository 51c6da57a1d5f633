"""One benchmark case: the task, its input tensors (the same for every implementation), and what is timed on them.

B batch · S tokens · T raw keys · C compressed blocks · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.bench.shapes import BenchShape
from nsa.core.branches import BRANCH_ORDER, BranchStreams
from nsa.errors import ConfigError

TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
DATA = ("random", "smooth")
_ANCHOR_EVERY, _JITTER = 64, 0.3

GRADIENTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@dataclass(frozen=True)
class BenchTask:
    """Operation, sizes, dtype and device that are timed."""

    op: str
    shape: BenchShape
    length: int
    dtype: str
    backward: bool = False
    part: str = "all"
    device: str = "cpu"


@dataclass(frozen=True)
class BenchCase:
    """Random queries, keys, values and gates.

    `random`: every token independent, so that neighbouring queries select unrelated blocks: the worst case for
    kernels that share loads between queries. `smooth`: neighbours are similar, as in text.
    Drawn on the CPU for every device, so that the numbers are the same everywhere.
    """

    shape: BenchShape
    length: int
    dtype: torch.dtype
    data: str = "random"
    seed: int = 0
    device: torch.device = CPU
    q_BSGRK: Tensor = field(init=False, repr=False)
    raw: BranchStreams = field(init=False, repr=False)
    k_BCGK: Tensor = field(init=False, repr=False)
    v_BCGV: Tensor = field(init=False, repr=False)
    gates_BSGR3: Tensor = field(init=False, repr=False)
    dout_BSGRV: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        s, n, generator = self.shape, self.length, torch.Generator().manual_seed(self.seed)
        n_compressed = s.geometry.n_compressed(n)
        heads = (s.n_kv_groups, s.heads_per_group)
        if self.data not in DATA:
            raise ConfigError(f"--data is {self.data!r}: there is no such kind. Use one of: {', '.join(DATA)}.")

        def tensor(length: int, *rest: int, every: int = _ANCHOR_EVERY) -> Tensor:
            if self.data == "random":
                return torch.randn(1, length, *rest, generator=generator).to(self.device, self.dtype)
            return _smooth(length, rest, every, generator).to(self.device, self.dtype)

        per_block = max(1, _ANCHOR_EVERY // s.geometry.d)
        values: dict[str, object] = dict(
            q_BSGRK=tensor(n, *heads, s.d_k),
            raw=BranchStreams(*(tensor(n, s.n_kv_groups, width) for _ in BRANCH_ORDER for width in (s.d_k, s.d_v))),
            k_BCGK=tensor(n_compressed, s.n_kv_groups, s.d_k, every=per_block),
            v_BCGV=tensor(n_compressed, s.n_kv_groups, s.d_v, every=per_block),
            gates_BSGR3=torch.randn(1, n, *heads, len(BRANCH_ORDER), generator=generator).softmax(-1).to(self.device),
            dout_BSGRV=tensor(n, *heads, s.d_v),
        )
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def scale(self) -> float:
        return float(self.shape.d_k**-0.5)

    def inputs(self) -> dict[str, Tensor]:
        """Inputs that gradients are computed for, in the order of GRADIENTS."""
        raw = self.raw
        tensors = (
            self.q_BSGRK, self.k_BCGK, self.v_BCGV, raw.k_sel, raw.v_sel, raw.k_win, raw.v_win, self.gates_BSGR3
        )  # fmt: skip
        return dict(zip(GRADIENTS, tensors, strict=True))

    def n_bytes(self) -> int:
        tensors = [*self.inputs().values(), self.raw.k_cmp, self.raw.v_cmp, self.dout_BSGRV]
        return sum(x.nbytes for x in tensors)


def _smooth(length: int, rest: tuple[int, ...], every: int, generator: torch.Generator) -> Tensor:
    """Anchors joined by straight lines, plus a little noise of each token's own."""
    anchors = torch.randn(length // every + 2, *rest, generator=generator)
    at = torch.arange(length) / every
    low, share = at.long(), (at - at.long()).view(-1, *[1] * len(rest))
    path = anchors[low] * (1 - share) + anchors[low + 1] * share
    return (path + _JITTER * torch.randn(length, *rest, generator=generator))[None]


Results = dict[str, Tensor]
"""`out` and gradients by input name, laid out as in `BenchCase`."""


@dataclass
class BenchRunner:
    """One implementation on one case: the callables to time, and how its results map to the case's layout."""

    forward: Callable[[], Tensor]
    leaves: dict[str, Tensor] = field(default_factory=dict)
    """Inputs that backward computes gradients for, in the implementation's own layout."""
    dout: Tensor | None = None
    to_case: Callable[[Results], Results] = lambda results: results
    chosen: Callable[[Tensor], Tensor] | None = None
    """The blocks that these query rows select: [rows] → [1, rows, G, N]. None: nothing is selected."""
    note: str = ""
    """Shown below the table, e.g. the variant that is timed."""

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
