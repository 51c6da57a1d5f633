"""Sizes and dtypes of the GPU check: realistic ones for a GPU, tiny ones for a rehearsal in the interpreter."""

from dataclasses import dataclass
from typing import Any

import torch

from nsa.bench.shapes import SHAPES, BenchShape
from nsa.core.attention_config import INIT_STD
from nsa.core.nsa_attention import NSAAttention
from nsa.core.positions import packed_layout, plain_layout
from nsa.core.probe import Probe
from nsa.geometry import Geometry
from nsa.kernels.registry import BackendRequest
from nsa.kernels.self_check.kernel_call import CPU, KernelCall, QueryPositions

BACKEND = "triton"

_BASE = SHAPES["base"].geometry
_SHORT = Geometry(l=32, d=16, l_sel=64, n_sel=4, w=128)
_ODD = Geometry(l=48, d=16, l_sel=96, n_sel=5, w=100)  # no powers of two, and blocks that overlap three times
_MINI = Geometry(l=4, d=2, l_sel=4, n_sel=4, w=6)


@dataclass(frozen=True)
class KernelSizes:
    """One call of every kernel."""

    shape: BenchShape
    length: int
    documents: tuple[int, ...] = ()
    """Cumulative lengths of packed documents; none: one document."""

    def call(self, dtype: torch.dtype) -> KernelCall:
        """Drawn inputs of these sizes."""
        g = self.shape.geometry
        if self.documents:
            layout = packed_layout(torch.tensor(self.documents), self.length, g)
        else:
            layout = plain_layout(1, self.length, g, CPU)
        n_compressed = layout.begin_BC.shape[1]
        positions = QueryPositions(*layout[:3])
        return KernelCall(self.shape.kernel, positions, self.length, n_compressed, dtype, seed=self.length)

    def __str__(self) -> str:
        packed = ", packed" if self.documents else ""
        s = self.shape
        return f"{s.heads_per_group} heads/group, {s.d_k}/{s.d_v}, {self.length} tokens{packed}"


@dataclass(frozen=True)
class ModuleSizes:
    """The whole attention module on a row of tokens."""

    shape: BenchShape
    length: int
    cuts: tuple[int, ...]
    """Positions from which on later tokens are changed."""
    prompt: int
    """Tokens of the prefill before decode steps."""
    ragged: tuple[int, ...]
    """Lengths of the rows of a batch that ends token by token."""

    @property
    def dim(self) -> int:
        return self.shape.n_heads * self.shape.d_k


@dataclass(frozen=True)
class SpeedSizes:
    """What the benchmark times."""

    shape_name: str
    shape: BenchShape
    lengths: tuple[int, ...]
    decode_lengths: tuple[int, ...]
    memory_lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    backward: tuple[bool, ...]
    """Forward alone, with backward, or both."""
    budget_s: float


@dataclass(frozen=True)
class CheckSizes:
    device: torch.device
    full: bool
    kernels: tuple[tuple[KernelSizes, tuple[str, ...]], ...]
    """Sizes and the dtypes to check each in."""
    module: ModuleSizes
    overlapping: Geometry
    """Blocks that overlap more than twice: their gradients are sums of more than two terms."""
    module_dtypes: tuple[str, ...]
    compiler: str
    speed: SpeedSizes
    long: ModuleSizes
    """A long row, compared with the portable backend."""
    training: tuple[str, ...]
    """Changes to configs/train_50k.yaml for a few steps of the trainer."""

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


def on_gpu(device: torch.device, *, full: bool) -> CheckSizes:
    every = ("fp32", "fp16", "bf16")
    sizes = (
        KernelSizes(BenchShape(2, 2, 64, 64, _SHORT), 601),
        KernelSizes(BenchShape(6, 2, 64, 64, _SHORT), 457, (0, 1, 60, 60, 297, 457)),
        KernelSizes(BenchShape(5, 1, 128, 128, _ODD), 601),
        KernelSizes(BenchShape(12, 2, 64, 64, _BASE), 1601),
        KernelSizes(BenchShape(12, 2, 128, 128, _ODD), 1093, (0, 700, 701, 1093)),
        KernelSizes(BenchShape(16, 1, 192, 128, _BASE), 1217),
        KernelSizes(BenchShape(16, 1, 192, 128, _SHORT), 803, (0, 333, 803)),
    )
    lengths = (2048, 4096, 8192, 16_384, 32_768, 65_536)
    return CheckSizes(
        device,
        full,
        tuple((size, every) for size in sizes),
        ModuleSizes(BenchShape(12, 2, 64, 64, _SHORT), 601, (1, 64, 333, 600), prompt=200, ragged=(601, 7, 250, 1, 64)),
        _ODD,
        every,
        "inductor",
        SpeedSizes("base", SHAPES["base"], lengths, lengths, lengths[2:], ("bf16", "fp16"), (False, True), 5.0),
        ModuleSizes(SHAPES["base"], 8192, (), prompt=0, ragged=()),
        ("train.steps=40", "train.warmup_steps=10", "train.log_every=10", "train.eval_every=0", "train.save_every=0"),
    )


def rehearsal(*, full: bool) -> CheckSizes:
    """Every path of the real check, on the CPU under Triton's interpreter."""
    sizes = (
        (KernelSizes(BenchShape(3, 1, 16, 16, _MINI), 31), ("fp32", "fp16", "bf16")),
        (KernelSizes(BenchShape(1, 1, 24, 16, _MINI), 31, (0, 1, 8, 31)), ("fp32",)),
    )
    shape = BenchShape(3, 1, 16, 16, _MINI)
    return CheckSizes(
        torch.device("cpu"),
        full,
        sizes,
        ModuleSizes(BenchShape(3, 1, 16, 16, _MINI), 31, (17,), prompt=29, ragged=(31, 20)),
        Geometry(l=6, d=2, l_sel=4, n_sel=4, w=6),
        ("fp32",),
        "aot_eager",
        SpeedSizes("rehearsal", shape, (27,), (), (), ("fp32",), (True,), 0.0),
        ModuleSizes(shape, 50, (), prompt=0, ragged=()),
        (
            *(f"kernels.{branch}={BACKEND}" for branch in BackendRequest._fields),
            *("runtime.device=cpu", "runtime.precision=fp32", "model.dim=16", "model.n_layers=1", "model.n_heads=2"),
            *("model.n_kv_groups=1", "model.d_k=16", "model.d_v=16", "model.vocab_size=300"),
            *(f"nsa.{name}={size}" for name, size in vars(_MINI).items()),
            *("train.steps=1", "train.warmup_steps=0", "train.seq_len=24", "train.batch_size=1"),
            *("train.eval_every=0", "train.save_every=0"),
        ),
    )


def attention(scope: CheckSizes, dtype: torch.dtype, probe: Probe | None = None, **changes: Any) -> NSAAttention:
    """The module on the device with the Triton kernels in every branch; the same weights on every device."""
    m = scope.module
    torch.manual_seed(0)
    s, blocks = m.shape, vars(m.shape.geometry) | changes
    module = NSAAttention(
        m.dim, s.n_heads, s.n_kv_groups, s.d_k, s.d_v, **blocks, kernels=BackendRequest(*[BACKEND] * 4)
    )
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.startswith(("w_q", "w_k", "w_v")):  # spread scores, so that selection is not a tie
                parameter.mul_(1.5 / (INIT_STD * m.dim**0.5))
    module.probe = probe
    return module.to(scope.device, dtype)


def tokens(scope: CheckSizes, dtype: torch.dtype, batch: int = 1, *, seed: int = 1) -> torch.Tensor:
    """[B, S, D], drawn on the CPU."""
    m = scope.module
    drawn = torch.randn(batch, m.length, m.dim, generator=torch.Generator().manual_seed(seed))
    return drawn.to(scope.device, dtype)
