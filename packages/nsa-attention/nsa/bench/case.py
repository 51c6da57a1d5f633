"""Shapes and cases of the benchmark: the task, its input tensors (the same for all implementations), what is timed.

B batch · S tokens · T raw keys · C compressed blocks · G kv groups · R heads per group · K key dim · V value dim
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.core.branches import BRANCH_ORDER, BranchStreams
from nsa.errors import ConfigError
from nsa.geometry import Geometry
from nsa.kernels.registry import KernelShape

BASE_GEOMETRY = Geometry(l=32, d=16, l_sel=64, n_sel=16, w=512)


@dataclass(frozen=True)
class BenchShape:
    n_heads: int
    n_kv_groups: int
    d_k: int
    d_v: int
    geometry: Geometry

    @property
    def heads_per_group(self) -> int:
        return self.n_heads // self.n_kv_groups

    @property
    def kernel(self) -> KernelShape:
        return KernelShape(self.n_kv_groups, self.heads_per_group, self.d_k, self.d_v, self.geometry)

    def describe(self) -> str:
        g = self.geometry
        return (
            f"{self.n_heads} heads, {self.n_kv_groups} groups, d_k={self.d_k} d_v={self.d_v}, "
            f"l={g.l} d={g.d} l_sel={g.l_sel} n_sel={g.n_sel} w={g.w}"
        )


SHAPES: dict[str, BenchShape] = {
    "base": BenchShape(12, 2, 64, 64, BASE_GEOMETRY),
    "gqa16": BenchShape(32, 2, 64, 64, BASE_GEOMETRY),
    "paper": BenchShape(64, 4, 192, 128, BASE_GEOMETRY),
    "tiny": BenchShape(6, 2, 16, 16, Geometry(l=8, d=4, l_sel=8, n_sel=4, w=16)),
    "wide": BenchShape(32, 8, 128, 128, BASE_GEOMETRY),
}
_FORMER_NAMES = {"seed": "base"}
"""Spellings that recorded commands use."""
DTYPES = ("fp32", "bf16", "fp16")
PARTS = ("all", "compressed", "select", "selected", "sliding")


def shape_named(name: str) -> BenchShape:
    name = _FORMER_NAMES.get(name, name)
    if name not in SHAPES:
        raise ConfigError(f"--shape is {name!r}: there is no such shape. Use one of: {', '.join(SHAPES)}.")
    return SHAPES[name]


TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
_DATA = ("random", "smooth")
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


class BenchCase:
    """Random queries, keys, values and gates.

    `random`: every token independent, so that neighbouring queries select unrelated blocks: the worst case for
    kernels that share loads between queries. `smooth`: neighbours are similar, as in text.
    Drawn on the CPU for every device, so that the numbers are the same everywhere.
    """

    def __init__(
        self, shape: BenchShape, length: int, dtype: torch.dtype, data: str = "random", seed: int = 0,
        device: torch.device = CPU,
    ) -> None:  # fmt: skip
        self.shape, self.length, self.dtype, self.data, self.device = shape, length, dtype, data, device
        s, generator = shape, torch.Generator().manual_seed(seed)
        n_compressed, heads = s.geometry.n_compressed(length), (s.n_kv_groups, s.heads_per_group)
        if data not in _DATA:
            raise ConfigError(f"--data is {data!r}: there is no such kind. Use one of: {', '.join(_DATA)}.")

        def tensor(n: int, *rest: int, every: int = _ANCHOR_EVERY) -> Tensor:
            if data == "random":
                return torch.randn(1, n, *rest, generator=generator).to(device, dtype)
            return _smooth(n, rest, every, generator).to(device, dtype)

        per_block = max(1, _ANCHOR_EVERY // s.geometry.d)
        self.q_BSGRK = tensor(length, *heads, s.d_k)
        pairs = (tensor(length, s.n_kv_groups, width) for _ in BRANCH_ORDER for width in (s.d_k, s.d_v))
        self.raw = BranchStreams(*pairs)
        self.k_BCGK = tensor(n_compressed, s.n_kv_groups, s.d_k, every=per_block)
        self.v_BCGV = tensor(n_compressed, s.n_kv_groups, s.d_v, every=per_block)
        gates = torch.randn(1, length, *heads, len(BRANCH_ORDER), generator=generator)
        self.gates_BSGR3 = gates.softmax(-1).to(device)
        self.dout_BSGRV = tensor(length, *heads, s.d_v)

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
