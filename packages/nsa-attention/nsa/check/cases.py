"""Table of cases that the correctness checks run: sizes, documents and dtypes of kernel calls and of whole modules.

The self-check takes one case in the run's own shape. `nsa gpu-check` takes realistic ones on a GPU and tiny ones in its
rehearsal; `nsa doctor --prove` and `python -m nsa.check` take `MODULE` in the shape that they are given.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from nsa.bench.case import SHAPES, TORCH_DTYPES, BenchShape
from nsa.check.kernel_call import CPU, KernelCall, QueryPositions
from nsa.core.attention_config import INIT_STD
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import plain_layout
from nsa.core.probe import Probe
from nsa.geometry import Geometry
from nsa.kernels.interface import KernelShape
from nsa.kernels.registry import BRANCHES, RequestedKernels
from nsa.kernels.triton import PIECE

BACKEND = "triton"
_MOST_TOKENS = 4501
"""The reference compares every query with every key: longer windows are checked without being full."""
SMALL_PIECE, _SMALL_TOKENS = 20, 41
"""Under the interpreter: rows are short, but longer than a tile of 32 keys."""
DECODE_STEPS = 3

_BASE = SHAPES["base"].geometry
_SHORT = Geometry(l=32, d=16, l_sel=64, n_sel=4, w=128)
_ODD = Geometry(l=48, d=16, l_sel=96, n_sel=5, w=100)  # no powers of two, and blocks that overlap three times
_MINI = Geometry(l=4, d=2, l_sel=4, n_sel=4, w=6)
_EVERY_DTYPE = ("fp32", "fp16", "bf16")
TIMED_LAYERS, KERNEL_LENGTHS = ("base", "wide"), (2048, 8192, 65_536)
"""Layers and lengths whose kernels are timed one by one and modelled (`nsa.bench.predictions`)."""


class KernelCase(NamedTuple):
    """One call of every kernel."""

    shape: KernelShape
    documents: tuple[tuple[int, ...], ...]
    """Cumulative lengths of the documents of each row; all rows have one length."""
    dtypes: tuple[str, ...] = _EVERY_DTYPE

    @property
    def length(self) -> int:
        return self.documents[0][-1]

    @property
    def decode_lengths(self) -> tuple[int, ...]:
        """Tokens of each cached row before the first step: the second step completes a compressed block in both."""
        g = self.shape.geometry
        blocks = (self.length - DECODE_STEPS - g.l + 2) // g.d
        return max(0, g.l - 2), max(0, g.l + blocks * g.d - 2)

    @property
    def is_packed(self) -> bool:
        return any(len(row) > 2 for row in self.documents)

    def call(self, dtype: torch.dtype) -> KernelCall:
        """Drawn inputs of these sizes."""
        g, n = self.shape.geometry, self.length
        if self.is_packed:
            positions = _packed_rows(self.documents, g)
        else:
            positions = QueryPositions(*plain_layout(len(self.documents), n, g, CPU)[:3])
        return KernelCall(self.shape, positions, n, g.n_compressed(n), dtype, seed=n, strided=True)

    def __str__(self) -> str:
        packed = ", packed" if self.is_packed else ""
        s = self.shape
        return f"{s.heads_per_group} heads/group, {s.d_k}/{s.d_v}, {self.length} tokens{packed}"


def _packed_rows(documents: tuple[tuple[int, ...], ...], geometry: Geometry) -> QueryPositions:
    """Positions of every token of rows of packed documents, one row of cumulative lengths each."""
    rows = []
    for cumulative in documents:
        tokens, first = [], 0
        for begin, end in pairwise(cumulative):
            tokens += [(token - begin, begin, first) for token in range(begin, end)]
            first += geometry.n_compressed(end - begin)
        rows.append(tokens)
    pos, start, first_BS = torch.tensor(rows).unbind(-1)
    return QueryPositions(pos, start, first_BS)


def self_check_case(shape: KernelShape, *, small: bool) -> KernelCase:
    """The case of the self-check, long enough to reach every path of the kernels for the run's own shape.

    Two rows: one document, and packed documents, one of a single token, one shorter than a compressed block, one empty,
    one shorter than the window. The row's length is a multiple of no tile, longer than the window, has more blocks than
    are chosen, and more queries than one program of the selected branch's backward sums over. `small`: for the
    interpreter, with pieces of SMALL_PIECE queries.
    """
    g = shape.geometry
    least = _SMALL_TOKENS if small else PIECE + 100
    wanted = max(least, (g.n_sel + 3) * g.l_sel, g.w + g.l_sel, 2 * g.l + g.d)
    length = min(_MOST_TOKENS, wanted) | 1
    ends = (1, g.l, g.l, g.l + 2 * g.l_sel + 3)  # documents of 1, l − 1, 0 and two blocks and a few tokens
    return KernelCase(shape, ((0, length), (0, *(min(end, length) for end in ends), length)))


@dataclass(frozen=True)
class ModuleCase:
    """The whole attention module on a row of tokens."""

    shape: BenchShape
    length: int
    cuts: tuple[int, ...] = ()
    """Positions from which on later tokens are changed."""
    prompt: int = 0
    """Tokens of the prefill before decode steps."""
    ragged: tuple[int, ...] = ()
    """Lengths of the rows of a batch that ends token by token."""
    device: torch.device = CPU
    dtype: str = "fp32"
    kernels: RequestedKernels = "auto"
    compiler: str = "inductor"
    overlapping: Geometry = _ODD
    """Blocks that overlap more than twice: their gradients are sums of more than two terms."""

    @property
    def dim(self) -> int:
        return self.shape.n_heads * self.shape.d_k

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def attention(self, probe: Probe | None = None, **changes: Any) -> NSAAttention:
        """The module on the device; the same weights on every device."""
        torch.manual_seed(0)
        s, blocks = self.shape, vars(self.shape.geometry) | changes
        module = NSAAttention(self.dim, s.n_heads, s.n_kv_groups, s.d_k, s.d_v, **blocks, kernels=self.kernels)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.startswith(("w_q", "w_k", "w_v")):  # spread scores, so that selection is not a tie
                    parameter.mul_(1.5 / (INIT_STD * self.dim**0.5))
        module.probe = probe
        return module.to(self.device, self.torch_dtype)

    def tokens(self, batch: int = 1, *, seed: int = 1) -> torch.Tensor:
        """[B, S, D], drawn on the CPU."""
        drawn = torch.randn(batch, self.length, self.dim, generator=torch.Generator().manual_seed(seed))
        return drawn.to(self.device, self.torch_dtype)


MODULE = ModuleCase(
    BenchShape(12, 2, 64, 64, _SHORT), 601, (1, 64, 333, 600), prompt=200, ragged=(601, 7, 250, 1, 64)
)  # fmt: skip
"""An odd length of several chunks and blocks."""


class GenerationSizes(NamedTuple):
    """A whole model that generates after a prompt."""

    shape: BenchShape
    vocabulary: int
    dim: int
    layers: int
    prompt: int
    tokens: int


class _SpeedSizes(NamedTuple):
    """Sizes that the benchmark times."""

    shape_name: str
    shape: BenchShape
    lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    backward: tuple[bool, ...]
    """Forward alone, with backward, or both."""
    budget_s: float
    layers: tuple[tuple[str, BenchShape], ...]
    """Layers, by name, whose host time and kernels are timed."""
    host_lengths: tuple[int, ...]
    """The shortest leaves a GPU next to nothing to do."""
    kernel_lengths: tuple[int, ...]
    """Also the lengths that are timed first."""
    parts: tuple[tuple[BenchShape, str], ...]
    """Other shapes, and single branches for packages that compute nothing else."""
    generation: GenerationSizes


@dataclass(frozen=True)
class CheckSizes:
    """Everything that `nsa gpu-check` runs on one device."""

    device: torch.device
    full: bool
    kernels: tuple[KernelCase, ...]
    module: ModuleCase
    module_dtypes: tuple[str, ...]
    speed: _SpeedSizes
    long: ModuleCase
    """A long row, compared with the portable backend."""
    training: tuple[str, ...]
    """Changes to configs/train_50k.yaml for a few steps of the trainer."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def on_gpu(device: torch.device, *, full: bool) -> CheckSizes:
    kernels = (
        (KernelShape(2, 1, 64, 64, _SHORT), (0, 601)),
        (KernelShape(2, 3, 64, 64, _SHORT), (0, 1, 60, 60, 297, 457)),
        (KernelShape(1, 5, 128, 128, _ODD), (0, 601)),
        (KernelShape(2, 6, 64, 64, _BASE), (0, 1601)),
        (KernelShape(2, 6, 128, 128, _ODD), (0, 700, 701, 1093)),
        (KernelShape(1, 16, 192, 128, _BASE), (0, 1217)),
        (KernelShape(1, 16, 192, 128, _SHORT), (0, 333, 803)),
    )
    lengths = (2048, 4096, 8192, 16_384, 32_768, 65_536)
    here: dict[str, Any] = dict(device=device, kernels=BACKEND)
    return CheckSizes(
        device,
        full,
        tuple(KernelCase(shape, (row,)) for shape, row in kernels),
        replace(MODULE, **here),
        _EVERY_DTYPE,
        _SpeedSizes(
            "base",
            SHAPES["base"],
            lengths,
            lengths,
            lengths[2:],
            ("bf16", "fp16"),
            (False, True),
            5.0,
            tuple((name, SHAPES[name]) for name in TIMED_LAYERS),
            (128, 8192),
            KERNEL_LENGTHS,
            (
                (SHAPES["wide"], "all"),
                *((SHAPES["base"], part) for part in ("compressed", "selected", "sliding")),
                (SHAPES["gqa16"], "selected"),
            ),
            GenerationSizes(SHAPES["base"], 32_768, 768, 12, 8192, 64),
        ),
        ModuleCase(SHAPES["base"], 8192, **here),
        ("train.steps=40", "train.warmup_steps=10", "train.log_every=10", "train.eval_every=0", "train.save_every=0"),
    )


def rehearsal(*, full: bool) -> CheckSizes:
    """Every path of the real check, on the CPU under Triton's interpreter."""
    shape = BenchShape(3, 1, 16, 16, _MINI)
    module = ModuleCase(
        shape, 31, (17,), prompt=29, ragged=(31, 20), kernels=BACKEND, compiler="aot_eager",
        overlapping=Geometry(l=6, d=2, l_sel=4, n_sel=4, w=6),
    )  # fmt: skip
    return CheckSizes(
        CPU,
        full,
        (
            KernelCase(shape.kernel, ((0, 31),)),
            KernelCase(KernelShape(1, 1, 24, 16, _MINI), ((0, 1, 8, 31),), ("fp32",)),
        ),
        module,
        ("fp32",),
        _SpeedSizes(
            "rehearsal",
            shape,
            (27,),
            (),
            (),
            ("fp32",),
            (True,),
            0.0,
            (("rehearsal", shape),),
            (27,),
            (27,),
            ((shape, "selected"), (shape, "sliding")),
            GenerationSizes(shape, 50, 48, 1, 9, 3),
        ),
        replace(module, length=50),
        (
            *(f"kernels.{branch}={BACKEND}" for branch in BRANCHES),
            *("runtime.device=cpu", "runtime.precision=fp32", "model.dim=16", "model.n_layers=1", "model.n_heads=2"),
            *("model.n_kv_groups=1", "model.d_k=16", "model.d_v=16", "model.vocab_size=300"),
            *(f"nsa.{name}={size}" for name, size in vars(_MINI).items()),
            *("train.steps=1", "train.warmup_steps=0", "train.seq_len=24", "train.batch_size=1"),
            *("train.eval_every=0", "train.save_every=0"),
        ),
    )
